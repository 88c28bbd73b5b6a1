"""Kills the proxy's process at random moments, and recovers its sessions from their archives.

    python tests/load/run_kills.py [--kills 50] [--sessions 24] [--tree TREE]

Each time a fresh process serves sessions whose clients call again at once, and gets SIGKILL after a random time. Every
answer that a client read to the end must be in what the archives' reader recovers, with the ids and log-probabilities
that the engine gave, and what is recovered must export. Prints a table, and exits with 1 where something is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import run_load
import server
import trials
from bare_import import import_from
from run_load import Outcome


@contextmanager
def forked(archives: Path, disk_s: float | None = None) -> Iterator[tuple[int, dict[str, str]]]:
    """A serving process, forked from this one as its imports take seconds; its id and URLs."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            asyncio.run(_serve(archives, writing, disk_s))
        finally:
            os._exit(1)
    os.close(writing)
    try:
        with os.fdopen(reading) as pipe:
            line = pipe.readline()
        if not line:
            raise SystemExit("kills: the server did not start")
        yield child, json.loads(line)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


async def _serve(archives: Path, writing: int, disk_s: float | None) -> None:
    urls, _proxy = await server.start(archives, pace_s=(0.0, 0.0), disk_s=disk_s)
    os.write(writing, json.dumps(urls).encode() + b"\n")
    await asyncio.Event().wait()


async def until_killed(
    process: int, urls: dict[str, str], sessions: int, after_s: float, rng: random.Random
) -> trials.Ledger:
    """Clients of `sessions` sessions until the server is gone; what they have."""
    ledger = trials.Ledger()
    shape = trials.Shape(turns=(400, 400), think_s=0.0, answer=(5, 200), stall_s=0.1)

    async def one(http: aiohttp.ClientSession, number: int) -> None:
        async with http.post(f"{urls['control']}/sessions/k{number}") as response:
            session = await response.json()
        own = random.Random(rng.random())
        ways = ("plain", "repeat", "twice at once")
        trial = trials.Trial(http, f"k{number}", session["url"], session["token"], ledger, shape, own, ways)
        await trial.run()

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        tasks = [asyncio.ensure_future(one(http, number)) for number in range(sessions)]
        await asyncio.sleep(after_s)
        os.kill(process, signal.SIGKILL)
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(error, trials.Wrong) or not isinstance(error, aiohttp.ClientError | OSError | None):
                ledger.wrong.append(f"{type(error).__name__}: {error}")
    return ledger


def recover(archives: Path, ledger: trials.Ledger, outcome: Outcome, totals: Counter[str]) -> None:
    """What the reader finds, against the script and against what the clients have."""
    from verl.experimental.agent_loop.chat_proxy.archive import read_archive

    for folder in archives.iterdir():
        totals["sessions"] += 1
        try:
            recovered = read_archive(folder)
        except FileNotFoundError:  # killed before the session's first line
            outcome.must(folder.name not in ledger.received, f"{folder.name} has no archive")
            continue
        totals["journal lines cut"] += recovered.lost
        nonces, wrong = run_load.answers(recovered)
        totals["finished turns recovered"] += len(nonces)
        outcome.must(wrong == 0, f"{folder.name}: {wrong} recovered turns are not what the engine sampled")
        for sample in recovered.accumulators():
            totals["tokens of actions"] += sum(sample.traj_response_mask)
        absent = set(ledger.received.get(folder.name, ())) - set(nonces)
        totals["answers that clients have"] += len(ledger.received.get(folder.name, ()))
        totals["of these lost"] += len(absent)
        outcome.must(not absent, f"{folder.name}: {sorted(absent)[:3]} were answered and are not in the archive")
    outcome.must(not ledger.wrong, f"clients went wrong: {ledger.wrong[:3]}")


def run(kills: int, sessions: int, disk_s: Sequence[float | None] = (None, 0.005), seed: int = 1) -> Outcome:
    """All kills, one after another, on a fast and on a slow disk in turn."""
    outcome, totals, rng = Outcome(), Counter[str](), random.Random(seed)
    began = time.monotonic()
    for number in range(kills):
        archives = Path(tempfile.mkdtemp())
        try:
            with forked(archives, disk_s[number % len(disk_s)]) as (process, urls):
                ledger = asyncio.run(until_killed(process, urls, sessions, rng.uniform(0.2, 1.5), rng))
            recover(archives, ledger, outcome, totals)
        finally:
            shutil.rmtree(archives)
    outcome.figures |= {"kills": kills, **totals, "seconds": round(time.monotonic() - began, 1)}
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--sessions", type=int, default=24)
    parser.add_argument("--tree", type=Path, required=True, help="a verl tree with the series applied")
    options = parser.parse_args()
    import_from(options.tree)
    outcome = run(options.kills, options.sessions)
    return outcome.told()


if __name__ == "__main__":
    sys.exit(main())
