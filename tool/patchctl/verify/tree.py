"""A tree by hash: its files are exactly the post-images that series.lock names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from patchctl.tree import FileState, Progress, TreeState
from patchctl.verify.findings import Finding

if TYPE_CHECKING:
    from patchctl.diagnose import Diagnosis


def check_post_images(state: TreeState, diagnosis: Diagnosis | None = None) -> Iterator[Finding]:
    """A finding for every file of the series that is not its last patch's post-image, edited files first.

    Where no file carries a patch, that is one finding about the tree, and only edited files have one each.
    `diagnosis` is why a tree has such files.
    """
    foreign = diagnosis is not None and diagnosis.foreign
    if not state.patched and state.progress is not Progress.APPLIED and not foreign:
        yield Finding("post-image", ".", None, f"the series for {state.pin} is not applied", "run `patchctl apply`")
    for file in state.modified:
        missing = file.found.content is None
        message = "is missing" if missing else f"is neither {state.pin}'s own file nor what the series makes of it"
        if diagnosis is not None and foreign:
            fix = diagnosis.advice
        else:
            fix = f"{'restore it' if missing else 'undo the local edits'}, then run `patchctl apply`"
        yield Finding("post-image", file.path, None, message, fix)
    if state.patched and not foreign:
        for file in state.files:
            yield from _unfinished(file)


def _unfinished(file: FileState) -> Iterator[Finding]:
    """What a file whose contents are known lacks."""
    if file.position is None:
        return
    if not file.applied:
        message = f"has {file.position} of its {len(file.chain)} patches"
        yield Finding("post-image", file.path, None, message, "run `patchctl apply` to finish")
    elif any(step.executable is not None for step in file.chain):
        wanted = next(step.executable for step in reversed(file.chain) if step.executable is not None)
        if file.found.executable != wanted:
            message = f"is {'not ' if wanted else ''}executable"
            yield Finding("post-image", file.path, None, message, f"chmod {'+' if wanted else '-'}x it")
