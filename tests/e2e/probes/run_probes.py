"""Asks a real vLLM, through verl's server and client, what its KV cache holds, and vLLM itself. Writes the answers.

    python run_probes.py FOLDER

The patched verl tree, this folder, the engine tests' and the folder of shims.write_metadata are on PYTHONPATH.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import engine_world
import recording_server
from engine_world import World
from probed_server import BLOCK, BLOCKS, ProbedServer

recording_server.RecordingServer = ProbedServer  # type: ignore[misc]
Result = dict[str, Any]
TIMEOUT = 30.0


class Asked:
    """One session's view of a server, through verl's client."""

    def __init__(self, world_: World, server: Any) -> None:
        self.client, self.server = world_.plain, server

    async def usage(self, timeout_s: float = TIMEOUT) -> Any:
        return await self.client.kv_cache_usage(self.server, timeout_s=timeout_s)

    async def resident(self, ids: list[int], timeout_s: float = TIMEOUT) -> Any:
        return await self.client.resident_prefix_tokens(self.server, ids, timeout_s=timeout_s)


def prompt(seed: int, tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000, 100_000) for _ in range(tokens)]


async def generate(here: World, ids: list[int], tokens: int) -> list[int]:
    params = {"max_tokens": tokens, "temperature": 1.0, "ignore_eos": True}
    output = await here.server.generate.remote(ids, params, f"request-{time.monotonic_ns()}")
    return list(output.token_ids)


async def residency(here: World, asked: Asked) -> Result:
    """The same prompts asked about and then sent: [tokens, probe, vLLM's own number]."""
    rows = []
    whole = prompt(1, 2000)
    rows.append(["nothing cached", await asked.resident(whole), await here.server.cached_tokens.remote(whole)])
    for tokens in (1, BLOCK - 1, BLOCK, BLOCK + 1, 1000, 1984, 1985, 2000):
        part = whole[:tokens]
        rows.append([f"{tokens} tokens", await asked.resident(part), await here.server.cached_tokens.remote(part)])
    changed = [*whole[:777], whole[777] + 1, *whole[778:]]
    rows.append(["one token changed", await asked.resident(changed), await here.server.cached_tokens.remote(changed)])
    answer = await generate(here, whole, 100)
    longer = [*whole, *answer, *prompt(2, 300)]
    rows.append(["answer and new text", await asked.resident(longer), await here.server.cached_tokens.remote(longer)])
    await here.server.clear_kv_cache.remote()
    rows.append(["cache reset", await asked.resident(whole), await here.server.cached_tokens.remote(whole)])
    return {"rows": rows}


async def eviction(here: World, asked: Asked) -> Result:
    """A prompt's residency as others fill the cache, with many probes in between and with none."""
    rows, again = [], []
    mine = prompt(10, 3000)
    for probes, into in ((20, rows), (1, again)):
        for others in range(6):
            await here.server.clear_kv_cache.remote()
            await generate(here, mine, 1)
            for number in range(others):
                await generate(here, prompt(100 + number, 1200), 1)
                for _ in range(probes - 1):
                    await asked.resident(mine)
                    await asked.usage()
            into.append([others, await asked.resident(mine), await here.server.cached_tokens.remote(mine)])
    return {"rows": rows, "again": again}


async def usage(here: World, asked: Asked) -> Result:
    """Usage before, during and after a request, and again with its prefix cached."""
    found: Result = {"capacity": BLOCK * BLOCKS, "idle": await asked.usage()}
    ids = prompt(20, 3000)
    await here.server.slow_down.remote()
    running = asyncio.ensure_future(generate(here, ids, 40))
    during = []
    while not running.done():
        during.append(await asked.usage())
    await running
    await here.server.speed_up.remote()
    found |= {"during": during, "after": await asked.usage(), "resident_after": await asked.resident(ids)}
    return found


async def queue(here: World, asked: Asked) -> Result:
    """Probes while the engine is paused, with a request that waits: they are answered, and are no requests."""
    ids = prompt(30, 500)
    await here.server.abort_all_requests.remote()
    waiting = asyncio.ensure_future(generate(here, ids, 1))
    while sum(await here.server.counts.remote()) < 1:
        await asyncio.sleep(0.01)
    before = await here.server.counts.remote()
    answers = [[await asked.usage(), await asked.resident(ids)] for _ in range(20)]
    tracked = await here.server.running.remote()
    after, done = await here.server.counts.remote(), waiting.done()
    await here.server.resume_generation.remote()
    await waiting
    return {
        "before": before,
        "after": after,
        "answers": answers,
        "done": done,
        "tracked": tracked,
        "resumed": await asked.resident(ids),
    }


async def busy(here: World, asked: Asked) -> Result:
    """Time-outs while the engine core is in a long step, and answers behind it."""
    found: Result = {}
    kept = here.server.keep_busy.remote(2.0)
    await asyncio.sleep(0.3)
    for name, question in (("usage", asked.usage(0.2)), ("resident", asked.resident(prompt(40, 64), 0.2))):
        began = time.monotonic()
        try:
            found[name] = ["answered", await question]
        except TimeoutError as error:
            found[name] = [type(error).__name__, str(error), time.monotonic() - began]
    await kept
    found["behind"] = [await asked.usage(), await asked.resident(prompt(40, 64))]
    return found


async def routing(here: World, asked: Asked) -> Result:
    """Sessions' servers by the load balancer, beside a server that can't be asked."""
    import ray
    from omegaconf import OmegaConf
    from verl.workers.rollout.llm_server import LLMServerClient

    @ray.remote(num_cpus=0)
    class Silent:
        def ready(self) -> bool:
            return True

    silent = Silent.remote()
    await silent.ready.remote()
    balancer = engine_world.start_balancer({"vllm": here.server, "silent": silent})
    client = LLMServerClient(OmegaConf.create({}), balancer)
    held = {
        f"session-{number}": await client.hold_server(f"session-{number}", timeout_s=TIMEOUT) for number in range(8)
    }
    status = await balancer.get_status.remote()
    for server_id, _ in held.values():
        client.leave_server(server_id)
    again = [(await client.hold_server(session, timeout_s=TIMEOUT))[0] for session in held]
    for server_id in again:
        client.leave_server(server_id)
    silenced = next(server for server_id, server in held.values() if server_id == "silent")
    ids = prompt(50, 100)
    return {
        "held": status["servers"],
        "first": [server_id for server_id, _ in held.values()],
        "again": again,
        "left": (await balancer.get_status.remote())["servers"],
        "silent": [
            await client.kv_cache_usage(silenced, timeout_s=TIMEOUT),
            await client.resident_prefix_tokens(silenced, ids, timeout_s=TIMEOUT),
        ],
    }


SCENARIOS: dict[str, Callable[[World, Asked], Awaitable[Result]]] = {
    each.__name__: each for each in (residency, eviction, usage, queue, busy, routing)
}


async def main(folder: Path) -> None:
    result: Result = {}
    async with engine_world.start(engine_world.write_model(folder / "model")) as here:
        asked = Asked(here, (await here.plain.hold_server("session", timeout_s=TIMEOUT))[1])
        for name, scenario in SCENARIOS.items():
            await here.server.clear_kv_cache.remote()
            result[name] = await scenario(here, asked)
            print(name, result[name], flush=True)
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    asyncio.run(main(Path(sys.argv[1]).absolute()))
