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
import stat
import threading
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
def exclusive(folders: Sequence[Path], *, wait: bool = False) -> Iterator[None]:
    """Hold every folder against other runs.

    The lock is the kernel's, on the folder itself: it leaves nothing behind and ends with the process.

    Raises:
        InTheWayError: another run holds one of them, and `wait` is not given.
    """
    operation = fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB
    with contextlib.ExitStack() as held:
        for folder in sorted(set(folders)):
            try:
                descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
                held.callback(os.close, descriptor)
                _lock(descriptor, operation, held)
            except BlockingIOError:
                raise InTheWayError(
                    f"{folder}: another patchctl{_holder(descriptor)} is working on it; wait until it has ended"
                ) from None
            except OSError as error:
                raise PatchctlError(f"{folder}: can't be locked: {error.strerror}") from None
        yield


def _lock(folder: int, operation: int, held: contextlib.ExitStack) -> None:
    try:
        fcntl.flock(folder, operation)
    except BlockingIOError:
        raise
    except OSError:
        # NFS locks no folders. A file on this machine's own disk stands for it, and holds off this machine's runs.
        import tempfile

        status = os.fstat(folder)
        name = Path(tempfile.gettempdir()) / f"patchctl-{status.st_dev:x}-{status.st_ino:x}.lock"
        descriptor = os.open(name, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        held.callback(os.close, descriptor)
        fcntl.flock(descriptor, operation)


def _holder(descriptor: int) -> str:
    """` (pid N)` of the process that holds the lock, where the kernel tells."""
    inode = os.fstat(descriptor).st_ino
    try:
        rows = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    except OSError:
        return ""
    pids = [row[4] for row in rows if len(row) > 5 and row[1] == "FLOCK" and row[5].endswith(f":{inode}")]
    return f" (pid {pids[0]})" if pids else ""


class Written(NamedTuple):
    """A write that was carried out, and what `stat` said of the file before; None where there was none."""

    write: Write
    status: os.stat_result | None


def commit(writes: Sequence[Write]) -> list[Written]:
    """Carry out every write, or none of them.

    Interrupts wait until the files are in place, a matter of milliseconds.

    Raises:
        InTheWayError: a file is not `before` any more; every other file is as before.
        PatchctlError: a file could not be written; the message names it, and every file is as before
            (exit code 4 where even going back failed).
    """
    created: list[Path] = []
    try:
        for write in writes:
            if write.after is not None:
                _stage(write, created)
        with _interrupts_held():
            return _replace_all(writes)
    except OSError as error:
        raise PatchctlError(f"{_named(error)}: can't be written: {error.strerror}; nothing was changed") from None
    finally:
        for write in writes:
            remove_staged(write.path)
        for folder in reversed(created):
            with contextlib.suppress(OSError):  # it holds the files that were put in place
                folder.rmdir()


def remove_staged(path: Path) -> None:
    """Remove what a run that was killed, or that failed, has staged for `path`."""
    with contextlib.suppress(OSError):  # no such folder, or one that can't be written to: nothing was staged there
        staged_path(path).unlink(missing_ok=True)


def _stage(write: Write, created: list[Path]) -> None:
    missing = [folder for folder in write.path.parents if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir()
        created.append(folder)
        _give(folder, folder.parent.stat())
    status = _status(write.path)
    mode = None
    if status is not None:
        mode = stat.S_IMODE(status.st_mode)
        if write.executable is not None:
            # Whoever may read it may execute it, as git does.
            mode = mode | (mode & 0o444) >> 2 if write.executable else mode & ~0o111
    _write_staged(write.path, write.after or b"", mode, status, executable=bool(write.executable))


def _write_staged(
    path: Path, content: bytes, mode: int | None, status: os.stat_result | None, *, executable: bool = False
) -> None:
    """Write the copy beside `path`, with the owner of the file it replaces, or else of its folder."""
    staged = staged_path(path)
    try:
        staged.unlink(missing_ok=True)  # of a run that was killed
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        descriptor = os.open(staged, flags, 0o777 if executable else 0o666)
        with os.fdopen(descriptor, "wb") as file:
            _give(descriptor, status or path.parent.stat())
            if mode is not None:
                os.fchmod(descriptor, mode)
            file.write(content)
    except OSError as error:
        error.filename = error.filename or str(staged)  # a full disk does not say for which file
        raise


def _give(file: Path | int, like: os.stat_result) -> None:
    """Root's files belong to whom the tree belongs; others' to the same group, where they are in it."""
    mine = os.fstat(file) if isinstance(file, int) else file.stat()
    if (mine.st_uid, mine.st_gid) != (like.st_uid, like.st_gid):
        with contextlib.suppress(OSError):  # not ours to give, or an owner that this container can't name
            os.chown(file, like.st_uid if os.geteuid() == 0 else -1, like.st_gid)


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except FileNotFoundError:
        return None


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _replace_all(writes: Sequence[Write]) -> list[Written]:
    done: list[Written] = []
    try:
        for write in writes:
            if _content(write.path) != write.before:
                raise InTheWayError(f"{write.path}: another program changed it meanwhile; run the command again")
            done.append(Written(write, _status(write.path)))
            if write.after is None:
                write.path.unlink()
            else:
                staged_path(write.path).replace(write.path)
    except (OSError, InTheWayError) as error:
        put_back(done, error)
        raise
    return done


def put_back(done: Sequence[Written], cause: OSError | PatchctlError) -> None:
    """Undo writes because of `cause`: contents, mode, owner and time. What others wrote meanwhile is left alone.

    Raises:
        PatchctlError: a file could not be put back (exit code 4).
    """
    why = f"{_named(cause)}: can't be written: {cause.strerror}" if isinstance(cause, OSError) else str(cause)
    for write, status in reversed(done):
        try:
            if _content(write.path) != write.after:
                continue
            if write.before is None or status is None:
                write.path.unlink()
                continue
            _write_staged(write.path, write.before, stat.S_IMODE(status.st_mode), status)
            os.utime(staged_path(write.path), ns=(status.st_atime_ns, status.st_mtime_ns))
            staged_path(write.path).replace(write.path)
        except OSError as error:
            raise PatchctlError(
                f"{why}; going back failed too ({_named(error)}: {error.strerror}): the tree is partly applied; "
                "free the disk, then run the command again",
                exit_code=PARTLY_APPLIED,
            ) from None


def _named(error: OSError) -> str:
    """The file that the error is about, by the name it shall have."""
    path = Path(os.fsdecode(error.filename2 or error.filename or "a file"))
    if path.name.endswith(STAGED_SUFFIX):
        path = path.with_name(path.name[1 : -len(STAGED_SUFFIX)])
    return str(path)


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Signals that come meanwhile take effect afterwards. Python runs handlers in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def note(number: int, _: object) -> None:
        came.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for came_number in dict.fromkeys(came):
            os.kill(os.getpid(), came_number)
