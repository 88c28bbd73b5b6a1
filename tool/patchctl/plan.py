"""From a tree's state and the patches to the writes that bring it where it shall be. Nothing is written here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from patchctl.errors import InTheWayError, PatchctlError
from patchctl.patchfile import FilePatch, HunkError, Patch
from patchctl.transaction import Write
from patchctl.tree import FileState, Tree, TreeState, blob_id


def plan(state: TreeState, patches: Sequence[Patch], *, forward: bool) -> list[Write]:
    """The writes that bring every file of a known state to the end (or the start) of its chain."""
    by_name = {patch.name: {file.path: file for file in patch.files} for patch in patches}
    crlf = any(file.found.crlf for file in state.files)
    writes = []
    for file in state.files:
        goal = len(file.chain) if forward else 0
        if file.position is None or goal in file.positions:
            continue
        steps = file.chain[file.position :] if forward else tuple(reversed(file.chain[: file.position]))
        content, executable = file.found.content, None
        for step in steps:
            change: FilePatch = by_name[step.patch][file.path]
            change = change if forward else change.reversed()
            content = change.apply(content, step.patch)
            executable = change.executable if change.executable is not None else executable
        found = None if content is None else blob_id(content)
        if found != file.target_blob(goal):
            raise PatchctlError(
                f"series.lock: does not describe what the patches make of {file.path}; run `patchctl refresh`"
            )
        if content is not None and file.found.content is None and not forward:
            # Upstream's own file, which the series deleted: it comes back with the line ends that the others have.
            file = file._replace(found=file.found._replace(crlf=crlf))
        writes.append(_write(state.tree, file, content, executable))
    return writes


def _write(tree: Tree, file: FileState, content: bytes | None, executable: bool | None) -> Write:
    found = file.found
    return Write(
        path=tree.root / file.path,
        before=None if found.content is None else found.on_disk(found.content),
        after=None if content is None else found.on_disk(content),
        executable=executable if content is not None else None,
    )


def plan_forced(tree: Tree, file: FileState, patches: Sequence[Patch]) -> tuple[list[Write], Path | None]:
    """Take the patches out of an edited file; a copy is saved where the file itself goes."""
    if file.found.content is None:
        if file.chain[0].pre is None:
            return [], None
        raise InTheWayError(f"{tree.root / file.path}: is missing; restore it first (git checkout -- {file.path})")
    if file.chain[0].pre is None:
        place = tree.root / file.path
        copy = place.with_name(place.name + ".edited")
        content = file.found.on_disk(file.found.content)
        if copy.exists():
            raise InTheWayError(f"{copy}: is in the way of the copy that a forced revert saves; move it away")
        return [Write(copy, None, content), _write(tree, file, None, None)], copy
    forward = [(change, patch.name) for patch in patches for change in patch.files if change.path == file.path]
    reverted: bytes | None = file.found.content
    try:
        for change, name in reversed(forward):
            reverted = change.reversed().apply(reverted, name)
    except HunkError as error:
        if _misfit(file.found.content, forward) is None:  # edited, and not patched
            return [], None
        raise InTheWayError(f"{error}: your edits touch the patch's own lines; undo them first") from None
    return [_write(tree, file, reverted, None)], None


def first_mismatch(file: FileState, patches: Sequence[Patch]) -> str | None:
    """Where the patches do not fit an unknown file; None where they do, or are all in it already beside the edits."""
    forward = [(change, patch.name) for patch in patches for change in patch.files if change.path == file.path]
    backward = [(change.reversed(), name) for change, name in reversed(forward)]
    if _misfit(file.found.content, backward) is None:
        return None
    return _misfit(file.found.content, forward)


def _misfit(content: bytes | None, changes: Sequence[tuple[FilePatch, str]]) -> str | None:
    try:
        for change, name in changes:
            content = change.apply(content, name)
    except HunkError as error:
        return str(error)
    return None
