"""Make the environments of the real agents under build/agents, or leave them alone when they are already right.

npm's agents (Claude Code, OpenCode, Codex) come from package.json, whose versions are exact, as are those of their own
packages for each platform. OpenHands and Harbor (for Terminus 2) have a virtual environment each: they need other
versions of the same packages, and Python 3.12.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "e2e"))

import setup_env  # noqa: E402

INTO = HERE.parents[1] / "build" / "agents"
PYTHONS = ("python3.12", "python3.13")
INTERPRETER = "PATCHCTL_AGENTS_PYTHON"


def _fresh(folder: Path, made_of: str) -> bool:
    return setup_env.is_fresh(folder, setup_env.stamp_of(str(folder), made_of))


def _stamp(folder: Path, made_of: str) -> None:
    (folder / ".stamp").write_text(setup_env.stamp_of(str(folder), made_of), encoding="utf-8")


def npm() -> None:
    """build/agents/npm.

    Raises:
        SetupError: npm is not there, or does not reach its registry.
    """
    folder = INTO / "npm"
    package = HERE / "package.json"
    made_of = package.read_text(encoding="utf-8")
    if _fresh(folder, made_of):
        return
    if shutil.which("npm") is None:
        raise setup_env.SetupError("npm is not installed; Claude Code, OpenCode and Codex come from it (Node.js 18+)")
    print(f"making {folder} (1 GB)", file=sys.stderr)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copy(package, folder)
    # Claude Code's and OpenCode's own install scripts put the program of the platform's package in place.
    setup_env.run(["npm", "install", "--prefix", folder, "--no-audit", "--no-fund"], "npm install failed")
    _stamp(folder, made_of)


def _python() -> str:
    """An interpreter that OpenHands and Harbor run on.

    Raises:
        SetupError: there is none.
    """
    named = os.environ.get(INTERPRETER)
    for name in (named,) if named else PYTHONS:
        found = shutil.which(name)
        code = "import sys, venv; sys.exit(sys.version_info < (3, 12))"
        if found and subprocess.run([found, "-c", code], capture_output=True, check=False).returncode == 0:
            return found
    raise setup_env.SetupError(
        f"OpenHands and Terminus 2 need Python 3.12 or newer, and {named or ' and '.join(PYTHONS)} can't be run; "
        f"install one, or name it in {INTERPRETER}"
    )


def venv(name: str) -> None:
    """build/agents/NAME, from requirements-NAME.txt.

    Raises:
        SetupError: no Python for it, or pip does not reach its registry.
    """
    folder, requirements = INTO / name, HERE / f"requirements-{name}.txt"
    made_of = requirements.read_text(encoding="utf-8")
    if _fresh(folder, made_of):
        return
    python = _python()
    print(f"making {folder} (up to four minutes)", file=sys.stderr)
    shutil.rmtree(folder, ignore_errors=True)
    setup_env.run([python, "-m", "venv", folder], "cannot make a virtual environment")
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    setup_env.run([*pip, "--requirement", requirements], f"cannot install {requirements}")
    _stamp(folder, made_of)


NEEDS = {
    "claude-code": npm,
    "opencode": npm,
    "codex": npm,
    "openhands": lambda: venv("openhands"),
    "terminus-2": lambda: venv("harbor"),
}
