"""One patch on another commit of upstream: how it gets there, and who stands in its way."""

from __future__ import annotations

import enum
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from patchctl import patchfile
from patchctl.git import Git, GitError
from patchctl.maintain.commits import ABSENT, FileState, States, apply_patch
from patchctl.patchfile import FilePatch, Hunk, HunkError, Patch

_LOOKED_UP = 3  # lines of a hunk whose history is asked for
_EXPLAINED = 9  # hunks of a patch, likewise
_CLASS = re.compile(rb"class ([A-Za-z_][A-Za-z0-9_]*)")


class Word(str, enum.Enum):
    """How a patch gets to another commit."""

    CLEAN = "clean"  # exactly where it says
    OFFSET = "offset"  # exactly, at other lines
    MERGED = "merged"  # by a 3-way merge
    CONFLICT = "conflict"
    UPSTREAM = "already upstream"  # its change is there


class Clash(NamedTuple):
    """A hunk that does not fit.

    Attributes:
        hunk: its number in the file's section, 1-based; 0 where the file as a whole is the matter.
        line: of the hunk in the file that the patch was made for.
        touched_by: upstream's commits that changed its lines, the latest first, as `id subject`; none without history.
    """

    path: str
    hunk: int
    line: int
    reason: str
    touched_by: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f"{self.path}: hunk {self.hunk} (line {self.line}): " if self.hunk else f"{self.path}: "
        commits = f" [{'; '.join(self.touched_by)}]" if self.touched_by else ""
        return where + self.reason + commits


class Carried(NamedTuple):
    """A patch on the other commit.

    Attributes:
        after: what it makes of the files it touches; for a conflict with its own side of the lines in dispute.
        shift: by how many lines its hunks moved, the farthest.
        clashes: the hunks that do not fit exactly, for what is merged or in conflict.
    """

    word: Word
    after: States
    shift: int = 0
    clashes: tuple[Clash, ...] = ()


def exactly(patch: Patch, there: States) -> Carried | None:
    """The patch applied to the byte; None where it does not fit so."""
    try:
        after = apply_patch(patch, there)
    except HunkError:
        return None
    shifts = [shift for file in patch.files for shift in _shifts(file, there[file.path].content)]
    farthest = max(shifts, key=abs, default=0)
    return Carried(Word.OFFSET if farthest else Word.CLEAN, after, farthest)


def _shifts(file: FilePatch, content: bytes | None) -> list[int]:
    """By how many lines each hunk stands elsewhere than its header says; the file is known to take all of them."""
    lines = patchfile.split_lines(content or b"")
    shifts = []
    offset = 0
    for hunk in file.hunks:
        at = hunk.old_start - 1 if hunk.old else hunk.old_start
        if not _stands(hunk, lines, at + offset):
            places = [place for place in range(len(lines)) if _stands(hunk, lines, place)]
            offset = min((place - at for place in places), key=lambda shift: abs(shift - offset), default=offset)
        shifts.append(offset)
    return shifts


def _stands(hunk: Hunk, lines: Sequence[bytes], at: int) -> bool:
    return at >= 0 and tuple(lines[at : at + len(hunk.old)]) == hunk.old


def merged(patch: Patch, before: States, after: States, there: States) -> Carried:
    """The patch by a 3-way merge, a file at a time.

    Args:
        before, after: the files in the series that the patch is from.
        there: the files where it shall go.
    """
    result: dict[str, FileState] = {}
    clashes: list[Clash] = []
    conflict = False
    for file in patch.files:
        base, theirs, ours = before[file.path], after[file.path], there[file.path]
        state, clean, reason = _merge_file(base, theirs, ours)
        result[file.path] = state
        misfits = _misfits(file, ours.content)
        if not clean:
            conflict = True
            clashes += misfits if reason is None and misfits else [Clash(file.path, 0, 0, reason or "both change it")]
        elif state != ours:
            clashes += misfits
    if conflict:
        return Carried(Word.CONFLICT, result, clashes=tuple(clashes))
    same = all(result[path] == there[path] for path in result)
    return Carried(Word.UPSTREAM if same else Word.MERGED, result, clashes=() if same else tuple(clashes))


def _merge_file(base: FileState, theirs: FileState, ours: FileState) -> tuple[FileState, bool, str | None]:
    """What becomes of a file, whether without conflict, and why with one; None where its lines clash."""
    if theirs == ours:
        return ours, True, None
    if base == ours:
        return theirs, True, None
    if base.content is None or theirs.content is None or ours.content is None:
        if base.content is None:
            return theirs, False, "upstream added a file of this name with other contents"
        if theirs.content is None:
            return theirs, False, "the patch deletes it, upstream changed it"
        return theirs, False, "upstream removed or moved it"
    executable = theirs.executable if theirs.executable != base.executable else ours.executable
    with tempfile.TemporaryDirectory() as scratch:
        names = ("ours", "base", "theirs")
        for name, state in zip(names, (ours, base, theirs), strict=True):
            Path(scratch, name).write_bytes(state.content or b"")
        git = Git(Path(scratch))
        # Without --theirs the exit code counts the conflicts; with it there is none.
        clean = git.succeeds("merge-file", "-p", "-q", *names)
        content = git.run("merge-file", "-p", "-q", "--theirs", *names)
    return FileState(content, executable), clean, None


def _misfits(file: FilePatch, content: bytes | None) -> list[Clash]:
    """The hunks whose lines stand nowhere in the file, with the first line that is missing."""
    lines = patchfile.split_lines(content or b"")
    known = set(lines)
    found = []
    for number, hunk in enumerate(file.hunks, start=1):
        if any(_stands(hunk, lines, at) for at in range(len(lines) + 1)):
            continue
        missing = [line for line in hunk.old if line not in known]
        reason = f"{patchfile.show(missing[0])} is not there" if missing else "its lines stand in another order there"
        found.append(Clash(file.path, number, hunk.old_start, reason))
    return found


def explain(
    git: Git, old: str, new: str, patch: Patch, clashes: Sequence[Clash], before: States, there: States
) -> tuple[Clash, ...]:
    """The clashes with upstream's commits that changed their lines, and where their class has gone.

    Where the history is not at hand they stay without commits.

    Args:
        old, new: upstream's commits that the patch is from and goes to.
        before, there: the files at both.
    """
    hunks = {(file.path, number): hunk for file in patch.files for number, hunk in enumerate(file.hunks, start=1)}
    # A commit without its parents seems to have written every line.
    history = git.line("rev-parse", "--is-shallow-repository") == "false"
    explained: list[Clash] = []
    for clash in clashes:
        hunk = hunks.get((clash.path, clash.hunk))
        commits: dict[str, None] = {}
        if hunk is not None:
            ours = before[clash.path].content or b""
            clash = clash._replace(reason=clash.reason + _gone(git, new, clash.path, _owner(ours, hunk), there))
        if history and hunk is not None and len(explained) < _EXPLAINED:
            known = set(patchfile.split_lines(there[clash.path].content or b""))
            lines = [line for line in hunk.old if line.strip() and line not in known]
            for line in lines[:_LOOKED_UP]:
                text = line.decode("utf-8", "surrogateescape").rstrip("\n")
                commits.update(dict.fromkeys(_log(git, f"-S{text}", f"{old}..{new}", clash.path)))
        if history and hunk is None and there.get(clash.path, ABSENT).content is None:
            commits.update(dict.fromkeys(_log(git, "--diff-filter=D", f"{old}..{new}", clash.path)))
        explained.append(clash._replace(touched_by=tuple(commits)))
    return tuple(explained)


def _owner(content: bytes, hunk: Hunk) -> str | None:
    """The class that a hunk's lines belong to; None where they belong to none."""
    lines = patchfile.split_lines(content)
    for line in reversed(lines[: hunk.old_start + hunk.leading]):
        if match := _CLASS.match(line):
            return match[1].decode()
        if line[:1].strip() and not line.startswith((b"@", b"#", b")")):
            return None
    return None


def _gone(git: Git, new: str, path: str, owner: str | None, there: States) -> str:
    """Where the class is, of a file that has it no more."""
    if owner is None or re.search(rb"(?m)^class %s\b" % owner.encode(), there[path].content or b""):
        return ""
    package = path.partition("/")[0]
    try:
        found = git.line("grep", "-l", "-E", f"^class {owner}($|[^A-Za-z0-9_])", new, "--", package)
    except GitError:  # nowhere
        return f"; class {owner} is gone"
    return f"; class {owner} is in {', '.join(name.partition(':')[2] for name in found.split())}"


def _log(git: Git, choice: str, span: str, path: str) -> list[str]:
    """The latest commit of a kind that touches a path, as `id subject`; none where git can't tell."""
    try:
        found = git.line("log", "-1", "--no-show-signature", "--no-color", "--format=%H %s", choice, span, "--", path)
    except GitError:  # without the history
        return []
    return [f"{found[:10]} {found[41:]}"] if found else []


def states_at(git: Git, commit: str, paths: Sequence[str]) -> dict[str, FileState]:
    """The files at a commit of a repository."""
    listing = git.run("ls-tree", "-r", "-z", "--full-tree", commit, "--", *paths).decode("utf-8", "surrogateescape")
    rows = [row.partition("\t") for row in listing.split("\0") if row]
    fields = {path: entry.split(" ") for entry, _, path in rows}
    blobs = {path: blob for path, (mode, _, blob) in fields.items() if mode in ("100644", "100755")}
    contents = dict(zip(blobs, git.blobs(list(blobs.values())), strict=True))
    return {
        path: FileState(contents[path], fields[path][0] == "100755") if path in contents else ABSENT for path in paths
    }
