"""Checks that run beside each other bring what they would bring one after the other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from patchctl.verify import beside

TOOL = Path(beside.__file__).parents[2]


def python(code: str) -> subprocess.CompletedProcess[str]:
    """A process without threads: the tests' own may have some, and then nothing is forked."""
    code = "import os, sys, signal, time\nfrom patchctl.verify import beside\n" + textwrap.dedent(code)
    environment = {**os.environ, "PYTHONPATH": str(TOOL)}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)


forks = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="one core, or no fork"
)


def test_no_task_and_one_task() -> None:
    assert beside.run([]) == []
    assert beside.run([os.getpid]) == [os.getpid()]


@forks
def test_results_come_in_order_from_processes_of_their_own() -> None:
    done = python("""
        slow = lambda: (time.sleep(0.2), os.getpid())[1]
        pids = beside.run([slow, os.getpid, slow])
        print(pids[0] == os.getpid(), len(set(pids)))
    """)
    assert (done.stdout, done.stderr) == ("True 3\n", "")


@forks
def test_nothing_is_forked_beside_a_thread() -> None:
    done = python("""
        import threading
        end = threading.Event()
        threading.Thread(target=end.wait).start()
        print(len(set(beside.run([os.getpid, os.getpid]))))
        end.set()
    """)
    assert (done.stdout, done.stderr) == ("1\n", "")


@pytest.mark.parametrize("where", [0, 1, 2])
def test_an_error_is_raised_here(where: int) -> None:
    done = python(f"""
        from patchctl.git import GitError
        def fails():
            raise GitError("git is gone", "stderr")
        tasks = [lambda: 1, lambda: 2, lambda: 3]
        tasks[{where}] = fails
        try:
            beside.run(tasks)
        except GitError as error:
            print(error, error.stderr)
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            print("no child is left")
    """)
    assert (done.stdout, done.stderr) == ("git is gone stderr\nno child is left\n", "")


@forks
def test_a_process_that_is_killed_has_its_task_done_here() -> None:
    done = python("""
        own = os.getpid()
        def dies_elsewhere():
            if os.getpid() != own:
                os.kill(os.getpid(), signal.SIGKILL)
            return "done"
        print(beside.run([lambda: 1, dies_elsewhere]))
    """)
    assert (done.stdout, done.stderr) == ("[1, 'done']\n", "")


@forks
def test_an_error_here_does_not_wait_for_the_others() -> None:
    done = python("""
        def fails():
            raise ValueError("no")
        try:
            beside.run([fails, lambda: time.sleep(1000)])
        except ValueError as error:
            print(error)
    """)
    assert (done.stdout, done.stderr) == ("no\n", "")


@forks
def test_an_interrupt_ends_all(tmp_path: Path) -> None:
    code = """
        import os, sys, time
        from pathlib import Path
        from patchctl.verify import beside
        def waits():
            Path(sys.argv[1], str(os.getpid())).touch()
            time.sleep(1000)
        beside.run([waits, waits])
    """
    environment = {**os.environ, "PYTHONPATH": str(TOOL)}
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while len(list(tmp_path.iterdir())) < 2:
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert said.count("Traceback") == 1
    for pid in (int(path.name) for path in tmp_path.iterdir()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_text_that_waits_to_be_written_is_written_once() -> None:
    done = python("""
        print("begun", end=" ")
        print(beside.run([lambda: 1, lambda: 2]))
    """)
    assert (done.stdout, done.stderr) == ("begun [1, 2]\n", "")
