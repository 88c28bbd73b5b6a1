"""Edit: a worktree with a pin's series as commits."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from patchctl import patchfile, sources
from patchctl.errors import InTheWayError, PatchctlError, UsageError
from patchctl.git import Git
from patchctl.maintain import worktrees
from patchctl.maintain.base import Base
from patchctl.maintain.commits import ABSENT, Change, FileState, apply_patch, read_patch, write_commits
from patchctl.maintain.worktrees import Record, Worktree
from patchctl.patchfile import Patch
from patchctl.pins import Pin
from patchctl.project import Project
from patchctl.sources import Say
from patchctl.tree import blob_id


def changes_on(pin: Pin, patches: Sequence[Patch], texts: Sequence[bytes], base: Base | None) -> list[Change]:
    """The pin's patches as commits; every file that they change must be in `base` or come from one of them.

    Raises:
        PatchctlError: a patch does not apply.
    """
    states: dict[str, FileState] = {}
    changes = []
    for patch, text in zip(patches, texts, strict=True):
        for file in patch.files:
            if file.path not in states:
                states[file.path] = ABSENT if base is None else base.state(file.path)
        try:
            after = apply_patch(patch, states)
        except patchfile.HunkError as error:
            raise PatchctlError(f"{pin}: {error}") from None
        states.update(after)
        changes.append(read_patch(text, f"patches/{patch.name}", after))
    return changes


def self_contained(patches: Sequence[Patch]) -> list[Patch]:
    """The patches that only add files, or change what such patches added."""
    added: set[str] = set()
    found = []
    for patch in patches:
        if all(file.pre is None or file.path in added for file in patch.files):
            found.append(patch)
            added |= {file.path for file in patch.files}
        else:
            added -= {file.path for file in patch.files}
    return found


@dataclass(frozen=True)
class Edited:
    """A worktree as `edit` leaves it.

    Attributes:
        news: "made", "brought up to date", or "up to date".
    """

    worktree: Worktree
    news: str
    patches: int
    left_out: int = 0


def edit(project: Project, pin: Pin, into: Path | None, source: str, say: Say) -> Edited:
    """A worktree with the pin's series as commits.

    Args:
        source: `git`, `pypi`, `none`, or `auto`: the first of them that can be had.
    Raises:
        InTheWayError: there is something in the folder, or work that no refresh has taken in.
        PatchctlError: the pin can't be had from the source.
    """
    names = project.series.for_pin(pin)
    texts = {name: project.patch_bytes(name) for name in names}
    patches = [patchfile.load(texts[name], name) for name in names]
    place = into.absolute() if into is not None else worktrees.usual_place(project, pin.upstream.name, pin.name)
    if place.is_dir() and (record := worktrees.read_record(place)) is not None:
        return _again(project, Worktree(place.resolve(), pin, record.base, record), patches, texts, say)
    with worktrees.appearing(project, pin.upstream.name, pin.name, into) as (fresh, place):
        git, base, source = _based(pin, fresh, source, say)
        carried = self_contained(patches) if source == "none" else patches
        files = None if source == "none" else Base(pin, say, git if source == "git" else None)
        changes = changes_on(pin, carried, [texts[patch.name] for patch in carried], files)
        ids = write_commits(git, f"refs/heads/series-{pin.name}", base, changes)
        tip = ids[-1] if ids else base
        _check_lock(project, pin, carried, changes)
        git.run("update-ref", f"refs/heads/series-{pin.name}", tip)
        git.run("tag", f"pin-{pin.name}", base)
        git.run("checkout", "--quiet", f"series-{pin.name}")
        record = Record(pin.upstream.name, pin.name, base, source, tip, worktrees.digest(project, pin))
        worktrees.write_record(git, record)
    worktree = Worktree(place, pin, base, record)
    return Edited(worktree, "made", len(carried), len(patches) - len(carried))


def _check_lock(project: Project, pin: Pin, patches: Sequence[Patch], changes: Sequence[Change]) -> None:
    """That the commits have the files that the lock says."""
    lock = project.chains(pin)
    steps = {(step.patch, path): step.post for path, chain in lock.items() for step in chain}
    for patch, change in zip(patches, changes, strict=True):
        for path, state in change.files.items():
            post = None if state.content is None else blob_id(state.content)
            if steps.get((patch.name, path), post) != post:
                raise PatchctlError(
                    f"patches/{patch.name}: makes of {path} something else than series.lock says; "
                    "restore it (git checkout), or run `patchctl refresh` if the change is meant"
                )


def _based(pin: Pin, folder: Path, source: str, say: Say) -> tuple[Git, str, str]:
    """A repository at `folder` with the commit that the series stands on, and where that is from."""
    reasons = []
    if source in ("auto", "git"):
        try:
            git = sources.attach(pin.upstream, [pin.commit], folder, say)
            worktrees.prepare(git)
            return git, pin.commit, "git"
        except PatchctlError as error:
            if source == "git":
                raise
            reasons.append(str(error))
            shutil.rmtree(folder)
            folder.mkdir()
    if source == "pypi" and pin.wheel is None:
        raise UsageError(f"{pin}: no PyPI release has its files; give --source git or none")
    git = Git(folder)
    git.run("init", "--quiet")
    worktrees.prepare(git)
    date = b"1000000000 +0000"  # the same wheel gives the same commit
    if source in ("auto", "pypi") and pin.wheel is not None:
        if reasons:
            say(f"{pin}: not to be had from git; taking the PyPI release, whose files equal the pin's")
        message = f"{pin.wheel.requirement} from PyPI, whose package equals {pin.commit}\n".encode()
        files = Base(pin, say).all_states()
        source = "pypi"
    else:
        if source == "auto":
            say(f"{reasons[0]}; only the patches that need no file of upstream's can be edited")
        message, files, source = b"nothing: the patches here need no file of upstream's\n", {}, "none"
    change = Change("base", b"patchctl <maintainers@patchctl.invalid>", date, message, files)
    return git, write_commits(git, "refs/patchctl/base", None, [change])[0], source


def _again(project: Project, worktree: Worktree, patches: Sequence[Patch], texts: dict[str, bytes], say: Say) -> Edited:
    """A worktree that is there: left alone, brought up to date, or refused where there is work in it."""
    record, pin, git = worktree.record, worktree.pin, worktree.git
    assert record is not None
    if (record.upstream, record.pin) != (pin.upstream.name, pin.name):
        raise InTheWayError(f"{worktree.folder}: is the worktree for {record.upstream} {record.pin}")
    carried = self_contained(patches) if worktree.partial else patches
    left_out = len(patches) - len(carried)
    worktree.check_clean()
    digest, head = worktrees.digest(project, pin), git.line("rev-parse", "HEAD")
    if digest == record.series:
        if head == record.tip:
            return Edited(worktree, "up to date", len(carried), left_out)
        raise InTheWayError(
            f"{worktree.folder}: has commits that no refresh has taken in: run `patchctl refresh`, or remove the folder"
        )
    files = None if worktree.partial else Base(pin, say, worktree.clone)
    changes = changes_on(pin, carried, [texts[patch.name] for patch in carried], files)
    _check_lock(project, pin, carried, changes)
    branch = f"series-{pin.name}-new"
    ids = write_commits(git, f"refs/heads/{branch}", record.base, changes)
    tip = ids[-1] if ids else record.base
    if head == record.tip:
        git.run("reset", "--quiet", "--hard", tip)
    elif not git.succeeds("merge-base", "--is-ancestor", tip, "HEAD"):
        raise InTheWayError(
            f"{worktree.folder}: has commits that no refresh has taken in, and patches/ has changed too: "
            f"git rebase --onto {branch} {record.tip[:12]}, then edit again"
        )
    git.run("update-ref", "-d", f"refs/heads/{branch}")
    record = replace(record, tip=tip, series=digest)
    worktrees.write_record(git, record)
    return Edited(replace(worktree, record=record), "brought up to date", len(carried), left_out)
