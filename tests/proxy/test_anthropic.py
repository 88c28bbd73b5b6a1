"""The Anthropic messages API, through the real anthropic and litellm clients and by hand."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from serving import END, Reply, Served, asynchronous, events, serve

USER = [{"role": "user", "content": "hi"}]
TOOLS = [
    {
        "name": "Bash",
        "description": "runs it",
        "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}},
    }
]
CALL = '<tool_call>\n{"name": "Bash", "arguments": {"command": "ls"}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "Bash", "arguments": {"command": "é🦊"}}\n</tool_call>'
THOUGHT = "<think>\nwhy\n</think>\n\n"
DELTAS = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}


@asynccontextmanager
async def client(served: Served, **options: Any) -> AsyncIterator[Any]:
    anthropic = pytest.importorskip("anthropic")
    async with anthropic.AsyncAnthropic(base_url=served.root, api_key=served.session.token, **options) as found:
        yield found


async def post(served: Served, body: Any, path: str = "", **headers: str) -> tuple[int, Any, dict[str, str]]:
    async with (
        aiohttp.ClientSession() as http,
        http.post(served.messages_url + path, json=body, headers=served.api_key | headers) as response,
    ):
        text = await response.text()
        is_json = response.content_type == "application/json"
        return response.status, json.loads(text) if is_json else events(text), dict(response.headers)


def checked(found: list[tuple[str, Any]]) -> list[dict[str, Any]]:
    """The content blocks of a stream, after every rule of the protocol's order has been asserted."""
    assert all(name == data["type"] for name, data in found)
    found = [(name, data) for name, data in found if name != "ping"]
    assert found[0][0] == "message_start" and [name for name, _ in found].count("message_start") == 1
    assert [name for name, _ in found[-2:]] == ["message_delta", "message_stop"]
    message = found[0][1]["message"]
    assert message["content"] == [] and message["stop_reason"] is None and message["usage"]["input_tokens"] >= 0
    blocks: list[dict[str, Any]] = []
    open_index: int | None = None
    for name, data in found[1:-2]:
        if name == "content_block_start":
            assert open_index is None and data["index"] == len(blocks)
            open_index = data["index"]
            blocks.append(dict(data["content_block"]) | {"deltas": []})
        elif name == "content_block_delta":
            assert data["index"] == open_index
            block, delta = blocks[-1], data["delta"]
            if delta["type"] == "signature_delta":
                assert block["type"] == "thinking"
                block["signature"] = delta["signature"]
            else:
                assert delta["type"] == DELTAS[block["type"]]
                block["deltas"].append(delta)
        else:
            assert name == "content_block_stop" and data["index"] == open_index
            open_index = None
    assert open_index is None
    final = found[-2][1]
    assert None not in final["usage"].values() and final["usage"]["output_tokens"] > 0
    assert final["delta"]["stop_reason"] in ("end_turn", "max_tokens", "tool_use", "stop_sequence")
    return blocks


@asynchronous
async def test_an_answer_is_a_message() -> None:
    async with serve("hello 🦊") as served, client(served) as anthropic:
        message = await anthropic.messages.create(model="m", max_tokens=100, messages=USER)
    assert [block.text for block in message.content] == ["hello 🦊"]
    assert message.stop_reason == "end_turn" and message.role == "assistant" and message.model == "m"
    assert message.usage.input_tokens == len(served.engine.calls[0][0])
    assert message.usage.output_tokens == len("hello 🦊".encode()) + 1
    assert message.id.startswith("msg_") and served.turns[0].delivered


@asynchronous
async def test_the_stream_keeps_the_protocols_order() -> None:
    body = {"model": "m", "max_tokens": 500, "messages": USER, "stream": True, "tools": TOOLS}
    text = THOUGHT + "I look.\n" + CALL + "\n" + SECOND
    async with serve(text) as served:
        _, found, headers = await post(served, body | {"thinking": {"type": "adaptive"}})
    blocks = checked(found)
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    thinking, said, *calls = blocks
    assert "".join(delta["thinking"] for delta in thinking["deltas"]).strip() == "why" and thinking["signature"]
    assert "".join(delta["text"] for delta in said["deltas"]).strip() == "I look."
    inputs = [json.loads("".join(delta["partial_json"] for delta in call["deltas"])) for call in calls]
    assert inputs == [{"command": "ls"}, {"command": "é🦊"}]
    assert all(call["id"].startswith("toolu_") and call["input"] == {} for call in calls)
    assert calls[0]["id"] != calls[1]["id"]
    assert found[-2][1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert found[0][1]["message"]["usage"]["input_tokens"] == len(served.engine.calls[0][0])
    assert headers["Content-Type"].startswith("text/event-stream")


@asynchronous
async def test_the_clients_own_accumulator_gets_the_whole_answer() -> None:
    text = THOUGHT + "I look.\n" + CALL
    options = {"model": "m", "max_tokens": 500, "tools": TOOLS, "thinking": {"type": "adaptive"}}
    async with serve(text) as served, client(served) as anthropic:
        whole = await anthropic.messages.create(messages=USER, **options)
        async with anthropic.messages.stream(messages=[*USER, *USER], **options) as stream:
            streamed = await stream.get_final_message()
    assert [block.type for block in whole.content] == [block.type for block in streamed.content]
    for one, other in zip(whole.content, streamed.content, strict=True):
        if one.type == "tool_use":
            assert (one.name, one.input) == (other.name, other.input) == ("Bash", {"command": "ls"})
        elif one.type == "text":
            assert one.text == other.text
        else:
            assert one.thinking == other.thinking and one.signature and other.signature
    assert whole.stop_reason == streamed.stop_reason == "tool_use"
    assert whole.usage.output_tokens == streamed.usage.output_tokens


@pytest.mark.parametrize("thinking", [None, {"type": "disabled"}])
@asynchronous
async def test_thinking_that_nobody_asked_for_is_not_shown(thinking: Any) -> None:
    body = {"max_tokens": 500, "messages": USER} | ({} if thinking is None else {"thinking": thinking})
    async with serve(THOUGHT + "yes") as served:
        _, whole, _ = await post(served, body)
        _, found, _ = await post(served, body | {"messages": [*USER, *USER], "stream": True})
    assert [block["type"] for block in whole["content"]] == ["text"]
    assert [block["type"] for block in checked(found)] == ["text"]
    assert served.turns[0].answer.message.reasoning.strip() == "why"  # it's on record all the same


@asynchronous
async def test_a_silent_model_still_makes_a_block() -> None:
    async with serve("") as served:
        _, whole, _ = await post(served, {"max_tokens": 5, "messages": USER})
        _, found, _ = await post(served, {"max_tokens": 5, "messages": [*USER, *USER], "stream": True})
    assert whole["content"] == [{"type": "text", "text": ""}]
    assert [block["type"] for block in checked(found)] == ["text"]


@asynchronous
async def test_stop_sequences_reach_the_engine_and_are_reported() -> None:
    async with serve(Reply("one STOP two", ends=False, finish_reason="stop")) as served:
        body = {"max_tokens": 100, "messages": USER, "stop_sequences": ["NEVER", "STOP"]}
        _, whole, _ = await post(served, body)
        _, found, _ = await post(served, body | {"messages": [*USER, *USER], "stream": True})
    assert served.engine.calls[0][1]["stop"] == ["NEVER", "STOP"]
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "STOP")
    assert whole["content"] == [{"type": "text", "text": "one "}]
    (block,) = checked(found)
    assert "".join(delta["text"] for delta in block["deltas"]) == "one "
    assert found[-2][1]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "STOP"}


@asynchronous
async def test_max_tokens_is_clamped_and_a_cut_is_told() -> None:
    async with serve(Reply("x" * 9000, ends=False), context_limit=100) as served:
        _, whole, _ = await post(served, {"max_tokens": 32000, "messages": USER})
        _, found, _ = await post(served, {"max_tokens": 9, "messages": [*USER, *USER], "stream": True})
    assert whole["stop_reason"] == "max_tokens"
    assert sum(whole["usage"][name] for name in ("input_tokens", "cache_read_input_tokens", "output_tokens")) == 100
    checked(found)
    assert found[-2][1]["delta"]["stop_reason"] == "max_tokens"
    assert found[-2][1]["usage"]["output_tokens"] == 9


@asynchronous
async def test_count_tokens_counts_what_would_be_rendered_and_touches_nothing() -> None:
    messages = [
        *USER,
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "a.txt"}]},
    ]
    body = {"model": "m", "messages": messages, "tools": TOOLS, "system": "S"}
    async with serve() as served, client(served) as anthropic:
        counted = await anthropic.messages.count_tokens(**body)
        assert served.turns == [] and served.engine.calls == []
        answer = await anthropic.messages.create(**body, max_tokens=5)
    assert counted.input_tokens == answer.usage.input_tokens == len(served.engine.calls[0][0]) > 50


@asynchronous
async def test_system_messages_inside_the_conversation_are_served() -> None:
    messages = [*USER, {"role": "system", "content": "agents: none"}]
    async with serve() as served:
        status, _, _ = await post(served, {"max_tokens": 9, "system": "S", "messages": messages})
    text = served.engine.tokenizer.decode(served.engine.calls[0][0])
    assert status == 200 and text.index("S") < text.index("hi") < text.index("agents: none")


def _billed(nonce: str, text: str = "You are an agent.") -> list[dict[str, Any]]:
    line = f"x-anthropic-billing-header: cc_version=2.1.{nonce}; cch={nonce};"
    return [{"type": "text", "text": line}, {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]


@asynchronous
async def test_the_billing_nonce_never_reaches_the_prompt() -> None:
    async with serve() as served:
        for nonce in ("1c0", "7bf"):
            await post(served, {"max_tokens": 9, "system": _billed(nonce), "messages": USER})
    (first, _), (second, _) = served.engine.calls
    assert first == second
    assert "billing" not in served.engine.tokenizer.decode(first)


def test_a_moving_cache_mark_leaves_the_message_as_it_is() -> None:
    from verl.experimental.agent_loop.chat_proxy.anthropic_messages import convert

    block = {"tool_use_id": "toolu_1", "type": "tool_result", "content": "r", "is_error": False}
    marked = block | {"cache_control": {"type": "ephemeral"}}
    assert convert({"role": "user", "content": [block]}) == convert({"role": "user", "content": [marked]})


def test_tool_results_keep_their_order_their_errors_and_their_images() -> None:
    from verl.experimental.agent_loop.chat_proxy.anthropic_messages import convert
    from verl.experimental.agent_loop.chat_proxy.messages import Image, Text

    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    content = [
        {"type": "tool_result", "tool_use_id": "toolu_2", "content": "second", "is_error": True},
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "done"}, image]},
        {"type": "tool_result", "tool_use_id": "toolu_3"},
        {"type": "text", "text": "go on"},
    ]
    second, first, empty, user = convert({"role": "user", "content": content})
    assert (second.role, second.tool_call_id, second.text, second.is_error) == ("tool", "call_2", "second", True)
    assert first.parts == (Text("done"), Image("data:image/png;base64,AAAA", "image/png")) and not first.is_error
    assert (empty.role, empty.text) == ("tool", "")
    assert (user.role, user.text) == ("user", "go on")


def test_call_ids_map_one_to_one_both_ways() -> None:
    from verl.experimental.agent_loop.chat_proxy.anthropic_messages import anthropic_call_id, canonical_call_id

    ids = ["toolu_1", "call_1", "c1", "toolu_", "call_", "", "call_toolu_1"]
    assert len({canonical_call_id(name) for name in ids}) == len(ids)
    assert all(anthropic_call_id(canonical_call_id(name)) == name for name in ids)


def test_an_echo_carries_its_thoughts_and_their_signature() -> None:
    from verl.experimental.agent_loop.chat_proxy.anthropic_messages import convert

    content = [
        {"type": "thinking", "thinking": "why", "signature": "turn-7"},
        {"type": "redacted_thinking", "data": "xyz"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"b": 1, "a": "é"}},
    ]
    (message,) = convert({"role": "assistant", "content": content})
    assert (message.reasoning, message.anchor, message.text) == ("why", "turn-7", "I look.")
    assert message.tool_calls[0].id == "call_1" and message.tool_calls[0].mapping() == {"b": 1, "a": "é"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"max_tokens": None}, "max_tokens: Field required"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": None}]}, "content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "content block"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]}, "tool_use_id"),
        ({"messages": [{"role": "user", "content": [{"type": "server_tool_use"}]}]}, "server_tool_use"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64"}}]}]}, "document"),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "y", "input": "z"}]}
                ]
            },
            "tool_use",
        ),
        ({"system": 7}, "system"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tools": [{"name": "x"}]}, "input_schema"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"thinking": {"type": "loud"}}, "thinking"),
        ({"temperature": 3}, "temperature"),
    ],
)
@asynchronous
async def test_what_can_not_be_served_is_refused_by_name(change: dict[str, Any], says: str) -> None:
    body = {key: value for key, value in ({"max_tokens": 9, "messages": USER} | change).items() if value is not None}
    async with serve() as served:
        status, answer, _ = await post(served, body)
    assert status == 400 and not served.engine.calls and served.turns == []
    assert answer["type"] == "error" and answer["error"]["type"] == "invalid_request_error"
    assert says in answer["error"]["message"] and answer["request_id"].startswith("req_")


@asynchronous
async def test_an_image_in_a_tool_result_is_refused_without_a_processor_and_not_dropped() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    messages = [
        *USER,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": [image]}]},
    ]
    async with serve() as served:
        status, answer, _ = await post(served, {"max_tokens": 9, "messages": messages})
    assert status == 400 and answer["error"]["type"] == "invalid_request_error" and not served.engine.calls


def test_a_document_of_text_is_text() -> None:
    from verl.experimental.agent_loop.chat_proxy.anthropic_messages import convert

    source = {"type": "text", "media_type": "text/plain", "data": "the text"}
    (message,) = convert(
        {"role": "user", "content": [{"type": "document", "source": source}, {"type": "text", "text": "?"}]}
    )
    assert message.text == "the text\n?"


@asynchronous
async def test_tool_choice_none_hides_the_tools() -> None:
    async with serve() as served:
        await post(served, {"max_tokens": 9, "messages": USER, "tools": TOOLS, "tool_choice": {"type": "none"}})
    assert "runs it" not in served.engine.tokenizer.decode(served.engine.calls[0][0])


def answer_schema(name: str) -> dict[str, Any]:
    return {"format": {"type": "json_schema", "schema": {"type": "object", "properties": {name: {"type": "string"}}}}}


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"tools": TOOLS, "tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "run"}}, "tool_choice"),
        ({"output_config": answer_schema("result")}, "output_config.format"),
        ({"output_format": {"type": "json_schema", "schema": {}}}, "output_config.format"),
    ],
)
@asynchronous
async def test_a_promise_that_sampling_cannot_keep_is_refused_or_said_to_be_ignored(
    fields: dict[str, Any], told: str
) -> None:
    body = {"max_tokens": 9, "messages": USER, **fields}
    async with serve() as served:
        status, error, headers = await post(served, body)
        assert (status, error["type"], error["error"]["type"]) == (400, "error", "invalid_request_error")
        assert f"'{told}' is not supported" in error["error"]["message"]
        assert headers["x-should-retry"] == "false"
        assert served.engine.calls == [] and served.turns == []
    async with serve(service={"constraints": "tell"}) as served:
        status, _, headers = await post(served, body)
    assert (status, headers["x-proxy-ignored"]) == (200, told)


@asynchronous
async def test_a_title_may_be_no_json() -> None:
    """Claude Code asks for one before its first turn, and a refusal is nothing that it expects."""
    async with serve() as served:
        status, _, headers = await post(
            served, {"max_tokens": 9, "messages": USER, "output_config": answer_schema("title")}
        )
    assert (status, headers["x-proxy-ignored"]) == (200, "output_config.format")


@asynchronous
async def test_a_beginning_of_the_answer_is_continued() -> None:
    async with serve(" the rest") as served:
        status, whole, _ = await post(
            served, {"max_tokens": 50, "messages": [*USER, {"role": "assistant", "content": "The answer:"}]}
        )
    assert status == 200 and whole["content"] == [{"type": "text", "text": " the rest"}]
    assert served.engine.tokenizer.decode(served.engine.calls[0][0]).endswith("<|im_start|>assistant\nThe answer:")


@asynchronous
async def test_a_conversation_goes_on_behind_the_sampled_tokens() -> None:
    async with serve([THOUGHT + CALL, "done"]) as served, client(served) as anthropic:
        options = {"model": "m", "max_tokens": 500, "tools": TOOLS, "thinking": {"type": "adaptive"}}
        messages: list[Any] = list(USER)
        first = await anthropic.messages.create(messages=messages, **options)
        call = next(block for block in first.content if block.type == "tool_use")
        messages.append({"role": "assistant", "content": [block.model_dump() for block in first.content]})
        messages.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "a"}]})
        second = await anthropic.messages.create(messages=messages, **options)
    (first_ids, _), (second_ids, _) = served.engine.calls
    sampled = served.engine.tokenizer.encode(THOUGHT + CALL + END, add_special_tokens=False)
    assert second_ids[: len(first_ids) + len(sampled)] == first_ids + sampled
    usage = second.usage
    assert usage.cache_read_input_tokens == len(first_ids) + len(sampled)
    assert usage.input_tokens + usage.cache_read_input_tokens == len(second_ids)  # cached tokens are not counted twice


@asynchronous
async def test_litellm_speaks_this_protocol_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")
    async with serve(["hello", "streamed"]) as served:
        options = {"model": "anthropic/m", "api_base": served.root, "api_key": served.session.token, "max_tokens": 50}
        text = await litellm.acompletion(messages=USER, **options)
        stream = await litellm.acompletion(messages=[*USER, *USER], stream=True, **options)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    assert text.choices[0].message.content == "hello" and text.choices[0].finish_reason == "stop"
    assert "".join(pieces) == "streamed"


def test_who_calls_is_read_from_headers_and_system_prompt() -> None:
    from multidict import CIMultiDict
    from verl.experimental.agent_loop.chat_proxy.lineage import read_lineage

    sub = read_lineage(CIMultiDict({"X-Claude-Code-Agent-Id": "a7"}), {"system": "S"})
    assert (sub.agent_id, sub.kind) == ("a7", "subagent")
    line = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cc_is_subagent=true;"}
    assert read_lineage(CIMultiDict(), {"system": [line]}).kind == "subagent"
    title = {"output_config": {"format": {"schema": {"properties": {"title": {}}}}}, "tools": []}
    assert read_lineage(CIMultiDict(), title).kind == "title"
    openai = {"messages": [{"role": "system", "content": "You are a title generator. You output ONLY a title."}]}
    assert read_lineage(CIMultiDict({"x-session-id": "s", "x-parent-session-id": "p"}), openai).kind == "title"
    assert read_lineage(CIMultiDict(), {"system": "You are an agent."}).kind is None
