"""Make the dumps of a run whose inference side has a fault, to try `pair`, `compare` and `report` on without an NPU.

    python tests/e2e/demo.py [--into build/demo]

verl's FSDP engine trains on what a small model is asked, and the same model with a scaled weight in its third layer
answers, both under the real msprobe and the hooks and loggers of the series. Leaves build/demo/update_actor (training),
build/demo/generate_scaled (inference with the fault) and build/demo/generate_correct (without).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "e2e"
PIN = "v0.8.0"  # a release, which every machine can get


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=ROOT / "build" / "demo")
    into = parser.parse_args().into.resolve()
    if (Path(sys.prefix).parent / "msprobe-26.0.0").is_dir():
        make(into)
        return 0
    import setup_env

    try:
        print("demo: the environment of the end-to-end tests (two minutes, 2.5 GB, the first time)", flush=True)
        python = setup_env.ensure(BUILD)
    except setup_env.SetupError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    folders = [ROOT / "tool", ROOT / "tests", HERE, HERE / "dumps"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders)), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    return subprocess.run([python, __file__, "--into", into], env=environment, check=False).returncode


def make(into: Path) -> None:
    from real_runs import Scenario, make_dumps

    import trees

    pin = next(pin for pin in trees.PROJECT.pins.of("verl") if pin.name == PIN)
    shutil.rmtree(into, ignore_errors=True)
    print("demo: running both sides (half a minute)", flush=True)
    make_dumps(trees.applied(pin), into, Scenario("fsdp", seed=0))
    for name in ("update_actor", "generate_scaled", "generate_correct"):
        shown = into / name
        print(f"demo: {shown.relative_to(Path.cwd()) if shown.is_relative_to(Path.cwd()) else shown}")


if __name__ == "__main__":
    sys.exit(main())
