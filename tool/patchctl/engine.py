"""Apply and revert: from a tree's state and the patches to the writes, one transaction, then the proof."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from glob import escape
from pathlib import Path
from typing import NamedTuple

from patchctl.errors import PatchctlError
from patchctl.pins import Pin
from patchctl.project import Project
from patchctl.transaction import Write, commit, exclusive, put_back, remove_staged
from patchctl.tree import Progress, Tree, TreeState, read_state


class Target(NamedTuple):
    """A tree and the pin whose series it shall get."""

    tree: Tree
    pin: Pin


class Outcome(NamedTuple):
    """What happened (or, in a dry run, would happen) to one tree.

    Attributes:
        before: the tree's progress when the command started.
        written: the files that were changed, relative to the tree's root; empty if there was nothing to do.
        kept: copies of edited files that a forced revert saved.
        notes: things the user should know and need not act on.
    """

    target: Target
    patches: tuple[str, ...]
    before: Progress
    written: tuple[str, ...]
    kept: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()


def apply(project: Project, targets: Sequence[Target], *, dry_run: bool = False) -> list[Outcome]:
    """Apply each target's series; all trees, or none.

    A tree that an interrupted run left between two states is finished.

    Raises:
        InTheWayError: a file is neither pristine nor patched, or another run is at work.
        PatchctlError: a write failed, or the result is not what series.lock says; the trees are as before.
    """
    with exclusive([target.tree.root for target in targets]):
        states = [_state(project, target) for target in targets]
        for state in states:
            if state.modified:
                from patchctl.diagnose import in_the_way

                raise in_the_way(project, state)
        outcomes, writes = [], []
        for target, state in zip(targets, states, strict=True):
            planned: list[Write] = []
            if state.progress is not Progress.APPLIED:
                from patchctl.plan import plan  # brings the patch parser: a run with nothing to do starts without it

                planned = plan(state, project.patches(target.pin), forward=True)
            outcomes.append(_outcome(project, target, state, planned, dry_run))
            writes += planned
        if not dry_run:
            _carry_out(project, targets, states, writes, Progress.APPLIED)
    return outcomes


def revert(project: Project, targets: Sequence[Target], *, force: bool = False, dry_run: bool = False) -> list[Outcome]:
    """Take each target's series back out, to the byte; all trees, or none.

    Where `force` is given, a patched file with local edits is reverted hunk by hunk and keeps the edits; a file that
    the series created and the user edited is removed after a copy of it is saved beside it as `NAME.edited`.

    Raises:
        InTheWayError: a file has local edits and `force` is not given, or another run is at work.
        PatchctlError: as for `apply`.
    """
    with exclusive([target.tree.root for target in targets]):
        states = [_state(project, target) for target in targets]
        for state in states:
            if state.modified and not force:
                from patchctl.diagnose import in_the_way

                raise in_the_way(project, state, reverting=True)
        outcomes, writes = [], []
        for target, state in zip(targets, states, strict=True):
            planned: list[Write] = []
            kept: list[Path] = []
            if state.progress is not Progress.UNAPPLIED:
                from patchctl.plan import plan, plan_forced

                patches = project.patches(target.pin)
                planned = plan(state, patches, forward=False)
                for file in state.modified:
                    forced, copy = plan_forced(state.tree, file, patches)
                    planned += forced
                    kept += [copy] if copy else []
            outcomes.append(_outcome(project, target, state, planned, dry_run, kept))
            writes += planned
        if not dry_run:
            _carry_out(project, targets, states, writes, None if force else Progress.UNAPPLIED)
            from patchctl import stamp

            for state in states:
                _remove_leftovers(state)
                stamp.remove(state.tree)
    return outcomes


def _state(project: Project, target: Target) -> TreeState:
    return read_state(target.tree, target.pin, project.chains(target.pin))


def _outcome(
    project: Project,
    target: Target,
    state: TreeState,
    writes: Sequence[Write],
    dry_run: bool,
    kept: Sequence[Path] = (),
) -> Outcome:
    root = target.tree.root
    notes = []
    if state.progress is Progress.PARTLY and writes:
        notes.append("the tree was partly applied; an interrupted run is finished")
    head = _head(target.tree) if writes and not dry_run else None
    if head and head != target.pin.commit:
        notes.append(f"HEAD is {head[:12]}, not the pin {target.pin.commit[:12]}; every touched file equals the pin's")
    return Outcome(
        target=target,
        patches=project.series.for_pin(target.pin),
        before=state.progress,
        written=tuple(sorted(write.path.relative_to(root).as_posix() for write in writes)),
        kept=tuple(kept),
        notes=tuple(notes),
    )


def _head(tree: Tree) -> str | None:
    if not tree.is_checkout:
        return None
    from patchctl.git import head

    return head(tree.root)


def _carry_out(
    project: Project,
    targets: Sequence[Target],
    states: Sequence[TreeState],
    writes: Sequence[Write],
    expected: Progress | None,
) -> None:
    for state in states:
        _remove_staged(state)
    if not writes:
        return
    written = commit(writes)
    wrong = [
        state
        for state in (_state(project, target) for target in targets)
        if expected is not None and state.progress is not expected
    ]
    if wrong:  # another program wrote to the tree meanwhile
        names = ", ".join(file.path for state in wrong for file in state.modified) or str(wrong[0].tree)
        error = PatchctlError(f"{names}: changed while patchctl was writing, which is undone; run the command again")
        put_back(written, error)
        raise error
    if expected is Progress.APPLIED:
        from patchctl import stamp

        for target, state in zip(targets, states, strict=True):
            if state.progress is not Progress.APPLIED:
                stamp.write(target.tree, target.pin, project.lock)


def _remove_staged(state: TreeState) -> None:
    for file in state.files:
        remove_staged(state.tree.root / file.path)


def _remove_leftovers(state: TreeState) -> None:
    """Remove what the series' own new files leave behind: their compiled forms, and folders that are empty now."""
    for file in state.files:
        if file.chain[0].pre is not None:
            continue
        place = state.tree.root / file.path
        if place.exists():
            continue
        if place.suffix == ".py":
            with contextlib.suppress(OSError):  # another user's: what is compiled from no file is never imported
                for compiled in (place.parent / "__pycache__").glob(f"{escape(place.stem)}.*.pyc"):
                    compiled.unlink(missing_ok=True)
        for folder in (place.parent / "__pycache__", *place.parents):
            if folder == state.tree.root:
                break
            with contextlib.suppress(OSError):  # it still holds something, or is gone: both are as it should be
                folder.rmdir()
