"""Apply and revert on whole trees: what they make, what they refuse, and that nothing is ever lost."""

from __future__ import annotations

import os
import re
import shutil
import stat
from pathlib import Path

import pytest

import mini_project
import trees
from mini_project import PY, Exe, File, Mini, PinSpec, content, edit, git, snapshot, tree_files, write_files
from patchctl import engine, stamp
from patchctl.engine import Target
from patchctl.errors import InTheWayError, PatchctlError
from patchctl.pins import Pin
from patchctl.project import Project
from patchctl.tree import Progress, open_tree, read_state


@pytest.fixture
def target(mini: Mini, tmp_path: Path) -> Target:
    """A pristine verl tree without git, in a place whose name has a space and Chinese characters."""
    pin = mini.pin()
    return Target(mini.pristine(tmp_path / "树 tree", pin), pin)


def both(mini: Mini, folder: Path) -> list[Target]:
    pins = [mini.pin("verl"), mini.pin("vllm-ascend")]
    return [Target(mini.pristine(folder / pin.upstream.name, pin), pin) for pin in pins]


def progress(mini: Mini, target: Target) -> Progress:
    return read_state(target.tree, target.pin, mini.project.chains(target.pin)).progress


def at(mini: Mini, target: Target, through: int | None) -> None:
    """Bring a tree to where so many patches leave it, without patchctl."""
    shutil.rmtree(target.tree.root)
    write_files(target.tree.root, mini.expected(target.pin, through))


# -- the real series, on every pin


def test_the_real_series_is_applied_and_taken_back_out_to_the_byte(pin: Pin, pristine_copy: Path) -> None:
    project = trees.PROJECT
    before = snapshot(pristine_copy)
    target = Target(open_tree(pristine_copy, pin.upstream), pin)
    outcome = engine.apply(project, [target])[0]
    state = read_state(target.tree, pin, project.chains(pin))
    assert state.progress is Progress.APPLIED
    assert outcome.written == tuple(sorted(project.chains(pin)))
    for file in state.files:
        place = pristine_copy / file.path
        assert (mini_project.blob(place.read_bytes()) if place.exists() else None) == file.chain[-1].post
    changed = {
        name for name, value in snapshot(pristine_copy).items() if before.get(name) != value and value[1] is not None
    }
    assert changed - {stamp.place(target.tree).name} == set(outcome.written)
    engine.revert(project, [target])
    assert snapshot(pristine_copy) == before


def test_the_real_series_makes_the_tree_that_git_makes_of_it(pin: Pin, pristine_copy: Path, tmp_path: Path) -> None:
    """git reads the same patches, and its result is the one that counts."""
    project = trees.PROJECT
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    for path, chain in project.chains(pin).items():
        if chain[0].pre is not None:
            (theirs / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(pristine_copy / path, theirs / path)
    git(theirs, "init", "--quiet")
    stream = b"".join(project.patch_bytes(name) for name in project.series.for_pin(pin))
    git(theirs, "apply", "--whitespace=nowarn", "-p1", "-", stdin=stream)
    engine.apply(project, [Target(open_tree(pristine_copy, pin.upstream), pin)])
    for path in project.chains(pin):
        assert (pristine_copy / path).read_bytes() == (theirs / path).read_bytes()


# -- apply


def test_apply_makes_exactly_the_files_of_the_series(mini: Mini, target: Target) -> None:
    outcome = engine.apply(mini.project, [target])[0]
    assert tree_files(target.tree.root) == mini.expected(target.pin)
    assert outcome.before is Progress.UNAPPLIED
    assert outcome.written == tuple(sorted(mini.project.chains(target.pin)))
    assert outcome.patches == tuple(f"verl/000{number}-step.patch" for number in range(1, 5))


def test_a_second_apply_writes_nothing_not_even_a_time(mini: Mini, target: Target) -> None:
    engine.apply(mini.project, [target])
    before = snapshot(target.tree.root, mtimes=True)
    outcome = engine.apply(mini.project, [target])[0]
    assert snapshot(target.tree.root, mtimes=True) == before
    assert (outcome.before, outcome.written) == (Progress.APPLIED, ())


@pytest.mark.parametrize("verb", [engine.apply, engine.revert])
@pytest.mark.parametrize("through", [0, 2, None])
def test_a_dry_run_changes_no_byte_time_or_index(mini: Mini, tmp_path: Path, verb: object, through: int | None) -> None:
    pin = mini.pin()
    target = Target(mini.checkout(tmp_path / "t", pin), pin)
    write_files(target.tree.root, mini.expected(pin, through))
    (target.tree.root / "mine.txt").write_text("x")
    before = snapshot(tmp_path, mtimes=True)
    index = (target.tree.root / ".git/index").read_bytes()
    refs = git(target.tree.root, "for-each-ref")
    git_files = sorted((place, place.lstat().st_mtime_ns) for place in (target.tree.root / ".git").rglob("*"))
    planned = verb(mini.project, [target], dry_run=True)[0]  # type: ignore[operator]
    assert snapshot(tmp_path, mtimes=True) == before
    assert (target.tree.root / ".git/index").read_bytes() == index
    assert sorted((place, place.lstat().st_mtime_ns) for place in (target.tree.root / ".git").rglob("*")) == git_files
    assert git(target.tree.root, "for-each-ref") == refs
    assert verb(mini.project, [target])[0].written == planned.written  # type: ignore[operator]


def test_both_trees_are_patched_or_neither(mini: Mini, tmp_path: Path) -> None:
    targets = both(mini, tmp_path)
    runner = targets[1].tree.root / "vllm_ascend/runner.py"
    runner.write_bytes(runner.read_bytes().replace(b"line 12\n", b"mine\n"))
    before = snapshot(tmp_path, mtimes=True)
    with pytest.raises(InTheWayError, match=r"runner\.py"):
        engine.apply(mini.project, targets)
    assert snapshot(tmp_path, mtimes=True) == before
    runner.write_bytes(PY)
    engine.apply(mini.project, targets)
    for target in targets:
        assert tree_files(target.tree.root) == mini.expected(target.pin)


@pytest.mark.parametrize("fail_at", range(1, 10))
def test_a_failed_write_in_either_tree_leaves_both_as_they_were(
    mini: Mini, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fail_at: int
) -> None:
    targets = both(mini, tmp_path)
    before = snapshot(tmp_path)
    original = Path.replace
    calls = iter(range(1, 1000))

    def replace(self: Path, to: Path) -> Path:
        if self.name.endswith(".patchctl-staged") and next(calls) == fail_at:
            raise OSError(5, "Input/output error", str(self), None, str(to))
        return original(self, to)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", replace)
        if fail_at <= 8:
            with pytest.raises(PatchctlError, match="Input/output error; nothing was changed"):
                engine.apply(mini.project, targets)
            assert snapshot(tmp_path) == before
        else:  # the two trees have eight files to write: all of them were tried
            engine.apply(mini.project, targets)


@pytest.mark.parametrize("through", [1, 2, 3])
def test_a_tree_between_two_patches_is_finished_or_undone(mini: Mini, target: Target, through: int) -> None:
    at(mini, target, through)
    outcome = engine.apply(mini.project, [target])[0]
    assert outcome.before is Progress.PARTLY
    assert "partly applied" in outcome.notes[0]
    assert tree_files(target.tree.root) == mini.expected(target.pin)
    at(mini, target, through)
    engine.revert(mini.project, [target])
    assert tree_files(target.tree.root) == mini.spec(target.pin).base


@pytest.mark.parametrize("seed", range(12))
def test_files_of_different_states_are_each_finished_or_undone(mini: Mini, target: Target, seed: int) -> None:
    """Whatever a kill left: some files patched, some not, copies staged, folders made."""
    import random

    choose = random.Random(seed)
    base, done = mini.spec(target.pin).base, mini.expected(target.pin)
    for verb in (engine.apply, engine.revert):
        shutil.rmtree(target.tree.root)
        write_files(target.tree.root, base)
        for path in mini.project.chains(target.pin):
            place = target.tree.root / path
            if choose.random() < 0.5:
                place.unlink(missing_ok=True)
                write_files(target.tree.root, {path: done.get(path)})
            if choose.random() < 0.5 and place.parent.is_dir():
                place.with_name(f".{place.name}.patchctl-staged").write_bytes(b"half")
        (target.tree.root / "verl/new").mkdir(exist_ok=True)
        verb(mini.project, [target])
        assert tree_files(target.tree.root) == (done if verb is engine.apply else base)
        if verb is engine.revert:
            assert not (target.tree.root / "verl/new").exists()


def test_a_file_that_changes_while_apply_writes_makes_it_undo_its_writes(
    mini: Mini, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot(target.tree.root)
    other = target.tree.root / "verl/b.py"
    original = engine.commit

    def commit(writes: object) -> object:
        result = original(writes)  # type: ignore[arg-type]
        other.write_bytes(b"somebody's work\n")
        return result

    monkeypatch.setattr(engine, "commit", commit)
    with pytest.raises(PatchctlError, match=r"verl/b.py: changed while patchctl was writing, which is undone"):
        engine.apply(mini.project, [target])
    after = snapshot(target.tree.root)
    assert after.pop("verl/b.py")[1] == b"somebody's work\n"
    before.pop("verl/b.py")
    assert {name: value for name, value in after.items() if value[1] is not None} == {
        name: value for name, value in before.items() if value[1] is not None
    }


def test_a_lock_that_does_not_describe_the_result_stops_apply_before_the_first_write(
    mini: Mini, target: Target
) -> None:
    place = mini.root / "series.lock"
    done = mini_project.blob(content(mini.expected(target.pin)["verl/a.py"]))
    place.write_text(place.read_text().replace(str(done), "0" * 39 + "1"))
    before = snapshot(target.tree.root, mtimes=True)
    with pytest.raises(PatchctlError, match=r"series.lock: does not describe what the patches make of verl/a.py"):
        engine.apply(mini.project, [target])
    assert snapshot(target.tree.root, mtimes=True) == before


def test_a_patch_that_was_edited_stops_apply_before_the_first_write(mini: Mini, target: Target) -> None:
    place = mini.root / "patches/verl/0004-step.patch"
    place.write_bytes(place.read_bytes().replace(b"#!/bin/sh", b"#!/bin/ssh"))
    before = snapshot(target.tree.root, mtimes=True)
    with pytest.raises(
        PatchctlError, match=r"patches/verl/0004-step.patch: not the file that series.lock was made from"
    ):
        engine.apply(mini.project, [target])
    assert snapshot(target.tree.root, mtimes=True) == before


def test_150_patches_are_applied_and_taken_back_out(tmp_path: Path) -> None:
    base: dict[str, File] = {"verl/__init__.py": b"", **{f"verl/f{number}.py": PY for number in range(10)}}
    steps: list[dict[str, File]] = []
    now = dict(base)
    for number in range(150):
        path = f"verl/f{number % 10}.py" if number % 3 else f"verl/new{number % 7}/g{number}.py"
        before = content(now.get(path)) or PY
        now[path] = edit(before, 1 + (number * 5) % 30, b"patch %d\n" % number)
        steps.append({path: now[path]})
    mini = mini_project.build(tmp_path / "p", {"verl": [PinSpec("p1", base, steps)]})
    pin = mini.pin()
    target = Target(mini.pristine(tmp_path / "t", pin), pin)
    outcome = engine.apply(mini.project, [target])[0]
    assert len(outcome.patches) == 150
    assert tree_files(target.tree.root) == mini.expected(pin)
    engine.revert(mini.project, [target])
    assert snapshot(target.tree.root) == snapshot(mini.pristine(tmp_path / "again", pin).root)


# -- what a tree may be


def test_awkward_names_and_contents(tmp_path: Path) -> None:
    names = ("a b.py", "x b/x", 'quote".py', "tab\there.py", "café 树.py", "-p.py", "[1]*.py", "back\\slash.py")
    paths = [f"verl/{name}" for name in names]
    base: dict[str, File] = {"verl/__init__.py": b"", **dict.fromkeys(paths, PY)}
    base |= {
        "verl/latin.py": b"caf\xe9\n" * 9,
        "verl/bom.py": b"\xef\xbb\xbfa\nb\nc\n",
        "verl/ff.py": "a\x0c\nb\u2028c\nd\r e\n".encode(),
        "verl/noeol.py": b"a\nb",
        "verl/toeol.py": b"a\nb",
        "verl/crlf.py": b"a\r\nb\r\n",
        "verl/empty.py": b"",
        "verl/deleted.sh": Exe(b"x\n"),
        "verl/unset.sh": Exe(b"y\n"),
    }
    step: dict[str, File] = {path: edit(PY, 3, b"new\n") for path in paths}
    step |= {
        "verl/latin.py": b"caf\xe9\n" * 4 + b"\xff\xfe\x00\n" + b"caf\xe9\n" * 5,
        "verl/bom.py": b"\xef\xbb\xbfa\nB\nc\n",
        "verl/ff.py": "a\x0c\nb\u2028C\nd\r E\n".encode(),
        "verl/noeol.py": b"a\nB",
        "verl/toeol.py": b"a\nb\n",
        "verl/crlf.py": b"a\r\nB\r\n",
        "verl/empty.py": b"no more\n",
        "verl/deleted.sh": None,
        "verl/unset.sh": b"y\n",
        "verl/new dir/empty": b"",
        "verl/new dir/run": Exe(b""),
        "verl/new 'q'/\u2028.py": b"\r\n\r",
    }
    mini = mini_project.build(tmp_path / "p", {"verl": [PinSpec("p1", base, [step])]})
    pin = mini.pin()
    target = Target(mini.pristine(tmp_path / "t", pin), pin)
    before = snapshot(target.tree.root)
    engine.apply(mini.project, [target])
    assert tree_files(target.tree.root) == mini.expected(pin)
    engine.revert(mini.project, [target])
    assert snapshot(target.tree.root) == before
    from patchctl.verify.series import check_series

    assert check_series(mini.project).findings == ()


def to_crlf(folder: Path, paths: list[str]) -> None:
    for path in paths:
        place = folder / path
        place.write_bytes(place.read_bytes().replace(b"\n", b"\r\n"))


def test_a_checkout_under_autocrlf_keeps_its_line_ends(mini: Mini, tmp_path: Path) -> None:
    pin = mini.pin()
    tree = mini.checkout(tmp_path / "t", pin)
    git(tree.root, "config", "core.autocrlf", "true")
    git(tree.root, "rm", "--quiet", "--cached", "-r", ".")
    git(tree.root, "reset", "--quiet", "--hard")
    assert b"\r\n" in (tree.root / "verl/a.py").read_bytes()
    before = snapshot(tree.root)
    engine.apply(mini.project, [Target(tree, pin)])
    patched = mini.expected(pin)
    for path in ("verl/a.py", "verl/b.py", "verl/tool.sh"):
        expected = (content(patched[path]) or b"").replace(b"\n", b"\r\n")
        assert (tree.root / path).read_bytes() == expected
    assert progress(mini, Target(tree, pin)) is Progress.APPLIED
    out = git(tree.root, "diff", "--name-only").decode().split()
    assert out == ["verl/a.py", "verl/b.py", "verl/old.py", "verl/tool.sh"]
    engine.revert(mini.project, [Target(tree, pin)])
    assert snapshot(tree.root) == before
    assert git(tree.root, "status", "--porcelain") == b""


def test_a_file_with_mixed_line_ends_is_refused_and_named(mini: Mini, target: Target) -> None:
    place = target.tree.root / "verl/b.py"
    place.write_bytes(place.read_bytes().replace(b"row 20\n", b"row 20\r\n"))
    before = snapshot(target.tree.root, mtimes=True)
    with pytest.raises(InTheWayError, match=r"verl/b.py: hunk 1, line 20: expected 'row 20', found 'row 20\\r'"):
        engine.apply(mini.project, [target])
    assert snapshot(target.tree.root, mtimes=True) == before


def test_untouched_files_with_crlf_stay_as_they_are(mini: Mini, target: Target) -> None:
    to_crlf(target.tree.root, ["verl/untouched.py", "README.md"])
    engine.apply(mini.project, [target])
    assert (target.tree.root / "verl/untouched.py").read_bytes() == b"x = 1\r\n"


@pytest.mark.parametrize("kind", ["shallow", "worktree", "submodule", "branch"])
def test_every_kind_of_checkout(mini: Mini, tmp_path: Path, kind: str) -> None:
    pin = mini.pin()
    repository = mini.repositories["verl"]
    folder = tmp_path / "t"
    if kind == "shallow":
        folder.mkdir()
        git(folder, "init", "--quiet")
        git(folder, "fetch", "--quiet", "--depth=1", f"file://{repository}", pin.commit)
        git(folder, "checkout", "--quiet", "FETCH_HEAD")
    elif kind == "worktree":
        mini.checkout(tmp_path / "main", pin)
        git(tmp_path / "main", "worktree", "add", "--quiet", "--detach", str(folder))
    elif kind == "submodule":
        parent = tmp_path / "parent"
        git(tmp_path, "init", "--quiet", str(parent))
        git(parent, "submodule", "--quiet", "add", "--branch", "pin-p1", str(repository), "third/verl")
        folder = parent / "third/verl"
        git(folder, "checkout", "--quiet", pin.commit)
    else:
        git(tmp_path, "clone", "--quiet", "--branch", "pin-p1", str(repository), str(folder))
    target = Target(open_tree(folder, pin.upstream), pin)
    outcome = engine.apply(mini.project, [target])[0]
    assert outcome.notes == ()
    assert tree_files(folder) == mini.expected(pin)
    assert stamp.read(target.tree)["pin"] == "verl/p1"  # type: ignore[index]
    assert not list(folder.glob(".patchctl*"))
    status = {line[3:]: line[:2] for line in git(folder, "status", "--porcelain", "-uall").decode().splitlines()}
    assert set(status) == set(mini.project.chains(pin))
    engine.revert(mini.project, [target])
    assert git(folder, "status", "--porcelain", "--ignored") == b""
    assert stamp.read(target.tree) is None


def test_other_dirt_in_a_checkout_is_left_alone(mini: Mini, tmp_path: Path) -> None:
    pin = mini.pin()
    target = Target(mini.checkout(tmp_path / "t", pin), pin)
    root = target.tree.root
    (root / "verl/untouched.py").write_text("x = 2  # mine\n")
    (root / "notes.txt").write_text("mine\n")
    (root / "verl/new").mkdir()
    (root / "verl/new/mine.py").write_text("mine\n")
    (root / "README.md").write_text("staged\n")
    git(root, "add", "README.md")
    before = git(root, "status", "--porcelain", "-uall")
    kept = snapshot(root, mtimes=True)
    engine.apply(mini.project, [target])
    engine.revert(mini.project, [target])
    assert git(root, "status", "--porcelain", "-uall") == before
    after = snapshot(root, mtimes=True)
    for name in ("verl/untouched.py", "notes.txt", "verl/new/mine.py", "README.md"):
        assert after[name] == kept[name]
    assert {name: value[:2] for name, value in after.items()} == {name: value[:2] for name, value in kept.items()}


def test_a_tree_inside_another_repositorys_work_tree(mini: Mini, tmp_path: Path) -> None:
    """Where plain `git apply` skips every file, changes nothing and ends with 0."""
    pin = mini.pin()
    outer = tmp_path / "outer"
    git(tmp_path, "init", "--quiet", str(outer))
    (outer / ".gitignore").write_text("venv/\n")
    target = Target(mini.pristine(outer / "venv/site-packages", pin), pin)
    outcome = engine.apply(mini.project, [target])[0]
    assert outcome.notes == ()  # the outer repository's HEAD is none of our business
    assert tree_files(target.tree.root) == mini.expected(pin)
    assert not list((outer / ".git").glob("patchctl*"))
    engine.revert(mini.project, [target])
    assert tree_files(target.tree.root) == mini.spec(pin).base


def test_site_packages_with_record_and_compiled_files(mini: Mini, tmp_path: Path) -> None:
    pin = mini.pin()
    site = tmp_path / "lib/python3.11/site-packages"
    target = Target(mini.pristine(site, pin), pin)
    others: dict[str, File] = {
        "verl-0.1.dist-info/RECORD": b"verl/a.py,sha256=x,1\n",
        "click/__init__.py": b"",
        "verl/__pycache__/a.cpython-311.pyc": b"old",
        "verl/__pycache__/run.cpython-311.pyc": b"of run.py, not of run.sh",
    }
    write_files(site, others)
    before = snapshot(site)
    engine.apply(mini.project, [target])
    assert (site / ".patchctl-verl.json").is_file()
    compiled: dict[str, File] = {
        f"verl/new/__pycache__/{name}.cpython-{version}.pyc": b"c"
        for name in ("__init__", "mod", "mod.opt-1")
        for version in (310, 311)
    }
    write_files(
        site, {name.replace(".opt-1.cpython-311", ".cpython-311.opt-1"): data for name, data in compiled.items()}
    )
    engine.revert(mini.project, [target])
    assert snapshot(site) == before


def test_hard_linked_files_keep_their_contents_elsewhere(mini: Mini, tmp_path: Path) -> None:
    """As package managers link installed files to a cache that other environments share."""
    pin = mini.pin()
    cache = mini.pristine(tmp_path / "cache", pin).root
    before = snapshot(cache, mtimes=True)
    target = Target(open_tree(trees.copy(cache, tmp_path / "env"), pin.upstream), pin)
    engine.apply(mini.project, [target])
    assert snapshot(cache, mtimes=True) == before
    assert tree_files(target.tree.root) == mini.expected(pin)
    engine.revert(mini.project, [target])
    assert snapshot(cache, mtimes=True) == before
    assert snapshot(target.tree.root) == snapshot(cache)


@pytest.mark.parametrize("what", ["file", "folder", "package"])
def test_symbolic_links_are_refused_and_nothing_changes(mini: Mini, target: Target, tmp_path: Path, what: str) -> None:
    root = target.tree.root
    place = {"file": root / "verl/b.py", "folder": root / "verl/new", "package": root / "verl"}[what]
    elsewhere = tmp_path / "elsewhere"
    if place.exists():
        place.rename(elsewhere)
    else:
        elsewhere.mkdir()
    place.symlink_to(elsewhere)
    before = snapshot(tmp_path, mtimes=True)
    with pytest.raises(InTheWayError, match=re.escape(f"{place}: a symbolic link")):
        engine.apply(mini.project, [target])
    assert snapshot(tmp_path, mtimes=True) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")
def test_a_tree_of_another_owner(mini: Mini, tmp_path: Path) -> None:
    pin = mini.pin()
    target = Target(mini.checkout(tmp_path / "t", pin), pin)
    for place in (target.tree.root, *target.tree.root.rglob("*")):
        os.lchown(place, 1234, 1234)
    git(target.tree.root, "-c", f"safe.directory={target.tree.root}", "commit", "--allow-empty", "--quiet", "-m", "x")
    outcome = engine.apply(mini.project, [target])[0]
    assert "HEAD is" in outcome.notes[0]  # git was asked, and did not refuse because of the owner
    for path in outcome.written:
        place = target.tree.root / path
        assert not place.exists() or place.stat().st_uid == 1234
    assert (target.tree.root / "verl/new").stat().st_uid == 1234


def test_modes_of_touched_files_are_kept(mini: Mini, target: Target) -> None:
    (target.tree.root / "verl/a.py").chmod(0o664)
    (target.tree.root / "verl/tool.sh").chmod(0o640)
    engine.apply(mini.project, [target])
    assert stat.S_IMODE((target.tree.root / "verl/a.py").stat().st_mode) == 0o664
    assert stat.S_IMODE((target.tree.root / "verl/tool.sh").stat().st_mode) == 0o750
    engine.revert(mini.project, [target])
    assert stat.S_IMODE((target.tree.root / "verl/a.py").stat().st_mode) == 0o664
    assert stat.S_IMODE((target.tree.root / "verl/tool.sh").stat().st_mode) == 0o640


# -- what is in the way


def test_a_touched_file_with_edits_is_refused_and_every_such_file_is_named(mini: Mini, target: Target) -> None:
    root = target.tree.root
    (root / "verl/a.py").write_bytes(PY.replace(b"line 6\n", b"line six\n"))
    (root / "verl/b.py").write_bytes((root / "verl/b.py").read_bytes() + b"mine\n")
    before = snapshot(root, mtimes=True)
    with pytest.raises(InTheWayError) as caught:
        engine.apply(mini.project, [target])
    message = str(caught.value)
    assert "verl/0001-step.patch: verl/a.py: hunk 1, line 6: expected 'line 6', found 'line six'" in message
    assert "1 more: verl/b.py" in message
    assert snapshot(root, mtimes=True) == before


def test_edits_that_no_hunk_touches_are_called_local_edits(mini: Mini, target: Target) -> None:
    (target.tree.root / "verl/b.py").write_bytes((target.tree.root / "verl/b.py").read_bytes() + b"mine\n")
    with pytest.raises(InTheWayError, match=r"verl/b.py has local edits; keep .* undo them \(reinstall"):
        engine.apply(mini.project, [target])


def test_edits_in_a_patched_file_are_called_local_edits(mini: Mini, target: Target) -> None:
    engine.apply(mini.project, [target])
    place = target.tree.root / "verl/a.py"
    place.write_bytes(place.read_bytes() + b"mine\n")
    with pytest.raises(InTheWayError, match=r"verl/a.py has local edits"):
        engine.apply(mini.project, [target])


def test_a_file_in_the_place_of_a_new_one_is_refused_and_kept(mini: Mini, target: Target) -> None:
    write_files(target.tree.root, {"verl/new/mod.py": b"mine\n"})
    with pytest.raises(InTheWayError, match=r"verl/new/mod.py: the patch creates this file, but it is there already"):
        engine.apply(mini.project, [target])
    assert (target.tree.root / "verl/new/mod.py").read_bytes() == b"mine\n"


def test_a_missing_file_is_named(mini: Mini, target: Target) -> None:
    (target.tree.root / "verl/b.py").unlink()
    with pytest.raises(InTheWayError, match=r"verl/b.py is missing; restore it \(reinstall"):
        engine.apply(mini.project, [target])


def test_another_commit_with_the_pins_files_is_allowed_with_a_note(mini: Mini, tmp_path: Path) -> None:
    pin = mini.pin()
    target = Target(mini.checkout(tmp_path / "t", pin), pin)
    git(target.tree.root, "commit", "--quiet", "--allow-empty", "-m", "mine")
    head = git(target.tree.root, "rev-parse", "HEAD").decode()[:12]
    outcome = engine.apply(mini.project, [target])[0]
    assert outcome.notes == (f"HEAD is {head}, not the pin {pin.commit[:12]}; every touched file equals the pin's",)
    assert tree_files(target.tree.root) == mini.expected(pin)


def test_another_commit_with_other_files_is_refused_and_both_commits_are_named(mini: Mini, tmp_path: Path) -> None:
    pin = mini.pin()
    target = Target(mini.checkout(tmp_path / "t", pin), pin)
    (target.tree.root / "verl/a.py").write_bytes(PY.replace(b"line 6\n", b"line six\n"))
    git(target.tree.root, "commit", "--quiet", "--all", "-m", "mine")
    head = git(target.tree.root, "rev-parse", "HEAD").decode()[:12]
    with pytest.raises(InTheWayError) as caught:
        engine.apply(mini.project, [target])
    assert f"not verl {pin.name} but commit {head} (the pin is {pin.commit[:12]}): " in str(caught.value)
    assert "expected 'line 6', found 'line six'" in str(caught.value)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("patched", [False, True])
def test_a_tree_of_another_pin_is_refused_and_the_pin_that_fits_is_named(
    mini: Mini, tmp_path: Path, patched: bool
) -> None:
    other = mini.pin(number=1)
    tree = mini.pristine(tmp_path / "t", other)
    if patched:
        engine.apply(mini.project, [Target(tree, other)])
    with pytest.raises(InTheWayError, match=r"its files are those of verl p2, not p1; give that pin, or another tree"):
        engine.apply(mini.project, [Target(tree, mini.pin())])


def test_a_checkout_without_a_commit_or_with_a_broken_git_folder_is_judged_by_its_files(
    mini: Mini, tmp_path: Path
) -> None:
    pin = mini.pin()
    for number, make in enumerate((lambda r: git(r, "init", "-q"), lambda r: (r / ".git").mkdir())):
        target = Target(mini.pristine(tmp_path / str(number), pin), pin)
        make(target.tree.root)
        assert engine.apply(mini.project, [target])[0].notes == ()
    target = Target(mini.pristine(tmp_path / "file", pin), pin)
    (target.tree.root / ".git").write_bytes(b"gitdir: \0nowhere\n")
    engine.apply(mini.project, [target])
    assert stamp.read(target.tree) is not None


# -- revert


def test_revert_restores_contents_modes_and_folders(mini: Mini, target: Target) -> None:
    before = snapshot(target.tree.root)
    engine.apply(mini.project, [target])
    outcome = engine.revert(mini.project, [target])[0]
    assert snapshot(target.tree.root) == before
    assert outcome.before is Progress.APPLIED
    assert outcome.written == tuple(sorted(mini.project.chains(target.pin)))


def test_revert_of_a_pristine_tree_does_nothing(mini: Mini, target: Target) -> None:
    before = snapshot(target.tree.root, mtimes=True)
    outcome = engine.revert(mini.project, [target])[0]
    assert (outcome.before, outcome.written) == (Progress.UNAPPLIED, ())
    assert snapshot(target.tree.root, mtimes=True) == before


def test_revert_refuses_edits_and_names_every_edited_file(mini: Mini, target: Target) -> None:
    engine.apply(mini.project, [target])
    for path in ("verl/a.py", "verl/new/mod.py"):
        place = target.tree.root / path
        place.write_bytes(place.read_bytes() + b"mine\n")
    before = snapshot(target.tree.root, mtimes=True)
    with pytest.raises(InTheWayError, match=r"local edits in verl/a.py, verl/new/mod.py; undo them, or give --force"):
        engine.revert(mini.project, [target])
    assert snapshot(target.tree.root, mtimes=True) == before


def test_a_forced_revert_keeps_edits_and_saves_edited_new_files(mini: Mini, target: Target) -> None:
    engine.apply(mini.project, [target])
    root = target.tree.root
    for path in ("verl/a.py", "verl/new/mod.py"):
        (root / path).write_bytes((root / path).read_bytes() + b"mine\n")
    outcome = engine.revert(mini.project, [target], force=True)[0]
    assert (root / "verl/a.py").read_bytes() == PY + b"mine\n"
    assert outcome.kept == (root / "verl/new/mod.py.edited",)
    assert outcome.kept[0].read_bytes() == b"def f():\n    return 2\nmine\n"
    left = {
        name: value for name, value in tree_files(root).items() if name not in ("verl/a.py", "verl/new/mod.py.edited")
    }
    base = {name: value for name, value in mini.spec(target.pin).base.items() if name != "verl/a.py"}
    assert left == base


def test_a_forced_revert_of_edits_in_the_patches_own_lines_is_refused(mini: Mini, target: Target) -> None:
    engine.apply(mini.project, [target])
    place = target.tree.root / "verl/a.py"
    place.write_bytes(place.read_bytes().replace(b"three\n", b"drei\n"))
    before = snapshot(target.tree.root, mtimes=True)
    with pytest.raises(InTheWayError, match=r"verl/a.py: hunk 1, line 7: expected 'three', found 'drei': your edits"):
        engine.revert(mini.project, [target], force=True)
    assert snapshot(target.tree.root, mtimes=True) == before


def test_a_forced_revert_does_not_write_over_an_earlier_copy(mini: Mini, target: Target) -> None:
    engine.apply(mini.project, [target])
    root = target.tree.root
    (root / "verl/new/mod.py").write_bytes(b"mine\n")
    (root / "verl/new/mod.py.edited").write_bytes(b"older\n")
    with pytest.raises(InTheWayError, match=r"mod.py.edited: is in the way of the copy"):
        engine.revert(mini.project, [target], force=True)
    assert (root / "verl/new/mod.py.edited").read_bytes() == b"older\n"


def test_a_forced_revert_keeps_crlf(mini: Mini, target: Target) -> None:
    engine.apply(mini.project, [target])
    place = target.tree.root / "verl/a.py"
    place.write_bytes((place.read_bytes() + b"mine\n").replace(b"\n", b"\r\n"))
    engine.revert(mini.project, [target], force=True)
    assert place.read_bytes() == (PY + b"mine\n").replace(b"\n", b"\r\n")


def test_revert_after_an_interrupted_apply_removes_what_it_staged(mini: Mini, target: Target) -> None:
    before = snapshot(target.tree.root)
    (target.tree.root / "verl/new").mkdir()
    (target.tree.root / "verl/new/.mod.py.patchctl-staged").write_bytes(b"half")
    (target.tree.root / ".patchctl-verl.json.new").write_bytes(b"{")
    engine.revert(mini.project, [target])
    assert snapshot(target.tree.root) == before


# -- the note


def test_the_note_says_which_series_was_applied_and_decides_nothing(mini: Mini, target: Target) -> None:
    engine.apply(mini.project, [target])
    note = stamp.read(target.tree)
    assert note is not None
    assert (note["pin"], note["commit"]) == ("verl/p1", target.pin.commit)
    assert set(note) == {"patchctl", "pin", "commit", "series", "applied"}
    place = stamp.place(target.tree)
    for damage in (b"", b"{", b"[]", b"\xff\xfe", b'{"pin": "verl/p2"}'):
        place.write_bytes(damage)
        assert engine.apply(mini.project, [target])[0].before is Progress.APPLIED
        assert stamp.read(target.tree) in (None, {"pin": "verl/p2"})
    place.unlink()
    assert engine.apply(mini.project, [target])[0].before is Progress.APPLIED
    engine.revert(mini.project, [target])
    assert tree_files(target.tree.root) == mini.spec(target.pin).base


def test_a_note_that_can_not_be_written_spoils_nothing(mini: Mini, target: Target) -> None:
    stamp.place(target.tree).mkdir()
    engine.apply(mini.project, [target])
    assert progress(mini, target) is Progress.APPLIED


def test_nothing_of_the_project_is_written_by_apply(mini: Mini, target: Target) -> None:
    before = snapshot(mini.root, mtimes=True)
    engine.apply(Project(mini.root), [target])
    engine.revert(Project(mini.root), [target])
    assert snapshot(mini.root, mtimes=True) == before


def test_a_tree_that_another_series_patched_is_told_from_local_edits(mini: Mini, tmp_path: Path) -> None:
    pin = mini.pin()
    target = Target(mini.pristine(tmp_path / "t", pin), pin)
    engine.apply(mini.project, [target])
    (target.tree.root / "verl/a.py").write_bytes(b"as the older series had it\n")
    note = stamp.place(target.tree)
    note.write_text(note.read_text().replace('"series": "', '"series": "0'))
    for command in (engine.apply, engine.revert):
        with pytest.raises(InTheWayError, match="another state of the series is applied here"):
            command(mini.project, [target])


def test_an_installed_release_that_is_no_pin_is_called_by_its_version(mini: Mini, tmp_path: Path) -> None:
    pin = mini.pin()
    target = Target(mini.pristine(tmp_path / "site-packages", pin), pin)
    (target.tree.root / "verl-0.7.1.dist-info").mkdir()
    (target.tree.root / "verl/a.py").write_bytes(b"older\n")
    with pytest.raises(InTheWayError, match=r"not verl p1 but verl 0\.7\.1: .*; the series serves p1, p2"):
        engine.apply(mini.project, [target])


def test_a_second_forced_revert_finds_nothing_to_do(mini: Mini, tmp_path: Path) -> None:
    pin = mini.pin()
    target = Target(mini.pristine(tmp_path / "t", pin), pin)
    engine.apply(mini.project, [target])
    path = target.tree.root / "verl/a.py"
    path.write_bytes(path.read_bytes() + b"# mine\n")
    engine.revert(mini.project, [target], force=True)
    before = snapshot(target.tree.root, mtimes=True)
    assert engine.revert(mini.project, [target], force=True)[0].written == ()
    assert snapshot(target.tree.root, mtimes=True) == before
