"""All writes or none: a failure, a signal or a full disk leaves every file as it was, or as it shall be."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import signal
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mini_project import snapshot
from patchctl import transaction
from patchctl.errors import IN_THE_WAY, PARTLY_APPLIED, InTheWayError, PatchctlError
from patchctl.transaction import Write, commit, exclusive, put_back, staged_path

AS_ROOT = os.geteuid() == 0


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / ".venv" / "t"
    folder.mkdir(parents=True)
    for name in ("a", "b", "c"):
        (folder / name).write_text(f"{name} old\n")
        os.utime(folder / name, ns=(10**18, 10**18))
    (folder / "b").chmod(0o640)
    (folder / "c").chmod(0o755)
    return folder


def writes(tree: Path) -> list[Write]:
    """A change, one that sets the bit, one that takes it, a removal, and two new files in new folders."""
    (tree / "d").write_text("d old\n")
    (tree / "d").chmod(0o600)
    return [
        Write(tree / "a", b"a old\n", b"a new\n"),
        Write(tree / "b", b"b old\n", b"b new\n", executable=True),
        Write(tree / "c", b"c old\n", b"c old\n", executable=False),
        Write(tree / "d", b"d old\n", None),
        Write(tree / "x/y/e", None, b"e new\n", executable=True),
        Write(tree / "x/f", None, b"f new\n"),
    ]


def test_every_write_is_carried_out_with_its_mode(tree: Path) -> None:
    commit(writes(tree))
    found = snapshot(tree)
    assert found == {
        "a": ("0o100644", b"a new\n"),
        "b": ("0o100750", b"b new\n"),
        "c": ("0o100644", b"c old\n"),
        "x": ("0o40755", None),
        "x/f": ("0o100644", b"f new\n"),
        "x/y": ("0o40755", None),
        "x/y/e": ("0o100755", b"e new\n"),
    }


def test_the_umask_decides_on_the_mode_of_new_files(tree: Path) -> None:
    before = os.umask(0o077)
    try:
        commit(writes(tree))
    finally:
        os.umask(before)
    assert oct((tree / "x/y/e").stat().st_mode) == "0o100700"
    assert oct((tree / "a").stat().st_mode) == "0o100644"


def count_calls(tree: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], fail_at: int) -> list[str]:
    """Make the call number `fail_at` of these of `Path` fail, and every later one work."""
    calls: list[str] = []

    def wrap(name: str) -> None:
        original = getattr(Path, name)

        def wrapper(self: Path, *args: object, **kwargs: object) -> object:
            calls.append(f"{name} {self}")
            if len(calls) == fail_at:
                raise OSError(errno.EIO, "Input/output error", str(self))
            return original(self, *args, **kwargs)

        monkeypatch.setattr(Path, name, wrapper)

    for name in names:
        wrap(name)
    return calls


@pytest.mark.parametrize("fail_at", range(1, 6))
def test_a_failure_of_any_rename_puts_everything_back(
    tree: Path, monkeypatch: pytest.MonkeyPatch, fail_at: int
) -> None:
    planned = writes(tree)
    before = {name: (mode, data) for name, (mode, data, *_) in snapshot(tree).items()}
    times = {name: (tree / name).stat().st_mtime_ns for name in before}
    with monkeypatch.context() as patched:
        calls = count_calls(tree, patched, ("replace",), fail_at)
        with pytest.raises(PatchctlError, match=r"/\.venv/t/\S+: can't be written: Input/output error; nothing was"):
            commit(planned)
    assert len(calls) >= fail_at
    assert snapshot(tree) == before
    assert {name: (tree / name).stat().st_mtime_ns for name in before} == times


def test_a_failed_removal_puts_everything_back(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = writes(tree)
    before = snapshot(tree)
    original = Path.unlink

    def unlink(self: Path, missing_ok: bool = False) -> None:
        if self == tree / "d":
            raise PermissionError(errno.EPERM, "Operation not permitted", str(self))
        original(self, missing_ok=missing_ok)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", unlink)
        with pytest.raises(
            PatchctlError, match=r"/t/d: can't be written: Operation not permitted; nothing was changed"
        ):
            commit(planned)
    assert snapshot(tree) == before


def test_a_failure_before_the_first_rename_leaves_no_trace(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = writes(tree)
    before = snapshot(tree, mtimes=True)
    opened = os.open
    for fail_at in range(1, 6):
        count = iter(range(1, 100))

        def failing(path: str, *args: int, count: Iterator[int] = count, at: int = fail_at) -> int:
            if str(path).endswith(transaction.STAGED_SUFFIX) and next(count) == at:
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
            return opened(path, *args)

        with monkeypatch.context() as patched:
            patched.setattr(os, "open", failing)
            with pytest.raises(PatchctlError, match=r"/t/\S+: can't be written: No space left on device; nothing was"):
                commit(planned)
        assert snapshot(tree, mtimes=True) == before


def test_where_going_back_fails_too_it_says_so_with_the_exit_code_of_a_partly_applied_tree(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = writes(tree)
    original = Path.replace
    calls = iter(range(100))

    def replace(self: Path, target: Path) -> Path:
        if next(calls) >= 1:
            raise OSError(errno.ENOSPC, "No space left on device", str(self), None, str(target))
        return original(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(
        PatchctlError, match=r"t/b: can't be written.*going back failed too.*t/a.*partly applied"
    ) as caught:
        commit(planned)
    assert caught.value.exit_code == PARTLY_APPLIED
    assert (tree / "a").read_text() == "a new\n"
    assert not list(tree.rglob(f"*{transaction.STAGED_SUFFIX}"))


@pytest.mark.skipif(not AS_ROOT, reason="mounting a small disk needs root")
def test_a_full_disk_is_named_with_the_file_and_changes_nothing(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], check=False).returncode:
        pytest.skip("this machine allows no mount")
    try:
        (disk / "a").write_bytes(b"a" * 20_000)
        (disk / "b").write_bytes(b"b" * 20_000)
        before = snapshot(disk, mtimes=True)
        planned = [
            Write(disk / "a", b"a" * 20_000, b"A" * 20_000),
            Write(disk / "sub/b", None, b"B" * 20_000),
        ]
        with pytest.raises(PatchctlError, match=r"disk/sub/b: can't be written: No space left on device; nothing was"):
            commit(planned)
        assert snapshot(disk, mtimes=True) == before
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.skipif(not AS_ROOT, reason="mounting needs root")
def test_a_disk_that_can_only_be_read_is_named(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], check=False).returncode:
        pytest.skip("this machine allows no mount")
    try:
        (disk / "a").write_text("a old\n")
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        with pytest.raises(
            PatchctlError, match=r"disk/a: can't be written: Read-only file system; nothing was changed"
        ):
            commit([Write(disk / "a", b"a old\n", b"a new\n")])
    finally:
        subprocess.run(["umount", disk], check=True)


def test_hard_links_keep_the_old_contents(tree: Path) -> None:
    os.link(tree / "a", tree.parent / "cache")
    commit([Write(tree / "a", b"a old\n", b"a new\n")])
    assert (tree.parent / "cache").read_text() == "a old\n"
    assert (tree / "a").read_text() == "a new\n"


@pytest.mark.skipif(not AS_ROOT, reason="giving files away needs root")
def test_roots_writes_belong_to_the_owner_of_the_tree(tree: Path) -> None:
    planned = writes(tree)
    for place in (tree, *tree.iterdir()):
        os.chown(place, 1234, 2345)
    commit(planned)
    for name in ("a", "b", "x", "x/f", "x/y", "x/y/e"):
        status = (tree / name).stat()
        assert (name, status.st_uid, status.st_gid) == (name, 1234, 2345)


def test_what_an_interrupted_run_staged_is_written_over_and_never_through(tree: Path) -> None:
    victim = tree.parent / "victim"
    victim.write_text("mine\n")
    staged_path(tree / "a").symlink_to(victim)
    staged_path(tree / "b").write_text("half")
    commit(writes(tree))
    assert victim.read_text() == "mine\n"
    assert (tree / "a").read_text() == "a new\n"
    assert not (tree / "a").is_symlink()
    assert not list(tree.rglob(f"*{transaction.STAGED_SUFFIX}"))


def test_a_file_that_changed_since_it_was_read_is_not_overwritten(tree: Path) -> None:
    planned = writes(tree)
    (tree / "c").write_text("somebody's work\n")
    before = snapshot(tree)
    with pytest.raises(InTheWayError, match="t/c: another program changed it meanwhile"):
        commit(planned)
    assert snapshot(tree) == before


def test_a_new_file_that_appeared_meanwhile_is_not_overwritten(tree: Path) -> None:
    planned = writes(tree)
    (tree / "x").mkdir()
    (tree / "x/f").write_text("somebody's work\n")
    before = snapshot(tree)
    with pytest.raises(InTheWayError, match="t/x/f: another program changed it meanwhile"):
        commit(planned)
    assert snapshot(tree) == before


def test_putting_back_leaves_alone_what_others_wrote_meanwhile(tree: Path) -> None:
    done = commit(writes(tree))
    (tree / "a").write_text("somebody's work\n")
    put_back(done, PatchctlError("why"))
    assert (tree / "a").read_text() == "somebody's work\n"
    assert (tree / "b").read_text() == "b old\n"
    assert oct((tree / "c").stat().st_mode) == "0o100755"
    assert oct((tree / "d").stat().st_mode) == "0o100600"
    assert not (tree / "x/f").exists()


# -- signals


def test_an_interrupt_during_the_renames_waits_until_they_are_done(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Path.replace

    def replace(self: Path, target: Path) -> Path:
        os.kill(os.getpid(), signal.SIGINT)
        return original(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", replace)
        with pytest.raises(KeyboardInterrupt):
            commit(writes(tree))
    assert (tree / "a").read_text() == "a new\n"
    assert (tree / "x/y/e").read_text() == "e new\n"
    assert not (tree / "d").exists()
    assert not list(tree.rglob(f"*{transaction.STAGED_SUFFIX}"))


def test_an_interrupt_before_the_renames_leaves_no_trace(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = writes(tree)
    before = snapshot(tree, mtimes=True)
    original = Path.mkdir

    def mkdir(self: Path, *args: int) -> None:
        original(self, *args)
        if self.name == "y":
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "mkdir", mkdir)
        with pytest.raises(KeyboardInterrupt):
            commit(planned)
    after = snapshot(tree, mtimes=True)
    # a folder that was made when the signal came is the most that may stay, and it is empty
    assert {name: value for name, value in after.items() if name in before} == before
    assert set(after) - set(before) <= {"x", "x/y"}


# -- the lock


def _hold(folder: Path, ready: object, done: object) -> None:
    with exclusive([folder]):
        ready.set()  # type: ignore[attr-defined]
        done.wait()  # type: ignore[attr-defined]


def test_a_second_run_is_refused_and_told_who_is_at_work(tree: Path) -> None:
    context = multiprocessing.get_context("fork")
    ready, done = context.Event(), context.Event()
    holder = context.Process(target=_hold, args=(tree, ready, done))
    holder.start()
    try:
        assert ready.wait(30)
        failure = pytest.raises(InTheWayError, match=rf"t: another patchctl \(pid {holder.pid}\) is working on it")
        with failure as caught, exclusive([tree.parent, tree]):
            pass
        assert caught.value.exit_code == IN_THE_WAY
        with exclusive([tree.parent]):  # what was locked before the refusal is free again
            pass
    finally:
        done.set()
        holder.join()
    with exclusive([tree, tree]):
        pass


def test_the_lock_of_a_killed_run_is_gone_with_it(tree: Path) -> None:
    context = multiprocessing.get_context("fork")
    ready, done = context.Event(), context.Event()
    holder = context.Process(target=_hold, args=(tree, ready, done))
    holder.start()
    assert ready.wait(30)
    holder.kill()
    holder.join()
    with exclusive([tree]):
        assert snapshot(tree).keys() == {"a", "b", "c"}


def test_a_file_system_that_locks_no_folders_is_locked_by_a_file_elsewhere(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS is."""
    original = fcntl.flock

    def flock(descriptor: int, operation: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EBADF, "Bad file descriptor")
        original(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for _ in range(2):
        with exclusive([tree]):
            with pytest.raises(InTheWayError, match="another patchctl"), exclusive([tree]):
                pass
            with exclusive([tree.parent]):
                pass


def test_a_folder_that_can_not_be_locked_is_named(tmp_path: Path) -> None:
    failure = pytest.raises(PatchctlError, match="gone: can't be locked: No such file or directory")
    with failure, exclusive([tmp_path / "gone"]):
        pass
