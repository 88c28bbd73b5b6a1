"""The request id that goes to the rollout server is the one that the sample keeps, also through resumes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from verl_parts import load


def output(tokens: list[int], stop_reason: str = "completed") -> SimpleNamespace:
    return SimpleNamespace(
        token_ids=tokens,
        log_probs=[0.0] * len(tokens),
        num_preempted=None,
        routed_experts=None,
        stop_reason=stop_reason,
        extra_fields={"global_steps": 3},
    )


class Server:
    """A rollout server that answers with a script and notes the request ids and prompts that it gets."""

    def __init__(self, script: list[SimpleNamespace]):
        self.script = script
        self.requests: list[tuple[str, list[int]]] = []
        self.generate = SimpleNamespace(remote=self._generate)

    async def _generate(self, request_id: str, prompt_ids: list[int], **_: Any) -> SimpleNamespace:
        self.requests.append((request_id, list(prompt_ids)))
        return self.script[len(self.requests) - 1]


def generate(tree: Path, server: Server, fully_async: bool, **sampling_params: int) -> Any:
    """One call of `generate` of verl's own client, with a prompt of five tokens."""
    client_class = load(
        tree / "verl/workers/rollout/llm_server.py",
        "LLMServerClient",
        {"verl.utils.rollout_trace": {"rollout_trace_op": lambda function: function}},
    )
    if fully_async:
        client_class = load(
            tree / "verl/experimental/fully_async_policy/fully_async_rollouter.py",
            "FullyAsyncLLMServerClient",
            {
                "verl.utils.rollout_trace": {"rollout_trace_op": lambda function: function},
                "verl.workers.rollout.llm_server": {"LLMServerClient": client_class, "LLMServerManager": object},
                "verl.workers.rollout.replica": {"TokenOutput": new_output, "RolloutReplica": object},
                "verl.utils": {"normalize_token_ids": list},
                "asyncio": {"sleep": no_sleep},
            },
        )
    balancer = SimpleNamespace(
        acquire_server=SimpleNamespace(remote=acquired(server)), release_server=SimpleNamespace(remote=lambda **_: None)
    )
    config = SimpleNamespace(async_training=SimpleNamespace(partial_rollout=True))
    client = client_class(config, balancer)
    return asyncio.run(
        client.generate("session", prompt_ids=[1, 2, 3, 4, 5], sampling_params={"max_tokens": 9, **sampling_params})
    )


def new_output(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"routed_experts": None, "stop_reason": None, "extra_fields": {}, **fields})


async def no_sleep(_: float) -> None:
    return None


def acquired(server: Server) -> Any:
    async def remote(request_id: str) -> tuple[str, Server]:
        return "server0", server

    return remote


def test_id_sent_is_id_kept(verl_tree: Path) -> None:
    server = Server([output([7, 8])])
    result = generate(verl_tree, server, fully_async=False)
    assert result.extra_fields == {"global_steps": 3, "request_id": server.requests[0][0]}


def test_each_call_has_an_id_of_its_own(verl_tree: Path) -> None:
    sent = [Server([output([7])]) for _ in range(2)]
    for server in sent:
        generate(verl_tree, server, fully_async=False)
    assert sent[0].requests[0][0] != sent[1].requests[0][0]


@pytest.mark.parametrize(
    ("script", "chosen"),
    [
        ([output([7, 8, 9])], 0),
        ([output([7, 8], "aborted"), output([9])], 0),
        ([output([], "aborted"), output([7, 8], "aborted"), output([9])], 1),
        ([output([], "aborted"), output([], "abort"), output([])], 2),
    ],
    ids=["never aborted", "aborted once", "aborted before the first token", "no token at all"],
)
def test_id_of_the_bare_prompt_survives_resumes(verl_tree: Path, script: list[SimpleNamespace], chosen: int) -> None:
    server = Server(script)
    result = generate(verl_tree, server, fully_async=True)
    tokens = [token for each in script for token in each.token_ids]
    assert result.token_ids == tokens
    request_id, prompt = server.requests[chosen]
    assert result.extra_fields["request_id"] == request_id
    assert prompt == [1, 2, 3, 4, 5]
    assert json.loads(result.extra_fields["request_chain"]) == [
        {"request_id": sent, "prompt_len": len(prompt), "num_tokens": len(each.token_ids)}
        for (sent, prompt), each in zip(server.requests, script, strict=True)
    ]
    assert result.extra_fields["min_global_steps"] == 3


def test_id_is_kept_when_the_length_ends_it(verl_tree: Path) -> None:
    server = Server([output([7, 8], "aborted"), output([9])])
    result = generate(verl_tree, server, fully_async=True, max_tokens=2)
    assert result.stop_reason == "length"
    assert result.extra_fields["request_id"] == server.requests[0][0]
