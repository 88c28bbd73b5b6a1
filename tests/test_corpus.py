"""One small patch per bug that was reported against some patch tool: read right, or refused for the right reason.

`READ` says what the patch makes of which files, `REFUSED` what is said of its text, `MISFIT` of a file it does not fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from mini_project import Exe, File, content
from patchctl import patchfile
from patchctl.patchfile import HunkError

CORPUS = Path(__file__).parent / "corpus"

ONE = b"one\ntwo\nthree\nfour\n"
ONE_PATCHED = b"one\nlog_step()\ntwo\nthree\ndebugger.stop()\nfour\n"
SEVEN = b"a\nb\nc\nd\ne\nf\ng\n"
THIRTY = b"".join(b"l%d\n" % number for number in range(1, 31))
FIVE_MORE = b"".join(b"m%d\n" % number for number in range(1, 6))

READ: dict[str, tuple[Mapping[str, File], Mapping[str, File]]] = {
    "plain": ({"f.py": ONE}, {"f.py": ONE_PATCHED}),
    "signature": ({"f.py": ONE}, {"f.py": ONE_PATCHED}),
    "lone-carriage-return": ({"f.py": b"x\n"}, {"f.py": b"TW\rO\nx\n"}),
    "blank-context-line-without-its-space": ({"f.py": b"a\n\nb\n"}, {"f.py": b"a\n\nB\n"}),
    "deletion": ({"f.py": ONE}, {"f.py": None}),
    "quoted-utf8-name-with-space": ({"café x.py": ONE}, {"café x.py": ONE_PATCHED}),
    "quoted-name-with-tab-and-quote": ({'t\ta"b.py': ONE}, {'t\ta"b.py': ONE_PATCHED}),
    "name-with-spaces-and-tab-ends": ({"a b.py": ONE}, {"a b.py": ONE_PATCHED}),
    "name-that-holds-b-slash": ({"x b/x": ONE}, {"x b/x": ONE_PATCHED}),
    "empty-new-file": ({"n.py": None}, {"n.py": b""}),
    "empty-new-file-then-another": ({"n.py": None, "f.py": ONE}, {"n.py": b"", "f.py": ONE_PATCHED}),
    "line-separator-forges-a-header": (
        {"f.py": b"x\n"},
        {"f.py": "x\u2028diff --git a/z b/z\u2028--- a/z\nx\n".encode()},
    ),
    "form-feed-and-other-separators": ({"f.py": b"x\n"}, {"f.py": b"a\x0cb\x1cc\x0bd\xc2\x85e\nx\n"}),
    "latin1-and-nul-bytes": ({"f.py": b"caf\xe9\n"}, {"f.py": b"caf\xe9\0\xff\n"}),
    "byte-order-mark-in-the-file": ({"f.py": b"\xef\xbb\xbfx\n"}, {"f.py": b"\xef\xbb\xbfy\n"}),
    "hunk-indented-in-the-message": ({"f.py": ONE}, {"f.py": ONE_PATCHED}),
    "message-latin1": ({"f.py": ONE}, {"f.py": ONE_PATCHED}),
    "message-with-an-unknown-charset": ({"f.py": ONE}, {"f.py": ONE_PATCHED}),
    "one-line-counts-left-out": ({"f.py": b"a\n"}, {"f.py": b"b\n"}),
    "new-executable": ({"run.sh": None}, {"run.sh": Exe(b"#!/bin/sh\n")}),
    "mode-only": ({"run.sh": b"#!/bin/sh\n"}, {"run.sh": Exe(b"#!/bin/sh\n")}),
    "crlf-file": ({"f.py": b"a\r\nb\r\n"}, {"f.py": b"a\r\nc\r\n"}),
    "no-newline-at-the-end-of-both": ({"f.py": b"a\nb"}, {"f.py": b"A\nb"}),
    "no-newline-at-the-end-before": ({"f.py": b"a"}, {"f.py": b"a\nb\n"}),
    "no-newline-at-the-end-after": ({"f.py": b"a\nb\n"}, {"f.py": b"a\nb"}),
    "trailing-blanks-in-added-lines": ({"f.py": b"a\n"}, {"f.py": b"a\nb  \t\n\t \n"}),
    "insert-only": ({"f.py": SEVEN}, {"f.py": b"a\nb\nc\nx\nd\ne\nf\ng\n"}),
    "at-the-end-of-the-file": ({"f.py": SEVEN}, {"f.py": SEVEN + b"h\n"}),
    "two-hunks": ({"f.py": THIRTY}, {"f.py": THIRTY.replace(b"l5\n", b"x\nl5\n").replace(b"l21\n", b"y\nl21\n")}),
    "context-in-the-middle": (
        {"f.py": FIVE_MORE + THIRTY},
        {"f.py": FIVE_MORE + THIRTY.replace(b"l15\n", b"new\nl15\n")},
    ),
}

REFUSED: dict[str, tuple[int | None, str]] = {
    "counts-too-few-at-the-end": (18, "counted by no hunk header, and would be dropped in silence: '+debugger.stop()'"),
    "counts-too-few-before-another-file": (18, "counted by no hunk header"),
    "counts-too-few-before-another-hunk": (18, "counted by no hunk header"),
    "counts-too-few-before-a-signature": (18, "counted by no hunk header"),
    "counts-too-few-hidden-by-a-signature-line": (16, "counted by no hunk header"),
    "counts-too-many": (13, "the hunk ends 1 lines before its header says"),
    "counts-one-side-too-few": (13, "more lines of one side than its header says"),
    "counts-huge": (13, "not a hunk header"),
    "cut-last-newline": (19, "does not end in a newline"),
    "cut-last-newline-then-another-patch": (None, "counted by no hunk header"),
    "cut-in-the-middle-of-a-hunk": (13, "before its header says"),
    "rename-of-all": (11, "a rename"),
    "copy-with-change": (11, "a copy"),
    "names-empty-as-difflib-writes-them": (10, "looks like a diff"),
    "no-git-header": (None, "looks like a diff"),
    "quoted-name-with-a-byte-beyond-255": (9, "is not a name that git writes"),
    "quoted-name-with-a-byte-beyond-255-in-the-file-header": (11, "expected `--- a/f.py`"),
    "quoted-name-with-a-newline": (9, "not a safe path"),
    "name-raw-latin1": (9, "is not UTF-8; rename the file"),
    "emptied-without-a-hunk": (9, "no hunk"),
    "binary-marker-first": (11, "a binary marker without contents"),
    "binary-git-literal": (12, "a binary patch"),
    "combined-diff-of-a-merge": (9, "looks like a diff"),
    "byte-order-mark-before-the-patch": (1, "byte order mark"),
    "signature-counted-as-a-removed-line": (20, "the mail's signature as a removed line"),
    "rubbish-behind-the-signature": (20, "counted by no hunk header"),
    "rubbish-at-the-end": (20, "counted by no hunk header"),
    "hunk-quoted-in-the-message": (9, "looks like a diff"),
    "diff-header-quoted-in-the-message": (9, "looks like a diff"),
    "same-hunk-twice": (20, "overlaps the one before it, or comes out of order"),
    "hunks-out-of-order": (18, "overlaps the one before it, or comes out of order"),
    "hunks-that-overlap": (18, "overlaps the one before it, or comes out of order"),
    "hunk-whose-new-start-is-wrong": (18, "starts at +17, but the hunks before it make it +18"),
    "mode-without-its-old-mode": (9, "old mode"),
    "mode-setuid": (9, "mode '104755'"),
    "new-and-deleted-at-once": (9, "both created and deleted"),
    "mnemonic-prefixes": (9, "does not start with a/"),
    "no-prefixes": (9, "does not start with a/"),
    "crlf-throughout": (1, "CRLF line ends"),
    "crlf-in-the-headers-of-a-file": (9, "CRLF line ends"),
    "no-newline-in-the-middle": (13, "not the last line"),
    "no-newline-before-another-hunk": (13, "not the last line"),
    "submodule": (9, "a submodule"),
    "symbolic-link": (9, "a symbolic link"),
    "index-abbreviated": (10, "no full blob ids"),
    "index-missing": (9, "no `index` line"),
    "index-says-created-mode-does-not": (9, "disagree"),
    "one-file-in-two-sections": (16, "two sections in one patch"),
    "path-into-git-folder": (9, "git's own folder"),
    "path-into-git-folder-by-case": (9, "git's own folder"),
    "path-above-the-tree": (9, "not a safe path"),
    "path-absolute": (9, "not a safe path"),
    "path-with-an-empty-part": (9, "not a safe path"),
    "file-header-names-another-file": (11, "expected `--- a/f.py`"),
    "hunk-that-changes-nothing": (13, "changes nothing"),
    "hunk-header-broken": (13, "not a hunk header"),
    "no-file-at-all": (1, "changes no file"),
    "empty": (1, "changes no file"),
}

MISFIT: dict[str, tuple[bytes | None, str]] = {
    # a stale context line, anywhere in the hunk: no fuzz
    "insert-only": (SEVEN.replace(b"f\n", b"F\n"), "line 6: expected 'f', found 'F'"),
    # the same patch a second time
    "two-hunks": (
        THIRTY.replace(b"l5\n", b"x\nl5\n").replace(b"l21\n", b"y\nl21\n"),
        "hunk 1, line 5: expected 'l5', found 'x'",
    ),
    # two places with the same context, neither where the header says
    "insert-between-equal-blocks": (b"1\n2\na\nb\n3\na\nb\n4\n", "fits in 2 places (lines 3, 6)"),
    # what stands at the end of the file in the patch must stand at the end of the file
    "at-the-end-of-the-file": (SEVEN + b"more\n", "the start or the end of the file is not"),
    # the lines are there, but with other line ends
    "crlf-in-the-hunk": (ONE, "expected 'one\\r', found 'one'"),
    "deletion": (ONE + b"five\n", "the start or the end of the file is not"),
    "deletion-that-leaves-lines": (ONE, "the start or the end of the file is not"),
    "plain": (None, "changes this file, but it is missing"),
}


def read(name: str) -> bytes:
    return (CORPUS / f"{name}.patch").read_bytes()


def test_every_file_of_the_corpus_is_in_a_table() -> None:
    assert {path.stem for path in CORPUS.iterdir()} == set(READ) | set(REFUSED) | set(MISFIT)
    assert not set(READ) & set(REFUSED)


@pytest.mark.parametrize("name", READ)
def test_reads_and_applies(name: str) -> None:
    before, after = READ[name]
    patch, problems = patchfile.parse(read(name), name)
    assert problems == []
    assert {file.path for file in patch.files} == set(before)
    for file in patch.files:
        assert file.apply(content(before[file.path]), name) == content(after[file.path])
        assert file.reversed().apply(content(after[file.path]), name) == content(before[file.path])
        if isinstance(after[file.path], Exe):
            assert file.executable is True


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_and_says_where_and_why(name: str) -> None:
    line, words = REFUSED[name]
    _, problems = patchfile.parse(read(name), name)
    fitting = [problem for problem in problems if words in problem.message]
    assert fitting, f"said instead: {problems}"
    assert line in (None, fitting[0].line)
    assert all("\n" not in problem.message for problem in problems)


@pytest.mark.parametrize("name", MISFIT)
def test_does_not_fit_and_names_the_line(name: str) -> None:
    before, words = MISFIT[name]
    patch, problems = patchfile.parse(read(name), name)
    assert problems == []
    with pytest.raises(HunkError) as caught:
        patch.files[0].apply(before, name)
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"{name}: f.py")
