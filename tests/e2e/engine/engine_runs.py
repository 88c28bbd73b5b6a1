"""Starts run_sessions.py in the engine's environment and reads what it wrote."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import shims

HERE = Path(__file__).resolve().parent
Record = dict[str, Any]
TIMEOUT_S = 1500


class Failed(Exception):
    """The run ended early; says how."""


def environment(tree: Path, folder: Path) -> dict[str, str]:
    """For a process that runs verl from `tree` on the CPU build of vLLM; its metadata goes to `folder`."""
    paths = [tree, HERE, shims.write_metadata(folder / "metadata")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray's actors stand back behind all other processes; here the whole engine is in one.
        "RAY_worker_niceness": "0",
        # A client that is collected after the end would start another Ray, to release its server.
        "RAY_ENABLE_AUTO_CONNECT": "0",
        # Ray would hide from its workers what is no accelerator of its own.
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }


def run(python: Path, tree: Path, folder: Path) -> Record:
    """All scenarios on one engine.

    Raises:
        Failed: with the end of its output.
    """
    log = folder / "run.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [python, HERE / "run_sessions.py", folder],
            env=environment(tree, folder),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # Ray's processes too, if the run left any
    if code != 0:
        lines = [line for line in log.read_text(errors="replace").splitlines() if "INFO" not in line]
        told = f"exit code {code}" if code is not None else f"no end after {TIMEOUT_S} s"
        raise Failed("\n".join([*lines[-40:], f"run_sessions.py: {told}, see {log}"]))
    return dict(json.loads((folder / "result.json").read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Matched:
    """A finished turn and the engine's requests that it is made of, in order."""

    session: Record
    turn: Record
    parts: tuple[Record, ...]

    @property
    def versions(self) -> list[int]:
        """The weights' version for each sampled token."""
        return [step for part in self.parts for step in part["steps"]]


def turns(sessions: Iterable[Record]) -> Iterator[tuple[Record, Record]]:
    for session in sessions:
        for turn in session["turns"]:
            yield session, turn


def match(sessions: list[Record], records: list[Record]) -> tuple[list[Matched], list[Record]]:
    """Finds for every finished turn the requests whose prompts and tokens are its own; and the requests that are left.

    A request of a turn has the turn's prompt and what was sampled of the turn before; their tokens together are the
    turn's. AssertionError names a turn for which there are none.
    """
    by_prompt: dict[tuple[int, ...], list[Record]] = defaultdict(list)
    for record in records:
        by_prompt[tuple(record["prompt"])].append(record)
    found = []
    for session, turn in turns(sessions):
        if turn["state"] != "finished":
            continue
        sampled, at, parts = turn["sampled"], 0, []
        while not parts or at < len(sampled):
            alike = by_prompt[tuple(turn["prompt"] + sampled[:at])]
            fitting = [each for each in alike if each["tokens"] == sampled[at : at + len(each["tokens"])]]
            assert fitting, f"{session['id']}, {turn['kind']} turn: nothing that the engine returned is tokens {at}..."
            part = max(fitting, key=lambda each: len(each["tokens"]) if not each["scores"] else -1)
            assert part["tokens"], f"{session['id']}: the engine returned no token here"
            alike.remove(part)
            parts.append(part)
            at += len(part["tokens"])
        found.append(Matched(session, turn, tuple(parts)))
    return found, [record for alike in by_prompt.values() for record in alike]


def summary(result: Record) -> str:
    """What a run was made of, in one line."""
    proxied = [result[name] for name in ("conversations", "rewrites", "weight_syncs", "departures")]
    finished = [turn for part in proxied for _, turn in turns(part["sessions"]) if turn["state"] == "finished"]
    syncs, checked = result["weight_syncs"], result["weight_syncs"]["checked"]
    pairs = [pair for each in checked for pair in zip(each["log_probs"], each["own"], strict=True)]
    parts = [len(each.parts) for each in match(syncs["sessions"], syncs["records"])[0]]
    seconds = ", ".join(f"{name} {value:.0f} s" for name, value in result["seconds"].items())
    return (
        f"{sum(len(part['sessions']) for part in proxied)} sessions, {len(finished)} turns, "
        f"{sum(len(turn['sampled']) for turn in finished)} tokens; {len(syncs['aborted'])} weight syncs aborted "
        f"{sum(syncs['aborted'])} requests, {sum(n > 1 for n in parts)} turns of up to {max(parts)} parts; "
        f"{len(pairs)} log-probabilities within {max(abs(a - b) for a, b in pairs):.0e} of a forward pass ({seconds})"
    )
