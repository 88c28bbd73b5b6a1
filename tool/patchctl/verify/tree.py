"""A tree by hash: its files are exactly the post-images that series.lock names."""

from __future__ import annotations

from collections.abc import Iterator

from patchctl.tree import Progress, TreeState
from patchctl.verify.findings import Finding


def check_post_images(state: TreeState) -> Iterator[Finding]:
    """A finding for every file of the series that is not its last patch's post-image."""
    if state.progress is Progress.UNAPPLIED and state.files:
        yield Finding("post-image", ".", None, f"the series for {state.pin} is not applied", "run `patchctl apply`")
        return
    for file in state.files:
        if file.position is None and file.found.content is None:
            yield Finding("post-image", file.path, None, "is missing", "restore it, then run `patchctl apply`")
        elif file.position is None:
            message = f"is neither {state.pin}'s own file nor what the series makes of it"
            yield Finding("post-image", file.path, None, message, "undo the local edits, then run `patchctl apply`")
        elif not file.applied:
            message = f"has {file.position} of its {len(file.chain)} patches"
            yield Finding("post-image", file.path, None, message, "run `patchctl apply` to finish")
        elif any(step.executable is not None for step in file.chain):
            wanted = next(step.executable for step in reversed(file.chain) if step.executable is not None)
            if file.found.executable != wanted:
                message = f"is {'not ' if wanted else ''}executable"
                yield Finding("post-image", file.path, None, message, f"chmod {'+' if wanted else '-'}x it")
