"""Make the Python environment of the end-to-end tests, or leave it alone when it is already right.

    python tests/e2e/setup_env.py [--into build/e2e]

    build/e2e/venv/             requirements.txt beside this file, installed
    build/e2e/msprobe-26.0.0/   a second msprobe, chosen by putting this folder first on PYTHONPATH

Prints the path of the environment's interpreter. A stamp in each folder holds the hash of what made it, so a second
run does nothing and a changed pin rebuilds. Needs Python 3.11 or newer with venv, and package registries that pip
reaches; about two minutes and 2.5 GB. Exit code 1 and one line on stderr when the environment cannot be made.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
REQUIREMENTS = HERE / "requirements.txt"
OLD_MSPROBE = "26.0.0"
OLDEST_PYTHON = (3, 11)
TORCH_DOWNLOADS = "PATCHCTL_E2E_ANY_TORCH"


class SetupError(Exception):
    """The environment cannot be made; the message says why and what to do."""


def run(command: Sequence[str | Path], failure: str) -> str:
    """Run a command and return its stdout; raise SetupError with `failure` and pip's or npm's last words."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        noise = ("WARNING", "npm error A complete log")
        lines = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith(noise)]
        raise SetupError(f"{failure}: {lines[-1] if lines else f'exit code {done.returncode}'}")
    return done.stdout


def pinned(name: str) -> str:
    """The line of requirements.txt that pins `name`."""
    for line in REQUIREMENTS.read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}=="):
            return line.strip()
    raise SetupError(f"`{name}` has no pin in {REQUIREMENTS}")


def refuse_cuda_torch(python: Path) -> None:
    """Ask pip which torch it would take, without downloading it, and refuse one that drags CUDA along."""
    pin = pinned("torch")
    version = ".".join(map(str, sys.version_info[:2]))
    report = run(
        [
            python,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--dry-run",
            "--ignore-installed",
            "--no-deps",
            "--report",
            "-",
            pin,
        ],
        f"no {pin} for Python {version} on this platform (use another Python, or move the pin in {REQUIREMENTS.name})",
    )
    metadata = json.loads(report)["install"][0]["metadata"]
    needs_cuda = any(
        requirement.lower().startswith(("nvidia", "cuda")) for requirement in metadata.get("requires_dist", [])
    )
    if needs_cuda and "+cpu" not in metadata["version"] and os.environ.get(TORCH_DOWNLOADS) != "1":
        raise SetupError(
            f"pip would take the CUDA build of {pin}, several GB: point PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS at its "
            f"CPU wheel, or set {TORCH_DOWNLOADS}=1 to install the CUDA build"
        )


def make_venv(venv: Path) -> None:
    """A fresh virtual environment with everything in requirements.txt."""
    shutil.rmtree(venv, ignore_errors=True)
    run([sys.executable, "-m", "venv", venv], "cannot make a virtual environment (on Debian: install python3-venv)")
    python = venv / "bin" / "python"
    refuse_cuda_torch(python)
    if os.environ.get(TORCH_DOWNLOADS) == "1":
        run([python, "-m", "pip", "install", "--quiet", pinned("torch")], "cannot install torch")
    run(
        [python, "-m", "pip", "install", "--quiet", "--no-deps", "--requirement", REQUIREMENTS],
        f"cannot install {REQUIREMENTS.name}",
    )
    run([python, "-c", "import torch, tensordict, transformers, megatron.core, msprobe"], "the environment is broken")


def make_old_msprobe(python: Path, folder: Path) -> None:
    """The second msprobe, alone in a folder."""
    shutil.rmtree(folder, ignore_errors=True)
    requirement = f"mindstudio-probe=={OLD_MSPROBE}"
    run(
        [python, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, requirement],
        f"cannot install {requirement}",
    )


def stamp_of(*parts: str) -> str:
    """A hash over what decides an environment's content."""
    return hashlib.sha256("\0".join((sys.version, *parts)).encode()).hexdigest()


def is_fresh(folder: Path, stamp: str) -> bool:
    """Whether `folder` was finished by the inputs that `stamp` is the hash of."""
    stamp_file = folder / ".stamp"
    return stamp_file.is_file() and stamp_file.read_text(encoding="utf-8") == stamp


def ensure(into: Path) -> Path:
    """Make or keep both folders under `into`; return the interpreter's path."""
    if sys.version_info < OLDEST_PYTHON:
        raise SetupError(
            f"Python {'.'.join(map(str, OLDEST_PYTHON))} or newer is needed, this is {sys.version.split()[0]}"
        )
    into.mkdir(parents=True, exist_ok=True)
    venv, old_msprobe = into / "venv", into / f"msprobe-{OLD_MSPROBE}"
    python = venv / "bin" / "python"
    stamp = stamp_of(str(venv), REQUIREMENTS.read_text(encoding="utf-8"))
    if not (is_fresh(venv, stamp) and python.exists()):
        print(f"making {venv} (about two minutes)", file=sys.stderr)
        make_venv(venv)
        (venv / ".stamp").write_text(stamp, encoding="utf-8")
    stamp = stamp_of(OLD_MSPROBE)
    if not is_fresh(old_msprobe, stamp):
        make_old_msprobe(python, old_msprobe)
        (old_msprobe / ".stamp").write_text(stamp, encoding="utf-8")
    return python


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the environment of the end-to-end tests.")
    parser.add_argument("--into", type=Path, default=HERE.parent.parent / "build" / "e2e", help="folder to fill")
    try:
        print(ensure(parser.parse_args().into.resolve()))
    except SetupError as error:
        print(f"e2e environment: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
