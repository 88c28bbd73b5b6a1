"""Refresh: the series written anew from worktrees, and proved on every pin whose patches change.

A worktree is the truth for its pin. A pin without one keeps its patches, except where it shares a patch that was
changed elsewhere: then the changed patch is tried on it, and must apply exactly. A patch's text is always the one that
the first pin it serves gives, so that the same series has the same bytes whatever it was written from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from patchctl import patchfile, series
from patchctl.errors import PatchctlError, UsageError
from patchctl.maintain import commits, editing, worktrees
from patchctl.maintain.base import Base
from patchctl.maintain.commits import Change, Exported, FileState, States
from patchctl.maintain.files import Refreshed, seen
from patchctl.maintain.worktrees import Worktree
from patchctl.patchfile import HunkError, Patch
from patchctl.pins import Pin, Pins
from patchctl.project import Project
from patchctl.series import Chain, Lock, Step
from patchctl.sources import Say
from patchctl.tree import blob_id


class _File(NamedTuple):
    """A patch as it is on disk; `patch` is None where its text has a problem."""

    name: str
    text: bytes
    subject: str
    patch: Patch | None


@dataclass
class _Series:
    """A pin's series while it is gone through, patch by patch.

    Attributes:
        worktree: where it is taken from; None where the files are kept.
        disk: its patches as they are on disk, by subject.
        exported: the worktree's commits as patches, by subject.
        added: it is a new pin's, whose patches are its own matter: what differs there is not tried on other pins.
    """

    pin: Pin
    base: Base
    worktree: Worktree | None
    disk: dict[str, _File]
    exported: dict[str, Exported]
    order: list[str]
    added: bool = False
    _pending: list[Patch] = field(default_factory=list)
    _states: dict[str, FileState] = field(default_factory=dict)

    def states(self, patch: Patch) -> dict[str, FileState]:
        """What stands before the next patch in the files that `patch` touches."""
        pending, self._pending = self._pending, []
        for earlier in pending:
            self._states.update(self.apply(earlier))
        return {
            file.path: self._states[file.path] if file.path in self._states else self.base.state(file.path)
            for file in patch.files
        }

    def apply(self, patch: Patch) -> dict[str, FileState]:
        """What the next patch makes of the files it touches."""
        return commits.apply_patch(patch, self.states(patch))

    def take(self, patch: Patch) -> None:
        """Go on behind a patch. Its effect is worked out when something asks for it: files may have to come first."""
        self._pending.append(patch)


@dataclass
class _Variant:
    """One text of a patch, with the pins it serves.

    Attributes:
        kept: the file on disk that it is, for pins that keep their patches.
    """

    text: bytes
    patch: Patch
    pins: list[Pin]
    kept: str | None = None


def refresh(
    project: Project,
    folders: Sequence[Path],
    say: Say,
    *,
    complete: bool | None = None,
    pins: Pins | None = None,
    added: Worktree | None = None,
) -> Refreshed:
    """The series with the commits of the worktrees taken in, and the lock proved anew.

    Args:
        folders: the worktrees; an upstream without one keeps its patches.
        complete: prove every pin, also those whose patches and lock are as they were (default: without worktrees).
        pins, added: the pins with a new one, and the worktree of that.
    Raises:
        PatchctlError: a patch does not apply to a pin it serves, a rule is broken, or the worktrees disagree.
    """
    made_from = seen(project.root)
    pins = pins or project.pins
    given = [worktrees.open_worktree(folder, project.pins) for folder in folders] + ([added] if added else [])
    by_pin: dict[str, Worktree] = {}
    for worktree in given:
        if other := by_pin.get(worktree.pin.key):
            raise UsageError(f"{worktree.folder} and {other.folder} are both for {worktree.pin}; give one of them")
        worktree.check_clean()
        by_pin[worktree.pin.key] = worktree
    _check_listed(project, [name for name in pins.upstreams if name not in {w.pin.upstream.name for w in given}])
    complete = not given if complete is None else complete
    texts: dict[str, bytes] = {}
    guards: dict[str, list[str]] = {}
    notes: list[str] = []
    bases = {pin.key: Base(pin, say, by_pin[pin.key].clone if pin.key in by_pin else None) for pin in pins.pins}
    for upstream in pins.upstreams:
        rewrite = _Rewrite(project, pins, upstream, by_pin, bases, complete)
        rewrite.run()
        texts.update(rewrite.texts)
        guards.update(rewrite.guards)
        notes += rewrite.notes
    listing = _series_text(project, pins, guards)
    parsed, problems = series.parse(listing, pins)
    if problems:
        raise PatchctlError(f"series: {problems[0].message}")
    sha256 = {name: series.sha256(data) for name, data in sorted(texts.items())}
    patches = {name: patchfile.load(data, name) for name, data in texts.items()}
    kept = {} if complete else _unchanged(project, parsed, sha256, pins)
    chains = {}
    for pin in pins.pins:
        if pin.key in kept:
            chains[pin.key] = kept[pin.key]
            continue
        say(f"{pin}: proving {len(parsed.for_pin(pin))} patches")
        chains[pin.key], after = _chains(pin, [patches[name] for name in parsed.for_pin(pin)], bases[pin.key])
        if pin.debugger_stops is not None:
            bases[pin.key].prove(after)
    lock = Lock(sha256, chains)
    files = {f"patches/{name}": data for name, data in texts.items()}
    return Refreshed(
        {**files, "series": listing.encode(), "series.lock": lock.dump().encode()}, tuple(notes), made_from
    )


def _unchanged(
    project: Project, parsed: series.Series, sha256: Mapping[str, str], pins: Pins
) -> dict[str, Mapping[str, Chain]]:
    """The lock's chains of the pins whose patches are those that it was made from."""
    try:
        lock = project.lock
    except PatchctlError:  # it is written anew
        return {}
    same = {}
    for pin in pins.pins:
        names = parsed.for_pin(pin)
        chains = lock.chains.get(pin.key, {})
        locked = {step.patch for chain in chains.values() for step in chain}
        if locked == set(names) and all(lock.sha256.get(name) == sha256[name] for name in names):
            same[pin.key] = chains
    return same


def _chains(pin: Pin, patches: Sequence[Patch], base: Base) -> tuple[dict[str, Chain], dict[str, FileState]]:
    """What the pin's patches make of each file, from the pristine contents; and the files it ends with."""
    touched = sorted({file.path for patch in patches for file in patch.files})
    states = base.states(touched)
    chains: dict[str, list[Step]] = {path: [] for path in touched}
    for patch in patches:
        try:
            after = commits.apply_patch(patch, states)
        except HunkError as error:
            raise PatchctlError(f"{pin}: patches/{error}") from None
        for file in patch.files:
            before, now = states[file.path].content, after[file.path].content
            chains[file.path].append(
                Step(
                    patch=patch.name,
                    pre=None if before is None else blob_id(before),
                    post=None if now is None else blob_id(now),
                    executable=file.executable if file.executable or file.pre is not None else None,
                )
            )
        states.update(after)
    return {path: tuple(chain) for path, chain in chains.items()}, states


class _Rewrite:
    """One upstream's patches: their texts, names and guards."""

    def __init__(
        self,
        project: Project,
        pins: Pins,
        upstream: str,
        by_pin: Mapping[str, Worktree],
        bases: Mapping[str, Base],
        complete: bool,
    ) -> None:
        self.project = project
        self.upstream = upstream
        self.complete = complete
        self.texts: dict[str, bytes] = {}
        self.guards: dict[str, list[str]] = {}
        self.notes: list[str] = []
        self.files: dict[str, _File] = {}
        for entry in project.series.entries:
            if entry.upstream == upstream:
                self.files[entry.patch] = self._read(entry.patch)
        own = {pin.key: by_pin[pin.key] for pin in pins.of(upstream) if pin.key in by_pin}
        self.touched = bool(own)
        self.series = [self._series(pin, bases[pin.key], own.get(pin.key)) for pin in pins.of(upstream)]
        self.first = {
            name: next((pin for pin in pins.of(upstream) if name in project.series.for_pin(pin)), None)
            for name in self.files
        }

    def _read(self, name: str) -> _File:
        text = self.project.patch_bytes(name)
        patch, problems = patchfile.parse(text, name)
        # A patch that is damaged still names its subject, and a refresh is what repairs it.
        return _File(name, text, patch.subject, None if problems else patch)

    def _series(self, pin: Pin, base: Base, worktree: Worktree | None) -> _Series:
        disk: dict[str, _File] = {}
        for name in self.project.series.for_pin(pin):
            disk[self.files[name].subject] = self.files[name]
        if worktree is None:
            return _Series(pin, base, None, disk, {}, list(disk))
        changes = commits.read_commits(worktree.git, worktree.base)
        package = f"{pin.upstream.package}/"
        for change in changes:
            outside = [path for path in change.files if not path.startswith(package)]
            if outside:
                raise PatchctlError(f"{change.origin}: {outside[0]}: the series changes files below {package} only")
        paths = {path for change in changes for path in change.files}
        before = {} if worktree.partial else base.states(paths)
        exported = {found.change.subject: found for found in commits.export(changes, before)}
        order = list(exported)
        if worktree.partial:
            contained = {patch.subject for patch in editing.self_contained(self._parsed(disk))}
            order = _merged_order(
                [[subject for subject in disk if subject not in contained or subject in exported], order]
            )
        return _Series(pin, base, worktree, disk, exported, order, added=pin not in self.project.pins.pins)

    def _parsed(self, disk: Mapping[str, _File]) -> list[Patch]:
        return [patchfile.load(file.text, file.name) for file in disk.values()]

    def run(self) -> None:
        """Go through the subjects in their order.

        Raises:
            PatchctlError: pins without a worktree can't take a change over; names them all.
        """
        subjects = _merged_order([found.order for found in self.series])
        names = self._names(subjects)
        refused: dict[str, str] = {}
        for subject in subjects:
            goals = self._goals(subject, refused)
            if refused:
                continue
            for number, variant in enumerate(self._variants(goals)):
                name = names[subject]
                if number:
                    name = f"{name.removesuffix('.patch')}.{variant.pins[0].name}.patch"
                self.texts[name] = variant.text
                everywhere = len(variant.pins) == len(self.series)
                self.guards[name] = [] if everywhere else [f"#+{pin.name}" for pin in variant.pins]
            for found, patch in goals:
                found.take(patch.patch)
        if refused:
            pins = ", ".join(refused)
            commands = " and ".join(f"`patchctl edit {self.upstream} --pin {pin}`" for pin in refused)
            raise PatchctlError(
                f"{self.upstream} {pins}: {next(iter(refused.values()))}; make the change there too, in a worktree of "
                f"its own ({commands}), then refresh again; nothing was written"
            )

    def _goals(self, subject: str, refused: dict[str, str]) -> list[tuple[_Series, Exported]]:
        """For each pin that the patch serves what it is there: a worktree's commit, a file that is kept, or what a
        changed patch of another pin makes of it."""
        fresh: list[tuple[_Series, Exported]] = []
        goals: dict[str, Exported] = {}
        for found in self.series:
            if subject in found.exported:
                goals[found.pin.key] = found.exported[subject]
                if not found.added and not self._same(found, subject):
                    fresh.append((found, found.exported[subject]))
        changed = {found.disk[subject].name for found, _ in fresh if subject in found.disk}
        is_new = bool(fresh) and not any(subject in found.disk for found in self.series)
        for found in self.series:
            if found.pin.key in goals or (found.worktree is not None and subject not in found.order):
                continue
            file = found.disk.get(subject)
            if file is not None and file.name not in changed:
                goals[found.pin.key] = Exported(_KEPT, file.text, patchfile.load(file.text, file.name))
            elif (file is not None or is_new) and found.pin.name not in refused:
                sharing = [(other, patch) for other, patch in fresh if is_new or other.disk.get(subject) == file]
                taken = self._try(found, [patch for _, patch in sharing], refused)
                if taken is not None:
                    goals[found.pin.key] = taken
                    origin = ", ".join(other.pin.name for other, _ in sharing)
                    self.notes.append(f"{found.pin}: takes over {subject!r} as it is on {origin}")
        for found in self.series:
            if found.worktree is not None and subject in found.disk and subject not in found.order:
                others = [other.pin.name for other in self.series if other.pin.key in goals]
                kept = f"; kept for {', '.join(others)}" if others else ""
                self.notes.append(f"{found.pin}: drops {subject!r}{kept}")
        return [(found, goals[found.pin.key]) for found in self.series if found.pin.key in goals]

    def _same(self, found: _Series, subject: str) -> bool:
        """Whether the worktree's commit is what the file on disk says."""
        file = found.disk.get(subject)
        own = found.exported[subject]
        if file is None or file.patch is None or _words(file.text) != _words(own.text):
            return False
        return _makes(file.patch, found, own.change.files)

    def _try(self, found: _Series, candidates: Sequence[Exported], refused: dict[str, str]) -> Exported | None:
        """The first of the changed patches that applies to this pin, as a change of its own."""
        reason = ""
        for other in candidates:
            try:
                after = found.apply(other.patch._replace(name=repr(other.change.subject)))
            except HunkError as error:
                reason = reason or f"{error}"
                continue
            change = Change(other.change.origin, other.change.author, other.change.date, other.change.message, after)
            return commits.export([change], found.states(other.patch))[0]
        refused[found.pin.name] = reason
        return None

    def _variants(self, goals: Sequence[tuple[_Series, Exported]]) -> list[_Variant]:
        variants: list[_Variant] = []
        for found, goal in goals:
            if goal.change is _KEPT:
                file = found.disk[goal.patch.subject]
                joined = next((variant for variant in variants if variant.kept == file.name), None)
                if joined is None:
                    joined = self._kept(found, file)
                    variants.append(joined)
            else:
                joined = next(
                    (
                        variant
                        for variant in variants
                        if _words(variant.text) == _words(goal.text) and _makes(variant.patch, found, goal.change.files)
                    ),
                    None,
                )
                if joined is None:
                    if goal.text not in [file.text for file in self.files.values()]:
                        commits.check_mail(goal)
                    joined = _Variant(goal.text, goal.patch, [])
                    variants.append(joined)
                if goal.change.subject in found.exported and self._same(found, goal.change.subject):
                    joined.kept = found.disk[goal.change.subject].name
            joined.pins.append(found.pin)
        return variants

    def _kept(self, found: _Series, file: _File) -> _Variant:
        """A file that stays; its text is made anew where it was made from a pin that it serves no more, and in a
        complete refresh."""
        patch = patchfile.load(file.text, file.name)
        if self.first[file.name] == found.pin and not self.complete:
            return _Variant(file.text, patch, [], file.name)
        try:
            after = found.apply(patch)
        except HunkError as error:
            raise PatchctlError(f"{found.pin}: patches/{error}") from None
        change = commits.read_patch(file.text, f"patches/{file.name}", after)
        anew = commits.export([change], found.states(patch))[0]
        return _Variant(anew.text, anew.patch, [], file.name)

    def _names(self, subjects: Sequence[str]) -> dict[str, str]:
        """Each subject's file name: the one it has, or else a new one; numbers follow the order."""
        pins = "|".join(re.escape(found.pin.name) for found in self.series)
        variant = re.compile(rf"\.(?:{pins})\.patch$")
        known: dict[str, str] = {}
        for file in self.files.values():
            known.setdefault(file.subject, variant.sub(".patch", file.name))
        names: dict[str, str] = {}
        last = 0
        for subject in subjects:
            existing = known.get(subject)
            if existing and int(existing.partition("/")[2][:4]) > last:
                names[subject], last = existing, int(existing.partition("/")[2][:4])
                continue
            last += 1
            slug = existing.partition("/")[2][5:] if existing else f"{_slug(subject)}.patch"
            names[subject] = f"{self.upstream}/{last:04d}-{slug}"
        return names


_KEPT = Change("", b"", b"", b"", {})
"""Stands for the change of a file that is kept as it is."""


def _slug(subject: str) -> str:
    words = re.sub(r"^\[[^]]*\] *", "", subject).lower()
    return re.sub(r"[^a-z0-9]+", "-", words).strip("-")[:60].rstrip("-")


def _words(text: bytes) -> bytes:
    """Author and message of a patch; its date is the commit's, and one patch may be two commits on two pins."""
    head, _, body = text.partition(b"\ndiff --git ")[0].partition(b"\n\n")
    return re.sub(rb"(?m)^Date: .*\n", b"", head + b"\n") + body


def _makes(patch: Patch, found: _Series, goal: States) -> bool:
    """Whether a patch made for another pin gives this pin exactly what its own commit gives."""
    if {file.path for file in patch.files} != set(goal):
        return False
    try:
        return found.apply(patch) == dict(goal)
    except HunkError:
        return False


def _merged_order(orders: Sequence[Sequence[str]]) -> list[str]:
    """One order that holds every list's order; a subject that only some lists have stands behind its predecessor."""
    merged: list[str] = []
    for order in orders:
        at = 0
        for subject in order:
            if subject in merged:
                found = merged.index(subject)
                if found < at - 1:
                    raise PatchctlError(f"{subject!r} stands in another order in another worktree; rebase one of them")
                at = found + 1
            else:
                merged.insert(at, subject)
                at += 1
    return merged


def _check_listed(project: Project, upstreams: Sequence[str]) -> None:
    """Where no worktree tells what the patches are, a file that the series lost must not be taken for a dropped one."""
    listed = {entry.patch for entry in project.series.entries}
    for path in sorted((project.root / "patches").rglob("*.patch")):
        name = path.relative_to(project.root / "patches").as_posix()
        if name.partition("/")[0] in upstreams and name not in listed:
            raise PatchctlError(f"patches/{name}: not listed in series; list it, or remove the file")


def _series_text(project: Project, pins: Pins, guards: Mapping[str, list[str]]) -> str:
    """The series file: its leading comment as it is, then one line a patch."""
    lines = []
    for line in (project.root / "series").read_text(encoding="utf-8").split("\n"):
        if line and not line.startswith("#"):
            break
        lines.append(line)
    head = "\n".join(lines).rstrip("\n")
    body = []
    for upstream in pins.upstreams:
        own = sorted(name for name in guards if name.startswith(f"{upstream}/"))
        width = max((len(name) for name in own), default=0)
        body.append("\n".join(f"{name:<{width}}  {' '.join(guards[name])}".rstrip() for name in own))
    return head + "\n\n" + "\n\n".join(block for block in body if block) + "\n"
