"""What real agents sent, sent again: Claude Code, OpenCode, Codex, OpenHands, Terminus and three SDKs.

The captures are requests to a stub, long texts cut, ids and keys redacted. The scripted engine answers each request
with what the next one of the same conversation echoes, so that the conversations go on; the ids of tool calls and the
signatures of thoughts, which are the server's to make, are replaced by those that it made.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import real_tokenizers
from serving import END, Reply, Served, asynchronous, byte_tokenizer, events, serve

FOLDER = Path(__file__).parent / "captures"
AGENTS = sorted(path.stem for path in FOLDER.glob("*.json"))
SERVED = [name for name in AGENTS if name != "cx_default"]  # Codex's is replayed by test_responses.py
DROPPED = {"host", "content-length", "connection", "accept-encoding", "authorization", "x-api-key"}


def load(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((FOLDER / f"{name}.json").read_text())
    return found


def unmarked(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: unmarked(item) for key, item in value.items() if key != "cache_control"}
    return [unmarked(item) for item in value] if isinstance(value, list) else value


def replaced(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: replaced(item, names) for key, item in value.items()}
    if isinstance(value, list):
        return [replaced(item, names) for item in value]
    return names.get(value, value) if isinstance(value, str) else value


def is_call(request: dict[str, Any]) -> bool:
    return str(request["path"]).partition("?")[0].endswith(("/messages", "/chat/completions"))


def successor(requests: list[dict[str, Any]], index: int) -> int | None:
    """The request that goes on where ``index`` was answered; the SDKs' probes have histories of their own making."""
    mine = requests[index]
    if "abc-123" not in mine["path"]:
        return None
    messages = unmarked(mine["body"]["messages"])
    for later in range(index + 1, len(requests)):
        other = requests[later]
        if not is_call(other) or other["headers"].get("x-claude-code-agent-id") != mine["headers"].get(
            "x-claude-code-agent-id"
        ):
            continue
        theirs = unmarked(other["body"]["messages"])
        if (
            len(theirs) > len(messages)
            and theirs[: len(messages)] == messages
            and theirs[len(messages)]["role"] == "assistant"
        ):
            return later
    return None


def echo(requests: list[dict[str, Any]], index: int) -> dict[str, Any] | None:
    later = successor(requests, index)
    if later is None:
        return None
    found: dict[str, Any] = requests[later]["body"]["messages"][len(requests[index]["body"]["messages"])]
    return found


def sampled_text(message: dict[str, Any] | None) -> str:
    """What a model of the Hermes family would have sampled for this message."""
    if message is None:
        return "done from stub"
    content = message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    thoughts = "".join(block["thinking"] for block in blocks if block["type"] == "thinking")
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    calls = [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]
    for call in message.get("tool_calls") or []:
        calls.append((call["function"]["name"], json.loads(call["function"]["arguments"])))
    parts = [f"<think>\n{thoughts}\n</think>\n\n"] if thoughts else []
    parts += [text] if text else []
    parts += [
        f"\n<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"
        for name, arguments in calls
    ]
    return "".join(parts).lstrip("\n")


@dataclass
class Replay:
    """A capture after it has been played."""

    requests: list[dict[str, Any]]
    statuses: list[int] = field(default_factory=list)
    bodies: list[Any] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)  # index of the request behind each call of the engine


def identities(message: dict[str, Any] | None, anthropic: bool) -> list[str]:
    if message is None:
        return []
    if anthropic:
        content = message["content"] if isinstance(message["content"], list) else []
        return [
            block.get("id") or block.get("signature") for block in content if block["type"] in ("tool_use", "thinking")
        ]
    return [call["id"] for call in message.get("tool_calls") or []]


def made(body: Any) -> list[str]:
    """Ids and signatures of an answer, in its order."""
    if isinstance(body, dict):
        if "choices" in body:
            return [call["id"] for call in body["choices"][0]["message"].get("tool_calls") or []]
        content = body.get("content") or []
        return [
            block.get("id") or block.get("signature") for block in content if block["type"] in ("tool_use", "thinking")
        ]
    names = []
    for name, data in body:
        if name == "content_block_start" and data["content_block"]["type"] == "tool_use":
            names.append(data["content_block"]["id"])
        elif name == "content_block_delta" and data["delta"]["type"] == "signature_delta":
            names.append(data["delta"]["signature"])
        elif not name and data != "[DONE]" and data["choices"]:
            names += [call["id"] for call in data["choices"][0]["delta"].get("tool_calls", []) if "id" in call]
    return names


async def play(served: Served, requests: list[dict[str, Any]], replay: Replay) -> None:
    names: dict[str, str] = {}
    async with aiohttp.ClientSession() as http:
        for index, request in enumerate(requests):
            path = request["path"].split("/", 3)
            url = f"{served.root}/{path[3]}" if len(path) > 3 else served.root
            headers = {key: value for key, value in request["headers"].items() if key.lower() not in DROPPED}
            original = {key.lower() for key in request["headers"]}
            headers |= served.api_key if "x-api-key" in original else served.bearer
            body = None if request["body"] is None else replaced(request["body"], names)
            if is_call(request):
                replay.calls.append(index)
            async with http.request(request["method"], url, json=body, headers=headers) as response:
                text = await response.text()
                replay.statuses.append(response.status)
                stream = response.content_type == "text/event-stream"
                replay.bodies.append(events(text) if stream else json.loads(text) if text else None)
            if is_call(request):
                old = identities(echo(requests, index), path[-1].startswith("v1/messages"))
                names |= dict(zip(old, made(replay.bodies[-1]), strict=False))


def tokenizer_of(name: str) -> Any:
    if name == "bytes":
        return byte_tokenizer()
    try:
        return real_tokenizers.load(name)[0]
    except real_tokenizers.Unavailable as reason:
        pytest.skip(str(reason))


# The model of each family writes its calls as Hermes does; Qwen2.5 does not think.
PAIRS = [(agent, family) for agent in SERVED for family in ("bytes", "qwen3", "qwen2_5")]
PAIRS.remove(("cc_thinking", "qwen2_5"))


@pytest.mark.parametrize(("agent", "family"), PAIRS)
@asynchronous
async def test_every_request_is_served_and_every_conversation_goes_on_exactly(agent: str, family: str) -> None:
    requests = load(agent)
    tokenizer = tokenizer_of(family)
    replay = Replay(requests)
    texts = [sampled_text(echo(requests, index)) for index, request in enumerate(requests) if is_call(request)]

    def script(number: int, prompt_ids: list[int], params: dict[str, Any]) -> Reply:
        return Reply(texts[number], chunk=4)

    async with serve(script, tokenizer=tokenizer, context_limit=400_000) as served:
        await play(served, requests, replay)
        assert replay.statuses == [200] * len(requests), replay.bodies
        turns = served.turns
        trajectory = await served.proxy.close_session(served.session.id)

    assert len(served.engine.calls) == len(replay.calls) == len(turns)
    assert all(turn.state == "finished" and turn.delivered for turn in turns)
    by_request = dict(zip(replay.calls, turns, strict=True))
    prompts = dict(zip(replay.calls, (ids for ids, _ in served.engine.calls), strict=True))
    goes_on = 0
    for index, turn in by_request.items():
        # Only what the client echoes of an answer that it got is an answer's successor.
        later = successor(requests, index)
        if later is None:
            continue
        goes_on += 1
        assert by_request[later].parent is turn
        whole = [*prompts[index], *turn.sampled.tolist()]
        assert prompts[later][: len(whole)] == whole
        assert turn.answer is not None and turn.answer.text == texts[replay.calls.index(index)]
    expected = {"cc_default": 1, "cc_parallel": 1, "cc_subagent": 2, "cc_thinking": 1, "cc_overflow": 1}
    assert goes_on >= expected.get(agent, 0)

    from verl.experimental.agent_loop.chat_proxy.export import export_all

    exported = export_all(trajectory)
    assert sum(sum(part.traj_response_mask) for part in exported) == sum(len(turn.sampled) for turn in turns)
    for ids, _ in served.engine.calls:
        text = tokenizer.decode(ids)
        assert "x-anthropic-billing-header" not in text
    assert sum(1 for turn in turns if turn.proved is False) == 0


@asynchronous
async def test_the_title_call_that_comes_first_is_not_the_main_conversation() -> None:
    for agent in ("cc_default", "oc_default"):
        requests = load(agent)
        texts = [sampled_text(echo(requests, index)) for index, request in enumerate(requests) if is_call(request)]
        async with serve(list(texts), context_limit=400_000) as served:
            await play(served, requests, Replay(requests))
            trajectory = await served.proxy.close_session(served.session.id)
        main = trajectory.main_branch()
        assert main is not None
        assert [turn.number for turn in main.turns] == [1, 2], agent
        labels = sorted(branch.label for branch in trajectory.branches())
        assert labels == ["main", "side"]


@asynchronous
async def test_a_sub_agent_is_a_branch_of_its_own() -> None:
    requests = load("cc_subagent")
    texts = [sampled_text(echo(requests, index)) for index, request in enumerate(requests) if is_call(request)]
    async with serve(list(texts), context_limit=400_000) as served:
        await play(served, requests, Replay(requests))
        trajectory = await served.proxy.close_session(served.session.id)
    main = trajectory.main_branch()
    assert main is not None and [turn.number for turn in main.turns] == [0, 3]
    assert {branch.label: [turn.number for turn in branch.turns] for branch in trajectory.branches()} == {
        "main": [0, 3],
        "subagent": [1, 2],
    }


@pytest.mark.parametrize("agent", [name for name in SERVED if name.startswith("cc_")])
@asynchronous
async def test_a_prompt_beyond_the_context_is_told_to_claude_code_in_its_own_words(agent: str) -> None:
    requests = [request for request in load(agent) if is_call(request)]
    replay = Replay(requests)
    async with serve(context_limit=100) as served:
        await play(served, requests, replay)
    assert set(replay.statuses) == {400} and not served.engine.calls
    for body in replay.bodies:
        assert body["error"]["message"].startswith("prompt is too long: ")
        assert body["error"]["message"].endswith(" tokens > 100 maximum")


@asynchronous
async def test_claude_codes_max_tokens_is_clamped_to_the_context() -> None:
    requests = [request for request in load("cc_default") if is_call(request)]
    async with serve(context_limit=150_000) as served:
        await play(served, requests, Replay(requests))
    assert [request["body"]["max_tokens"] for request in requests] == [64000] * 3
    for ids, params in served.engine.calls:
        assert params["max_tokens"] == min(64000, 150_000 - len(ids))
        assert len(ids) + params["max_tokens"] <= 150_000


@asynchronous
async def test_count_tokens_of_a_real_request_is_the_prompt_that_it_gets() -> None:
    request = next(request for request in load("cc_thinking") if is_call(request))
    counted = {key: request["body"][key] for key in ("model", "messages", "system", "tools", "thinking")}
    async with serve(context_limit=400_000) as served, aiohttp.ClientSession() as http:
        async with http.post(f"{served.messages_url}/count_tokens", json=counted, headers=served.api_key) as response:
            tokens = (await response.json())["input_tokens"]
        await play(served, [request], Replay([request]))
    assert tokens == len(served.engine.calls[0][0])


@asynchronous
async def test_terminus_gets_the_ids_that_its_own_rollout_is_made_of() -> None:
    requests = load("terminus_llm")
    replay = Replay(requests)
    async with serve("done from stub", context_limit=10_000) as served:
        await play(served, requests, replay)
    ids = served.engine.tokenizer.encode("done from stub" + END, add_special_tokens=False)
    first, second = replay.bodies
    assert first["prompt_token_ids"] == served.engine.calls[0][0] and first["choices"][0]["token_ids"] == ids
    assert second["prompt_token_ids"][: len(first["prompt_token_ids"]) + len(ids)] == first["prompt_token_ids"] + ids
    assert len(first["choices"][0]["logprobs"]["content"]) == len(ids)
