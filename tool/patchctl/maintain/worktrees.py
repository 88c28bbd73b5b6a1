"""Worktrees with the series as commits, and how they are found again.

They are made in `edit/` of the project, one for a pin; that folder ignores itself in git. One made elsewhere has a
link there. What a worktree is for is kept in its git folder, so that it may be moved. It is a repository of its own
that borrows the objects of the upstream's local clone, or has the pin's commit alone: no clone of the user's is
written to, and removing the folder removes everything.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from patchctl.errors import InTheWayError, PatchctlError, UsageError
from patchctl.git import Git, GitError
from patchctl.pins import Pin, Pins
from patchctl.project import Project
from patchctl.series import sha256
from patchctl.transaction import exclusive

EDIT = "edit"
_RECORD = "patchctl.json"
_UNDER_WAY = {
    "rebase-merge": "rebase",
    "rebase-apply": "rebase",
    "CHERRY_PICK_HEAD": "cherry-pick",
    "MERGE_HEAD": "merge",
    "REVERT_HEAD": "revert",
}


@dataclass(frozen=True)
class Record:
    """What a worktree is for.

    Attributes:
        upstream, pin: as in pins.toml. The pin of a port is not there yet.
        base: the commit that the series stands on.
        source: where the base is from: `git` (it is the pin's own commit), `pypi` (a commit of the wheel's files), or
            `none` (an empty commit; only the patches that need no file of upstream's are there).
        tip: the last commit that the project's patches were written from, or made into.
        series: the sha256 of the pin's patches at that time.
    """

    upstream: str
    pin: str
    base: str
    source: str
    tip: str
    series: str


@dataclass(frozen=True)
class Worktree:
    """A git worktree whose commits on top of `base` are the series for a pin."""

    folder: Path
    pin: Pin
    base: str
    record: Record | None = None

    @property
    def git(self) -> Git:
        return Git(self.folder)

    @property
    def partial(self) -> bool:
        """Whether only the patches that need no file of upstream's are here."""
        return self.record is not None and self.record.source == "none"

    @property
    def clone(self) -> Git | None:
        """The repository, where it has the pin's own commit."""
        return self.git if self.record is None or self.record.source == "git" else None

    @property
    def untouched(self) -> bool:
        """Whether it is as `edit` or the last refresh left it; False where neither is known."""
        return (
            self.record is not None
            and self.git.line("rev-parse", "HEAD") == self.record.tip
            and not self._uncommitted()
        )

    def check_clean(self) -> None:
        """That what is there is committed.

        Raises:
            InTheWayError: there are changes, or git is in the middle of something.
        """
        for name, what in _UNDER_WAY.items():
            if (self.folder / self.git.line("rev-parse", "--git-path", name)).exists():
                raise InTheWayError(f"{self.folder}: a {what} is under way: finish or abort it (git status tells how)")
        if names := self._uncommitted():
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise InTheWayError(f"{self.folder}: {names[0]}{more} is not committed: commit, stash or remove it")

    def _uncommitted(self) -> list[str]:
        """The files that are not as committed, and those that git neither knows nor ignores."""
        status = self.git.run("status", "--porcelain", "-z", "--no-renames", "--untracked-files=all")
        return [entry[3:] for entry in status.decode("utf-8", "surrogateescape").split("\0") if entry]


def record_path(git: Git) -> Path:
    return git.folder / git.line("rev-parse", "--git-path", _RECORD)


def read_record(folder: Path) -> Record | None:
    """What the worktree at `folder` was made for; None where `edit` and `port` did not make it."""
    with contextlib.suppress(GitError, FileNotFoundError):
        try:
            return Record(**json.loads(record_path(Git(folder)).read_text(encoding="utf-8"))["worktree"])
        except (ValueError, TypeError, KeyError) as error:
            raise PatchctlError(f"{folder}: {_RECORD} in its git folder is damaged ({error}); make it anew") from None
    return None


def write_record(git: Git, record: Record) -> None:
    write_json(record_path(git), {"worktree": asdict(record)})


def write_json(path: Path, document: object) -> None:
    """Replace the file by one with this document."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    fresh.replace(path)


def open_worktree(folder: Path, pins: Pins) -> Worktree:
    """The worktree, with the pin it was made for, or else the nearest of those that are ancestors of its HEAD.

    Raises:
        UsageError: it stands on no pin.
    """
    folder = folder.resolve()
    record = read_record(folder)
    if record is not None:
        for pin in pins.of(record.upstream):
            if pin.name == record.pin:
                return Worktree(folder, pin, record.base, record)
        if port_path(folder).exists():
            raise UsageError(f"{folder}: its port is not finished: `patchctl port {record.upstream} --continue`")
        raise UsageError(f"{folder}: is for {record.upstream} {record.pin}, which is no pin any more: remove it")
    git = Git(folder)
    distances: list[tuple[int, Pin]] = []
    for pin in pins.pins:
        if git.succeeds("merge-base", "--is-ancestor", pin.commit, "HEAD"):
            distances.append((int(git.line("rev-list", "--count", f"{pin.commit}..HEAD")), pin))
    if not distances:
        raise UsageError(f"{folder}: no git worktree on top of a pin; see `patchctl list` for the pins")
    pin = min(distances, key=lambda found: found[0])[1]
    return Worktree(folder, pin, pin.commit)


def made(project: Project) -> list[Path]:
    """The folders that `edit` and `port` made for this project; not those of a port that is under way."""
    return [folder for folder in _folders(project) if not port_path(folder).exists()]


def ported(project: Project) -> list[Path]:
    """The folders of ports that are under way."""
    return [folder for folder in _folders(project) if port_path(folder).exists()]


def _folders(project: Project) -> list[Path]:
    if not (project.root / EDIT).is_dir():
        return []
    places = sorted(place for place in (project.root / EDIT).iterdir() if not place.name.startswith("."))
    return [place.resolve() for place in places if place.is_dir() and read_record(place) is not None]


def port_path(folder: Path) -> Path:
    """Where the state of a port that is under way is kept."""
    git = Git(folder)
    return git.folder / git.line("rev-parse", "--git-path", "patchctl-port.json")


def digest(project: Project, pin: Pin) -> str:
    """A sum over the pin's patches as they are on disk."""
    return sha256(b"".join(project.patch_bytes(name) for name in project.series.for_pin(pin)))


def usual_place(project: Project, upstream: str, pin: str) -> Path:
    return project.root / EDIT / f"{upstream}-{pin}"


@contextlib.contextmanager
def appearing(project: Project, upstream: str, pin: str, into: Path | None) -> Iterator[tuple[Path, Path]]:
    """A fresh folder that takes its place, `into` or `edit/UPSTREAM-PIN`, once it is complete; and that place.

    Raises:
        InTheWayError: there is something already.
    """
    usual = usual_place(project, upstream, pin)
    place = usual if into is None else into.absolute()
    fresh = place.with_name(f".{place.name}.making")
    try:
        usual.parent.mkdir(exist_ok=True)
        ignore = usual.parent / ".gitignore"
        if not ignore.exists():
            ignore.write_text("*\n", encoding="utf-8")
        if usual.is_symlink() and not usual.exists():
            usual.unlink()  # the folder it named was removed
        if usual.is_dir() and read_record(usual) and port_path(usual).exists():
            raise InTheWayError(
                f"{usual.resolve()}: a port to {upstream} {pin} is under way there: --continue or --abort it"
            )
        if place != usual and usual.exists():
            raise InTheWayError(f"{usual.resolve()}: is the worktree for {upstream} {pin} already; remove it first")
        if place.exists() and (not place.is_dir() or any(place.iterdir())):
            raise InTheWayError(f"{place}: not an empty folder; give another place (--into), or remove it")
        place.parent.mkdir(parents=True, exist_ok=True)
        with exclusive([usual.parent]):
            shutil.rmtree(fresh, ignore_errors=True)  # of a run that was killed
            fresh.mkdir()
            try:
                yield fresh, place
                fresh.rename(place)
                if place != usual:
                    usual.symlink_to(place)
            finally:  # not without the lock: a run that was refused it must leave the other's folder alone
                shutil.rmtree(fresh, ignore_errors=True)
    except OSError as error:
        raise PatchctlError(f"{error.filename or place}: can't be made: {error.strerror}") from None


def prepare(git: Git) -> None:
    """Keep files as upstream has them, whatever the user's git converts elsewhere; and leave Python's caches alone."""
    info = git.folder / ".git/info"
    info.mkdir(exist_ok=True)
    # The attributes here come before every other file of them, and before core.autocrlf.
    (info / "attributes").write_text("* -text -ident -filter\n", encoding="utf-8")
    (info / "exclude").write_text("__pycache__/\n*.pyc\n", encoding="utf-8")


def shown(folder: Path) -> str:
    """The folder as a user would type it."""
    with contextlib.suppress(ValueError):
        return str(folder.relative_to(Path.cwd()))
    return str(folder)
