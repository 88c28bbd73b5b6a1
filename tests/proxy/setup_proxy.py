"""Make the Python environment of the chat proxy's tests, or leave it alone when it is already right.

    python tests/proxy/setup_proxy.py [--into build/proxy]

Prints the path of the environment's interpreter. A stamp holds the hash of what made it, so a second run does nothing
and a changed pin rebuilds. Needs Python 3.11 or newer with venv, and a package registry that pip reaches; about two
minutes and 1.7 GB. Exit code 1 and one line on stderr when the environment cannot be made.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "e2e"))

import setup_env  # noqa: E402

REQUIREMENTS = HERE / "requirements.txt"
INTO = HERE.parents[1] / "build" / "proxy"


def make_venv(venv: Path) -> None:
    """A fresh virtual environment with everything in `REQUIREMENTS`."""
    shutil.rmtree(venv, ignore_errors=True)
    setup_env.run([sys.executable, "-m", "venv", venv], "cannot make a virtual environment (Debian: python3-venv)")
    python = venv / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    setup_env.refuse_cuda_torch(python)
    if os.environ.get(setup_env.TORCH_DOWNLOADS) == "1":
        setup_env.run([*pip, setup_env.pinned("torch")], "cannot install torch")
    setup_env.run([*pip, "--no-deps", "--requirement", REQUIREMENTS], f"cannot install {REQUIREMENTS}")
    setup_env.run([python, "-c", "import aiohttp, openai, anthropic, litellm, ray, torch"], "the environment is broken")


def ensure(into: Path) -> Path:
    """Make or keep the environment in `into`; return its interpreter's path.

    Raises:
        SetupError: it can't be made here; says why.
    """
    if sys.version_info < setup_env.OLDEST_PYTHON:
        oldest = ".".join(map(str, setup_env.OLDEST_PYTHON))
        raise setup_env.SetupError(
            f"Python {oldest} or newer is needed, this is {sys.version.split()[0]}; make PYTHON=python{oldest}"
        )
    python = into / "bin" / "python"
    stamp = setup_env.stamp_of(str(into), REQUIREMENTS.read_text(encoding="utf-8"))
    if not (setup_env.is_fresh(into, stamp) and python.exists()):
        print(f"making {into} (about two minutes)", file=sys.stderr)
        make_venv(into)
        (into / ".stamp").write_text(stamp, encoding="utf-8")
    return python


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the environment of the chat proxy's tests.")
    parser.add_argument("--into", type=Path, default=INTO, help="folder to fill")
    try:
        print(ensure(parser.parse_args().into.resolve()))
    except setup_env.SetupError as error:
        print(f"chat proxy's environment: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
