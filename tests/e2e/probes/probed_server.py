"""verl's vLLM server with a small KV cache, that also tells what the engine itself says of a prompt."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import uuid4

from recording_server import RecordingServer
from verl.workers.rollout.vllm_rollout import vllm_cache_probes

BLOCK = 32
BLOCKS = 200


def request_counts(engine_core: Any) -> tuple[int, int]:
    """Requests that run and that wait in the engine core's scheduler."""
    counts: tuple[int, int] = engine_core.scheduler.get_request_counts()
    return counts


def sleep_in_step(engine_core: Any, seconds: float) -> None:
    """Keeps the engine core as busy as a long step does."""
    import time

    time.sleep(seconds)


vllm_cache_probes.PROBES += (request_counts, sleep_in_step)


class ProbedServer(RecordingServer):
    """See the module."""

    def __init__(self, *, config: Any, **kwargs: Any) -> None:
        config.engine_kwargs.vllm.num_gpu_blocks_override = BLOCKS + 1  # one of them is never used
        super().__init__(config=config, **kwargs)

    async def cached_tokens(self, prompt_ids: list[int]) -> int:
        """Sends the prompt as a request; how many of its tokens vLLM says it had."""
        outputs: list[Any] = []
        await self.generate(prompt_ids, {"max_tokens": 1}, uuid4().hex, on_output=outputs.append)
        return int(outputs[-1].num_cached_tokens)

    async def counts(self) -> tuple[int, int]:
        return tuple(await self.cache_probes.ask(request_counts, timeout_s=30))

    async def keep_busy(self, seconds: float) -> None:
        await self.cache_probes.ask(sleep_in_step, seconds, timeout_s=60)

    async def slow_down(self) -> None:
        """From now on a step takes at least 50 ms."""
        core = self.engine.engine_core

        async def steps() -> None:
            while True:
                await core.call_utility_async("sleep_in_step", 0.05)

        self._slow = asyncio.ensure_future(steps())

    async def speed_up(self) -> None:
        self._slow.cancel()
