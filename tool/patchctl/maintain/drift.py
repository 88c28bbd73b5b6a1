"""Drift: does the series still apply at some commit of upstream, patch by patch. Nothing is written but scratch."""

from __future__ import annotations

import datetime
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from patchctl import sources
from patchctl.errors import PatchctlError
from patchctl.git import Git
from patchctl.maintain import carry, editing
from patchctl.maintain.base import Base
from patchctl.maintain.carry import Carried, Clash, Word
from patchctl.maintain.commits import Change
from patchctl.maintain.newcomers import hooked, newcomers
from patchctl.patchfile import Patch
from patchctl.pins import Pin
from patchctl.project import Project
from patchctl.sources import Say

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def newest(project: Project, upstream: str) -> Pin:
    """The pin whose commit is the latest, by the dates in pins.toml; of equals the last."""
    document = tomllib.loads((project.root / "configs" / "pins.toml").read_text(encoding="utf-8"))
    dates = {(entry["upstream"], entry["name"]): entry.get("date", datetime.date.min) for entry in document["pins"]}
    pins = project.pins.of(upstream)
    if not pins:
        raise PatchctlError(f"{upstream}: has no pin in configs/pins.toml")
    return max(reversed(pins), key=lambda pin: dates[upstream, pin.name])


@dataclass(frozen=True)
class Drifted:
    """What became of a pin's patches at another commit.

    Attributes:
        carried: for each patch, in order, its name and how it gets there. Behind a conflict the patches are judged as
            if it had been settled in favour of the series.
        newcomers: upstream's new files that the series may have to see to, a line each.
    """

    pin: Pin
    revision: str
    commit: str
    carried: tuple[tuple[str, Carried], ...]
    newcomers: tuple[str, ...] = ()

    @property
    def applies(self) -> bool:
        return not any(found.word is Word.CONFLICT for _, found in self.carried)


def drift(project: Project, pin: Pin, revision: str, say: Say) -> Drifted:
    """How each patch of a pin would get to the commit that `revision` names.

    Raises:
        PatchctlError: a commit can't be had.
    """
    commit = sources.resolve(pin.upstream, revision, say)
    patches = project.patches(pin)
    texts = [project.patch_bytes(patch.name) for patch in patches]
    with tempfile.TemporaryDirectory() as scratch:
        git = sources.attach(pin.upstream, [commit], Path(scratch), say)
        has_pin = git.succeeds("rev-parse", "--quiet", "--verify", f"{pin.commit}^{{commit}}")
        base = Base(pin, say, git if has_pin else None)
        changes = editing.changes_on(pin, patches, texts, base)
        paths = dict.fromkeys(path for change in changes for path in change.files)
        moves = _moves(git, pin.commit, commit, paths) if has_pin else {}
        pristine = base.states(paths)
        before = {moves.get(path, path): state for path, state in pristine.items()}
        there = carry.states_at(git, commit, sorted(before))
        carried = []
        for patch, change in zip(patches, changes, strict=True):
            patch, change, moved = _moved(patch, change, moves)
            found = None if moved else carry.exactly(patch, there)
            if found is None:
                found = carry.merged(patch, before, change.files, there)
                clashes = carry.explain(git, pin.commit, commit, patch, found.clashes, before, there)
                found = found._replace(clashes=(*moved, *clashes))
            carried.append((patch.name, found))
            there.update(found.after)
            before.update(change.files)
        hooks = hooked(patches, changes, pristine)
        new = newcomers(git, pin.commit, commit, pin.upstream.package, hooks)
    return Drifted(pin, revision, commit, tuple(carried), tuple(new))


def _moves(git: Git, old: str, new: str, paths: Iterable[str]) -> dict[str, str]:
    """Where upstream has moved files of these paths to, as git's merge sees it."""
    gone = [path for path, state in carry.states_at(git, new, list(paths)).items() if state.content is None]
    known = carry.states_at(git, old, gone) if gone else {}
    if not any(state.content is not None for state in known.values()):
        return {}
    raw = git.run("diff-tree", "-r", "-z", "--name-status", "--find-renames", "-l7000", "--diff-filter=R", old, new)
    words = raw.decode("utf-8", "surrogateescape").split("\0")
    renames = dict(zip(words[1::3], words[2::3], strict=False))
    return {path: renames[path] for path in gone if path in renames}


def _moved(patch: Patch, change: Change, moves: Mapping[str, str]) -> tuple[Patch, Change, tuple[Clash, ...]]:
    """The patch as one of the moved files, and a line for each of them."""
    moved = tuple(
        Clash(file.path, 0, 0, f"upstream moved it to {moves[file.path]}") for file in patch.files if file.path in moves
    )
    files = tuple(file._replace(path=moves.get(file.path, file.path)) for file in patch.files)
    states = {moves.get(path, path): state for path, state in change.files.items()}
    return patch._replace(files=files), replace(change, files=states), moved
