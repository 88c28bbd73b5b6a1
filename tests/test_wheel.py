"""The wheel carries the series, patches and configs: `patchctl` works from any folder, installed or by `pipx run`."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import trees

pytestmark = pytest.mark.xdist_group("wheel")
QUIET = ["-q", "--disable-pip-version-check"]


def run(*command: str | Path, cwd: Path) -> str:
    """What the command prints, without what this process has on its path."""
    passed = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PATCHCTL_"))}
    environment = {**passed, "PIPX_HOME": str(cwd / "pipx")}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", *QUIET, "--no-deps", "-w", folder, trees.ROOT, cwd=folder)
    (built,) = folder.glob("patchctl-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """The programs of an empty virtual environment with the wheel in it, and pipx."""
    venv = wheel.parent / "venv"
    run(sys.executable, "-m", "venv", venv, cwd=wheel.parent)
    run(venv / "bin" / "python", "-m", "pip", "install", *QUIET, wheel, "pipx", cwd=wheel.parent)
    return venv / "bin"


def test_the_wheel_has_every_file_of_the_series(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        carried = {name: archive.read(name) for name in archive.namelist()}
    series = [trees.ROOT / "series", trees.ROOT / "series.lock"]
    for path in [*series, *(trees.ROOT / "patches").rglob("*.patch"), *(trees.ROOT / "configs").rglob("*.*")]:
        assert carried[f"patchctl/data/{path.relative_to(trees.ROOT).as_posix()}"] == path.read_bytes()


def test_installed_it_applies_and_proves_the_series_outside_the_repository(installed: Path, tmp_path: Path) -> None:
    command = installed / "patchctl"
    assert "site-packages/patchctl/data" in run(command, "--version", cwd=tmp_path)
    pins = ["--verl-commit", "v0.8.0"]
    assert "verl v0.8.0: applied" in run(command, "apply", *pins, "--source", "pypi", cwd=tmp_path)
    assert "ok" in run(command, "verify", cwd=tmp_path)
    assert "reverted" in run(command, "revert", cwd=tmp_path)


def test_pipx_runs_it(installed: Path, wheel: Path, tmp_path: Path) -> None:
    here, there = (
        run(*command, "--version", cwd=tmp_path).splitlines()
        for command in ([installed / "patchctl"], [installed / "pipx", "run", "--spec", wheel, "patchctl"])
    )
    assert [line.partition(" in ")[0] for line in here] == [line.partition(" in ")[0] for line in there]
