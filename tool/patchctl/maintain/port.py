"""Port: a pin's commits carried to another commit of upstream, one after another.

Each is applied exactly where it fits, else by git's cherry-pick. A conflict stops in the worktree, in the state that
git leaves. How far a port is stands beside the worktree's git data and is written after every step, so that a run
that was killed goes on where it stopped. Nothing of the project is written here; `newpin` does that, at the end.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchctl import sources
from patchctl.errors import InTheWayError, PatchctlError, UsageError
from patchctl.git import Git, GitError
from patchctl.maintain import carry, commits, editing, worktrees
from patchctl.maintain.base import Base
from patchctl.maintain.carry import Clash, Word
from patchctl.maintain.worktrees import Record
from patchctl.pins import NAME, Pin
from patchctl.project import Project
from patchctl.sources import Say

_MARKER = re.compile(rb"^(?:<{7}|>{7}|\|{7}) ", re.MULTILINE)
RELEASE = re.compile(r"v?(\d+(?:\.\w+)+)")
"""A pin's name that is a release's tag; the group is the version."""


@dataclass(frozen=True)
class Step:
    """A patch of the series that is carried.

    Attributes:
        patch: its file below patches/.
        source: its commit on the old pin.
        word: how it went; None where its turn has not come.
        detail: what a person should look at, a line each.
        resolved: a conflict that was settled by hand.
        dropped: it is left out: upstream has it already, or it was skipped.
    """

    patch: str
    subject: str
    source: str
    word: Word | None = None
    detail: tuple[str, ...] = ()
    resolved: bool = False
    dropped: bool = False

    def __str__(self) -> str:
        if self.word is None:
            return "to do"
        settled = ", resolved" if self.resolved else ", skipped" if self.dropped else ""
        return f"{self.word.value}{settled if self.word is Word.CONFLICT else ''}"

    @property
    def stopped(self) -> bool:
        return self.word is Word.CONFLICT and not self.resolved and not self.dropped

    def document(self) -> dict[str, Any]:
        return {
            "patch": self.patch,
            "subject": self.subject,
            "result": self.word.value if self.word else None,
            "resolved": self.resolved,
            "dropped": self.dropped,
            "detail": list(self.detail),
        }


@dataclass(frozen=True)
class Port:
    """A port that is under way.

    Attributes:
        old, name: the pin that the series is from, and the name of the new one.
        revision, commit: where it goes to, as it was given and as what it was found to be.
        tip: the worktree's HEAD after the last step that was finished.
    """

    folder: Path
    upstream: str
    old: str
    name: str
    revision: str
    commit: str
    pairs_with: str | None
    tip: str
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        return f"{self.upstream} {self.name}"

    @property
    def git(self) -> Git:
        return Git(self.folder)

    @property
    def turn(self) -> int | None:
        """The number of the step that has the turn: the first that is not done; None at the end."""
        return next((n for n, step in enumerate(self.steps) if step.word is None or step.stopped), None)

    @property
    def stopped(self) -> bool:
        return self.turn is not None and self.steps[self.turn].stopped

    def with_step(self, number: int, tip: str | None = None, **changes: Any) -> Port:
        """With one step changed, kept for the next run."""
        steps = list(self.steps)
        steps[number] = dataclasses.replace(steps[number], **changes)
        return dataclasses.replace(self, steps=tuple(steps), tip=tip or self.tip).saved()

    def saved(self) -> Port:
        fields = {**dataclasses.asdict(self), "folder": None}  # it may be moved
        worktrees.write_json(worktrees.port_path(self.folder), fields)
        return self


def _load(folder: Path) -> Port:
    path = worktrees.port_path(folder)
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        steps = tuple(
            Step(**{**step, "word": Word(step["word"]) if step["word"] else None, "detail": tuple(step["detail"])})
            for step in fields["steps"]
        )
        return Port(**{**fields, "steps": steps, "folder": folder})
    except (ValueError, TypeError, KeyError) as error:
        raise PatchctlError(f"{path}: damaged ({error}); remove {folder} and start the port anew") from None


def under_way(project: Project, upstream: str, name: str | None) -> Port:
    """The port of this upstream that is under way.

    Raises:
        UsageError: there is none, or there are several and `name` does not choose.
    """
    ports = [_load(folder) for folder in worktrees.ported(project)]
    found = [port for port in ports if port.upstream == upstream and name in (None, port.name)]
    if not found:
        raise UsageError(f"no port of {upstream}{f' to {name}' if name else ''} is under way; start one with --to REV")
    if len(found) > 1:
        raise UsageError(f"several ports are under way; give --name, one of {', '.join(port.name for port in found)}")
    return found[0]


def start(
    project: Project,
    upstream: str,
    revision: str,
    old: Pin,
    name: str | None,
    pairs_with: str | None,
    into: Path | None,
    say: Say,
) -> Port:
    """A worktree at the commit that `revision` names, with the old pin's commits at hand; none is carried yet.

    Raises:
        UsageError, InTheWayError: the commit is a pin already, or the name is taken or none.
        PatchctlError: a commit can't be had.
    """
    of = project.pins.upstreams[upstream]
    commit = sources.resolve(of, revision, say)
    name = name or (revision if RELEASE.fullmatch(revision) else commit[:8])
    if not NAME.fullmatch(name):
        raise UsageError(f"{name!r} can't be a pin's name: letters, digits, `.`, `_` and `-`; give --name NAME")
    for pin in project.pins.of(upstream):
        if pin.commit == commit:
            raise InTheWayError(f"{upstream} {revision}: is the pin {pin.name} already")
        if pin.name == name:
            raise InTheWayError(f"{upstream} has a pin {name} already; give --name NAME")
    _check_pair(project, old, pairs_with)
    patches = project.patches(old)
    texts = [project.patch_bytes(patch.name) for patch in patches]
    with worktrees.appearing(project, upstream, name, into) as (fresh, place):
        git = sources.attach(of, [old.commit, commit], fresh, say)
        worktrees.prepare(git)
        changes = editing.changes_on(old, patches, texts, Base(old, say, git))
        ids = commits.write_commits(git, f"refs/patchctl/series-{old.name}", old.commit, changes)
        git.run("update-ref", f"refs/heads/series-{name}", commit)
        git.run("tag", f"pin-{name}", commit)
        git.run("checkout", "--quiet", f"series-{name}")
        worktrees.write_record(git, Record(upstream, name, commit, "git", commit, ""))
        steps = tuple(
            Step(patch.name, change.subject, source)
            for patch, change, source in zip(patches, changes, ids, strict=True)
        )
        pairs_with = pairs_with or old.pairs_with
        port = Port(fresh, upstream, old.name, name, revision, commit, pairs_with, commit, steps).saved()
    return dataclasses.replace(port, folder=place)


def pair(project: Project, port: Port, pairs_with: str) -> Port:
    """The port with another pin that the new one goes with.

    Raises:
        UsageError: there is none of that name.
    """
    _check_pair(project, project.pins.resolve(port.upstream, port.old), pairs_with)
    return dataclasses.replace(port, pairs_with=pairs_with).saved()


def _check_pair(project: Project, old: Pin, pairs_with: str | None) -> None:
    others = [pin.name for pin in project.pins.pins if pin.upstream != old.upstream]
    if pairs_with is not None and (pairs_with not in others or old.pairs_with is None):
        raise UsageError(f"--pairs-with {pairs_with}: {old.upstream.name} pins go with none of that name")


def advance(project: Project, port: Port, say: Say) -> Port:
    """Carry commits until all are there or one is in conflict."""
    while (number := port.turn) is not None and not port.stopped:
        say(f"{port}: {port.steps[number].patch}")
        port = _carry(project, port, number)
    return port


def _carry(project: Project, port: Port, number: int) -> Port:
    git, source = port.git, port.steps[number].source
    change = commits.read_commits(git, f"{source}^", source)[0]
    paths = list(change.files)
    before = carry.states_at(git, f"{source}^", paths)
    patch = commits.export([change], before)[0].patch
    there = carry.states_at(git, port.tip, paths)
    if (carried := carry.exactly(patch, there)) is not None:
        after = dataclasses.replace(change, files=carried.after)
        tip = commits.write_commits(git, "refs/patchctl/port", port.tip, [after])[0]
        git.run("reset", "--quiet", "--hard", tip)
        detail = (f"up to {carried.shift:+d} lines",) if carried.shift else ()
        return port.with_step(number, tip, word=carried.word, detail=detail)
    # A run that was killed may have left a cherry-pick; the files of a step are the step's until it stops.
    git.run("reset", "--quiet", "--hard", port.tip)
    old = project.pins.resolve(port.upstream, port.old).commit
    misfits = carry.merged(patch, before, change.files, there).clashes
    clashes = carry.explain(git, old, port.commit, patch, misfits, before, there)
    try:
        git.run(*_committer(change), "-c", "merge.conflictStyle=diff3", "cherry-pick", source)
    except GitError:
        if conflicts := _unmerged(git):
            return port.with_step(number, word=Word.CONFLICT, detail=_detail(conflicts, clashes))
        if not git.succeeds("diff", "--quiet", "HEAD"):
            raise
        git.run("cherry-pick", "--skip")
        return port.with_step(number, word=Word.UPSTREAM, dropped=True)
    return port.with_step(number, git.line("rev-parse", "HEAD"), word=Word.MERGED, detail=_detail([], clashes))


def _committer(change: commits.Change) -> list[str]:
    name, _, mail = change.author.decode("utf-8", "surrogateescape").rpartition(" <")
    return ["-c", f"user.name={name or 'patchctl'}", "-c", f"user.email={mail.rstrip('>')}"]


def _detail(conflicts: Sequence[str], clashes: Sequence[Clash]) -> tuple[str, ...]:
    """The clashes; of a conflict those in its files, and the files of which nothing is known but the conflict."""
    chosen = [clash for clash in clashes if not conflicts or clash.path in conflicts]
    rest = [path for path in conflicts if path not in [clash.path for clash in chosen]]
    return (*(str(clash) for clash in chosen), *(f"{path}: in conflict" for path in rest))


def _unmerged(git: Git) -> list[str]:
    names = git.run("diff", "--name-only", "--diff-filter=U", "-z").decode("utf-8", "surrogateescape")
    return sorted({name for name in names.split("\0") if name})


def resume(port: Port, say: Say) -> Port:
    """Take what was resolved by hand; without a conflict there is nothing to take.

    Raises:
        InTheWayError: the conflict is not resolved, or the worktree has other work in it.
    """
    number = port.turn
    if number is None or not port.stopped:
        return port
    git, step, folder = port.git, port.steps[number], worktrees.shown(port.folder)
    head = git.line("rev-parse", "HEAD")
    if git.succeeds("rev-parse", "--quiet", "--verify", "CHERRY_PICK_HEAD"):
        _check_resolved(port, step)
        change = commits.read_commits(git, f"{step.source}^", step.source)[0]
        git.run(*_committer(change), "commit", "--quiet", "--no-verify", "-C", step.source)
        head = git.line("rev-parse", "HEAD")
    elif head == port.tip:
        if git.line("status", "--porcelain"):
            raise InTheWayError(
                f"{folder}: its cherry-pick was ended, but there are changes: commit them, or git reset --hard"
            )
        return port.with_step(number, word=None, detail=())  # given up by hand: tried again from the start
    elif not git.succeeds("merge-base", "--is-ancestor", port.tip, "HEAD"):
        tip = port.tip[:12]
        raise InTheWayError(f"{folder}: HEAD is not on top of {tip} any more: git reset --hard {tip}")
    say(f"{port}: {step.patch} is resolved")
    return port.with_step(number, head, resolved=True)


def _check_resolved(port: Port, step: Step) -> None:
    git, folder = port.git, worktrees.shown(port.folder)
    if conflicts := _unmerged(git):
        raise InTheWayError(
            f"{folder}: {', '.join(conflicts)}: not resolved; edit, git add, then --continue (or --skip, --abort)"
        )
    names = git.run("diff", "--cached", "--name-only", "-z", "HEAD").decode("utf-8", "surrogateescape")
    for name in names.split("\0"):
        place = port.folder / name
        if name and place.is_file() and (found := _MARKER.search(data := place.read_bytes())):
            line = data.count(b"\n", 0, found.start()) + 1
            raise InTheWayError(f"{worktrees.shown(place)}:{line}: a conflict marker is left: resolve it, then git add")
    if not git.succeeds("diff", "--quiet"):
        raise InTheWayError(f"{folder}: there are changes that are not added: git add them, then --continue")
    if not any(names.split("\0")):
        raise InTheWayError(f"{folder}: nothing is left of {step.subject!r}: --skip it if upstream has it by now")


def skip(port: Port) -> Port:
    """Leave out the patch that is in conflict.

    Raises:
        UsageError: none is.
    """
    number = port.turn
    if number is None or not port.stopped:
        raise UsageError(f"{port}: no patch is in conflict; go on with --continue")
    port.git.run("reset", "--quiet", "--hard", port.tip)
    return port.with_step(number, dropped=True)


def abort(project: Project, port: Port) -> None:
    """Remove the port's worktree, and all that was done in it."""
    usual = worktrees.usual_place(project, port.upstream, port.name)
    shutil.rmtree(port.folder)
    if usual.is_symlink():
        usual.unlink()
