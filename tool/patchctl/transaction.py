"""All writes or none: stage every file beside its target, then put all of them in place.

A file is replaced by renaming a finished copy over it, so a kill at any moment leaves each file as it was or as it
shall be; which one is read from its hash, and the next run goes on from there. Renaming also leaves hard links alone
(package managers link installed files to their cache).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from patchctl.errors import PARTLY_APPLIED, InTheWayError, PatchctlError

STAGED_SUFFIX = ".patchctl-staged"


class Write(NamedTuple):
    """A file's new contents.

    Attributes:
        before, after: the bytes on disk; None where there is no file.
        executable: the owner's executable bit to set; None leaves the mode as it is.
    """

    path: Path
    before: bytes | None
    after: bytes | None
    executable: bool | None = None


def staged_path(path: Path) -> Path:
    return path.with_name(f".{path.name}{STAGED_SUFFIX}")


@contextlib.contextmanager
def exclusive(folders: Sequence[Path]) -> Iterator[None]:
    """Hold every folder against other runs.

    The lock is the kernel's, on the folder itself: it leaves nothing behind and ends with the process.

    Raises:
        InTheWayError: another run holds one of them.
    """
    with contextlib.ExitStack() as held:
        for folder in sorted(set(folders)):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            held.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InTheWayError(
                    f"{folder}: another patchctl{_holder(descriptor)} is working on it; wait until it has ended"
                ) from None
            except OSError as error:  # a file system without locks (some NFS mounts)
                raise PatchctlError(f"{folder}: can't be locked: {error.strerror}; copy it to a local disk") from None
        yield


def _holder(descriptor: int) -> str:
    """` (pid N)` of the process that holds the lock, where the kernel tells."""
    inode = os.fstat(descriptor).st_ino
    try:
        rows = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    except OSError:
        return ""
    pids = [row[4] for row in rows if len(row) > 5 and row[1] == "FLOCK" and row[5].endswith(f":{inode}")]
    return f" (pid {pids[0]})" if pids else ""


def commit(writes: Sequence[Write]) -> None:
    """Carry out every write, or none of them.

    Interrupts wait until the files are in place, a matter of milliseconds.

    Raises:
        PatchctlError: a file could not be written; the message names it, and every file is as before
            (exit code 4 where even going back failed).
    """
    created: list[Path] = []
    try:
        for write in writes:
            if write.after is not None:
                _stage(write, created)
        with _interrupts_held():
            _replace_all(writes)
    except OSError as error:
        raise PatchctlError(f"{_named(error)}: can't be written: {error.strerror}; nothing was changed") from None
    finally:
        for write in writes:
            staged_path(write.path).unlink(missing_ok=True)
        for folder in reversed(created):
            with contextlib.suppress(OSError):  # it holds the files that were put in place
                folder.rmdir()


def _stage(write: Write, created: list[Path]) -> None:
    missing = [folder for folder in write.path.parents if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir()
        created.append(folder)
    _write_staged(write, write.after or b"")


def _write_staged(write: Write, content: bytes) -> None:
    staged = staged_path(write.path)
    staged.unlink(missing_ok=True)  # of a run that was killed
    mode = 0o777 if write.executable else 0o666
    descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    with os.fdopen(descriptor, "wb") as file:
        with contextlib.suppress(FileNotFoundError):
            old = write.path.stat()
            keep = old.st_mode & 0o7777
            if write.executable is not None:
                # Whoever may read it may execute it, as git does.
                keep = keep | (keep & 0o444) >> 2 if write.executable else keep & ~0o111
            if (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()) and os.geteuid() == 0:
                os.fchown(descriptor, old.st_uid, old.st_gid)
            os.fchmod(descriptor, keep)
        file.write(content)


def _replace_all(writes: Sequence[Write]) -> None:
    done: list[Write] = []
    try:
        for write in writes:
            done.append(write)
            if write.after is None:
                write.path.unlink(missing_ok=True)
            else:
                staged_path(write.path).replace(write.path)
    except OSError as error:
        for write in reversed(done):
            _put_back(write, error)
        raise


def _put_back(write: Write, cause: OSError) -> None:
    try:
        if write.before is None:
            write.path.unlink(missing_ok=True)
        elif not write.path.exists() or write.path.read_bytes() != write.before:
            _write_staged(write, write.before)
            staged_path(write.path).replace(write.path)
    except OSError as error:
        raise PatchctlError(
            f"{_named(cause)}: can't be written: {cause.strerror}; going back failed too ({_named(error)}: "
            f"{error.strerror}): the tree is partly applied; free the disk, then run the command again",
            exit_code=PARTLY_APPLIED,
        ) from None


def _named(error: OSError) -> str:
    name = str(error.filename2 or error.filename or "a file")
    return name.replace(STAGED_SUFFIX, "").replace("/.", "/") if STAGED_SUFFIX in name else name


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
