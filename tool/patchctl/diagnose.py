"""Why a tree has files that the series does not know, in one sentence with the next step. Asked for only on errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from patchctl import stamp
from patchctl.errors import InTheWayError, PatchctlError
from patchctl.git import head
from patchctl.pins import Pin
from patchctl.plan import first_mismatch
from patchctl.project import Project
from patchctl.series import sha256
from patchctl.tree import NAMED, FileState, Tree, TreeState, read_state


class Diagnosis(NamedTuple):
    """Why a tree has files that the series does not know.

    Attributes:
        cause: what is wrong, without the tree's name.
        advice: the next step.
        foreign: the tree is another one than the series is for, so that its files need no word each.
    """

    cause: str
    advice: str
    foreign: bool

    def __str__(self) -> str:
        return f"{self.cause}; {self.advice}"


def other_pin(project: Project, state: TreeState) -> PatchctlError | None:
    """The error to raise where the tree has exactly another pin's files."""
    tree, pin = state.tree, state.pin
    for other in project.pins.of(pin.upstream.name):
        if other != pin and not read_state(tree, other, project.chains(other)).modified:
            return InTheWayError(
                f"{tree}: its files are those of {other}, not {pin.name}; give that pin, or another tree "
                f"(`patchctl fetch --into DIR` obtains one)"
            )
    return None


def in_the_way(project: Project, state: TreeState, *, reverting: bool = False) -> PatchctlError:
    """Why the series can't be applied to a tree, or taken back out of it."""
    if error := other_pin(project, state):
        return error
    return InTheWayError(f"{state.tree}: {diagnose(project, state, reverting=reverting)}")


def diagnose(project: Project, state: TreeState, *, reverting: bool = False) -> Diagnosis:
    """What a tree is that has files which the series does not know, and is no other pin's tree."""
    tree, pin, first = state.tree, state.pin, state.modified[0]
    note = stamp.read(tree)
    other_series = note and note.get("series") not in (None, sha256(project.lock.dump().encode()))
    if note and other_series and not _mostly_pristine(state):
        cause = (
            f"another state of the series is applied here (by patchctl {note.get('patchctl')}, {note.get('applied')}), "
            f"and {first.path} differs from this one"
        )
        return Diagnosis(cause, "revert it with the series that applied it, or start from a fresh tree", foreign=True)
    names = [file.path for file in state.modified]
    what = _what_it_is(state)
    if reverting and not what:
        advice = "undo them, or give --force to revert around them"
        return Diagnosis(f"local edits in {_few(names)}", advice, foreign=False)
    if first.found.content is None:
        cause, advice = f"{first.path} is missing", "restore it"
    else:
        cause = _mismatch(project, pin, first) or f"{first.path} has local edits"
        advice = "keep the edits elsewhere and undo them"
    if others := names[1:]:
        shown = others[: NAMED - 1] + ["..."] * (len(names) > NAMED)
        cause += f"; and {len(others)} more: {', '.join(shown)}"
    if what:
        served = ", ".join(each.name for each in project.pins.of(pin.upstream.name))
        return Diagnosis(
            f"not {pin} but {what}: {cause}", f"the series serves {served}: give such a tree", foreign=True
        )
    return Diagnosis(cause, f"{advice} ({_how(tree, first)})", foreign=False)


def _mostly_pristine(state: TreeState) -> bool:
    """Whether a note in the tree is out of date: upstream's files came back without patchctl, say by git."""
    pristine = sum(file.pristine and file.found.content is not None for file in state.files)
    return not state.patched and pristine > len(state.modified)


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _mismatch(project: Project, pin: Pin, file: FileState) -> str | None:
    try:
        patches = project.patches(pin)
    except PatchctlError:  # what is wrong with a patch is told where it is needed, not where a tree is looked at
        return None
    return first_mismatch(file, patches)


def _how(tree: Tree, file: FileState) -> str:
    """How to undo a file's edits."""
    if file.chain[0].pre is None:
        return "remove the file: it is the series' own, not upstream's"
    return f"git checkout -- {file.path}" if tree.is_checkout else "reinstall the package, or copy the file anew"


def _what_it_is(state: TreeState) -> str | None:
    """The commit or the version that the tree says it is; None where that is the pin's, or nothing says it.

    A commit of the user's own that has the pin's patched files is no other tree: most of what upstream has is patched.
    """
    tree, pin = state.tree, state.pin
    if sum(file.chain[0].pre is not None for file in state.patched) > len(state.modified):
        return None
    if tree.is_checkout:
        found = head(tree.root)
        return f"commit {found[:12]} (the pin is {pin.commit[:12]})" if found and found != pin.commit else None
    for installed in tree.root.glob(f"{tree.upstream.package}-*.dist-info"):
        version = installed.name.removesuffix(".dist-info").partition("-")[2]
        if pin.wheel is None or pin.wheel.requirement != f"{pin.upstream.name}=={version}":
            return f"{pin.upstream.name} {version}"
    return None
