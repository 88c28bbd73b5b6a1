"""A few worker processes for work that is independent and ordered."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

Progress = Callable[[int, int], None]
RunAll = Callable[[Callable[..., Any], Sequence[tuple[Any, ...]]], Iterator[Any]]

MAX_WORKERS = 8


def worker_count() -> int:
    """One a core that this process may use, 8 at most: more would wait for the disk."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, MAX_WORKERS))


@contextmanager
def worker_pool(jobs: int) -> Iterator[RunAll]:
    """A function that runs calls and yields their results in order: here for one job, else in a pool.

    At most a few results wait at a time, so that memory stays bounded however many calls there are.
    """
    if jobs <= 1:
        yield lambda function, tasks: (function(*task) for task in tasks)
        return
    # Ctrl-C goes to every process of the group: this one stops the others, which have nothing to say about it.
    pool = ProcessPoolExecutor(max_workers=jobs, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN))

    def run_all(function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
        running: dict[Future[Any], int] = {}
        ready: dict[int, Any] = {}
        started = 0
        for index in range(len(tasks)):
            while started < len(tasks) and len(running) + len(ready) < 2 * jobs:
                running[pool.submit(function, *tasks[started])] = started
                started += 1
            while index not in ready:
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    ready[running.pop(future)] = future.result()
            yield ready.pop(index)

    try:
        yield run_all
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
