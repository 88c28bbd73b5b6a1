"""Many sessions at once on one chat proxy, with clients of every bad habit; then what was kept is compared.

    python tests/load/run_load.py [--sessions 1000] [--seconds 600] [--tree TREE] [--json OUT]

The server is one process, the clients another, and a third asks for /health all the time. The scripted engine's answers
tell which turn they are for, so an answer in the wrong place shows. First a wave of as many sessions that hurry shows
what memory the process holds when it is warm and idle. At the end: every session is closed and its archive is
complete; it has every answer that a client read to the end, with the ids and log-probabilities that the engine gave;
memory is back where it was. Prints a table, and exits with 1 where one of these is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import server
import serving
import trials
from bare_import import import_from

HERE = Path(__file__).resolve().parent
MEMORY_BACK = 0.05
HEALTH_P99_MS = 50.0
QUIET_S = 4.0
"""Longer than the proxy waits for a client that has left."""
PROBE = """
import http.client, json, sys, time
host, port = sys.argv[1].removeprefix("http://").split(":")
connection, taken = http.client.HTTPConnection(host, int(port), timeout=60), []
end = time.monotonic() + float(sys.argv[2])
while time.monotonic() < end:
    began = time.perf_counter()
    connection.request("GET", "/health")
    connection.getresponse().read()
    taken.append(time.perf_counter() - began)
    time.sleep(0.05)
print(json.dumps(taken))
"""


@dataclass
class Outcome:
    """
    Attributes:
        missed: what is lost, left over or wrong.
        off_target: figures that are not what they should be; a busy machine does that too.
    """

    figures: dict[str, Any] = field(default_factory=dict)
    missed: list[str] = field(default_factory=list)
    off_target: list[str] = field(default_factory=list)

    def told(self) -> int:
        """Prints all; the exit code."""
        width = max(map(len, self.figures))
        for name, value in self.figures.items():
            print(f"{name:<{width}}  {value}")
        for kind, found in (("missed", self.missed), ("off target", self.off_target)):
            for what in found[:20]:
                print(f"{kind}: {what}")
        return 1 if self.missed or self.off_target else 0

    def must(self, holds: bool, what: str) -> None:
        if not holds:
            self.missed.append(what)

    def should(self, holds: bool, what: str) -> None:
        if not holds:
            self.off_target.append(what)


@contextlib.contextmanager
def served(tree: Path, archives: Path) -> Iterator[dict[str, str]]:
    """The server's URLs."""
    command = [sys.executable, HERE / "server.py", tree, archives]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise SystemExit("load: the server did not start")
            yield json.loads(line)
        finally:
            process.kill()


class Crowd:
    """Keeps a number of trials running, each with a session of its own."""

    def __init__(self, urls: dict[str, str], ledger: trials.Ledger, seed: int = 1) -> None:
        self._urls = urls
        self._ledger = ledger
        self._rng = random.Random(seed)
        self.opened: list[str] = []

    async def one(self, http: aiohttp.ClientSession, shape: trials.Shape) -> None:
        """A trial from the opening of its session to the end."""
        name = f"t{len(self.opened)}"
        self.opened.append(name)
        control = f"{self._urls['control']}/sessions/{name}"
        async with http.post(control) as response:
            session = await response.json()
        rng = random.Random(self._rng.random())
        trial = trials.Trial(http, name, session["url"], session["token"], self._ledger, shape, rng)
        try:
            await trial.run()
        except (trials.Wrong, aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            self._ledger.wrong.append(f"{name}: {type(error).__name__}: {error}")
        async with http.delete(control) as response:
            await response.read()

    async def run(self, sessions: int, seconds: float, shape: trials.Shape) -> dict[str, Any]:
        """`sessions` trials at once, one after another, for `seconds`; trials that run then are let end.

        Returns what the server says of itself when all its clients are gone.
        """
        end = time.monotonic() + seconds

        async def lane(http: aiohttp.ClientSession, number: int) -> None:
            await asyncio.sleep(min(10, sessions / 50) * number / sessions)  # they don't all begin at once
            while True:
                await self.one(http, shape)
                if time.monotonic() >= end:
                    return

        timeout = aiohttp.ClientTimeout(total=None, sock_read=300)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:
            await asyncio.gather(*(lane(http, number) for number in range(sessions)))
        await asyncio.sleep(QUIET_S)
        async with aiohttp.ClientSession() as http, http.get(self._urls["control"] + "/stats") as response:
            found: dict[str, Any] = await response.json()
            return found


async def load(
    urls: dict[str, str], sessions: int, seconds: float, shape: trials.Shape, outcome: Outcome
) -> tuple[list[str], trials.Ledger]:
    """The waves; all sessions' names, and what the clients know."""
    figures, ledger = outcome.figures, trials.Ledger()
    crowd = Crowd(urls, ledger)
    base = await crowd.run(sessions, 0, dataclasses.replace(shape, think_s=min(1.0, shape.think_s)))
    vandals = [asyncio.ensure_future(trials.vandal(urls["proxy"], random.Random(n), ledger)) for n in range(8)]
    probe = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROBE, urls["proxy"], str(seconds), stdout=asyncio.subprocess.PIPE
    )
    began = time.monotonic()
    running = asyncio.ensure_future(crowd.run(sessions, seconds, shape))
    health = sorted(json.loads((await probe.communicate())[0]))
    for each in vandals:
        each.cancel()
    await asyncio.gather(*vandals, return_exceptions=True)
    last = await running
    took = time.monotonic() - began
    figures["sessions"] = len(crowd.opened)
    figures["turns answered"] = sum(len(nonces) for nonces in ledger.received.values())
    figures["seconds"] = round(took, 1)
    figures["ways"] = dict(ledger.counts)
    figures["memory, MB"] = [round(state["resident"] / 1e6, 1) for state in (base, last)]
    # What Python holds tells a leak; resident memory also has what the allocators keep of their peak.
    figures["blocks that Python holds"] = [state["blocks"] for state in (base, last)]
    outcome.must(last["blocks"] <= base["blocks"] * (1 + MEMORY_BACK), f"Python holds more than before: {last}")
    figures["threads, files, tasks"] = [[state[k] for k in ("threads", "files", "tasks")] for state in (base, last)]
    figures["health, ms (p50, p99, max)"] = [
        round(1000 * health[min(len(health) - 1, int(len(health) * share))], 1) for share in (0.5, 0.99, 1)
    ]
    figures["health asked"] = len(health)
    figures["client faults"] = last["client_faults"]
    outcome.must(not ledger.wrong, f"{len(ledger.wrong)} trials went wrong, the first: {ledger.wrong[:3]}")
    outcome.must(last["sessions"] == last["in_flight"] == last["running"] == 0, f"something is left: {last}")
    growth = last["resident"] / base["resident"] - 1
    figures["memory, growth"] = f"{growth:+.1%}"
    outcome.should(growth <= MEMORY_BACK, f"memory grew by {growth:.1%} of {base['resident'] / 1e6:.0f} MB")
    outcome.must(last["threads"] <= base["threads"] + 8 and last["files"] <= base["files"] + 8, "threads or files leak")
    outcome.should(figures["health, ms (p50, p99, max)"][1] < HEALTH_P99_MS, "health is slower than it may be")
    return crowd.opened, ledger


def answers(recovered: Any) -> tuple[list[str], int]:
    """The nonces of a session's finished turns, and how many turns are not what the engine made of their prompts."""
    from verl.experimental.agent_loop.chat_proxy.turns import path_ids

    nonces, wrong = [], 0
    for turn in recovered.turns:
        if turn.state != "finished":
            wrong += len(turn.sampled) > 0
            continue
        prompt = list(map(int, path_ids(turn)))[: turn.start + turn.context_length]
        asked = server.TOKENIZER.decode(prompt[-400:]).rpartition("[[")[2].partition("]]")[0]
        nonce, _, length = asked.partition(",")
        said = server.TOKENIZER.encode(server.answer_text(nonce, int(length)) + serving.END, add_special_tokens=False)
        values = [server.log_prob(len(prompt) + index, token) for index, token in enumerate(said)]
        wrong += turn.sampled.tolist() != said or turn.log_probs.tolist() != values
        nonces.append(nonce)
    return nonces, wrong


def compare(archives: Path, opened: list[str], received: dict[str, list[str]], outcome: Outcome) -> None:
    """Every archive against the script and against what its client read."""
    from verl.experimental.agent_loop.chat_proxy.archive import read_archive

    turns = finished = incomplete = 0
    for name in opened:
        try:
            recovered = read_archive(archives / name)
        except FileNotFoundError:
            outcome.must(False, f"{name} has no archive")
            continue
        incomplete += not recovered.complete or recovered.lost > 0
        nonces, wrong = answers(recovered)
        turns += len(recovered.turns)
        finished += len(nonces)
        outcome.must(wrong == 0, f"{name}: {wrong} turns are not what the engine sampled")
        recovered.turns = [turn for turn in recovered.turns if turn.delivered]
        absent = set(received.get(name, ())) - set(answers(recovered)[0])
        outcome.must(not absent, f"{name}: {sorted(absent)[:3]} were answered and are no actions")
    outcome.figures |= {"archived turns": turns, "finished turns": finished}
    outcome.must(incomplete == 0, f"{incomplete} archives are not complete")


def run(tree: Path, sessions: int, seconds: float, shape: trials.Shape) -> Outcome:
    """The whole run."""
    outcome = Outcome()
    with tempfile.TemporaryDirectory() as folder:
        archives = Path(folder)
        with served(tree, archives) as urls:
            opened, ledger = asyncio.run(load(urls, sessions, seconds, shape, outcome))
        compare(archives, opened, ledger.received, outcome)
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--think", type=float, default=8.0, help="mean seconds between a session's turns")
    parser.add_argument("--tree", type=Path, required=True, help="a verl tree with the series applied")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    import_from(options.tree)
    outcome = run(options.tree, options.sessions, options.seconds, trials.Shape(think_s=options.think))
    if options.json:
        options.json.write_text(json.dumps(dataclasses.asdict(outcome), indent=1), encoding="utf-8")
    return outcome.told()


if __name__ == "__main__":
    sys.exit(main())
