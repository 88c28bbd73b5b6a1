"""An engine that samples what a test says, and remembers every token with its log-probability and its experts."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

LAYERS, TOP_K, EXPERTS = 2, 2, 64


@dataclass
class Sampled:
    """One generation as the engine made it: the test's truth.

    Attributes:
        routes: one row for every token of prompt and answer but the last.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    log_probs: list[float]
    routes: np.ndarray


def route_of(position: int, token_id: int) -> np.ndarray:
    """Experts of a token: a function of where it stands and what it is, as prefill and decode agree."""
    seed = (position * 1000003 + token_id * 7919) & 0xFFFF
    return np.asarray(
        [[(seed + 17 * layer + 5 * k) % EXPERTS for k in range(TOP_K)] for layer in range(LAYERS)], np.int64
    )


def log_prob_of(position: int, token_id: int) -> float:
    """A recomputed log-probability, told apart from sampled ones by its sign pattern."""
    return -(((position * 31 + token_id) % 997) + 1) / 64.0


@dataclass
class ScriptedEngine:
    """Answers with the ids that `reply` returns for a prompt.

    Attributes:
        moe: routed experts come with every answer.
        abort_after: number of tokens after which a call is aborted, taken from the front; None: not at all.
        scored: the sequences whose log-probabilities were asked for.
    """

    reply: Callable[[list[int], dict[str, Any]], list[int]]
    moe: bool = False
    seed: int = 0
    global_steps: int = 1
    abort_after: list[int | None] = field(default_factory=list)
    score_error: Exception | None = None
    sampled: list[Sampled] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    scored: list[list[int]] = field(default_factory=list)
    streams: bool = False

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], *, media: Any = None
    ) -> Any:
        """See the proxy's `Engine`."""
        from verl.experimental.agent_loop.chat_proxy.engine import Generation

        self.calls.append({"request_id": request_id, "prompt_ids": list(prompt_ids), **sampling_params, "media": media})
        ids = self.reply(prompt_ids, sampling_params)[: sampling_params["max_tokens"]]
        aborted = False
        if self.abort_after and (after := self.abort_after.pop(0)) is not None and after < len(ids):
            ids, aborted = ids[:after], True
        log_probs = [-self._random.random() * 4 for _ in ids]
        sequence = [*prompt_ids, *ids]
        rows = (
            np.stack([route_of(i, t) for i, t in enumerate(sequence[:-1])])
            if len(sequence) > 1
            else np.zeros((0, LAYERS, TOP_K), np.int64)
        )
        self.sampled.append(Sampled(list(prompt_ids), list(ids), log_probs, rows))
        return Generation(
            token_ids=list(ids),
            log_probs=list(log_probs),
            routed_experts=rows if self.moe else None,
            stop_reason="aborted" if aborted else "completed",
            min_global_steps=self.global_steps,
            max_global_steps=self.global_steps,
        )

    async def score(self, request_id: str, ids: list[int]) -> tuple[list[float | None], int | None]:
        """See the proxy's `Engine`."""
        self.scored.append(list(ids))
        if self.score_error is not None:
            raise self.score_error
        return [None, *(log_prob_of(i, t) for i, t in enumerate(ids) if i)], self.global_steps
