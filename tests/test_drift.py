"""Drift: the same words as port, without writing anything anywhere."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import mini_project
from mini_project import PY, Files, Mini, PinSpec, edit, git, snapshot
from patchctl import cli
from patchctl.errors import FAILED, IN_THE_WAY, PatchctlError, UsageError
from patchctl.git import Git
from patchctl.maintain.newcomers import newcomers
from test_port import WORDS, shared_upstream

__all__ = ["shared_upstream"]
pytestmark = pytest.mark.usefixtures("own_sources")


def drift(mini: Mini, *arguments: object) -> Result:
    return CliRunner().invoke(cli.cli, ["--root", str(mini.root), "drift", *map(str, arguments)])


def patches(result: Result) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(result.stdout)["upstreams"][0]["patches"]
    return found


def test_every_patch_has_its_word_and_nothing_is_written(shared_upstream: Mini, tmp_path: Path) -> None:
    mini = shared_upstream
    before = snapshot(mini.root, mtimes=True), snapshot(mini.repositories["verl"])
    result = drift(mini, "verl", "--against", "v2.0", "--json")
    assert result.exit_code == FAILED
    assert (snapshot(mini.root, mtimes=True), snapshot(mini.repositories["verl"])) == before
    found = patches(result)
    assert [row["result"] for row in found] == WORDS
    assert [row["shift"] for row in found] == [0, 2, 0, 0, 0, 0, 0]
    (clash,) = found[3]["clashes"]
    commit = git(mini.repositories["verl"], "log", "-1", "--format=%H", "v2.0", "--", "verl/conflict.py").decode()
    assert clash == {
        "path": "verl/conflict.py",
        "hunk": 1,
        "line": 1,
        "reason": "'line 3' is not there",
        "touched_by": [f"{commit[:10]} upstream: verl/conflict.py"],
    }
    assert found[5]["clashes"][0]["reason"] == "upstream moved it to verl/elsewhere.py"


def test_the_table_says_the_same_for_people(shared_upstream: Mini) -> None:
    result = drift(shared_upstream, "verl", "--against", "v2.0")
    lines = result.stdout.splitlines()
    assert lines[:2] == ["verl/0001-step.patch  clean", "verl/0002-step.patch  offset (+2 lines)"]
    assert lines[-1].startswith("verl p1 does not apply at v2.0 (")


def test_its_own_commit_is_clean_and_an_older_one_too(shared_upstream: Mini) -> None:
    result = drift(shared_upstream, "verl", "--against", "pin-p1", "--json")
    assert result.exit_code == 0
    assert {row["result"] for row in patches(result)} == {"clean"}
    assert "verl p1 applies at pin-p1" in drift(shared_upstream, "verl", "--against", "pin-p1").stdout


def test_a_conflict_does_not_hide_what_becomes_of_later_patches(mini: Mini, tmp_path: Path) -> None:
    """Two patches change a.py, upstream the place of the first."""
    work = tmp_path / "work"
    repository = tmp_path / "upstream"
    shutil.copytree(mini.repositories["verl"], repository)
    path = mini.root / "configs/pins.toml"
    path.write_text(path.read_text().replace(str(mini.repositories["verl"]), str(repository)))
    git(tmp_path, "clone", "--quiet", "--branch", "pin-p1", str(repository), str(work))
    (work / "verl/a.py").write_bytes(PY.replace(b"line 4\n", b"theirs\n"))
    git(work, "commit", "--quiet", "--all", "-m", "their change")
    (work / "verl/b.py").unlink()
    git(work, "commit", "--quiet", "--all", "-m", "away with it")
    git(work, "push", "--quiet", "origin", "HEAD:refs/heads/next")
    result = drift(mini, "verl", "--against", "next", "--pin", "p1", "--json")
    assert [row["result"] for row in patches(result)] == ["conflict", "clean", "clean", "clean"]
    clashes = {clash["path"]: clash for clash in patches(result)[0]["clashes"]}
    assert clashes["verl/b.py"]["reason"] == "upstream removed or moved it"
    assert clashes["verl/b.py"]["touched_by"][0].endswith("away with it")
    assert clashes["verl/a.py"]["touched_by"][0].endswith("their change")


def test_without_an_upstream_both_are_tried_with_their_newest_pins(mini: Mini) -> None:
    path = mini.root / "configs/pins.toml"
    text = path.read_text()
    for number, date in enumerate(("2026-01-02", "2026-01-01", "2026-01-01", "2026-01-02")):
        head = text.split("[[pins]]\n")
        text = "[[pins]]\n".join([*head[: number + 1], f"date = {date}\n" + head[number + 1], *head[number + 2 :]])
    path.write_text(text)
    result = drift(mini, "--against", "main", "--json")
    assert result.exit_code == 0, result
    found = json.loads(result.stdout)
    assert [(row["upstream"], row["pin"]) for row in found["upstreams"]] == [("verl", "p1"), ("vllm-ascend", "a2")]
    assert found["ok"] is True


def test_what_can_not_be_told_is_no_answer(mini: Mini, tmp_path: Path) -> None:
    def refused(kind: type[PatchctlError], words: str, code: int, *arguments: str) -> None:
        result = drift(mini, *arguments)
        assert isinstance(result.exception, kind), result
        assert words in str(result.exception)
        assert result.exception.exit_code == code

    refused(UsageError, "has no tag, branch or commit 'v9'", 2, "verl", "--against", "v9")
    refused(UsageError, "--pin PIN needs an upstream", 2, "--against", "main", "--pin", "p1")
    path = mini.root / "configs/pins.toml"
    path.write_text(path.read_text().replace(str(mini.repositories["verl"]), f"file://{tmp_path}/nowhere"))
    refused(PatchctlError, "can't be asked: ", IN_THE_WAY, "verl", "--against", "main")


def test_a_remote_is_asked_for_one_commit_and_blames_nobody(shared_upstream: Mini, tmp_path: Path) -> None:
    shutil.copytree(shared_upstream.root, tmp_path / "project")
    mini = Mini(tmp_path / "project", shared_upstream.specs, shared_upstream.repositories)
    path = mini.root / "configs/pins.toml"
    repository = mini.repositories["verl"]
    path.write_text(path.read_text().replace(str(repository), f"file://{repository}"))
    commit = git(repository, "rev-parse", "v2.0^{commit}").decode().strip()
    for revision in ("v2.0", "next", commit):
        found = patches(drift(mini, "verl", "--against", revision, "--json"))
        # What upstream has moved is seen with the old commit only.
        assert [row["result"] for row in found] == [*WORDS[:5], "conflict", "clean"]
        assert found[3]["clashes"][0]["touched_by"] == []


def test_a_patch_is_merged_on_top_of_the_ones_before_it(tmp_path: Path) -> None:
    first = edit(PY, 10, b"one\n")
    steps = [{"verl/a.py": first}, {"verl/a.py": first.replace(b"one\n", b"two\n")}]
    mini = project_gone_on(tmp_path, {"verl/__init__.py": b"", "verl/a.py": PY}, steps, PY.replace(b"line 12", b"x"))
    assert [row["result"] for row in patches(drift(mini, "verl", "--against", "next", "--json"))] == ["merged"] * 2


def project_gone_on(tmp_path: Path, base: dict[str, bytes], steps: Sequence[Files], later: bytes) -> Mini:
    """A project whose upstream has other contents of verl/a.py on its branch `next`."""
    mini = mini_project.build(tmp_path / "p", {"verl": [PinSpec("p1", base, steps)]})
    work = tmp_path / "work"
    git(tmp_path, "clone", "--quiet", "--branch", "pin-p1", str(mini.repositories["verl"]), str(work))
    (work / "verl/a.py").write_bytes(later)
    git(work, "commit", "--quiet", "--all", "-m", "x")
    git(work, "push", "--quiet", "origin", "HEAD:refs/heads/next")
    return mini


CODE = b"import os\n\n\nclass Client:\n    def ask(self):\n        one = 1\n        two = 2\n        return one + two\n"


def test_a_class_that_moved_and_a_new_file_that_does_the_same_are_pointed_at(tmp_path: Path) -> None:
    base = {"verl/__init__.py": b"", "verl/a.py": CODE, "verl/known.py": b"def ask(self):\n    pass\n"}
    steps = [{"verl/a.py": CODE.replace(b"two = 2", b"two = 3")}]
    mini = project_gone_on(tmp_path, base, steps, b"import os\n")
    work = tmp_path / "work"
    (work / "verl/moved.py").write_bytes(CODE.replace(b"one = 1", b"one = 7"))
    (work / "verl/unlike.py").write_bytes(b"def ask_not(self):\n    pass\n")
    git(work, "add", "--all")
    git(work, "commit", "--quiet", "-m", "moves Client")
    git(work, "push", "--quiet", "origin", "HEAD:refs/heads/next")
    found = json.loads(drift(mini, "verl", "--against", "next", "--json").stdout)["upstreams"][0]
    (clash,) = found["patches"][0]["clashes"]
    assert clash["reason"].endswith(" is not there; class Client is in verl/moved.py")
    line = "upstream's new verl/moved.py defines ask, as what patches/verl/0001-step.patch changes does"
    assert found["newcomers"] == [f"{line}: look whether it needs the same"]
    repository = Git(mini.repositories["verl"])
    assert newcomers(repository, "pin-p1", "next", "verl", {"ask": "x.patch"}, {"verl/moved.py"}) == []
    git(work, "rm", "--quiet", "verl/moved.py")
    git(work, "commit", "--quiet", "-m", "and away")
    git(work, "push", "--quiet", "origin", "HEAD:refs/heads/next")
    found = json.loads(drift(mini, "verl", "--against", "next", "--json").stdout)["upstreams"][0]
    assert found["patches"][0]["clashes"][0]["reason"].endswith("; class Client is gone")
    assert found["newcomers"] == []


def test_an_ambiguous_place_is_not_guessed(tmp_path: Path) -> None:
    """The context stands twice in the new file: exactly would be a guess, so git's merge decides."""
    block = b"".join(b"same %d\n" % number for number in range(8))
    base = {"verl/__init__.py": b"", "verl/a.py": PY + block + PY}
    steps = [{"verl/a.py": PY + edit(block, 5, b"ours\n") + PY}]
    mini = project_gone_on(tmp_path, base, steps, block + b"more\n" + PY + block + PY)
    assert [row["result"] for row in patches(drift(mini, "verl", "--against", "next", "--json"))] == ["merged"]
