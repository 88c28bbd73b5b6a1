"""The parser and the applier of one patch: against the real patches, against mutations of them, and against git."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import trees
from mini_project import blob, git
from patchctl import patchfile
from patchctl.errors import PatchctlError
from patchctl.patchfile import HunkError, Patch, split_lines

PATCHES = sorted((trees.ROOT / "patches").rglob("*.patch"))
SMALL = [path for path in PATCHES if path.stat().st_size < 20_000]


def parsed(data: bytes) -> Patch:
    patch, problems = patchfile.parse(data, "p")
    assert problems == []
    return patch


@pytest.mark.parametrize("path", PATCHES, ids=lambda path: path.stem[:40])
def test_real_patch_reads_without_a_problem(path: Path) -> None:
    patch = parsed(path.read_bytes())
    assert patch.files
    assert patch.subject
    assert patch.author
    assert patch.trailer("Upstream-Status")


@pytest.mark.parametrize("path", PATCHES, ids=lambda path: path.stem[:40])
def test_new_files_of_real_patches_have_the_blob_id_that_their_index_line_says(path: Path) -> None:
    for file in parsed(path.read_bytes()).files:
        if file.pre is None:
            assert blob(file.apply(None, "p")) == file.post


def test_load_names_the_first_problem_and_counts_the_rest() -> None:
    data = SMALL[0].read_bytes()
    broken = data + b"stray\nstray\n"
    with pytest.raises(PatchctlError) as caught:
        patchfile.load(broken, "verl/0001.patch")
    lines = data.count(b"\n")
    assert str(caught.value).startswith(f"verl/0001.patch:{lines + 1}: ")
    assert "and 1 more" in str(caught.value)


# -- no input makes a traceback


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_mutated_patches_give_problems_and_never_raise(data: st.DataObject) -> None:
    text = bytearray(data.draw(st.sampled_from(SMALL)).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(len(text) - 1, 0)))
        kind = data.draw(st.sampled_from(["flip", "cut", "insert", "drop", "double", "swap"]))
        end = min(len(text), at + data.draw(st.integers(1, 200)))
        if kind == "flip" and text:
            text[at] = data.draw(st.integers(0, 255))
        elif kind == "cut":
            del text[at:]
        elif kind == "insert":
            text[at:at] = data.draw(
                st.binary(max_size=20)
                | st.sampled_from(
                    [
                        b"\n",
                        b"\r\n",
                        b"@@ -1 +1 @@\n",
                        b"diff --git a/x b/x\n",
                        b"-- \n",
                        b'"',
                        b"\\",
                        b"\0",
                        b"=?x?q?=?=",
                    ]
                )
            )
        elif kind == "drop":
            del text[at:end]
        elif kind == "double":
            text[at:at] = text[at:end]
        elif kind == "swap":
            lines = bytes(text).split(b"\n")
            random.Random(at).shuffle(lines)
            text = bytearray(b"\n".join(lines))
    check_never_raises(bytes(text))


PATCH_LINES = (
    *rb"""diff --git a/f b/f
diff --git "a/\777" "b/f"
diff --git a/f
index 1111111111111111111111111111111111111111..2222222222222222222222222222222222222222
index 0000000000000000000000000000000000000000..eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee 100644
new file mode 100644
deleted file mode 100755
old mode 100644
new mode 120000
--- a/f
+++ b/f
--- /dev/null
+++ /dev/null
@@ -1,2 +1,2 @@
@@ -0,0 +1 @@
@@ -1 +0,0 @@
@@
 a
+b
-a

\ No newline at end of file
2.39.5
From x
Subject: =?utf-8?b?!!?= y
rename from f
GIT binary patch
diff --cc f""".split(b"\n"),
    b"-- ",
    b"\r",
)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(PATCH_LINES), max_size=25))
def test_shuffled_patch_lines_give_problems_and_never_raise(lines: list[bytes]) -> None:
    check_never_raises(b"\n".join(lines) + b"\n")


def check_never_raises(data: bytes) -> None:
    patch, problems = patchfile.parse(data, "p")
    assert patch.files or problems
    for problem in problems:
        assert "\n" not in problem.message
        assert problem.line is None or 1 <= problem.line <= data.count(b"\n") + 2
    for file in patch.files:
        for direction in (file, file.reversed()):
            try:
                direction.apply(None if direction.pre is None else b"a\nb\nc\n", "p")
            except HunkError as error:
                assert "\n" not in str(error)


@pytest.mark.parametrize("path", SMALL, ids=lambda path: path.stem[:40])
def test_every_changed_dropped_or_doubled_line_of_a_diff_is_noticed(path: Path) -> None:
    """By the parser, or because the patch makes other contents: never by nothing at all."""
    text = path.read_bytes()
    start = text.index(b"\ndiff --git ") + 1
    lines = text.split(b"\n")
    first = text[:start].count(b"\n")
    original = parsed(text)
    before = {file.path: _old_side(file) for file in original.files}
    after = {file.path: file.apply(before[file.path], "p") for file in original.files}
    meaning = [(file.path, file.pre, file.post, file.executable) for file in original.files]
    for at in range(first, len(lines) - 1):
        line = lines[at]
        changes = [
            [],
            [line, line],
            [line + b" "],
            [line[:-1]],
            [b"+" + line[1:]],
            [b"-" + line[1:]],
            [b" " + line[1:]],
        ]
        for change in changes:
            if change == [line]:
                continue
            mutant = b"\n".join([*lines[:at], *change, *lines[at + 1 :]])
            patch, problems = patchfile.parse(mutant, "p")
            if problems:
                continue
            same = [(file.path, file.pre, file.post, file.executable) for file in patch.files] == meaning
            try:
                same = same and all(file.apply(before[file.path], "p") == after[file.path] for file in patch.files)
            except HunkError:
                continue
            # What stands behind the @@ of a hunk, and the space of an empty context line, mean nothing.
            meaningless = line.startswith(b"@@") or (line == b" " and change == [b""])
            assert not same or meaningless, f"line {at + 1}, {line!r} -> {change!r} passed unseen"


def _old_side(file: patchfile.FilePatch) -> bytes | None:
    """Contents that the patch fits exactly, made from its own hunks."""
    if file.pre is None:
        return None
    lines: list[bytes] = []
    for hunk in file.hunks:
        start = hunk.old_start - 1 if hunk.old else hunk.old_start
        lines += [b"filler %d\n" % number for number in range(len(lines), start)]
        lines += hunk.old
    return b"".join([*lines, *[b"tail %d\n" % number for number in range(5)]])


# -- the same as git


AWKWARD = [
    b"a",
    b"b",
    b"",
    b"  x",
    b"\tif y:",
    b"\x0c",
    "\u2028é".encode(),
    b"caf\xe9",
    b"z\r",
    b"--",
    b"++ q",
    b"@@ -1 +1 @@",
]
LINES = st.lists(st.sampled_from(AWKWARD), max_size=30)


@st.composite
def edited(draw: st.DrawFn) -> tuple[bytes, bytes]:
    before = draw(LINES)
    after = list(before)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(after)))
        if draw(st.booleans()) and after[at:]:
            del after[at : at + draw(st.integers(1, 3))]
        else:
            after[at:at] = draw(LINES)[: draw(st.integers(1, 4))]
    ends = [b"\n" if draw(st.integers(0, 4)) else b"" for _ in range(2)]
    return tuple(  # type: ignore[return-value]
        b"\n".join(side) + end if side else b"" for side, end in zip((before, after), ends, strict=True)
    )


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("git")
    git(folder, "init", "--quiet")
    return folder


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pairs=st.lists(edited(), min_size=1, max_size=8), context=st.sampled_from([3, 3, 1]))
def test_git_diffs_of_random_edits_apply_as_git_applies_them(
    scratch: Path, pairs: list[tuple[bytes, bytes]], context: int
) -> None:
    pairs = [pair for pair in pairs if pair[0] != pair[1]]
    if not pairs:
        return
    for number, (before, after) in enumerate(pairs):
        (scratch / "old").mkdir(exist_ok=True)
        (scratch / "new").mkdir(exist_ok=True)
        (scratch / "old" / f"f{number}").write_bytes(before)
        (scratch / "new" / f"f{number}").write_bytes(after)
    sides = []
    for side in ("old", "new"):
        git(scratch, "--work-tree", side, "--git-dir", ".git", "read-tree", "--empty")
        git(scratch, "--work-tree", side, "--git-dir", ".git", "add", "--all", "-f", ".")
        sides.append(git(scratch, "write-tree").decode().strip())
    for number in range(len(pairs)):
        for side in ("old", "new"):
            (scratch / side / f"f{number}").unlink()
    diff = git(scratch, "diff", "--full-index", "--no-renames", "--text", f"-U{context}", *sides)
    patch = parsed(b"Subject: x\n\n" + diff)
    files = {file.path: file for file in patch.files}
    for number, (before, after) in enumerate(pairs):
        file = files[f"f{number}"]
        assert file.apply(before, "p") == after
        assert file.reversed().apply(after, "p") == before
        assert file.post == blob(after)
    out = git(scratch, "apply", "--numstat", "-z", "-", stdin=diff).split(b"\0")
    theirs = [tuple(row.split(b"\t")) for row in out if row]
    assert [(b"%d" % a, b"%d" % r, p.encode()) for a, r, p in patchfile.numstat(patch.files)] == theirs


@given(st.binary(max_size=200))
def test_lines_join_to_the_same_bytes_and_only_newlines_end_them(data: bytes) -> None:
    lines = split_lines(data)
    assert b"".join(lines) == data
    assert all(line.endswith(b"\n") and line.count(b"\n") == 1 for line in lines[:-1])


# -- where a hunk may stand


BODY = b" a\n b\n c\n+new\n d\n e\n f\n"


def one_hunk(header: bytes, body: bytes = BODY) -> patchfile.FilePatch:
    ids = b"%s..%s" % (hashlib.sha1(b"1").hexdigest().encode(), hashlib.sha1(b"2").hexdigest().encode())
    text = b"Subject: x\n\ndiff --git a/f b/f\nindex %s 100644\n--- a/f\n+++ b/f\n%s\n%s" % (ids, header, body)
    return parsed(text).files[0]


BLOCK = b"a\nb\nc\nd\ne\nf\n"
PATCHED = b"a\nb\nc\nnew\nd\ne\nf\n"


def test_a_hunk_moves_where_its_lines_stand_in_one_place_only() -> None:
    hunk = one_hunk(b"@@ -10,6 +10,7 @@")
    assert hunk.apply(b"0\n" * 2 + BLOCK + b"0\n" * 20, "p") == b"0\n" * 2 + PATCHED + b"0\n" * 20
    assert hunk.apply(b"0\n" * 25 + BLOCK, "p") == b"0\n" * 25 + PATCHED


def test_a_hunk_that_fits_in_two_places_is_refused_unless_it_stands_where_its_header_says() -> None:
    hunk = one_hunk(b"@@ -10,6 +10,7 @@")
    with pytest.raises(HunkError, match=r"p: f: hunk 1 fits in 2 places \(lines 3, 12\)"):
        hunk.apply(b"0\n" * 2 + BLOCK + b"0\n" * 3 + BLOCK, "p")
    assert hunk.apply(b"0\n" * 9 + BLOCK + BLOCK, "p") == b"0\n" * 9 + PATCHED + BLOCK


TWO = b"@@ -10,6 +10,7 @@\n" + BODY + b"@@ -20,3 +21,4 @@\n x\n+more\n y\n z\n"


def test_a_hunk_does_not_move_before_the_one_above_it() -> None:
    content = b"0\n" * 3 + b"x\ny\nz\n" + b"0\n" * 3 + BLOCK + b"0\n" * 20
    with pytest.raises(HunkError, match="p: f: hunk 2, line 20: expected 'x', found '0'"):
        one_hunk(TWO.rstrip(b"\n"), b"").apply(content, "p")


def test_hunks_below_one_that_moved_are_expected_to_have_moved_along() -> None:
    content = b"0\n" * 14 + BLOCK + b"0\n" * 4 + b"x\ny\nz\n" * 3 + b"0\n"
    expected = b"0\n" * 14 + PATCHED + b"0\n" * 4 + b"x\nmore\ny\nz\n" + b"x\ny\nz\n" * 2 + b"0\n"
    assert one_hunk(TWO.rstrip(b"\n"), b"").apply(content, "p") == expected


def test_a_hunk_of_the_files_start_does_not_move() -> None:
    with pytest.raises(HunkError, match="line 1: expected 'a', found 'zero'"):
        one_hunk(b"@@ -1,6 +1,7 @@").apply(BLOCK.replace(b"a\n", b"zero\na\n"), "p")


@pytest.mark.parametrize("line", range(6))
def test_one_differing_context_line_is_never_forgiven(line: int) -> None:
    rows = split_lines(BLOCK)
    for changed in (rows[line].rstrip(b"\n") + b" \n", rows[line].rstrip(b"\n") + b"\r\n", b"\t" + rows[line]):
        content = b"".join([*rows[:line], changed, *rows[line + 1 :]])
        with pytest.raises(HunkError, match=rf"p: f: hunk 1, line {line + 10}: expected .*, found "):
            one_hunk(b"@@ -10,6 +10,7 @@").apply(b"0\n" * 9 + content, "p")


def test_the_message_of_a_misfit_names_the_end_of_the_file() -> None:
    with pytest.raises(HunkError, match="line 12: expected 'c', found the end of the file"):
        one_hunk(b"@@ -10,6 +10,7 @@").apply(b"0\n" * 9 + b"a\nb\n", "p")


def test_long_lines_are_cut_in_messages() -> None:
    with pytest.raises(HunkError) as caught:
        one_hunk(b"@@ -10,6 +10,7 @@").apply(b"x" * 5000 + b"\n", "p")
    assert len(str(caught.value)) < 500


def test_a_file_that_is_there_already_is_not_created_anew() -> None:
    head = b"Subject: x\n\ndiff --git a/f b/f\nnew file mode 100644\nindex %s..%s\n"
    body = b"--- /dev/null\n+++ b/f\n@@ -0,0 +1 @@\n+x\n"
    file = parsed(head % (b"0" * 40, str(blob(b"x\n")).encode()) + body).files[0]
    with pytest.raises(HunkError, match="creates this file, but it is there already"):
        file.apply(b"", "p")
    assert file.apply(None, "p") == b"x\n"


# -- the message


def test_subject_author_and_trailers_are_read_as_git_writes_them() -> None:
    text = (
        b"From 0 Mon Sep 17 00:00:00 2001\nFrom: =?UTF-8?q?J=C3=BCrgen?= <j@x.invalid>\n"
        b"Subject: [PATCH 2/3] [verl] area: a long\n subject\n\nWhy.\n\nDrop-when: it is\n  in a release\n---\n\n"
    )
    patch, _ = patchfile.parse(text, "p")
    assert patch.author == "Jürgen <j@x.invalid>"
    assert patch.subject == "[verl] area: a long subject"
    assert patch.trailer("Drop-when") == "it is in a release"
    assert patch.trailer("Upstream-Status") is None
    assert patch.body == "Why.\n\nDrop-when: it is\n  in a release"
