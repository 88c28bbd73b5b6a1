"""Why a tree has files that the series does not know, in one sentence with the next step. Asked for only on errors."""

from __future__ import annotations

from patchctl import stamp
from patchctl.errors import InTheWayError, PatchctlError
from patchctl.git import head
from patchctl.pins import Pin
from patchctl.plan import first_mismatch
from patchctl.project import Project
from patchctl.series import sha256
from patchctl.tree import Tree, TreeState, read_state


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
    tree, pin = state.tree, state.pin
    if error := other_pin(project, state):
        return error
    note = stamp.read(tree)
    if note and note.get("series") not in (None, sha256(project.lock.dump().encode())):
        return InTheWayError(
            f"{tree}: another state of the series is applied here (by patchctl {note.get('patchctl')}, "
            f"{note.get('applied')}), and {state.modified[0].path} differs from this one; revert it with the series "
            "that applied it, or start from a fresh tree"
        )
    names = [file.path for file in state.modified]
    if reverting:
        return InTheWayError(
            f"{tree}: local edits in {', '.join(names)}; undo them, or give --force to revert around them"
        )
    first = state.modified[0]
    more = f"; and {len(names) - 1} more: {', '.join(names[1:])}" if len(names) > 1 else ""
    if first.found.content is None:
        cause, advice = f"{first.path} is missing", "restore it"
    else:
        mismatch = first_mismatch(first, project.patches(pin))
        cause, advice = mismatch or f"{first.path} has local edits", "keep the edits elsewhere and undo them"
    if what := _what_it_is(tree, pin):
        served = ", ".join(each.name for each in project.pins.of(pin.upstream.name))
        return InTheWayError(
            f"{tree}: not {pin} but {what}: {cause}{more}; the series serves {served}: give such a tree"
        )
    how = f"git checkout -- {first.path}" if tree.is_checkout else "reinstall the package, or copy the file anew"
    return InTheWayError(f"{tree}: {cause}{more}; {advice} ({how})")


def _what_it_is(tree: Tree, pin: Pin) -> str | None:
    """The commit or the version that the tree says it is; None where that is the pin's, or nothing says it."""
    if tree.is_checkout:
        found = head(tree.root)
        return f"commit {found[:12]} (the pin is {pin.commit[:12]})" if found and found != pin.commit else None
    for installed in tree.root.glob(f"{tree.upstream.package}-*.dist-info"):
        version = installed.name.removesuffix(".dist-info").partition("-")[2]
        if pin.wheel is None or pin.wheel.requirement != f"{pin.upstream.name}=={version}":
            return f"{pin.upstream.name} {version}"
    return None
