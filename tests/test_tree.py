"""What a folder is, and how far the series is applied to it, read from contents alone."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

import mini_project
from mini_project import PY, Exe, Mini, PinSpec, edit, write_files
from patchctl import engine
from patchctl.engine import Target
from patchctl.errors import InTheWayError, PatchctlError, UsageError
from patchctl.pins import Upstream
from patchctl.tree import Progress, Tree, TreeState, open_tree, read_file, read_state
from patchctl.verify.tree import check_post_images

VERL = Upstream("verl", "verl", "", "PATCHCTL_VERL_URL")


def state(mini: Mini, folder: Path, number: int = 0) -> TreeState:
    pin = mini.pin(number=number)
    return read_state(open_tree(folder, pin.upstream), pin, mini.project.chains(pin))


def at(mini: Mini, folder: Path, through: int | None) -> Path:
    """The tree after so many patches, written without patchctl."""
    write_files(folder, mini.expected(mini.pin(), through))
    return folder


# -- which folders are trees


def test_a_package_in_a_folder_makes_a_tree_also_when_the_packages_own_folder_is_given(tmp_path: Path) -> None:
    write_files(tmp_path / "site-packages", {"verl/__init__.py": b"", "other/__init__.py": b""})
    tree = open_tree(tmp_path / "site-packages", VERL)
    assert tree.root == tmp_path / "site-packages"
    assert open_tree(tmp_path / "site-packages" / "verl", VERL) == tree


def test_a_link_to_a_tree_is_followed(tmp_path: Path) -> None:
    write_files(tmp_path / "tree", {"verl/__init__.py": b""})
    (tmp_path / "link").symlink_to("tree")
    assert open_tree(tmp_path / "link", VERL).root == tmp_path / "tree"


def _nothing(folder: Path) -> None: ...


def _file(folder: Path) -> None:
    folder.write_text("x")


def _other(folder: Path) -> None:
    write_files(folder, {"setup.py": b"", "src/verl/__init__.py": b""})


def _bare(folder: Path) -> None:
    mini_project.git(folder.parent, "init", "--quiet", "--bare", str(folder))


def _loop(folder: Path) -> None:
    folder.symlink_to(folder.name)


def _dangling(folder: Path) -> None:
    folder.symlink_to("gone")


NO_TREES = [
    (_nothing, "no such folder; give the verl checkout"),
    (_file, "not a folder; give the verl checkout"),
    (Path.mkdir, "is empty; remove it, and `patchctl fetch` obtains a verl tree"),
    (_other, "not a verl tree: it has no verl/__init__.py"),
    (_bare, "a bare repository has no files to patch; add a worktree"),
    (_loop, "Too many levels of symbolic links"),
    (_dangling, "no such folder"),
]


@pytest.mark.parametrize(("make", "words"), NO_TREES, ids=lambda value: getattr(value, "__name__", ""))
def test_what_is_no_tree_is_a_usage_error_that_says_why(tmp_path: Path, make: object, words: str) -> None:
    folder = tmp_path / "树 x"
    make(folder)  # type: ignore[operator]
    with pytest.raises(UsageError, match=words) as caught:
        open_tree(folder, VERL)
    assert "\n" not in str(caught.value)
    assert "树 x" in str(caught.value)


def test_a_name_that_is_too_long_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="File name too long"):
        open_tree(tmp_path / ("x" * 300), VERL)


# -- reading a file


def read(folder: Path, path: str = "verl/a.py", blobs: Sequence[str] = ()) -> object:
    return read_file(Tree(folder, VERL), path, blobs)


def test_a_file_over_a_symbolic_link_is_refused_wherever_the_link_is(tmp_path: Path) -> None:
    write_files(tmp_path / "t", {"real.py": b"x\n", "real/a.py": b"x\n", "verl/__init__.py": b""})
    (tmp_path / "t/verl/a.py").symlink_to("../real.py")
    (tmp_path / "t/verl/dir").symlink_to("../real")
    (tmp_path / "t/verl/gone.py").symlink_to("nowhere")
    for path in ("verl/a.py", "verl/dir/a.py", "verl/gone.py"):
        with pytest.raises(InTheWayError, match="a symbolic link; the series changes real files only"):
            read(tmp_path / "t", path)


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    write_files(tmp_path, {"verl/file": b"x"})
    (tmp_path / "verl/a.py").mkdir()
    os.mkfifo(tmp_path / "verl/pipe")
    for path in ("verl/a.py", "verl/pipe"):
        with pytest.raises(InTheWayError, match="not a regular file"):
            read(tmp_path, path)
    with pytest.raises(InTheWayError, match=r"file: not a folder, but verl/file/x.py belongs below it"):
        read(tmp_path, "verl/file/x.py")


def test_crlf_is_read_as_lf_only_where_it_is_at_every_line_end(tmp_path: Path) -> None:
    cases = {
        b"a\r\nb\r\n": (b"a\nb\n", True),
        b"a\r\nb": (b"a\nb", True),
        b"a\r\nb\n": (b"a\r\nb\n", False),
        b"a\r\r\nb\r\n": (b"a\r\nb\r\n", False),
        b"a\rb\n": (b"a\rb\n", False),
    }
    for raw, (content, crlf) in cases.items():
        write_files(tmp_path, {"verl/a.py": raw})
        found = read_file(Tree(tmp_path, VERL), "verl/a.py")
        if raw == b"a\r\r\nb\r\n":  # "a\r\n" is what git makes of "a\r": it can't be told, and must come back the same
            assert found.on_disk(found.content or b"") == raw
        else:
            assert (found.content, found.crlf) == (content, crlf)
        assert found.on_disk(found.content or b"") == raw


def test_a_file_that_upstream_has_with_crlf_is_taken_as_it_is(tmp_path: Path) -> None:
    raw = b"a\r\nb\r\n"
    write_files(tmp_path, {"verl/a.py": raw})
    found = read_file(Tree(tmp_path, VERL), "verl/a.py", [str(mini_project.blob(raw))])
    assert (found.content, found.crlf) == (raw, False)


# -- the state


@pytest.mark.parametrize("through", [0, 1, 2, 3, 4])
def test_the_state_counts_the_patches_from_contents_alone(mini: Mini, tmp_path: Path, through: int) -> None:
    found = state(mini, at(mini, tmp_path / "t", through))
    expected = {0: Progress.UNAPPLIED, 4: Progress.APPLIED}.get(through, Progress.PARTLY)
    assert found.progress is expected
    for number in range(1, 5):
        assert found.patch_applied(f"verl/000{number}-step.patch") is (number <= through)


def test_overlapping_patches_on_one_file_are_told_apart(mini: Mini, tmp_path: Path) -> None:
    """Where reversing each patch by itself would say of most applied patches that they are not."""
    found = state(mini, at(mini, tmp_path / "t", 1))
    positions = {file.path: file.position for file in found.files}
    assert positions["verl/a.py"] == 1
    assert positions["verl/b.py"] == 1
    assert positions["verl/new/mod.py"] == 0


def test_files_of_two_states_are_partly_applied_and_an_edited_one_is_modified(mini: Mini, tmp_path: Path) -> None:
    folder = at(mini, tmp_path / "t", None)
    (folder / "verl/b.py").write_bytes(mini.spec(mini.pin()).base["verl/b.py"])  # type: ignore[arg-type]
    found = state(mini, folder)
    assert found.progress is Progress.PARTLY
    assert found.patch_applied("verl/0001-step.patch") is None
    (folder / "verl/a.py").write_bytes(b"mine\n")
    found = state(mini, folder)
    assert found.progress is Progress.MODIFIED
    assert [file.path for file in found.modified] == ["verl/a.py"]
    assert found.patch_applied("verl/0003-step.patch") is None


def test_a_missing_file_is_modified_and_a_missing_new_file_is_unapplied(mini: Mini, tmp_path: Path) -> None:
    folder = at(mini, tmp_path / "t", 0)
    (folder / "verl/b.py").unlink()
    assert [file.path for file in state(mini, folder).modified] == ["verl/b.py"]


def test_a_mode_change_alone_is_told_by_the_bit(mini: Mini, tmp_path: Path) -> None:
    folder = at(mini, tmp_path / "t", 3)
    (folder / "verl/tool.sh").chmod(0o755)
    positions = {file.path: file.position for file in state(mini, folder).files}
    assert positions["verl/tool.sh"] == 1
    (folder / "verl/tool.sh").chmod(0o644)
    positions = {file.path: file.position for file in state(mini, folder).files}
    assert positions["verl/tool.sh"] == 0


def test_patches_that_undo_each_other_leave_a_pristine_tree_pristine(tmp_path: Path) -> None:
    base = {"verl/__init__.py": b"", "verl/a.py": PY, "verl/c.py": b"c\n"}
    there = edit(PY, 5, b"x\n")
    steps = [
        {"verl/a.py": there, "verl/made.py": b"m\n", "verl/c.py": b"d\n"},
        {"verl/a.py": PY, "verl/made.py": None},
    ]
    mini = mini_project.build(tmp_path / "p", {"verl": [PinSpec("p1", base, steps)]})
    pin = mini.pin()
    tree = mini.pristine(tmp_path / "t", pin)
    assert state(mini, tree.root).progress is Progress.UNAPPLIED
    assert state(mini, tree.root).patch_applied("verl/0001-step.patch") is False
    outcome = engine.apply(mini.project, [Target(tree, pin)])[0]
    assert outcome.written == ("verl/c.py",)
    assert state(mini, tree.root).progress is Progress.APPLIED
    assert state(mini, tree.root).patch_applied("verl/0001-step.patch") is True
    engine.revert(mini.project, [Target(tree, pin)])
    assert mini_project.tree_files(tree.root) == base


def test_the_pin_is_found_by_the_files_a_tree_has(mini: Mini, tmp_path: Path) -> None:
    for number, through in ((0, 0), (0, 4), (1, 0), (1, 4)):
        folder = tmp_path / f"t{number}{through}"
        write_files(folder, mini.expected(mini.pin(number=number), through))
        assert mini.project.detect(open_tree(folder, VERL)).pin.name == ("p1", "p2")[number]


def test_a_revision_overrides_what_the_files_say(mini: Mini, tmp_path: Path) -> None:
    tree = mini.pristine(tmp_path / "t", mini.pin())
    assert mini.project.detect(tree, "p2").pin.name == "p2"
    assert mini.project.detect(tree, "p2").progress is Progress.MODIFIED


# -- verify's look at the same state


def findings(mini: Mini, folder: Path) -> list[tuple[str, str]]:
    return [(found.path, found.message) for found in check_post_images(state(mini, folder))]


def test_verify_finds_nothing_on_a_patched_tree_and_one_line_on_a_pristine_one(mini: Mini, tmp_path: Path) -> None:
    assert findings(mini, at(mini, tmp_path / "done", None)) == []
    assert findings(mini, at(mini, tmp_path / "not", 0)) == [(".", "the series for verl p1 is not applied")]


def test_verify_names_every_file_that_is_not_the_post_image(mini: Mini, tmp_path: Path) -> None:
    folder = at(mini, tmp_path / "t", None)
    (folder / "verl/a.py").write_bytes(b"mine\n")
    (folder / "verl/b.py").unlink()
    (folder / "verl/new/mod.py").write_bytes(b"def f():\n    return 1\n")
    (folder / "verl/run.sh").chmod(0o644)
    (folder / "verl/old.py").write_bytes(b"gone\nsoon\n")
    assert findings(mini, folder) == [
        ("verl/a.py", "is neither verl p1's own file nor what the series makes of it"),
        ("verl/b.py", "is missing"),
        ("verl/new/mod.py", "has 1 of its 2 patches"),
        ("verl/old.py", "has 0 of its 1 patches"),
        ("verl/run.sh", "is not executable"),
    ]


@pytest.mark.parametrize("path", ["verl/a.py", "verl/new/mod.py", "verl/run.sh"])
def test_verify_sees_one_changed_byte_anywhere_in_a_patched_file(mini: Mini, tmp_path: Path, path: str) -> None:
    folder = at(mini, tmp_path / "t", None)
    place = folder / path
    original = place.read_bytes()
    for index in range(0, len(original), 7):
        changed = bytearray(original)
        changed[index] ^= 1
        place.write_bytes(bytes(changed))
        assert [name for name, _ in findings(mini, folder)] == [path]
    place.write_bytes(original)
    assert findings(mini, folder) == []


def test_an_unreadable_file_is_named(mini: Mini, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = at(mini, tmp_path / "t", 0)

    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(PatchctlError, match=r"a.py: can't be read: Permission denied"):
        read(folder)


def test_an_executable_bit_without_a_word_of_the_series_means_nothing(mini: Mini, tmp_path: Path) -> None:
    folder = at(mini, tmp_path / "t", 0)
    (folder / "verl/a.py").chmod(0o755)
    assert state(mini, folder).progress is Progress.UNAPPLIED
    shutil.rmtree(folder)
    write_files(folder, {**mini.expected(mini.pin()), "verl/b.py": Exe(mini.expected(mini.pin())["verl/b.py"])})  # type: ignore[arg-type]
    assert findings(mini, folder) == []
