"""Port: each patch gets to the other commit in its own way; a conflict stops, and what was done is never lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import mini_project
from mini_project import PY, Files, Mini, PinSpec, edit, git, snapshot
from patchctl import cli
from patchctl.errors import FAILED, InTheWayError, PatchctlError, UsageError
from patchctl.git import Git
from patchctl.maintain import worktrees
from patchctl.verify.series import check_series
from test_maintain import commit

pytestmark = pytest.mark.usefixtures("own_sources")

NUMBERS = PY.replace(b"line", b"number")
BASE: dict[str, bytes] = {
    "verl/__init__.py": b"",
    "verl/clean.py": PY,
    "verl/offset.py": PY,
    "verl/merged.py": PY,
    "verl/conflict.py": PY,
    "verl/upstream.py": PY,
    "verl/moved.py": NUMBERS,
}
STEPS: list[Files] = [
    {"verl/clean.py": edit(PY, 10, b"ours\n")},
    {"verl/offset.py": edit(PY, 10, b"ours\n")},
    {"verl/merged.py": edit(PY, 10, b"ours\n")},
    {"verl/conflict.py": PY.replace(b"line 3\n", b"ours\n")},
    {"verl/upstream.py": edit(PY, 10, b"ours\n")},
    {"verl/moved.py": edit(NUMBERS, 10, b"ours\n")},
    {"verl/new.py": b"new = 1\n"},
]
LATER: dict[str, bytes] = {
    "verl/offset.py": edit(PY, 2, b"theirs\n", b"theirs too\n"),
    "verl/merged.py": PY.replace(b"line 7\n", b"theirs\n"),
    "verl/conflict.py": PY.replace(b"line 3\n", b"theirs\n"),
    "verl/upstream.py": edit(PY, 10, b"ours\n"),
    "verl/elsewhere.py": NUMBERS,
}
WORDS = ["clean", "offset", "merged", "conflict", "already upstream", "merged", "clean"]


@pytest.fixture(scope="session")
def shared_upstream(tmp_path_factory: pytest.TempPathFactory) -> Mini:
    """A project of one pin whose upstream has gone on, to the tag v2.0; shared, so not to be written to."""
    folder = tmp_path_factory.mktemp("port")
    mini = mini_project.build(folder / "project", {"verl": [PinSpec("p1", BASE, STEPS)]})
    work = folder / "work"
    git(folder, "clone", "--quiet", "--branch", "pin-p1", str(mini.repositories["verl"]), str(work))
    (work / "verl/moved.py").unlink()
    for path, data in LATER.items():
        (work / path).write_bytes(data)
        git(work, "add", "--all")
        git(work, "commit", "--quiet", "-m", f"upstream: {path}")
    git(work, "tag", "v2.0")
    git(work, "push", "--quiet", "origin", "v2.0", "HEAD:refs/heads/next")
    return mini


@pytest.fixture
def upstream(shared_upstream: Mini, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mini:
    """The same, its project the test's own; PyPI is out of reach."""
    shutil.copytree(shared_upstream.root, tmp_path / "project")
    monkeypatch.setenv("PIP_INDEX_URL", str(tmp_path / "no-index"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return Mini(tmp_path / "project", shared_upstream.specs, shared_upstream.repositories)


def patchctl(mini: Mini, *arguments: object) -> Result:
    return CliRunner().invoke(cli.cli, ["--root", str(mini.root), *map(str, arguments)])


def port(mini: Mini, *arguments: object) -> Result:
    result = patchctl(mini, "port", "verl", *arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def refused(mini: Mini, kind: type[PatchctlError], words: str, *arguments: object) -> None:
    before = project_files(mini)
    result = patchctl(mini, "port", "verl", *arguments)
    assert isinstance(result.exception, kind), result
    assert words in str(result.exception)
    assert "\n" not in str(result.exception)
    assert project_files(mini) == before


def project_files(mini: Mini) -> dict[str, tuple[object, ...]]:
    return {name: value for name, value in snapshot(mini.root).items() if name.partition("/")[0] != worktrees.EDIT}


def document(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def settle(mini: Mini, name: str = "v2.0") -> Path:
    """Resolve the conflict as a person would."""
    folder = mini.root / f"edit/verl-{name}"
    (folder / "verl/conflict.py").write_bytes(PY.replace(b"line 3\n", b"theirs and ours\n"))
    git(folder, "add", "verl/conflict.py")
    return folder


def test_each_patch_has_its_word_and_a_conflict_stops_in_the_worktree(upstream: Mini) -> None:
    before = project_files(upstream)
    result = port(upstream, "--to", "v2.0", "--json")
    assert result.exit_code == FAILED
    found = document(result)
    assert found["state"] == "conflict"
    assert [step["result"] for step in found["steps"]] == [*WORDS[:4], None, None, None]
    assert found["steps"][1]["detail"] == ["up to +2 lines"]
    (detail,) = found["steps"][3]["detail"]
    assert detail.startswith("verl/conflict.py: hunk 1 (line 1): 'line 3' is not there [")
    assert detail.endswith("upstream: verl/conflict.py]")
    assert "resolve the conflict, git add, then `patchctl port verl --continue`" in result.stderr
    folder = Path(found["root"])
    assert b"UU verl/conflict.py" in git(folder, "status", "--porcelain")
    assert b"||||||| " in (folder / "verl/conflict.py").read_bytes()  # what stood there before, to judge by
    assert project_files(upstream) == before


def test_a_port_goes_on_to_a_new_pin_with_variants_only_where_they_differ(upstream: Mini) -> None:
    before = project_files(upstream)
    port(upstream, "--to", "v2.0")
    settle(upstream)
    result = port(upstream, "--continue")
    assert result.exit_code == 0
    assert project_files(upstream) == before  # it was not confirmed
    assert "nothing is written yet" in result.stderr
    found = document(port(upstream, "--continue", "--yes", "--json"))
    assert found["state"] == "written"
    assert [step["result"] for step in found["steps"]] == WORDS
    assert [step["dropped"] for step in found["steps"]] == [word == "already upstream" for word in WORDS]
    assert found["pin"]["wheel"] is None
    assert found["pin"]["origin"].startswith("from git only: verl==2.0: ")

    project = upstream.project
    assert check_series(project).findings == ()
    pin = project.pins.resolve("verl", "v2.0")
    assert pin.commit == git(upstream.repositories["verl"], "rev-parse", "v2.0^{commit}").decode().strip()
    listing = (upstream.root / "series").read_text().splitlines()
    guards = {words[0]: words[1:] for line in listing if (words := line.split()) and words[0].startswith("verl/")}
    assert guards == {
        "verl/0001-step.patch": [],
        "verl/0002-step.patch": [],
        "verl/0003-step.patch": ["#+p1"],
        "verl/0003-step.v2.0.patch": ["#+v2.0"],
        "verl/0004-step.patch": ["#+p1"],
        "verl/0004-step.v2.0.patch": ["#+v2.0"],
        "verl/0005-step.patch": ["#+p1"],
        "verl/0006-step.patch": ["#+p1"],
        "verl/0006-step.v2.0.patch": ["#+v2.0"],
        "verl/0007-step.patch": [],
    }
    old = {name: value for name, value in before.items() if name.startswith("patches/")}
    assert {name: value for name, value in project_files(upstream).items() if name in old} == old
    toml = (upstream.root / "configs/pins.toml").read_text()
    assert toml.startswith(before["configs/pins.toml"][1].decode())  # type: ignore[attr-defined]
    assert patchctl(upstream, "refresh").stdout == "nothing to refresh\n"
    assert patchctl(upstream, "refresh", "--check").exit_code == 0
    assert b"+theirs and ours" in (upstream.root / "patches/verl/0004-step.v2.0.patch").read_bytes()
    assert b"a/verl/elsewhere.py" in (upstream.root / "patches/verl/0006-step.v2.0.patch").read_bytes()
    refused(upstream, InTheWayError, "is the pin v2.0 already", "--to", "v2.0")


def test_a_patch_that_only_the_new_pin_needs_is_its_own(upstream: Mini) -> None:
    port(upstream, "--to", "v2.0")
    folder = settle(upstream)
    port(upstream, "--continue")
    commit(folder, "[verl] area: only here", {"verl/only.py": b"here = 1\n"})
    git(folder, "commit", "--quiet", "--amend", "-m", "[verl] area: only here\n\nFor a reason that is not told.\n")
    refused(upstream, PatchctlError, "the series would break a rule: ", "--continue", "--yes")
    git(folder, "reset", "--quiet", "--hard", "HEAD~1")
    commit(folder, "[verl] area: only here", {"verl/only.py": b"here = 1\n"})
    assert port(upstream, "--continue", "--yes").exit_code == 0
    assert ["verl/0008-area-only-here.patch", "#+v2.0"] in [
        line.split() for line in (upstream.root / "series").read_text().splitlines()
    ]
    assert check_series(upstream.project).findings == ()


def test_the_new_pins_tree_is_patched_like_any_other(upstream: Mini, tmp_path: Path) -> None:
    port(upstream, "--to", "v2.0")
    settle(upstream)
    port(upstream, "--continue", "--yes")
    arguments = ("apply", "--only", "verl", "--verl-commit", "v2.0", "--verl", tmp_path / "tree")
    git(tmp_path, "clone", "--quiet", "--branch", "v2.0", str(upstream.repositories["verl"]), str(tmp_path / "tree"))
    assert patchctl(upstream, *arguments).exit_code == 0
    patched = snapshot(tmp_path / "tree/verl")
    expected = snapshot(upstream.root / "edit/verl-v2.0/verl")
    assert {name: value[1] for name, value in patched.items()} == {name: value[1] for name, value in expected.items()}


def test_an_unresolved_conflict_a_marker_and_what_is_not_added_are_refused(upstream: Mini) -> None:
    port(upstream, "--to", "v2.0")
    folder = upstream.root / "edit/verl-v2.0"
    refused(upstream, InTheWayError, "verl/conflict.py: not resolved; edit, git add, then --continue", "--continue")
    git(folder, "add", "verl/conflict.py")
    refused(upstream, InTheWayError, "conflict.py:3: a conflict marker is left", "--continue")
    settle(upstream)
    (folder / "verl/clean.py").write_bytes(PY)
    refused(upstream, InTheWayError, "there are changes that are not added", "--continue")
    git(folder, "checkout", "--", "verl/clean.py")
    (folder / "verl/conflict.py").write_bytes(LATER["verl/conflict.py"])
    git(folder, "add", "verl/conflict.py")
    refused(upstream, InTheWayError, "nothing is left of '[verl] area: step 4': --skip it", "--continue")
    result = port(upstream, "--skip", "--yes", "--json")
    assert result.exit_code == 0
    step = document(result)["steps"][3]
    assert (step["result"], step["dropped"]) == ("conflict", True)
    assert "verl/0004-step.v2.0.patch" not in (upstream.root / "series").read_text()


def test_a_conflict_that_the_person_commits_or_gives_up(upstream: Mini) -> None:
    port(upstream, "--to", "v2.0")
    folder = upstream.root / "edit/verl-v2.0"
    git(folder, "cherry-pick", "--abort")
    assert port(upstream, "--continue").exit_code == FAILED  # tried again
    settle(upstream)
    git(folder, "commit", "--quiet", "--no-edit")
    assert port(upstream, "--continue", "--yes").exit_code == 0
    assert b"+theirs and ours" in (upstream.root / "patches/verl/0004-step.v2.0.patch").read_bytes()


def test_an_aborted_port_leaves_nothing_and_can_be_started_again(upstream: Mini, tmp_path: Path) -> None:
    before = project_files(upstream)
    port(upstream, "--to", "v2.0", "--into", tmp_path / "there")
    refused(upstream, InTheWayError, "a port to verl v2.0 is under way there", "--to", "v2.0")
    assert "removed" in port(upstream, "--abort").stdout
    assert not (tmp_path / "there").exists()
    assert [place.name for place in (upstream.root / "edit").iterdir()] == [".gitignore"]
    assert project_files(upstream) == before
    refused(upstream, UsageError, "no port of verl is under way; start one with --to REV", "--continue")
    assert port(upstream, "--to", "v2.0").exit_code == FAILED


def test_refresh_leaves_a_port_that_is_under_way_alone(upstream: Mini) -> None:
    port(upstream, "--to", "v2.0")
    assert patchctl(upstream, "refresh").stdout == "nothing to refresh\n"
    result = patchctl(upstream, "refresh", "--from", upstream.root / "edit/verl-v2.0")
    assert "its port is not finished: `patchctl port verl --continue`" in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        (("--to", "v9"), UsageError, "has no tag, branch or commit 'v9'"),
        (("--to", "pin-p1"), InTheWayError, "is the pin p1 already"),
        (("--to", "next", "--name", "p1"), InTheWayError, "verl has a pin p1 already; give --name NAME"),
        (("--to", "next", "--name", "a/b"), UsageError, "'a/b' can't be a pin's name"),
        (("--to", "next", "--from", "v7.0"), InTheWayError, "verl has no pin 'v7.0'"),
        (("--to", "next", "--pairs-with", "a1"), UsageError, "--pairs-with a1: "),
        ((), UsageError, "give one of --to REV, --continue, --skip, --abort"),
        (("--to", "next", "--continue"), UsageError, "give one of --to REV"),
        (("--skip",), UsageError, "no port of verl is under way"),
    ],
)
def test_what_can_not_be_ported_is_refused_before_anything_is_made(
    upstream: Mini, arguments: Sequence[str], kind: type[PatchctlError], words: str
) -> None:
    refused(upstream, kind, words, *arguments)
    assert not list((upstream.root / "edit").glob("verl-*"))


def test_a_commit_has_a_short_name_and_two_ports_are_told_apart_by_theirs(upstream: Mini) -> None:
    port(upstream, "--to", "next")
    commit = git(upstream.repositories["verl"], "rev-parse", "next").decode().strip()
    assert (upstream.root / f"edit/verl-{commit[:8]}").is_dir()
    port(upstream, "--to", "v2.0", "--name", "other")
    refused(upstream, UsageError, "several ports are under way; give --name, one of", "--continue")
    settle(upstream, "other")
    assert port(upstream, "--continue", "--name", "other", "--yes").exit_code == 0


def test_a_pin_that_breaks_a_rule_is_not_written(upstream: Mini) -> None:
    path = upstream.root / "configs/pins.toml"
    path.write_text(path.read_text() + "debugger_stops = 0\n")
    port(upstream, "--to", "v2.0")
    settle(upstream)
    before = project_files(upstream)
    refused(upstream, PatchctlError, "verl v2.0: the patched tree breaks a rule: ", "--continue", "--yes")
    assert project_files(upstream) == before


def test_a_remote_without_history_gives_the_same_port(upstream: Mini) -> None:
    path = upstream.root / "configs/pins.toml"
    repository = upstream.repositories["verl"]
    path.write_text(path.read_text().replace(str(repository), f"file://{repository}"))
    found = document(port(upstream, "--to", "v2.0", "--json"))
    assert [step["result"] for step in found["steps"]] == [*WORDS[:4], None, None, None]
    assert found["steps"][3]["detail"] == ["verl/conflict.py: hunk 1 (line 1): 'line 3' is not there"]
    settle(upstream)
    found = document(port(upstream, "--continue", "--yes", "--json"))
    assert [step["result"] for step in found["steps"]] == WORDS


Kill = Callable[[int, str, str], bool]
"""Whether to kill before a call of git, by its number, its words and those of the call before it."""


def run_killed(mini: Mini, kill: Kill) -> int | None:
    """The exit code of the port; None where it was killed."""
    pid = os.fork()
    if pid == 0:
        calls, before = 0, ""
        original = Git.start

        def start(self: Git, *words: str, **options: bool) -> Any:
            nonlocal calls, before
            calls += 1
            if kill(calls, " ".join(words), before):
                os.kill(os.getpid(), signal.SIGKILL)
            before = " ".join(words)
            return original(self, *words, **options)

        Git.start = start  # type: ignore[method-assign]
        code = 99
        try:
            code = patchctl(mini, "port", "verl", "--to", "v2.0").exit_code
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    return None if os.WIFSIGNALED(status) else os.waitstatus_to_exitcode(status)


def at_call(number: int) -> Kill:
    return lambda calls, words, before: calls == number


def test_a_port_that_is_killed_goes_on_to_the_same_end(upstream: Mini, tmp_path: Path) -> None:
    def finished(mini: Mini) -> dict[str, tuple[object, ...]]:
        settle(mini)
        assert document(port(mini, "--continue", "--yes", "--json"))["state"] == "written"
        return project_files(mini)

    def copy(name: str) -> Mini:
        shutil.copytree(upstream.root, tmp_path / name, ignore=shutil.ignore_patterns("edit"))
        return Mini(tmp_path / name, upstream.specs, upstream.repositories)

    kills: list[Kill] = [
        *(at_call(number) for number in range(3, 60, 14)),
        lambda calls, words, before: "cherry-pick" in before,  # merged, and not noted down
        lambda calls, words, before: "diff --name-only" in words and "cherry-pick" in before,  # in conflict, likewise
        lambda calls, words, before: "reset" in before,
    ]
    whole = copy("whole")
    port(whole, "--to", "v2.0")
    expected = finished(whole)
    for number, kill in enumerate(kills):
        mini = copy(f"killed-{number}")
        assert run_killed(mini, kill) is None
        going = (mini.root / "edit/verl-v2.0").is_dir()
        found = document(port(mini, *(("--continue",) if going else ("--to", "v2.0")), "--json"))
        assert [step["result"] for step in found["steps"]] == [*WORDS[:4], None, None, None]
        assert finished(mini) == expected
        shutil.rmtree(mini.root)
