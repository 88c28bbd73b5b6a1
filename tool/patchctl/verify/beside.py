"""Checks that need nothing of each other run beside each other: the series and two trees keep two cores busy."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeVar

T = TypeVar("T")


def run(tasks: Sequence[Callable[[], T]]) -> list[T]:
    """The results of all tasks, in their order.

    Each task but the first runs in a process of its own, and its result has to be one that can be pickled. Where there
    can be no such process, or it brings no result (the task raised, the process was killed), the task runs here, so
    that what it raises is raised here.
    """
    if len(tasks) < 2:
        return [task() for task in tasks]
    import pickle  # takes as long as the whole of a small check

    forked = [_fork(task, pickle.dumps) if _may_fork() else None for task in tasks[1:]]
    try:
        results = [tasks[0]()]
        for task, child in zip(tasks[1:], forked, strict=True):
            data = child.output() if child is not None else b""
            results.append(pickle.loads(data) if data else task())
        return results
    finally:
        for child in forked:
            if child is not None:
                child.end()


class _Child(NamedTuple):
    """A process that runs a task; `pipe` gives the pickled result, or nothing."""

    pid: int
    pipe: int

    def output(self) -> bytes:
        with open(self.pipe, "rb", closefd=False) as pipe:  # a descriptor, not a path
            return pipe.read()

    def end(self) -> None:
        os.close(self.pipe)
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)  # it has said all it has to say, or nobody listens any more
        os.waitpid(self.pid, 0)


def _may_fork() -> bool:
    """Whether a second process is possible and of use: a fork of a process with threads may wait for a lock forever."""
    if not hasattr(os, "fork"):
        return False
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threading = sys.modules.get("threading")
    return cores > 1 and (threading is None or threading.active_count() == 1)


def _fork(task: Callable[[], object], dump: Callable[[object], bytes]) -> _Child | None:
    reading, writing = os.pipe()
    try:
        pid = os.fork()
    except OSError:  # no memory or no process left
        os.close(reading)
        os.close(writing)
        return None
    if pid:
        os.close(writing)
        return _Child(pid, reading)
    # Here is the child. It ends without the parent's clean-up, and without the text that the parent has yet to write.
    status = 1
    try:
        os.close(reading)
        data = dump(task())
        with open(writing, "wb") as pipe:  # noqa: PTH123  # a descriptor
            pipe.write(data)
        status = 0
    finally:
        os._exit(status)
