"""A target tree: is it one, what stands in its files, and how far is the series applied to it.

The state is read from the files' own hashes. That needs no marker and no git, works in site-packages as in a checkout,
and is right after a kill at any moment.
"""

from __future__ import annotations

import enum
import hashlib
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from patchctl.errors import InTheWayError, PatchctlError, UsageError
from patchctl.pins import Pin, Upstream
from patchctl.series import Chain

NAMED = 3
"""So many files are named where many have the same trouble."""


def blob_id(content: bytes) -> str:
    """The id that git gives these contents."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


class Tree(NamedTuple):
    """A folder that has the upstream's package at its top: a checkout, a copy, or site-packages."""

    root: Path
    upstream: Upstream

    def __str__(self) -> str:
        return str(self.root)

    @property
    def is_checkout(self) -> bool:
        return (self.root / ".git").exists()


class FileContent(NamedTuple):
    """A file as the series sees it.

    Attributes:
        content: with `\\n` line ends; None where there is no file.
        crlf: the file on disk has `\\r\\n` at every line end (a checkout under core.autocrlf=true).
        executable: its owner may execute it.
    """

    content: bytes | None
    crlf: bool = False
    executable: bool = False

    def on_disk(self, content: bytes) -> bytes:
        """`content` with this file's line ends."""
        return content.replace(b"\n", b"\r\n") if self.crlf else content


MISSING = FileContent(None)


def open_tree(folder: Path, upstream: Upstream) -> Tree:
    """The tree at `folder`, which may also be the package's own folder inside it.

    Raises:
        UsageError: there is no tree of this upstream.
    """
    package = upstream.package
    name = upstream.name
    give = f"give the {name} checkout or the site-packages that has `{package}/`"
    try:
        names = {entry.name for entry in folder.iterdir()}
        folder = folder.resolve()
    except FileNotFoundError:
        raise UsageError(f"{folder}: no such folder; {give}") from None
    except NotADirectoryError:
        raise UsageError(f"{folder}: not a folder; {give}") from None
    except OSError as error:
        raise UsageError(f"{folder}: can't be read: {error.strerror}; {give}") from None
    if (folder / package / "__init__.py").is_file():
        return Tree(folder, upstream)
    if folder.name == package and "__init__.py" in names:
        return Tree(folder.parent, upstream)
    if not names:
        raise UsageError(f"{folder}: is empty; remove it, and `patchctl fetch` obtains a {name} tree")
    if {"HEAD", "objects", "refs"} <= names:
        raise UsageError(f"{folder}: a bare repository has no files to patch; add a worktree and give that")
    raise UsageError(f"{folder}: not a {name} tree: it has no {package}/__init__.py; {give}")


def read_file(tree: Tree, path: str, known_blobs: Iterable[str] = ()) -> FileContent:
    """The file at `path`, with CRLF read as LF where that makes it one of `known_blobs`.

    Raises:
        InTheWayError: the path leads over a symbolic link or to something that is no file.
        PatchctlError: the file can't be read.
    """
    place = tree.root
    try:
        for part in path.split("/"):
            place = place / part
            mode = place.lstat().st_mode
            if stat.S_ISLNK(mode):
                raise InTheWayError(f"{place}: a symbolic link; the series changes real files only: replace it by one")
        if not stat.S_ISREG(mode):
            raise InTheWayError(f"{place}: not a regular file; move it out of the way")
        raw = place.read_bytes()
    except FileNotFoundError:
        return MISSING
    except NotADirectoryError:
        raise InTheWayError(
            f"{place.parent}: not a folder, but {path} belongs below it; move it out of the way"
        ) from None
    except OSError as error:
        raise PatchctlError(f"{place}: can't be read: {error.strerror}") from None
    executable = bool(mode & stat.S_IXUSR)
    if b"\r\n" in raw:
        blobs = set(known_blobs)
        if blob_id(raw) not in blobs:
            converted = raw.replace(b"\r\n", b"\n")
            # Exactly what a conversion makes, and nothing else: writing it back must give the same bytes.
            if converted.replace(b"\n", b"\r\n") == raw:
                return FileContent(converted, crlf=True, executable=executable)
    return FileContent(raw, executable=executable)


class Progress(enum.Enum):
    UNAPPLIED = "unapplied"
    APPLIED = "applied"
    PARTLY = "partly applied"
    MODIFIED = "modified"


class FileState(NamedTuple):
    """One file of the series in a tree.

    Attributes:
        positions: after how many patches the file stands as it was found; several where patches undo each other,
            none where its contents are none that the series knows.
    """

    path: str
    chain: Chain
    found: FileContent
    positions: tuple[int, ...]

    @property
    def position(self) -> int | None:
        """How many of its patches are applied; None where its contents are none that the series knows."""
        return self.positions[-1] if self.positions else None

    @property
    def pristine(self) -> bool:
        return 0 in self.positions

    @property
    def applied(self) -> bool:
        return len(self.chain) in self.positions

    def target_blob(self, position: int) -> str | None:
        return self.chain[0].pre if position == 0 else self.chain[position - 1].post


class TreeState(NamedTuple):
    tree: Tree
    pin: Pin
    files: tuple[FileState, ...]

    @property
    def progress(self) -> Progress:
        if any(file.position is None for file in self.files):
            return Progress.MODIFIED
        if all(file.applied for file in self.files):
            return Progress.APPLIED
        if all(file.pristine for file in self.files):
            return Progress.UNAPPLIED
        return Progress.PARTLY

    @property
    def modified(self) -> tuple[FileState, ...]:
        return tuple(file for file in self.files if file.position is None)

    @property
    def patched(self) -> tuple[FileState, ...]:
        """The files that carry a patch for certain: those that are edited are not among them."""
        return tuple(file for file in self.files if file.positions and not file.pristine)

    def patch_applied(self, patch: str) -> bool | None:
        """Whether every file of the patch is at or past it; None where that can't be told, or is so for some only."""
        unapplied = self.progress is Progress.UNAPPLIED
        known = set()
        for file in self.files:
            position = 0 if unapplied else file.position
            for index, step in enumerate(file.chain):
                if step.patch == patch:
                    known.add(None if position is None else position > index)
        return known.pop() if len(known) == 1 else None


def read_state(tree: Tree, pin: Pin, chains: Mapping[str, Chain]) -> TreeState:
    """How far the pin's series is applied, from the hashes of the files it touches."""
    return TreeState(tree, pin, tuple(_file_state(tree, path, chain) for path, chain in sorted(chains.items())))


def _file_state(tree: Tree, path: str, chain: Chain) -> FileState:
    blobs = [chain[0].pre, *(step.post for step in chain)]
    found = read_file(tree, path, [blob for blob in blobs if blob])
    blob = None if found.content is None else blob_id(found.content)
    positions = [position for position, known in enumerate(blobs) if known == blob]
    if len(positions) > 1:  # a patch that changes the mode alone leaves the blob; the bit tells
        fitting = [position for position in positions if _executable_at(chain, position) in (None, found.executable)]
        positions = fitting or positions
    return FileState(path, chain, found, tuple(positions))


def _executable_at(chain: Chain, position: int) -> bool | None:
    """The executable bit that a file has after `position` patches, where the series says anything about it."""
    for step in reversed(chain[:position]):
        if step.executable is not None:
            return step.executable
    later = [step.executable for step in chain[position:] if step.executable is not None]
    return not later[0] if later and chain[0].pre is not None else None


def closest(states: Iterable[TreeState]) -> TreeState:
    """The state of the pin whose files the tree has: the first with the fewest unknown files."""
    return min(states, key=lambda state: len(state.modified))
