"""kill -9 at any moment: the next apply or revert ends in exactly the patched or the pristine tree."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import kill_loop
import mini_project
from mini_project import PY, Exe, File, PinSpec, edit
from patchctl import engine
from patchctl.engine import Target

VERBS = {"apply": engine.apply, "revert": engine.revert}


def test_a_run_that_is_killed_at_a_random_moment_is_finished_or_undone_by_the_next(tmp_path: Path) -> None:
    names = [f"verl/f{number:02}.py" for number in range(24)]
    one, two = edit(PY, 9, b"one\n"), edit(edit(PY, 9, b"one\n"), 11, b"two\n")
    odd: dict[str, File] = {"verl/__init__.py": b"", "verl/x.sh": b"x\n", "verl/z.py": b"z\n"}
    base = {**odd, **dict.fromkeys(names, PY)}
    steps: list[dict[str, File]] = [
        dict.fromkeys(names, one),
        {f"verl/new{number % 5}/g{number}.py": b"new\n" * 9 for number in range(10)},
        {**dict.fromkeys(names[::2], two), "verl/x.sh": Exe(b"x\n"), "verl/z.py": None},
    ]
    mini = mini_project.build(tmp_path / "p", {"verl": [PinSpec("p1", base, steps)]})
    pin = mini.pin()
    target = Target(mini.pristine(tmp_path / "t", pin), pin)

    def run(verb: str) -> Callable[[], int]:
        def start() -> int:
            pid = os.fork()
            if pid == 0:
                try:
                    VERBS[verb](mini.project, [target])
                finally:
                    os._exit(0)
            return pid

        return start

    def finish(verb: str) -> None:
        VERBS[verb](mini.project, [target])

    counts = kill_loop.loop(mini.project, [target.tree], run, finish, 25, 1, (0.02, 0.01))
    assert sum(counts.values()) == 25
    # Some kills must have come between the first write and the last: else nothing was proved.
    assert sum(count for what, count in counts.items() if "nothing written" not in what) >= 5, counts
