"""What stands in for verl's LLM client: the scripted model, with a scenario's faults, and a record of the truth."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from policy import Decision, Model

CHUNK = 8
"""Tokens of one piece of a stream."""


@dataclass
class Sampled:
    """One call to the engine.

    Attributes:
        step: of the plan; 0 for titles and summaries.
        log_probs: multiples of 1/512, so that they are the same in single precision.
        state: "open", "whole", "failed" (the engine's error), "closed" (its client left and nobody came back).
    """

    session: str
    prompt_ids: list[int]
    conversation: str
    step: int
    ids: list[int]
    log_probs: list[float]
    params: dict[str, Any]
    state: Literal["open", "whole", "failed", "closed"] = "open"


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong once, at a step of the main conversation.

    Attributes:
        kind: "error": the engine raises in the middle of its answer, or before it; "cut": the connection breaks.
        early: before the first token.
    """

    kind: Literal["error", "cut"]
    step: int
    early: bool = False


class Client:
    """Speaks as verl's `LLMServerClient` does. (No dataclass: hydra would take it for a configuration.)

    Attributes:
        cut: breaks the agent's connections.
        problems: why the model could not answer.
        scored: number of sequences whose log-probabilities were asked for.
    """

    def __init__(self, model: Model, faults: Sequence[Fault] = ()) -> None:
        self.model = model
        self.faults = list(faults)
        self.cut: Callable[[], Awaitable[None]] | None = None
        self.calls: list[Sampled] = []
        self.problems: list[str] = []
        self.scored = 0

    async def _begin(self, session: str, prompt_ids: list[int], params: dict[str, Any]) -> tuple[Sampled, Fault | None]:
        try:
            decision: Decision = await asyncio.to_thread(self.model.decide, prompt_ids)
        except Exception as error:
            self.problems.append(f"the model: {error}")
            raise
        ids = decision.ids[: params["max_tokens"]]
        number = len(self.calls)
        log_probs = [-((number * 613 + at * 31 + token) % 4096 + 1) / 512 for at, token in enumerate(ids)]
        call = Sampled(session, list(prompt_ids), decision.conversation, decision.step, ids, log_probs, dict(params))
        self.calls.append(call)
        fault = next((f for f in self.faults if call.conversation == "main" and f.step == call.step), None)
        if fault is not None:
            self.faults.remove(fault)
        return call, fault

    async def generate_stream(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **media: Any
    ) -> AsyncIterator[Any]:
        from verl.workers.rollout.replica import TokenOutput

        call, fault = await self._begin(request_id, prompt_ids, sampling_params)
        middle = 0 if fault is not None and fault.early else len(call.ids) // 2
        try:
            for start in range(0, len(call.ids), CHUNK):
                if fault is not None and start >= middle:
                    await self._strike(fault, call)
                    fault = None
                end = start + CHUNK
                yield TokenOutput(token_ids=call.ids[start:end], log_probs=call.log_probs[start:end])
                await asyncio.sleep(0.002)
            call.state = "whole"
            yield TokenOutput(token_ids=[], log_probs=[], stop_reason="completed", extra_fields={"global_steps": 3})
        finally:
            if call.state == "open":
                call.state = "closed"

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **media: Any
    ) -> Any:
        """The proxy streams all that it samples, and asks here for the log-probabilities of rewritten history.

        Row i belongs to token i + 1, and the last row is padding, as in verl's vLLM server.
        """
        from verl.workers.rollout.replica import TokenOutput

        if "prompt_logprobs" not in sampling_params:
            raise NotImplementedError("the proxy is expected to stream")
        self.scored += 1
        rows = [[-(token % 512 + 1) / 512] for token in prompt_ids[1:]] + [[0.0]]
        named = [[token] for token in prompt_ids[1:]] + [[0]]
        extra = {"prompt_logprobs": rows, "prompt_ids": named, "global_steps": 4}
        return TokenOutput(token_ids=[0], log_probs=[0.0], stop_reason="completed", extra_fields=extra)

    async def _strike(self, fault: Fault, call: Sampled) -> None:
        if fault.kind == "error":
            call.state = "failed"
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        assert self.cut is not None
        await self.cut()
