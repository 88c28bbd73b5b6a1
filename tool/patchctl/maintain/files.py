"""The project's own files, written all or none: patches, series, pins and, last, the lock.

The new files are staged in a folder of their own with a list of what is to happen; the folder gets its name when it is
complete, and that is the moment of decision. A kill before it leaves nothing changed; after it, the next refresh
finishes the work, and until then every command that needs the lock says that patches and lock disagree.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from patchctl.errors import InTheWayError, PatchctlError, UsageError
from patchctl.project import PACKAGED, Project
from patchctl.series import sha256
from patchctl.sources import Say
from patchctl.transaction import exclusive

_READY = ".refresh"
_STAGING = ".refresh.staging"
_LIST = "list.json"


def _digest(path: Path) -> str | None:
    return sha256(path.read_bytes()) if path.is_file() else None


def seen(root: Path) -> dict[str, str | None]:
    """The digests of the files that a refresh is made from, by path below the project's root."""
    patches = (path.relative_to(root).as_posix() for path in (root / "patches").rglob("*.patch"))
    return {name: _digest(root / name) for name in ("configs/pins.toml", "series", "series.lock", *sorted(patches))}


@dataclass(frozen=True)
class Refreshed:
    """The series as it should be on disk: contents by path below the project's root, the lock last.

    Attributes:
        notes: what a person should know of it, a line each.
        seen: what it was made from, see `seen`; None where that is not to be held to.
    """

    files: Mapping[str, bytes]
    notes: tuple[str, ...] = ()
    seen: Mapping[str, str | None] | None = None

    def differing(self, root: Path) -> list[str]:
        """The paths whose file is missing, superfluous or other than it should be."""
        there = {path.relative_to(root).as_posix() for path in (root / "patches").rglob("*.patch")}
        changed = [name for name, data in self.files.items() if _digest(root / name) != sha256(data)]
        return sorted({*changed, *(there - set(self.files))})

    def write(self, root: Path) -> None:
        """Put the new files in place and remove the ones that are no longer listed; the lock comes last.

        Raises:
            InTheWayError: another run is writing, or a file was changed since this was made.
            PatchctlError: a file can't be written; nothing was changed.
        """
        differing = self.differing(root)
        if not differing:
            return
        superfluous = [name for name in differing if name not in self.files]
        steps = [
            {"path": name, "before": _digest(root / name), "after": sha256(self.files[name])}
            for name in self.files
            if name in differing
        ]
        steps[-1:-1] = [{"path": name, "before": _digest(root / name), "after": None} for name in superfluous]
        staging = root / _STAGING
        with exclusive([root]):
            self._check_unchanged(root)
            try:
                shutil.rmtree(staging, ignore_errors=True)
                for step in steps:
                    name = str(step["path"])
                    if name in self.files:
                        (staging / name).parent.mkdir(parents=True, exist_ok=True)
                        (staging / name).write_bytes(self.files[name])
                (staging / _LIST).write_text(json.dumps(steps), encoding="utf-8")
                staging.rename(root / _READY)
            except OSError as error:
                raise PatchctlError(
                    f"{error.filename or staging}: can't be written: {error.strerror}; nothing was changed"
                ) from None
            finally:
                shutil.rmtree(staging, ignore_errors=True)
            _finish(root)

    def _check_unchanged(self, root: Path) -> None:
        """The proofs take minutes, and a port waits for a person: what was changed meanwhile must not be written over.

        Raises:
            InTheWayError: names the first file.
        """
        if self.seen is None:
            return
        now = seen(root)
        changed = [name for name in {**self.seen, **now} if self.seen.get(name) != now.get(name)]
        if changed:
            raise InTheWayError(f"{root / changed[0]}: was changed while this ran; run it again; nothing was written")


def prove(root: Path, refreshed: Refreshed) -> None:
    """Hold the series that is to be written to the rules about patches, their messages and the lock.

    Raises:
        PatchctlError: a rule is broken; names the first place, and how many there are.
    """
    from patchctl.verify.series import check_series  # brings unidiff, which nothing else here needs

    with tempfile.TemporaryDirectory() as scratch:
        pins = {"configs/pins.toml": (root / "configs/pins.toml").read_bytes()}
        for name, data in {**pins, **refreshed.files}.items():
            Path(scratch, name).parent.mkdir(parents=True, exist_ok=True)
            Path(scratch, name).write_bytes(data)
        findings = check_series(Project(Path(scratch))).findings
    if findings:
        more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
        raise PatchctlError(f"the series would break a rule: {findings[0]}{more}; nothing was written")


def interrupted(root: Path) -> bool:
    """Whether a refresh was killed while it put its files in place."""
    return (root / _READY / _LIST).is_file()


def recover(root: Path, say: Say) -> None:
    """Finish a refresh that was killed, unless the files have been changed since.

    Raises:
        InTheWayError: another run is writing.
    """
    if not interrupted(root):
        return
    with exclusive([root]):
        changed = [step["path"] for step in _steps(root) if _digest(root / step["path"]) not in _either(step)]
        if changed:
            say(f"an earlier refresh was interrupted, and {changed[0]} was changed since: what it meant is dropped")
            shutil.rmtree(root / _READY)
        else:
            say("an earlier refresh was interrupted: its files are put in place now")
            _finish(root)


def _either(step: Mapping[str, str | None]) -> tuple[str | None, ...]:
    return step["before"], step["after"]


def _steps(root: Path) -> Iterator[dict[str, str]]:
    yield from json.loads((root / _READY / _LIST).read_text(encoding="utf-8"))


def _finish(root: Path) -> None:
    ready, place = root / _READY, root
    try:
        for step in _steps(root):
            place = root / step["path"]
            if step["after"] is None:
                place.unlink(missing_ok=True)
            elif (ready / step["path"]).is_file():
                place.parent.mkdir(parents=True, exist_ok=True)
                (ready / step["path"]).replace(place)
    except OSError as error:
        raise PatchctlError(
            f"{place}: can't be written: {error.strerror}; some files are new already: make it writable or make room, "
            "and `patchctl refresh` puts the others in place"
        ) from None
    shutil.rmtree(ready)


def require_clone(root: Path, command: str) -> None:
    """That the project is one to work in.

    Raises:
        UsageError: it is the copy that an installed package carries.
    """
    if root == PACKAGED:
        raise UsageError(
            f"{root} is the series that this patchctl was installed with; run the patchctl of the clone "
            f"(`.venv/bin/patchctl`), or name the clone: patchctl --root DIR {command}"
        )
