"""Make the Python environment of the engine's end-to-end tests, or leave it alone when it is already right.

    python tests/e2e/engine/setup_engine.py [--into build/e2e-engine]

Prints the path of the environment's interpreter. A stamp holds the hash of what made it, so a second run does nothing
and a changed pin rebuilds. About two minutes and 2.5 GB.
"""

from __future__ import annotations

import argparse
import fcntl
import platform
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import setup_env  # noqa: E402

REQUIREMENTS = HERE / "requirements.txt"
INTO = HERE.parents[2] / "build" / "e2e-engine"
OLDEST_PYTHON = (3, 11)


class Unsupported(setup_env.SetupError):
    """There is no CPU build of vLLM for this machine."""


def check_platform() -> None:
    """Refuses a machine that `REQUIREMENTS` has no wheels for.

    Raises:
        Unsupported: with the reason.
    """
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise Unsupported(f"the CPU build of vLLM is for Linux on x86_64, this is {sys.platform} {platform.machine()}")
    if sys.version_info < OLDEST_PYTHON:
        raise Unsupported(f"the CPU build of vLLM needs Python 3.11 or newer, this is {platform.python_version()}")


def make_venv(venv: Path) -> None:
    """A fresh virtual environment with torch and everything in `REQUIREMENTS`."""
    shutil.rmtree(venv, ignore_errors=True)
    setup_env.run([sys.executable, "-m", "venv", venv], "cannot make a virtual environment (Debian: python3-venv)")
    python = venv / "bin" / "python"
    setup_env.refuse_cuda_torch(python)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    torch = setup_env.pinned("torch")
    setup_env.run([*pip, torch, "--requirement", REQUIREMENTS], f"cannot install {torch} and {REQUIREMENTS.name}")
    setup_env.run([python, "-c", "import torch, ray, tensordict, hydra, vllm"], "the environment is broken")


def ensure(into: Path = INTO) -> Path:
    """Make or keep the environment in `into`; return its interpreter's path.

    Raises:
        Unsupported: this machine can't have one.
        setup_env.SetupError: it could not be made.
    """
    check_platform()
    into.mkdir(parents=True, exist_ok=True)
    stamp = setup_env.stamp_of(str(into), setup_env.pinned("torch"), REQUIREMENTS.read_text(encoding="utf-8"))
    with (into / ".lock").open("w") as lock:  # test processes that run at the same time make it once
        fcntl.flock(lock, fcntl.LOCK_EX)
        python = into / "venv" / "bin" / "python"
        if not (setup_env.is_fresh(into, stamp) and python.exists()):
            print(f"making {into / 'venv'} (about two minutes)", file=sys.stderr)
            make_venv(into / "venv")
            (into / ".stamp").write_text(stamp, encoding="utf-8")
    return python


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the environment of the engine's end-to-end tests.")
    parser.add_argument("--into", type=Path, default=INTO, help="folder to fill")
    try:
        print(ensure(parser.parse_args().into.resolve()))
    except setup_env.SetupError as error:
        print(f"engine environment: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
