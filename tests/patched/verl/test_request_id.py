"""The request id that goes to the rollout server is the one that the sample keeps, also through resumes."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncIterator
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


class Streaming(Server):
    """One that streams as well: every token is a piece, and the last piece says how it ended."""

    def __init__(self, script: list[SimpleNamespace]):
        super().__init__(script)
        self.generate_stream = SimpleNamespace(options=lambda num_returns: SimpleNamespace(remote=self._pieces))

    async def _pieces(self, **request: Any) -> AsyncIterator[Any]:
        whole = await self._generate(**request)
        for token in whole.token_ids:
            yield ready(new_output(token_ids=[token], log_probs=[0.0]))
        yield ready(new_output(**{**vars(whole), "token_ids": [], "log_probs": []}))


async def ready(output: SimpleNamespace) -> SimpleNamespace:
    return output


def generate(tree: Path, server: Server, fully_async: bool, **sampling_params: int) -> Any:
    """One call of `generate` of verl's own client, with a prompt of five tokens."""
    client, arguments = client_of(tree, server, fully_async), arguments_with(sampling_params)
    return asyncio.run(client.generate("session", **arguments))


def stream(tree: Path, server: Server, fully_async: bool, **sampling_params: int) -> list[Any]:
    """The pieces that `generate_stream` of verl's own client gives for the same."""

    async def pieces() -> list[Any]:
        client, arguments = client_of(tree, server, fully_async), arguments_with(sampling_params)
        return [piece async for piece in client.generate_stream("session", **arguments)]

    return asyncio.run(pieces())


def arguments_with(sampling_params: dict[str, int]) -> dict[str, Any]:
    return {"prompt_ids": [1, 2, 3, 4, 5], "sampling_params": {"max_tokens": 9, **sampling_params}}


def client_of(tree: Path, server: Server, fully_async: bool) -> Any:
    file = tree / "verl/workers/rollout/llm_server.py"
    modules = {
        "verl.utils.rollout_trace": {"rollout_trace_op": lambda function: function},
        "verl.workers.rollout.replica": {"TokenOutput": new_output, "RolloutReplica": object},
        "verl.utils": {"normalize_token_ids": list},
        "verl.utils.tokenizer": {"normalize_token_ids": list},
        "asyncio": {"sleep": no_sleep},
    }
    client_class = load(file, "LLMServerClient", modules)
    if fully_async:
        name = "FullyAsyncLLMServerClient"
        if f"class {name}" not in file.read_text(encoding="utf-8"):  # where it lives depends on the upstream
            file = tree / "verl/experimental/fully_async_policy/fully_async_rollouter.py"
        own = {"LLMServerClient": client_class, "LLMServerManager": object}
        client_class = load(file, name, {**modules, "verl.workers.rollout.llm_server": own}, own)
    balancer = SimpleNamespace(
        acquire_server=SimpleNamespace(remote=acquired(server)), release_server=SimpleNamespace(remote=lambda **_: None)
    )
    rollout = SimpleNamespace(name="vllm", response_length=9)
    config = SimpleNamespace(
        async_training=SimpleNamespace(partial_rollout=True), actor_rollout_ref=SimpleNamespace(rollout=rollout)
    )
    return client_class(config, balancer)


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
    assert without_bounds(result) == {"global_steps": 3, "request_id": server.requests[0][0]}


def without_bounds(output: Any) -> dict[str, Any]:
    """The extra fields, without the bounds of the steps, which some upstreams set here already."""
    bounds = {f"{bound}_global_steps": 3 for bound in ("min", "max")}
    return {name: value for name, value in output.extra_fields.items() if bounds.get(name) != value}


def test_each_call_has_an_id_of_its_own(verl_tree: Path) -> None:
    sent = [Server([output([7])]) for _ in range(2)]
    for server in sent:
        generate(verl_tree, server, fully_async=False)
    assert sent[0].requests[0][0] != sent[1].requests[0][0]


RESUMED = [
    ([output([7, 8, 9])], 0),
    ([output([7, 8], "aborted"), output([9])], 0),
    ([output([], "aborted"), output([7, 8], "aborted"), output([9])], 1),
    ([output([], "aborted"), output([], "abort"), output([])], 2),
]
RESUMED_IDS = ["never aborted", "aborted once", "aborted before the first token", "no token at all"]


@pytest.mark.parametrize(("script", "chosen"), RESUMED, ids=RESUMED_IDS)
def test_id_of_the_bare_prompt_survives_resumes(verl_tree: Path, script: list[SimpleNamespace], chosen: int) -> None:
    server = Server(copy.deepcopy(script))
    result = generate(verl_tree, server, fully_async=True)
    tokens = [token for each in script for token in each.token_ids]
    assert result.token_ids == tokens
    has_whole_chain(result, server, script, chosen)


@pytest.mark.parametrize("server_class", [Server, Streaming])
@pytest.mark.parametrize(("script", "chosen"), RESUMED, ids=RESUMED_IDS)
def test_id_of_the_bare_prompt_survives_the_resumes_of_a_stream(
    verl_tree: Path, script: list[SimpleNamespace], chosen: int, server_class: type[Server]
) -> None:
    server = server_class(copy.deepcopy(script))
    *before, last = stream(verl_tree, server, fully_async=True)
    tokens = [token for each in script for token in each.token_ids]
    assert [token for piece in (*before, last) for token in piece.token_ids] == tokens
    assert all(piece.stop_reason is None for piece in before)
    assert last.stop_reason == script[-1].stop_reason
    has_whole_chain(last, server, script, chosen)


def has_whole_chain(result: Any, server: Server, script: list[SimpleNamespace], chosen: int) -> None:
    request_id, prompt = server.requests[chosen]
    assert result.extra_fields["request_id"] == request_id
    assert prompt == [1, 2, 3, 4, 5]
    assert json.loads(result.extra_fields["request_chain"]) == [
        {"request_id": sent, "prompt_len": len(prompt), "num_tokens": len(each.token_ids)}
        for (sent, prompt), each in zip(server.requests, script, strict=True)
    ]
    for name in ("global_steps", "min_global_steps", "max_global_steps"):
        assert result.extra_fields[name] == 3


@pytest.mark.parametrize("server_class", [Server, Streaming])
def test_the_last_piece_has_the_id_that_is_sent(verl_tree: Path, server_class: type[Server]) -> None:
    server = server_class([output([7, 8]), output([9])])
    for number in range(2):
        *before, last = stream(verl_tree, server, fully_async=False)
        assert without_bounds(last) == {"global_steps": 3, "request_id": server.requests[number][0]}
        assert all(piece.extra_fields == {} for piece in before)
    assert server.requests[0][0] != server.requests[1][0]


def test_a_stream_without_an_end_is_an_error(verl_tree: Path) -> None:
    class Cut(Streaming):
        async def _pieces(self, **request: Any) -> AsyncIterator[Any]:
            yield ready(new_output(token_ids=[7], log_probs=[0.0]))

    with pytest.raises(RuntimeError, match="ended without its last piece"):
        stream(verl_tree, Cut([]), fully_async=True)


def test_id_is_kept_when_the_length_ends_it(verl_tree: Path) -> None:
    server = Server([output([7, 8], "aborted"), output([9])])
    result = generate(verl_tree, server, fully_async=True, max_tokens=2)
    assert result.stop_reason == "length"
    assert result.extra_fields["request_id"] == server.requests[0][0]
