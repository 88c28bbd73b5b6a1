"""verl's real rollout clients before a scripted server: the ids that reach the log are those that were sent."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import batches
import pytest
from verl.utils.consistency_dump.training_log import sample_fields
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

sys.modules.setdefault("aiohttp", ModuleType("aiohttp"))  # only reward servers talk to it

from verl.experimental.fully_async_policy.fully_async_rollouter import (  # noqa: E402
    FullyAsyncLLMServerClient,
)

PROMPT = [5, 6, 7]


class Server:
    """Answers with a script of (number of tokens, stop reason) and notes what it was asked."""

    def __init__(self, *script: tuple[int, str]):
        self.script = list(script)
        self.requests: list[tuple[str, int]] = []
        self.generate = SimpleNamespace(remote=self._generate)

    async def _generate(self, request_id: str, prompt_ids: list[int], **_: Any) -> TokenOutput:
        tokens, stop_reason = self.script[len(self.requests)]
        self.requests.append((request_id, len(prompt_ids)))
        return TokenOutput(
            token_ids=[9] * tokens,
            log_probs=[-1.0] * tokens,
            num_preempted=0,
            stop_reason=stop_reason,
            extra_fields={"global_steps": len(self.requests)},
        )


def client(client_class: type, server: Server) -> Any:
    async def acquire(request_id: str) -> tuple[str, Server]:
        return "server", server

    balancer = SimpleNamespace(
        acquire_server=SimpleNamespace(remote=acquire), release_server=SimpleNamespace(remote=lambda **_: None)
    )
    rollout = SimpleNamespace(name="vllm", response_length=8)
    config = SimpleNamespace(
        actor_rollout_ref=SimpleNamespace(rollout=rollout), async_training=SimpleNamespace(partial_rollout=True)
    )
    return client_class(config, balancer)


def logged(outputs: list[TokenOutput]) -> dict[str, Any]:
    """The log's fields for samples whose extra fields went the way of verl's agent loop."""
    keys = {key for output in outputs for key in output.extra_fields}
    columns = {key: [output.extra_fields.get(key) for output in outputs] for key in keys}
    padded = {key: [*column, *[None] * (4 - len(column))] for key, column in columns.items()}
    return sample_fields([batches.engine_batch(batches.make_batch("unused", **padded))])


async def no_sleep(_: float) -> None:
    return None


def test_plain_client() -> None:
    servers = [Server((2, "completed")), Server((3, "completed"))]
    outputs = [
        asyncio.run(client(LLMServerClient, server).generate("s", prompt_ids=PROMPT, sampling_params={}))
        for server in servers
    ]
    sent = [server.requests[0][0] for server in servers]
    fields = logged(outputs)
    assert fields["request_ids"] == [*sent, None, None]
    assert sent[0] != sent[1]
    assert "request_chains" not in fields
    assert fields["min_global_steps"] == fields["max_global_steps"] == [1, 1, None, None]


def test_partial_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorded id is the one whose prefill was the bare prompt; all ids are kept in order."""
    monkeypatch.setattr(asyncio, "sleep", no_sleep)
    servers = [
        Server((2, "completed")),
        Server((2, "aborted"), (1, "completed")),
        Server((0, "aborted"), (2, "aborted"), (1, "completed")),
    ]
    outputs = [
        asyncio.run(
            client(FullyAsyncLLMServerClient, server).generate(
                "s", prompt_ids=PROMPT, sampling_params={"max_tokens": 8}
            )
        )
        for server in servers
    ]
    fields = logged(outputs)
    chosen = [servers[0].requests[0], servers[1].requests[0], servers[2].requests[1]]
    assert fields["request_ids"] == [*(request_id for request_id, _ in chosen), None]
    assert all(prompt_len == len(PROMPT) for _, prompt_len in chosen)
    for chain, server in zip(fields["request_chains"], servers, strict=False):
        assert [(link["request_id"], link["prompt_len"]) for link in chain] == server.requests
        assert [link["num_tokens"] for link in chain] == [tokens for tokens, _ in server.script]
    assert fields["min_global_steps"] == [1, 1, 2, None], "a request without a token has no part in its sample"
    assert fields["max_global_steps"] == [1, 2, 3, None]
