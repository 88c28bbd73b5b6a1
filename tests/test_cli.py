"""The commands from outside: exit codes, what goes to stdout and stderr, and that an error is one line."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import mini_project
import patchctl
from mini_project import Mini, git, snapshot, tree_files, write_files
from patchctl import cli, engine
from patchctl.engine import Target
from patchctl.transaction import STAGED_SUFFIX

pytestmark = pytest.mark.usefixtures("own_sources")
AS_ROOT = os.geteuid() == 0


class Result:
    def __init__(self, code: object, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    def __repr__(self) -> str:
        return f"exit code {self.code}\n--- stdout\n{self.out}--- stderr\n{self.err}"


Run = Callable[..., Result]


@pytest.fixture
def run(mini: Mini, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`patchctl ARGUMENTS` on the small project, in an empty folder, within this process."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    before = signal.getsignal(signal.SIGTERM)

    def call(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["patchctl", "--root", str(mini.root), *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        signal.signal(signal.SIGTERM, before)
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        assert "\x1b[" not in out + err
        return Result(ended.value.code or 0, out, err)

    return call


def spawn(mini: Mini, *arguments: object, **keywords: Any) -> subprocess.CompletedProcess[bytes]:
    """The same as a process of its own."""
    command = [sys.executable, "-m", "patchctl", "--root", str(mini.root), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, check=False, **keywords)
    assert b"Traceback" not in done.stdout + done.stderr
    return done


@pytest.fixture
def verl(mini: Mini, tmp_path: Path) -> Path:
    return mini.pristine(tmp_path / "verl 树", mini.pin()).root


@pytest.fixture
def ascend(mini: Mini, tmp_path: Path) -> Path:
    return mini.pristine(tmp_path / "ascend", mini.pin("vllm-ascend")).root


def one_line(result: Result, code: int, *words: str) -> None:
    """The error is one line on stderr, begins with the program's name, and says these words."""
    assert result.code == code, result
    assert result.out == "", result
    assert result.err.count("\n") == 1, result
    assert result.err.startswith("patchctl: "), result
    for word in words:
        assert word in result.err, result


def with_rules(mini: Mini) -> None:
    """Have `verify` hold the pin p1 to the rules; its patched tree breaks some."""
    place = mini.root / "configs/pins.toml"
    place.write_text(place.read_text().replace('name = "p1"', 'name = "p1"\ndebugger_stops = 1'))


def found_in(result: Result) -> list[str]:
    """What `verify` says on stdout of anything but the series."""
    return [line for line in result.out.splitlines() if not line.startswith("series: ")]


# -- the way through


def test_apply_verify_status_revert_on_given_trees(run: Run, mini: Mini, verl: Path, ascend: Path) -> None:
    trees = ("--verl", verl, "--vllm-ascend", ascend)
    result = run("status", *trees)
    assert (result.code, result.err) == (0, "")
    assert result.out.splitlines() == [
        f"verl p1: unapplied (0/4 patches) in {verl}",
        f"vllm-ascend a1: unapplied (0/2 patches) in {ascend}",
    ]
    result = run("apply", "--verl-commit", "p1", *trees, "--dry-run")
    assert result.out.splitlines()[0] == f"verl p1: would apply 4 patches to 7 files in {verl}"
    result = run("apply", "--verl-commit", "p1", *trees)
    assert (result.code, result.err) == (0, "")
    assert result.out.splitlines() == [
        f"verl p1: applied 4 patches to 7 files in {verl}",
        f"vllm-ascend a1: applied 2 patches to 2 files in {ascend}",
    ]
    before = [snapshot(verl, mtimes=True), snapshot(ascend, mtimes=True)]
    result = run("apply", "--verl-commit", "p1", *trees)
    assert result.code == 0
    assert result.out.splitlines()[0] == f"verl p1: already applied (4/4 patches) in {verl}"
    assert [snapshot(verl, mtimes=True), snapshot(ascend, mtimes=True)] == before
    assert "applied (4/4 patches)" in run("status", *trees).out
    result = run("revert", *trees)
    assert result.out.splitlines()[0] == f"verl p1: reverted 7 files in {verl}"
    assert tree_files(verl) == mini.spec(mini.pin()).base
    result = run("revert", *trees)
    assert (result.code, result.out.splitlines()[0]) == (0, f"verl p1: nothing to revert in {verl}")


def test_without_trees_they_are_obtained_into_src_and_found_there_again(run: Run, mini: Mini) -> None:
    result = run("apply", "--verl-commit", mini.pin().commit[:7])
    assert result.code == 0
    assert "verl p1: from git" in result.err
    assert result.out.splitlines() == [
        "verl p1: applied 4 patches to 7 files in src/verl",
        "vllm-ascend a1: applied 2 patches to 2 files in src/vllm-ascend",
    ]
    assert tree_files(Path("src/verl")) == mini.expected(mini.pin())
    assert run("status").out.splitlines()[0] == "verl p1: applied (4/4 patches) in src/verl"
    assert "already applied" in run("apply", "--verl-commit", "p1").out
    assert run("revert").code == 0
    assert git(Path("src/verl"), "status", "--porcelain", "--ignored") == b""


def test_fetch_obtains_the_trees_and_only_that(run: Run, mini: Mini) -> None:
    result = run("fetch", "--verl-commit", "p2", "--into", "there", "--json")
    assert [tree["pin"] for tree in json.loads(result.out)["trees"]] == ["p2", "a1"]
    assert tree_files(Path("there/verl")) == mini.spec(mini.pin(number=1)).base
    assert "already there" in run("fetch", "--verl-commit", "p2", "--into", "there").out
    one_line(run("fetch", "--verl-commit", "p1", "--into", "there"), 3, "is there already and is not verl p1")


def test_one_upstream_alone(run: Run, mini: Mini, verl: Path, ascend: Path) -> None:
    assert run("apply", "--only", "verl", "--verl", verl).code == 0
    assert run("apply", "--only", "vllm-ascend", "--vllm-ascend", ascend).code == 0
    assert tree_files(ascend) == mini.expected(mini.pin("vllm-ascend"))
    assert not Path("src").exists()
    one_line(run("apply", "--only", "verl", "--vllm-ascend", ascend), 2, "--only verl leaves vllm-ascend out")


def test_list_says_what_each_patch_is_for(run: Run) -> None:
    lines = run("list").out.splitlines()
    assert lines[:4] == [
        "verl/0001-step.p2.patch  [p2]",
        "    [verl] area: step 1",
        "    status: Not submitted (a test)",
        "    drop when: the tests end",
    ]
    rows = json.loads(run("list", "--json").out)["patches"]
    assert rows[2]["files"] == ["verl/new/__init__.py", "verl/new/mod.py"]
    assert rows[2]["pins"] == ["p1", "p2"]


def test_refresh_check_tells_whether_a_refresh_would_change_a_file(run: Run, mini: Mini) -> None:
    assert run("refresh", "--check").code == 0
    (mini.root / "series.lock").write_text((mini.root / "series.lock").read_text() + "\n")
    result = run("refresh", "--check")
    assert (result.code, result.out) == (1, f"differs: {mini.root / 'series.lock'}\n")
    assert run("refresh").out == f"written: {mini.root / 'series.lock'}\n"
    assert run("refresh").out == "nothing to refresh\n"


def test_verify_of_the_series_alone_and_with_a_fault(run: Run, mini: Mini) -> None:
    result = run("verify")
    assert (result.code, result.out) == (0, "series: ok (9 patches, 4 pins)\n")
    place = mini.root / "patches/verl/0002-step.patch"
    place.write_bytes(place.read_bytes() + b"rubbish\n")
    result = run("verify")
    assert result.code == 1
    assert "patches/verl/0002-step.patch:" in result.out
    assert "series: 2 findings" in result.out
    found = json.loads(run("verify", "--json").out)
    assert found["ok"] is False
    assert {finding["rule"] for finding in found["checked"][0]["findings"]} == {"patch-text", "lock"}


@pytest.mark.parametrize("verb", ["apply", "status", "revert", "verify", "list"])
def test_json_is_one_document_on_stdout(run: Run, verl: Path, ascend: Path, verb: str) -> None:
    trees = () if verb == "list" else ("--verl", verl, "--vllm-ascend", ascend)
    document = json.loads(run(verb, *trees, "--json").out)
    assert document["command"] == verb
    if verb in ("apply", "status", "revert"):
        assert [tree["root"] for tree in document["trees"]] == [str(verl), str(ascend)]


def test_json_status_tells_every_file_and_patch(run: Run, mini: Mini, verl: Path) -> None:
    write_files(verl, mini.expected(mini.pin(), 2))
    (verl / "verl/b.py").write_bytes(b"mine\n")
    result = run("status", "--verl", verl, "--json")
    tree = json.loads(result.out)["trees"][0]
    assert (result.code, tree["state"]) == (3, "modified")
    files = {file["path"]: (file["applied"], file["of"]) for file in tree["files"]}
    assert files["verl/a.py"] == (1, 2)
    assert files["verl/b.py"] == (None, 1)
    assert [patch["state"] for patch in tree["patches"]] == [
        "can't be told",
        "applied",
        "not applied",
        "not applied",
    ]


# -- exit codes of a tree in between, or with edits


def test_a_partly_applied_tree(run: Run, mini: Mini, verl: Path) -> None:
    write_files(verl, mini.expected(mini.pin(), 2))
    result = run("status", "--verl", verl)
    assert result.code == 4
    assert "partly applied (2/4 patches)" in result.out
    assert "next: `patchctl apply` finishes it, `patchctl revert` undoes it" in result.out
    lines = found_in(run("verify", "--verl", verl))
    assert [line.split(" has ")[-1] for line in lines[:4]] == [
        "1 of its 2 patches; run `patchctl apply` to finish",
        "1 of its 2 patches; run `patchctl apply` to finish",
        "0 of its 1 patches; run `patchctl apply` to finish",
        "and 2 more (--json names all)",
    ]
    assert run("apply", "--only", "verl", "--verl", verl).err == (
        "note: verl p1: the tree was partly applied; an interrupted run is finished\n"
    )
    assert tree_files(verl) == mini.expected(mini.pin())


def test_a_modified_tree(run: Run, verl: Path, ascend: Path) -> None:
    (verl / "verl/a.py").write_bytes(b"mine\n")
    trees = ("--verl", verl, "--vllm-ascend", ascend)
    result = run("status", *trees)
    assert result.code == 3
    assert "modified            verl/a.py" in result.out
    before = [snapshot(verl, mtimes=True), snapshot(ascend, mtimes=True)]
    result = run("apply", "--verl-commit", "p1", *trees)
    one_line(result, 3, "verl/0001-step.patch: verl/a.py: hunk 1, line 2: expected 'line 2', found the end of the file")
    assert [snapshot(verl, mtimes=True), snapshot(ascend, mtimes=True)] == before


def test_verify_says_once_that_nothing_is_applied_and_names_the_tree(run: Run, mini: Mini, verl: Path) -> None:
    with_rules(mini)
    assert found_in(run("verify", "--verl", verl)) == [
        f"{verl}: [post-image] the series for verl p1 is not applied; run `patchctl apply`",
        f"verl p1 in {verl}: 1 finding (7 files by hash)",
    ]
    assert run("apply", "--only", "verl", "--verl", verl).code == 0
    assert "(7 files by hash and by rule)" in found_in(run("verify", "--verl", verl))[-1]


def test_an_edit_in_an_unpatched_tree_is_not_buried(run: Run, mini: Mini, verl: Path) -> None:
    with_rules(mini)
    (verl / "verl/b.py").write_bytes((verl / "verl/b.py").read_bytes() + b"mine\n")
    why = f"{verl}: verl/b.py has local edits; keep the edits elsewhere and undo them (reinstall the package, or "
    result = run("verify", "--verl", verl)
    assert result.code == 1
    first, *others = found_in(result)
    assert first.startswith(why)
    assert others == [
        f"{verl}: [post-image] the series for verl p1 is not applied; run `patchctl apply`",
        f"{verl}/verl/b.py: [post-image] is neither verl p1's own file nor what the series makes of it; "
        "undo the local edits, then run `patchctl apply`",
        f"verl p1 in {verl}: 2 findings (7 files by hash)",
    ]
    result = run("status", "--verl", verl)
    assert result.code == 3
    first, *others = result.out.splitlines()
    assert first.startswith(why)
    assert others == [
        f"verl p1: modified, not applied (0/4 patches) in {verl}",
        "  modified            verl/b.py",
    ]


def test_an_edit_in_a_patched_tree_comes_first_and_the_rules_still_run(run: Run, mini: Mini, verl: Path) -> None:
    with_rules(mini)
    assert run("apply", "--only", "verl", "--verl", verl).code == 0
    (verl / "verl/new/mod.py").write_bytes(b"mine\n")
    (verl / "verl/a.py").write_bytes(mini_project.PY)
    lines = found_in(run("verify", "--verl", verl))
    assert lines[0] == (
        f"{verl}: verl/0002-step.patch: verl/new/mod.py: the patch creates this file, but it is there already; keep "
        "the edits elsewhere and undo them (remove the file: it is the series' own, not upstream's)"
    )
    assert [line.split(": ")[0] for line in lines[1:3]] == [f"{verl}/verl/new/mod.py", f"{verl}/verl/a.py"]
    assert any("[stop-count]" in line for line in lines[3:])
    assert "verl p1: modified (1/4 patches)" in run("status", "--verl", verl).out


UPSTREAMS_OWN = ("verl/a.py", "verl/b.py", "verl/old.py", "verl/tool.sh")


def _another_commit(mini: Mini, tree: Path) -> str:
    """A checkout whose own commit has none of the pin's files that the series changes; gives what it is."""
    mini.checkout(tree, mini.pin())
    for path in UPSTREAMS_OWN:
        (tree / path).write_bytes(b"other\n")
    git(tree, "commit", "--quiet", "--all", "-m", "other")
    return git(tree, "rev-parse", "HEAD").decode()[:12]


def test_a_checkout_of_another_commit_is_called_that_and_few_files_are_named(
    run: Run, mini: Mini, tmp_path: Path
) -> None:
    with_rules(mini)
    tree = tmp_path / "other"
    head = _another_commit(mini, tree)
    applied = run("apply", "--only", "verl", "--verl", tree)
    one_line(applied, 3, f"not verl p1 but commit {head} (the pin is ", "and 3 more: verl/b.py, verl/old.py, ...; the")
    assert "verl/tool.sh" not in applied.err
    why = applied.err.removeprefix("patchctl: ").rstrip()
    one_line(run("revert", "--only", "verl", "--verl", tree), 3, why)
    assert run("status", "--verl", tree).out.splitlines() == [
        why,
        f"verl p1: modified (0/4 patches) in {tree}",
        *(f"  modified            {path}" for path in UPSTREAMS_OWN[:3]),
        "  and 1 more (--json names all)",
    ]
    lines = found_in(run("verify", "--verl", tree))
    assert lines[0] == why
    assert [line.split(": ")[0] for line in lines[1:4]] == [f"{tree}/{path}" for path in UPSTREAMS_OWN[:3]]
    assert all(line.endswith("; the series serves p1, p2: give such a tree") for line in lines[:4])
    assert lines[4:] == [
        "and 1 more (--json names all)",
        f"verl p1 in {tree}: 4 findings (7 files by hash)",
    ]


def test_revert_names_few_of_many_edited_files(run: Run, verl: Path) -> None:
    assert run("apply", "--only", "verl", "--verl", verl).code == 0
    for path in ("verl/a.py", "verl/b.py", "verl/new/__init__.py", "verl/new/mod.py", "verl/tool.sh"):
        (verl / path).write_bytes(b"mine\n")
    result = run("revert", "--verl", verl)
    one_line(result, 3, "local edits in verl/a.py, verl/b.py, verl/new/__init__.py and 2 more; undo them, or give")


def test_json_keeps_every_file_and_tells_why(run: Run, mini: Mini, tmp_path: Path) -> None:
    tree = tmp_path / "other"
    head = _another_commit(mini, tree)
    status = json.loads(run("status", "--verl", tree, "--json").out)["trees"][0]
    assert [file["path"] for file in status["files"] if file["applied"] is None] == list(UPSTREAMS_OWN)
    verify = json.loads(run("verify", "--verl", tree, "--json").out)["checked"][1]
    assert [finding["path"] for finding in verify["findings"]] == list(UPSTREAMS_OWN)
    assert verify["diagnosis"] == status["diagnosis"]
    assert status["diagnosis"].startswith(f"not verl p1 but commit {head} ")


def test_a_patched_tree_in_a_commit_of_ones_own_is_still_the_pins(run: Run, mini: Mini, tmp_path: Path) -> None:
    tree = mini.checkout(tmp_path / "mine", mini.pin()).root
    assert run("apply", "--only", "verl", "--verl", tree).code == 0
    git(tree, "add", "--all")
    git(tree, "commit", "--quiet", "-m", "the series")
    (tree / "verl/b.py").write_bytes((tree / "verl/b.py").read_bytes() + b"mine\n")
    why = f"{tree}: verl/b.py has local edits; keep the edits elsewhere and undo them (git checkout -- verl/b.py)"
    assert run("status", "--verl", tree).out.splitlines()[0] == why
    one_line(run("revert", "--verl", tree), 3, "local edits in verl/b.py; undo them, or give --force")


def test_a_tree_that_another_state_of_the_series_patched_is_called_that(run: Run, mini: Mini, verl: Path) -> None:
    assert run("apply", "--only", "verl", "--verl", verl).code == 0
    with_rules(mini)
    note = verl / ".patchctl-verl.json"
    note.write_text(json.dumps({**json.loads(note.read_text()), "series": "0" * 64}))
    (verl / "verl/a.py").write_bytes(b"by another state\n")
    applied = run("apply", "--only", "verl", "--verl", verl)
    one_line(applied, 3, "another state of the series is applied here", "verl/a.py differs from this one; revert it")
    why = applied.err.removeprefix("patchctl: ").rstrip()
    assert run("status", "--verl", verl).out.splitlines()[0] == why
    lines = found_in(run("verify", "--verl", verl))
    assert lines[0] == why
    assert lines[1:] == [
        f"{verl}/verl/a.py: [post-image] is neither verl p1's own file nor what the series makes of it; "
        "revert it with the series that applied it, or start from a fresh tree",
        f"verl p1 in {verl}: 1 finding (7 files by hash)",
    ]


def test_a_note_that_outlived_its_series_explains_nothing(run: Run, mini: Mini, verl: Path) -> None:
    """The files are upstream's again, say by git, and the note stayed."""
    assert run("apply", "--only", "verl", "--verl", verl).code == 0
    note = (verl / ".patchctl-verl.json").read_text()
    assert run("revert", "--verl", verl).code == 0
    (verl / ".patchctl-verl.json").write_text(json.dumps({**json.loads(note), "series": "0" * 64}))
    (verl / "verl/b.py").write_bytes((verl / "verl/b.py").read_bytes() + b"mine\n")
    one_line(run("apply", "--only", "verl", "--verl", verl), 3, "verl/b.py has local edits")


def test_a_damaged_patch_hides_neither_the_state_nor_the_findings(run: Run, mini: Mini, verl: Path) -> None:
    place = mini.root / "patches/verl/0002-step.patch"
    place.write_bytes(place.read_bytes() + b"rubbish\n")
    (verl / "verl/a.py").write_bytes(b"mine\n")
    assert "verl/a.py has local edits" in run("status", "--verl", verl).out
    result = run("verify", "--verl", verl)
    assert result.code == 1
    assert "patches/verl/0002-step.patch:" in result.out
    assert "verl/a.py has local edits" in result.out


def test_git_is_asked_only_where_something_is_wrong(
    run: Run, mini: Mini, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = mini.checkout(tmp_path / "t", mini.pin()).root
    asked: list[Path] = []
    monkeypatch.setattr("patchctl.diagnose.head", asked.append)
    for verb in ("status", "verify"):
        run(verb, "--verl", tree)
    assert run("apply", "--only", "verl", "--verl", tree).code == 0
    for verb in ("status", "verify"):
        run(verb, "--verl", tree)
    assert asked == []
    (tree / "verl/a.py").write_bytes(b"mine\n")
    (tree / "verl/b.py").write_bytes(b"mine\n")
    (tree / "verl/tool.sh").write_bytes(b"mine\n")
    run("status", "--verl", tree)
    assert asked == [tree]


# -- bad input


@pytest.mark.parametrize("verb", ["apply", "status", "revert", "verify"])
def test_what_is_no_tree_ends_with_one_line_and_the_code_of_usage(run: Run, tmp_path: Path, verb: str) -> None:
    (tmp_path / "empty 空").mkdir()
    git(tmp_path, "init", "--quiet", "--bare", "bare")
    (tmp_path / "file").write_text("x")
    write_files(tmp_path / "other", {"setup.py": b""})
    for name, words in {
        "empty 空": "is empty",
        "bare": "a bare repository",
        "file": "not a folder",
        "other": "it has no verl/__init__.py; give the verl checkout or the site-packages that has `verl/`",
        "gone": "no such folder",
        "x" * 300: "File name too long",
    }.items():
        one_line(run(verb, "--verl", tmp_path / name, "--only", "verl"), 2, words)


def test_commits_that_are_no_pins(run: Run, verl: Path) -> None:
    one_line(run("apply", "--verl-commit", "deadbeef", "--verl", verl), 3, "verl commit deadbeef is not a pin", "p1 (")
    one_line(run("apply", "--verl-commit", "main", "--verl", verl), 2, "'main' names no verl commit")
    one_line(run("apply"), 2, "which verl? give --verl-commit REV (pins: p1, p2) or --verl DIR")
    one_line(run("apply", "--only", "vllm-ascend"), 2, "which vllm-ascend?")
    one_line(run("status"), 2, "no tree: give --verl DIR or --vllm-ascend DIR, or run in the folder that has ./src")


def test_a_tree_of_another_pin(run: Run, mini: Mini, tmp_path: Path) -> None:
    tree = mini.pristine(tmp_path / "t", mini.pin(number=1)).root
    result = run("apply", "--only", "verl", "--verl-commit", "p1", "--verl", tree)
    one_line(result, 3, "its files are those of verl p2, not p1")
    assert "verl p2: applied" in run("apply", "--only", "verl", "--verl", tree).out


@pytest.mark.parametrize("arguments", ["frobnicate", "apply --nope", "apply extra", "--root /nonexistent list"])
def test_usage_errors_end_with_2(run: Run, arguments: str) -> None:
    result = run(*arguments.split())
    assert result.code == 2
    assert result.out == ""
    assert "Usage: patchctl" in result.err


def test_a_dry_run_obtains_nothing(run: Run) -> None:
    one_line(run("apply", "--verl-commit", "p1", "--dry-run"), 2, "--dry-run obtains no tree")
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("damage", "code", "words"),
    [
        (lambda root: (root / "series").unlink(), 1, "series: no such file; is"),
        (lambda root: (root / "series").write_bytes(b"\xff\n"), 1, "series: not UTF-8 at byte 0"),
        (lambda root: (root / "series").write_text("what\n"), 1, "series:1: 'what' is not named"),
        (lambda root: (root / "series.lock").write_text("{"), 1, "series.lock: damaged"),
        (lambda root: (root / "series.lock").unlink(), 1, "series.lock: no such file"),
        (lambda root: (root / "configs/pins.toml").write_text("x"), 1, "pins.toml: not readable as TOML"),
        (lambda root: shutil.rmtree(root / "configs"), 1, "pins.toml: no such file"),
        (lambda root: shutil.rmtree(root / "patches"), 1, "0001-step.patch: can't be read: No such file"),
        (
            lambda root: (root / "patches/verl/0002-step.patch").write_bytes(b""),
            1,
            "0002-step.patch: not the file that",
        ),
    ],
)
def test_a_damaged_project_ends_with_one_line(
    run: Run, mini: Mini, verl: Path, damage: Callable[[Path], object], code: int, words: str
) -> None:
    before = snapshot(verl, mtimes=True)
    damage(mini.root)
    one_line(run("apply", "--only", "verl", "--verl-commit", "p1", "--verl", verl), code, words)
    assert snapshot(verl, mtimes=True) == before


def test_patches_that_were_converted_to_crlf_are_named(run: Run, mini: Mini, verl: Path) -> None:
    for place in (mini.root / "patches").rglob("*.patch"):
        place.write_bytes(place.read_bytes().replace(b"\n", b"\r\n"))
    one_line(run("apply", "--only", "verl", "--verl", verl), 1, "not the file that series.lock was made from")
    assert "CRLF line ends: the file was converted; check out patches with `*.patch -text`" in run("verify").out


def unprivileged(command: Sequence[str]) -> list[str]:
    """The command without root's right to write everywhere."""
    if not AS_ROOT:
        return list(command)
    if shutil.which("setpriv") is None:
        pytest.skip("running as root, and setpriv is not there to drop root's rights")
    rights = "-dac_override,-dac_read_search,-fowner"
    return ["setpriv", f"--bounding-set={rights}", f"--inh-caps={rights}", *command]


def test_a_tree_that_can_only_be_read(mini: Mini, verl: Path) -> None:
    before = snapshot(verl, mtimes=True)
    (verl / "verl").chmod(0o555)
    try:
        command = [sys.executable, "-m", "patchctl", "--root", str(mini.root), "apply", "--only", "verl", "--verl"]
        done = subprocess.run(unprivileged([*command, str(verl)]), capture_output=True, text=True, check=False)
    finally:
        (verl / "verl").chmod(0o755)
    assert done.returncode == 1
    assert done.stderr == f"patchctl: {verl}/verl/a.py: can't be written: Permission denied; nothing was changed\n"
    assert snapshot(verl, mtimes=True) == before


def test_a_file_that_can_not_be_read(mini: Mini, verl: Path) -> None:
    (verl / "verl/a.py").chmod(0)
    command = [sys.executable, "-m", "patchctl", "--root", str(mini.root), "status", "--verl", str(verl)]
    done = subprocess.run(unprivileged(command), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, f"patchctl: {verl}/verl/a.py: can't be read: Permission denied\n")


def test_a_folder_that_can_not_be_entered(mini: Mini, verl: Path) -> None:
    verl.parent.chmod(0)
    try:
        command = [sys.executable, "-m", "patchctl", "--root", "/", "status", "--verl", str(verl)]
        done = subprocess.run(unprivileged(command), capture_output=True, text=True, check=False, cwd="/")
    finally:
        verl.parent.chmod(0o755)
    assert "Traceback" not in done.stderr
    assert done.returncode in (1, 2)


# -- the terminal's side


def test_python_m_patchctl_and_the_version(mini: Mini) -> None:
    done = spawn(mini, "--version")
    assert (done.returncode, done.stderr) == (0, b"")
    lock = hashlib.sha256((mini.root / "series.lock").read_bytes()).hexdigest()
    assert done.stdout.decode().splitlines() == [
        f"patchctl {patchctl.__version__}",
        f"series {lock[:12]} ({len(mini.project.series.entries)} patches) in {mini.root}",
        "verl: p1, p2",
        "vllm-ascend: a1, a2",
    ]
    assert spawn(mini, "-h").stdout.startswith(b"Usage: patchctl ")


def test_a_reader_that_goes_away_is_no_error(mini: Mini) -> None:
    command = [sys.executable, "-m", "patchctl", "--root", str(mini.root), "list", "--json"]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_full_disk_behind_stdout_is_an_error_of_one_line(mini: Mini) -> None:
    command = [sys.executable, "-m", "patchctl", "--root", str(mini.root), "list"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (1, b"patchctl: No space left on device\n")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8:strict"])
def test_output_that_the_terminal_can_not_show_is_escaped(mini: Mini, verl: Path, encoding: str) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = spawn(mini, "status", "--verl", verl, env=environment)
    assert done.returncode == 0, done.stderr
    assert b"verl p1: unapplied (0/4 patches) in " in done.stdout
    done = spawn(mini, "status", "--verl", verl, "--json", env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["trees"][0]["root"] == str(verl)


def test_a_folder_whose_name_is_not_utf8(mini: Mini, tmp_path: Path) -> None:
    folder = mini.pristine(tmp_path / os.fsdecode(b"caf\xe9"), mini.pin()).root
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    for arguments in ((), ("--json",)):
        done = spawn(mini, "apply", "--only", "verl", "--verl", folder, *arguments, env=environment)
        assert (done.returncode, done.stderr) == (0, b"")
    assert tree_files(folder) == mini.expected(mini.pin())


def test_a_working_directory_that_is_gone(mini: Mini, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    shell = f'cd "{tmp_path}/gone" && rmdir "{tmp_path}/gone" && exec "$@"'
    for arguments in (("status",), ("apply", "--verl-commit", "p1"), ("list",)):
        command = [sys.executable, "-m", "patchctl", "--root", str(mini.root), *arguments]
        done = subprocess.run(["/bin/sh", "-c", shell, "sh", *command], capture_output=True, text=True, check=False)
        (tmp_path / "gone").mkdir()
        assert "Traceback" not in done.stderr, done.stderr
        assert done.stderr.count("\n") <= 1
        assert done.returncode == (0 if arguments == ("list",) else done.returncode)


# -- signals, and two at once


def slow_project(folder: Path) -> Mini:
    """A project whose writes take a while: many files."""
    names = [f"verl/f{number:03}.py" for number in range(120)]
    base: dict[str, mini_project.File] = {"verl/__init__.py": b"", **dict.fromkeys(names, mini_project.PY)}
    step: dict[str, mini_project.File] = dict.fromkeys(names, mini_project.edit(mini_project.PY, 9, b"x\n"))
    step |= {f"verl/new{number % 9}/g{number}.py": b"new\n" * 9 for number in range(40)}
    return mini_project.build(folder, {"verl": [mini_project.PinSpec("p1", base, [step])]})


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_with_130_and_both_states_whole(tmp_path: Path, number: signal.Signals) -> None:
    """Whatever the moment: the tree is as before, or finished, and nothing staged is left."""
    mini = slow_project(tmp_path / "p")
    pin = mini.pin()
    tree = mini.pristine(tmp_path / "t", pin)
    pristine, patched = mini.spec(pin).base, mini.expected(pin)
    first = tree.root / f"verl/.f000.py{STAGED_SUFFIX}"
    seen = set()
    for attempt in range(6):
        command = [sys.executable, "-m", "patchctl", "--root", str(mini.root), "apply", "--verl", str(tree.root)]
        process = subprocess.Popen([*command, "--only", "verl"], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
        while not first.exists() and process.poll() is None:
            time.sleep(0.0005)
        time.sleep(attempt * 0.002)
        process.send_signal(number)
        _, err = process.communicate()
        files = tree_files(tree.root)
        assert files in (pristine, patched)
        ends = [(130, b"patchctl: interrupted"), (0, b"")]
        if files == patched:  # the interpreter gives its handlers back before it ends
            ends.append((-number, b""))
        assert (process.returncode, err.strip()) in ends
        seen.add(process.returncode)
        engine.revert(mini.project, [Target(tree, pin)])
        assert tree_files(tree.root) == pristine
    assert 130 in seen


def test_of_two_runs_at_once_one_works_and_the_other_is_refused_or_finds_it_done(tmp_path: Path) -> None:
    mini = slow_project(tmp_path / "p")
    pin = mini.pin()
    tree = mini.pristine(tmp_path / "t", pin)
    command = [sys.executable, "-m", "patchctl", "--root", str(mini.root), "apply", "--verl", str(tree.root)]
    runs = [
        subprocess.Popen([*command, "--only", "verl"], stderr=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(4)
    ]
    answers = [(*each.communicate(), each.returncode) for each in runs]
    assert tree_files(tree.root) == mini.expected(pin)
    assert sum(b": applied 1 patches" in out for out, _, _ in answers) == 1
    for out, err, code in answers:
        if code:
            assert code == 3
            assert b"another patchctl" in err
        else:
            assert b"applied" in out
