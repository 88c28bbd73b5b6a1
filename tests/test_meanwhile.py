"""What is changed while a refresh or a port runs is not written over; names that git or a folder can't have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import mini_project
from mini_project import PY, Files, Mini, PinSpec, git, snapshot
from patchctl import cli
from patchctl.errors import InTheWayError, PatchctlError, UsageError
from patchctl.maintain import files, newpin, worktrees
from test_maintain import commit

pytestmark = pytest.mark.usefixtures("own_sources")

STEP: Files = {"verl/a.py": mini_project.edit(PY, 10, b"ours\n")}


@pytest.fixture
def upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mini:
    """A project of one pin whose upstream has gone on, to the tag v2.0; PyPI is out of reach."""
    monkeypatch.setenv("PIP_INDEX_URL", str(tmp_path / "no-index"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    base: Files = {"verl/__init__.py": b"", "verl/a.py": PY}
    mini = mini_project.build(tmp_path / "project", {"verl": [PinSpec("p1", base, [STEP])]})
    work = tmp_path / "work"
    git(tmp_path, "clone", "--quiet", "--branch", "pin-p1", str(mini.repositories["verl"]), str(work))
    commit(work, "upstream: more", {"verl/b.py": b"b = 1\n"})
    git(work, "push", "--quiet", "origin", "HEAD:refs/tags/v2.0")
    return mini


def patchctl(mini: Mini, *arguments: object) -> Result:
    return CliRunner().invoke(cli.cli, ["--root", str(mini.root), *map(str, arguments)])


def project_files(mini: Mini) -> dict[str, tuple[object, ...]]:
    return {name: value for name, value in snapshot(mini.root).items() if name.partition("/")[0] != "edit"}


def meanwhile(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, change: Callable[[], object]) -> None:
    """Has `change` happen just before a function is called, which is after the proofs."""
    real = getattr(module, name)

    def called(*arguments: Any) -> Any:
        change()
        return real(*arguments)

    monkeypatch.setattr(module, name, called)


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n# by hand\n")


@pytest.mark.parametrize("name", ["configs/pins.toml", "series", "series.lock", "patches/verl/0001-step.patch"])
def test_a_port_writes_over_nothing_that_was_changed_since(
    upstream: Mini, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    before = project_files(upstream)
    meanwhile(monkeypatch, newpin, "write", lambda: append(upstream.root / name))
    result = patchctl(upstream, "port", "verl", "--to", "v2.0", "--yes")
    assert isinstance(result.exception, InTheWayError)
    assert f"{upstream.root / name}: was changed while this ran; run it again" in str(result.exception)
    changed = {place for place, value in project_files(upstream).items() if before.get(place) != value}
    assert changed == {name}


@pytest.mark.parametrize("name", ["series", "patches/verl/0001-step.patch", "patches/verl/0009-new.patch"])
def test_a_refresh_writes_over_nothing_that_was_changed_since(
    upstream: Mini, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    assert patchctl(upstream, "edit", "verl").exit_code == 0
    commit(upstream.root / "edit/verl-p1", "[verl] area: more", {"verl/more.py": b"x = 1\n"})
    before = project_files(upstream)
    place = upstream.root / name
    meanwhile(monkeypatch, files, "prove", lambda: append(place) if place.exists() else place.write_bytes(b"new\n"))
    result = patchctl(upstream, "refresh")
    assert isinstance(result.exception, InTheWayError)
    assert str(place) in str(result.exception)
    assert {one for one, value in project_files(upstream).items() if before.get(one) != value} == {name}


BAD_NAMES = ["", "p 1", "../p", "a..b", "a.", ".a", "-a", "a/b", "a.lock", "中"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_pin_has_a_name_that_a_folder_and_a_branch_can_have(upstream: Mini, name: str) -> None:
    pins = upstream.root / "configs/pins.toml"
    pins.write_text(pins.read_text().replace('name = "p1"', f'name = "{name}"'))
    result = patchctl(upstream, "edit", "verl")
    assert type(result.exception) is PatchctlError
    assert f"{name!r} can't be a pin's name" in str(result.exception)


@pytest.mark.parametrize("name", [name for name in BAD_NAMES if name])
def test_a_port_gives_no_other_name(upstream: Mini, name: str) -> None:
    before = project_files(upstream)
    result = patchctl(upstream, "port", "verl", "--to", "v2.0", f"--name={name}")
    assert isinstance(result.exception, UsageError)
    assert project_files(upstream) == before


@pytest.mark.parametrize("arguments", [("edit", "verl"), ("port", "verl", "--to", "v2.0")])
@pytest.mark.parametrize("into", [False, True])
def test_a_run_that_is_refused_leaves_the_other_ones_folder_alone(
    upstream: Mini, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: tuple[str, ...], into: bool
) -> None:
    if into:
        arguments += ("--into", str(tmp_path / "elsewhere"))
    second: list[Result] = []
    meanwhile(monkeypatch, worktrees, "prepare", lambda: second.append(patchctl(upstream, *arguments)))
    first = patchctl(upstream, *arguments)
    assert isinstance(second[0].exception, InTheWayError)
    assert "another patchctl" in str(second[0].exception)
    assert first.exit_code == 0, first.output
