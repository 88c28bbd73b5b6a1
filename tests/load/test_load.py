"""Short versions of the load run and of the kills."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import run_load
import trials

HERE = Path(__file__).resolve().parent


def test_nothing_is_lost_under_load(proxy_tree: Path) -> None:
    outcome = run_load.run(proxy_tree, 60, 6, trials.Shape(think_s=0.3, stall_s=0.5))
    assert outcome.missed == []
    assert {"vanish and ask again", "stall", "repeat", "twice at once", "rubbish before"} <= set(
        outcome.figures["ways"]
    )
    assert outcome.figures["finished turns"] >= outcome.figures["turns answered"] > 60


def test_no_answer_that_a_client_has_is_lost_by_a_kill(proxy_tree: Path) -> None:
    # A process of its own: this one has threads, and is not to be forked.
    command = [sys.executable, HERE / "run_kills.py", "--kills", "6", "--sessions", "12", "--tree", proxy_tree]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
