"""Kill `patchctl apply` and `patchctl revert` at random moments; the next command must finish the work or undo it.

    python tests/kill_loop.py --times 200 --verl DIR --vllm-ascend DIR

The trees must be pristine, and are so again at the end. Half of the kills come at a moment drawn from the whole run,
half from the moment that the first file is staged: the writes are a few milliseconds of a run. After each kill `apply`
or `revert` is run, by turns, and the trees are compared to the byte with the patched or the pristine ones.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from mini_project import snapshot
from patchctl.project import Project, default_root
from patchctl.transaction import STAGED_SUFFIX, staged_path
from patchctl.tree import Tree, TreeState, open_tree

Snapshot = dict[str, tuple[object, ...]]


def look(trees: Sequence[Tree]) -> list[Snapshot]:
    """Every file and folder, contents and modes; without the note that `apply` leaves beside a package."""
    return [
        {name: value for name, value in snapshot(tree.root).items() if not name.startswith(".patchctl-")}
        for tree in trees
    ]


def kill_at(start: Callable[[], int], moment: float, staged: Path | None) -> bool:
    """Start a process and kill it after `moment` seconds, counted from the appearance of `staged` where that is given.

    Returns whether it was still running.
    """
    pid = start()
    deadline = time.monotonic() + 60
    while staged is not None and not staged.exists() and time.monotonic() < deadline:
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            break
    time.sleep(moment)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status)


def left_behind(states: Sequence[TreeState], before: Sequence[Snapshot], after: Sequence[Snapshot]) -> str:
    """What a kill left, in a word for the counts."""
    if list(before) == list(after):
        return "nothing written"
    kinds = {state.progress.value for state in states}
    debris = any(STAGED_SUFFIX in name for tree in after for name in tree)
    word = kinds.pop() if len(kinds) == 1 else "one tree of two"
    return f"{word}, staged files left" if debris else word


def loop(
    project: Project,
    trees: Sequence[Tree],
    run: Callable[[str], Callable[[], int]],
    finish: Callable[[str], None],
    times: int,
    seed: int,
    seconds: tuple[float, float],
) -> collections.Counter[str]:
    """Kill `times` runs; one that ended before its kill does not count.

    Args:
        run: gives, for "apply" or "revert", what starts it and returns its process id.
        finish: runs "apply" or "revert" to its end and raises where it fails.
        seconds: about how long a run takes, and how long its writes do.
    Raises:
        AssertionError: a tree is neither patched nor pristine to the byte.
    """
    choose = random.Random(seed)
    pristine = look(trees)
    finish("apply")
    patched = look(trees)
    finish("revert")
    assert look(trees) == pristine, "revert alone does not restore the tree"
    first = {tree: min(project.detect(tree).files, key=lambda file: file.path).path for tree in trees}
    counts: collections.Counter[str] = collections.Counter()
    number = 0
    while number < times:
        verb = choose.choice(("apply", "revert"))
        if verb == "revert":
            finish("apply")
        before = patched if verb == "revert" else pristine
        into_writes = choose.random() < 0.5
        moment = choose.uniform(0, seconds[1] if into_writes else seconds[0])
        watched = staged_path(trees[0].root / first[trees[0]]) if into_writes else None
        killed = kill_at(run(verb), moment, watched)
        states = [project.detect(tree) for tree in trees]
        if not killed:
            finish("revert")
            continue
        number += 1
        counts[f"{verb}: {left_behind(states, before, look(trees))}"] += 1
        then = "apply" if number % 2 else "revert"
        finish(then)
        assert look(trees) == (patched if then == "apply" else pristine), f"kill {number} of {verb}: not {then}ed"
        finish("revert")
        assert look(trees) == pristine, f"kill {number} of {verb}: not pristine again"
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--verl", type=Path, required=True)
    parser.add_argument("--vllm-ascend", type=Path, required=True)
    options = parser.parse_args()
    project = Project(default_root())
    folders = {"verl": options.verl, "vllm-ascend": options.vllm_ascend}
    trees = [open_tree(folder, project.pins.upstreams[name]) for name, folder in folders.items()]
    states = [project.detect(tree) for tree in trees]
    for state in states:
        if not all(file.pristine for file in state.files):
            sys.exit(f"{state.tree}: is {state.progress.value}; give a pristine tree")
    where = ["--verl", str(trees[0].root), "--vllm-ascend", str(trees[1].root)]
    revisions = ["--verl-commit", states[0].pin.name, "--vllm-ascend-commit", states[1].pin.name]

    def command(verb: str) -> list[str]:
        return [sys.executable, "-m", "patchctl", verb, *where, *revisions]

    def run(verb: str) -> Callable[[], int]:
        return lambda: subprocess.Popen(command(verb), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid

    def finish(verb: str) -> None:
        done = subprocess.run(command(verb), capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{verb}: exit code {done.returncode}: {done.stderr}"

    took = []
    for _ in range(3):
        start = time.monotonic()
        finish("apply")
        took.append(time.monotonic() - start)
        finish("revert")
    counts = loop(project, trees, run, finish, options.times, options.seed, (min(took), 0.006))
    for what, count in sorted(counts.items()):
        print(f"{count:5}  {what}")
    print(f"{options.times} kills: each time the next apply or revert gave exactly the patched or the pristine trees")


if __name__ == "__main__":
    main()
