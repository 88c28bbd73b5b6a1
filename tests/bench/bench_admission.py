"""What the chat proxy's admission buys: agents' sessions on a simulated engine, with the gate and without it.

    python tests/bench/bench_admission.py [--tree TREE] [--capacity TOKENS] [--seeds N] [--json OUT]

Real are the gate, its scheduler and its probes, from a patched verl tree. Simulated are time, agents and one engine:

* Its prefix cache is vLLM's: blocks, least recently used ones evicted first, tails before heads. The end-to-end tests
  hold the same model beside a real vLLM, block by block.
* It batches continuously: a step takes one token of each running answer and prefills with the rest of its budget. Its
  time is `fixed + decode * answers + prefill * tokens`, with numbers that are stated, not measured: 10 ms, 0.05 ms an
  answer and 12,000 tokens a second, about an 8B model on one card.
* Agents start together. Each takes turns that append an answer and a tool's result, with a tool's time between them.
  As many of them as make the cache overflow once, twice, four times with their mean prompts; each slot runs sessions
  one after the other.

Prints a table: the share of prompt tokens that came from the cache, turns a second, and how long turns waited.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import logging
import random
import statistics
import sys
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "proxy"), str(ROOT / "tests"), str(ROOT / "tool")]

import virtual_clock  # noqa: E402
from bare_import import import_from  # noqa: E402

OVERLOADS = (1, 2, 4)


# -- the engine --------------------------------------------------------------------------------------------------------


class PrefixCache:
    """vLLM's block pool, for requests that are sequences of blocks' keys.

    Args:
        blocks: number of blocks; each is free (and then may still hold a key) or in use by requests.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))
        self._keys: dict[int, Hashable] = {}
        self._by_key: dict[Hashable, int] = {}
        self._uses = [0] * blocks

    @property
    def usage(self) -> float:
        return 1 - len(self._free) / self.blocks

    def resident(self, keys: Sequence[Hashable]) -> int:
        """How many of the first blocks are cached."""
        return sum(1 for _ in itertools.takewhile(self._by_key.__contains__, keys))

    def take(self, keys: Sequence[Hashable], cached: int) -> list[int] | None:
        """Blocks for a prompt, of which the first ``cached`` are there; None if there are not enough free ones."""
        held = [self._by_key[key] for key in keys[:cached]]
        spare = sum(1 for block in held if not self._uses[block])
        if len(keys) - cached > len(self._free) - spare:
            return None
        for block in held:
            self._free.pop(block, None)
            self._uses[block] += 1
        return held + [self.grow(key) for key in keys[cached:]]

    def grow(self, key: Hashable) -> int:
        """One more block; the caller has seen to it that one is free."""
        block, _ = self._free.popitem(last=False)
        self._drop_key(block)
        self._keys[block] = key
        self._by_key.setdefault(key, block)
        self._uses[block] += 1
        return block

    @property
    def free(self) -> int:
        return len(self._free)

    def release(self, blocks: list[int], full: int) -> None:
        """A request's blocks are free again, and are evicted from its end on. Those behind the first ``full`` ones hold
        nothing that can be found, and are taken first."""
        for block in reversed(blocks):
            self._uses[block] -= 1
        for block in reversed(blocks[:full]):
            if not self._uses[block]:
                self._free[block] = None
        for block in blocks[full:]:
            self._drop_key(block)
            self._free[block] = None
            self._free.move_to_end(block, last=False)

    def _drop_key(self, block: int) -> None:
        if (old := self._keys.pop(block, None)) is not None and self._by_key.get(old) == block:
            del self._by_key[old]


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step: ``fixed + decode * running answers + prefill * prefilled tokens``."""

    fixed: float
    decode: float
    prefill: float
    budget: int


TIMES = StepTime(fixed=0.010, decode=0.00005, prefill=1 / 12_000, budget=8192)


@dataclass(eq=False)
class Request:
    """``keys``: of the blocks of prompt and answer. ``prefill``: tokens still to be computed."""

    session: Hashable
    keys: list[Hashable]
    prompt: int
    answer: int
    done: asyncio.Future[int]
    blocks: list[int] = field(default_factory=list)
    prefill: int = 0
    cached: int = 0
    sampled: int = 0


class Engine:
    """Continuous batching over a `PrefixCache`, in virtual time."""

    block = 16

    def __init__(self, capacity: int, times: StepTime) -> None:
        self.cache = PrefixCache(capacity // self.block)
        self.capacity = capacity
        self._times = times
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._work = asyncio.Event()
        self.preempted = 0
        self.prompt_tokens = self.cached_tokens = 0

    async def generate(self, session: Hashable, keys: list[Hashable], prompt: int, answer: int) -> None:
        request = Request(session, keys, prompt, answer, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        self._work.set()
        cached = await request.done
        self.prompt_tokens += prompt
        self.cached_tokens += cached

    async def run(self) -> None:
        while True:
            if not self._waiting and not self._running:
                self._work.clear()
                await self._work.wait()
            await asyncio.sleep(self._step())

    def _step(self) -> float:
        budget = self._times.budget
        decoding = 0
        prefilled = 0
        for request in list(self._running):
            if request not in self._running:
                continue  # preempted in this step
            if request.prefill:
                part = min(request.prefill, budget)
                request.prefill -= part
                budget -= part
                prefilled += part
                continue
            while len(request.blocks) * self.block < request.prompt + request.sampled + 1:
                if not self.cache.free and not self._preempt(request):
                    break
                request.blocks.append(self.cache.grow(request.keys[len(request.blocks)]))
            else:
                decoding += 1
                budget -= 1
                request.sampled += 1
                if request.sampled == request.answer:
                    self._running.remove(request)
                    # The last token's keys and values are never computed.
                    self.cache.release(request.blocks, (request.prompt + request.sampled - 1) // self.block)
                    request.done.set_result(request.cached)
        while self._waiting and budget > 0:
            request = self._waiting[0]
            needed = request.keys[: -(-(request.prompt + request.sampled) // self.block)]
            cached = min(self.cache.resident(needed), (request.prompt + request.sampled - 1) // self.block)
            blocks = self.cache.take(needed, cached)
            if blocks is None:
                break
            self._waiting.popleft()
            request.blocks = blocks
            request.prefill = request.prompt + request.sampled - cached * self.block
            request.cached = request.cached or cached * self.block
            part = min(request.prefill, budget)
            request.prefill -= part
            budget -= part
            prefilled += part
            self._running.append(request)
        return self._times.fixed + self._times.decode * decoding + self._times.prefill * prefilled

    def _preempt(self, but: Request) -> bool:
        """Puts the request that came last back into the queue; whether there was another one than ``but``."""
        victim = self._running[-1]
        if victim is but and len(self._running) == 1:
            raise RuntimeError("one request alone does not fit into the cache")
        self._running.remove(victim)
        computed = victim.prompt + victim.sampled - victim.prefill
        self.cache.release(victim.blocks, min(computed // self.block, len(victim.blocks)))
        victim.blocks, victim.prefill = [], 0
        self._waiting.appendleft(victim)
        self.preempted += 1
        return victim is not but


class Client:
    """What the gate asks: the simulated engine in place of verl's client. An answer takes a few milliseconds."""

    def __init__(self, engine: Engine, prompts: dict[int, list[Hashable]]) -> None:
        self._engine = engine
        self._prompts = prompts

    async def hold_server(self, request_id: str, *, timeout_s: float) -> tuple[str, None]:
        await asyncio.sleep(0.002)
        return "engine", None

    def leave_server(self, server_id: str) -> None:
        pass

    async def kv_cache_usage(self, server: None, *, timeout_s: float) -> tuple[float, int]:
        await asyncio.sleep(0.005)
        return self._engine.cache.usage, self._engine.capacity

    async def resident_prefix_tokens(self, server: None, prompt_ids: list[int], *, timeout_s: float) -> int:
        await asyncio.sleep(0.005)
        keys = self._prompts[prompt_ids[-1]][: len(prompt_ids) // Engine.block]
        return self._engine.cache.resident(keys) * Engine.block


# -- the agents --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """Tokens and seconds of agents' sessions; what is drawn is drawn evenly from half to one and a half of the mean."""

    shared: int = 2048
    own: int = 1024
    answer: int = 200
    result: int = 1000
    turns: int = 15
    tool_s: float = 8.0
    sessions_a_slot: int = 3

    @property
    def mean_prompt(self) -> int:
        return self.shared + self.own + (self.answer + self.result) * self.turns // 2


@dataclass
class Figures:
    """Of one run."""

    hits: float
    turns_s: float
    wait_p50: float
    wait_p99: float
    wait_max: float
    overdue: int
    preempted: int


class Session:
    """One agent: token ids that are its own behind those that all have, and its blocks' keys."""

    def __init__(self, number: int, shared: int) -> None:
        self.id = f"session-{number}"
        self._base = (number + 1) << 24
        self._shared = shared
        self.length = 0

    def ids(self) -> list[int]:
        own = range(self._base + self._shared, self._base + self.length)
        return [*range(min(self._shared, self.length)), *own]

    def keys(self, tokens: int) -> list[Hashable]:
        common = self._shared // Engine.block
        return [index if index < common else (self.id, index) for index in range(-(-tokens // Engine.block))]


async def simulate(load: Load, slots: int, capacity: int, times: StepTime, gated: bool, seed: int) -> Figures:
    from verl.experimental.agent_loop.chat_proxy.admission import AdmissionConfig
    from verl.experimental.agent_loop.chat_proxy.admission_gate import AdmissionGate
    from verl.experimental.agent_loop.chat_proxy.events import Events

    rng = random.Random(seed)
    loop = asyncio.get_running_loop()
    engine = Engine(capacity, times)
    prompts: dict[int, list[Hashable]] = {}
    events = Events()
    gate = AdmissionGate(AdmissionConfig(), Client(engine, prompts), events) if gated else None
    waits: list[float] = []
    turns = 0
    numbers = itertools.count()

    def about(mean: float) -> float:
        return rng.uniform(0.5 * mean, 1.5 * mean)

    async def run_session() -> None:
        nonlocal turns
        session = Session(next(numbers), load.shared)
        session.length = load.shared + int(about(load.own))
        for number in range(int(about(load.turns))):
            answer = int(about(load.answer))
            ids = session.ids()
            keys = session.keys(session.length + answer)
            prompts[ids[-1]] = keys
            turn = SimpleNamespace(
                path=lambda session=session: [session],
                parent=number or None,
                end=session.length + answer,
                id=session.id,
            )
            came = loop.time()
            prompt = SimpleNamespace(ids=ids, turn=turn, media=None)
            async with gate.admitted(session.id, prompt) if gate is not None else nullcontext():
                waits.append(loop.time() - came)
                await engine.generate(session.id, keys, session.length, answer)
            del prompts[ids[-1]]
            turns += 1
            session.length += answer + int(about(load.result))
            await asyncio.sleep(about(load.tool_s))
        if gate is not None:
            gate.forget(session.id)

    async def slot() -> None:
        await asyncio.sleep(rng.uniform(0, 2))
        for _ in range(load.sessions_a_slot):
            await run_session()

    working = asyncio.ensure_future(engine.run())
    await asyncio.gather(*(slot() for _ in range(slots)))
    took = loop.time()
    working.cancel()
    waits.sort()
    return Figures(
        hits=engine.cached_tokens / engine.prompt_tokens,
        turns_s=turns / took,
        wait_p50=waits[len(waits) // 2],
        wait_p99=waits[int(len(waits) * 0.99)],
        wait_max=waits[-1],
        overdue=events.total("admission", how="overdue"),
        preempted=engine.preempted,
    )


def median(runs: list[Figures]) -> Figures:
    names = [item.name for item in dataclasses.fields(Figures)]
    return Figures(**{name: statistics.median(getattr(run, name) for run in runs) for name in names})


def main() -> int:
    parser = argparse.ArgumentParser(description="Sessions on a simulated engine, with admission and without.")
    parser.add_argument("--tree", type=Path, help="a patched verl tree; by default one is made")
    parser.add_argument("--capacity", type=int, default=200_000, help="tokens of the KV cache")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures there too")
    arguments = parser.parse_args()
    logging.disable(logging.INFO)
    if arguments.tree is None:
        import trees

        arguments.tree = trees.applied(next(pin for pin in trees.PROJECT.pins.of("verl") if not trees.available(pin)))
    import_from(arguments.tree)
    load, times = Load(), TIMES
    print(f"{load}\n{times}, cache {arguments.capacity} tokens, median of {arguments.seeds} runs\n")
    print("load  sessions  gate  prefix hits  turns/s  wait p50       p99       max  overdue  preempted")
    found = []
    for overload in OVERLOADS:
        slots = round(overload * arguments.capacity / load.mean_prompt)
        for gated in (False, True):
            runs = [
                virtual_clock.run(simulate(load, slots, arguments.capacity, times, gated, seed))
                for seed in range(arguments.seeds)
            ]
            figures = median(runs)
            found.append({"overload": overload, "sessions": slots, "gated": gated} | dataclasses.asdict(figures))
            waits = "  ".join(f"{value:6.1f} s" for value in (figures.wait_p50, figures.wait_p99, figures.wait_max))
            print(
                f"{overload} x   {slots:8}  {'on' if gated else 'off':4}  {figures.hits:11.1%}  {figures.turns_s:7.2f}"
                f"  {waits}  {figures.overdue:7}  {figures.preempted:9}",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
