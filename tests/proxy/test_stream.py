"""Streams: whole characters, signs of life, errors at any moment, and the same answer as without a stream."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import aiohttp
import pytest
from serving import Reply, Served, asynchronous, events, serve, until

USER = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
PROTOCOLS = ["openai", "anthropic"]


def request(served: Served, protocol: str, body: dict[str, Any], stream: bool = True) -> dict[str, Any]:
    """Arguments of an aiohttp post."""
    body = {"messages": USER, "stream": stream} | body
    if protocol == "openai":
        return {"url": served.chat_url, "headers": served.bearer, "json": body}
    body = {"max_tokens": 2000, "thinking": {"type": "adaptive"}} | body
    return {"url": served.messages_url, "headers": served.api_key, "json": body}


def told(protocol: str, text: str) -> str:
    """The text that a stream's client puts together."""
    if protocol == "openai":
        deltas = [data["choices"][0]["delta"] for _, data in events(text) if data != "[DONE]" and data.get("choices")]
        return "".join(delta.get("content", "") for delta in deltas)
    return "".join(data["delta"].get("text", "") for name, data in events(text) if name == "content_block_delta")


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("chunk", [1, 2, 7])
@asynchronous
async def test_no_character_is_cut_in_two(protocol: str, chunk: int) -> None:
    text = "a é 🦊 👨‍👩‍👧 漢字 𝒜 end"
    async with serve(Reply(text, chunk=chunk)) as served, aiohttp.ClientSession() as http:
        raw = b""
        async with http.post(**request(served, protocol, {})) as response:
            async for part in response.content.iter_any():
                raw += part
    for _, data in events(raw.decode()):
        assert "\ufffd" not in json.dumps(data, ensure_ascii=False)
    assert told(protocol, raw.decode()) == text


@pytest.mark.parametrize("protocol", PROTOCOLS)
@asynchronous
async def test_a_cut_in_mid_character_loses_nothing(protocol: str) -> None:
    async with serve(Reply("ok 🦊", chunk=1, ends=False)) as served, aiohttp.ClientSession() as http:
        async with http.post(**request(served, protocol, {"max_tokens": 5})) as response:
            streamed = told(protocol, await response.text())
        async with http.post(**request(served, protocol, {"max_tokens": 5}, stream=False)) as response:
            whole = await response.json()
    assert streamed == "ok \ufffd"  # as in a decode of all five tokens
    said = whole["choices"][0]["message"]["content"] if protocol == "openai" else whole["content"][0]["text"]
    assert said == streamed
    assert len(served.turns[0].sampled) == 5


@pytest.mark.parametrize("protocol", PROTOCOLS)
@asynchronous
async def test_the_prompts_last_bytes_never_leak_into_the_answer(protocol: str) -> None:
    async with serve([Reply("ok 🦊", ends=False, chunk=1), Reply("then")]) as served, aiohttp.ClientSession() as http:
        async with http.post(**request(served, protocol, {"max_tokens": 5})) as response:
            first = told(protocol, await response.text())
        history = [*USER, {"role": "assistant", "content": first}, {"role": "user", "content": "go on"}]
        async with http.post(**request(served, protocol, {"messages": history})) as response:
            assert told(protocol, await response.text()) == "then"


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("streams", [True, False])
@asynchronous
async def test_a_silent_engine_is_bridged_by_signs_of_life(protocol: str, streams: bool) -> None:
    gate = asyncio.Event()
    async with (
        serve(Reply("late", gate=gate), streams=streams, service={"heartbeat_s": 0.05}) as served,
        aiohttp.ClientSession() as http,
        http.post(**request(served, protocol, {})) as response,
    ):
        assert response.status == 200  # the headers are there long before the first token
        seen = b""
        sign = b": keep-alive" if protocol == "openai" else b"event: ping"
        while seen.count(sign) < 3:
            seen += await response.content.readany()
        gate.set()
        text = (seen + await response.read()).decode()
    assert told(protocol, text) == "late"
    if protocol == "anthropic":
        assert events(text)[0][0] == "message_start" and events(text)[1][0] == "ping"


@asynchronous
async def test_thoughts_that_are_not_shown_are_no_silence() -> None:
    """Reasoning pours out of the engine all the time, and the client, which did not ask for it, must see life."""
    text = "<think>\n" + "why " * 200 + "\n</think>\n\nyes"
    async with serve(Reply(text, chunk=4, pace=0.005), service={"heartbeat_s": 0.1}) as served:
        body = {"thinking": {"type": "disabled"}}
        async with aiohttp.ClientSession() as http, http.post(**request(served, "anthropic", body)) as response:
            seen = await response.text()
    names = [name for name, _ in events(seen)]
    assert (
        names[0] == "message_start"
        and names.count("ping") >= 3
        and names.index("ping") < names.index("content_block_start")
    )
    assert told("anthropic", seen) == "yes" and "why" not in seen


@pytest.mark.parametrize("protocol", PROTOCOLS)
@asynchronous
async def test_tokens_arrive_while_the_engine_still_samples(protocol: str) -> None:
    hold = asyncio.Event()
    async with (
        serve(Reply("first and the rest", hold_at=6, hold=hold)) as served,
        aiohttp.ClientSession() as http,
        http.post(**request(served, protocol, {})) as response,
    ):
        seen = b""
        while b"t" not in told(protocol, seen.decode()).encode():
            seen += await response.content.readany()
        assert served.engine.running == 1
        hold.set()
        text = (seen + await response.read()).decode()
    assert told(protocol, text) == "first and the rest"


@pytest.mark.parametrize("protocol", PROTOCOLS)
@asynchronous
async def test_an_error_before_the_first_byte_has_a_status_and_later_it_is_an_event(protocol: str) -> None:
    error = RuntimeError("secret detail")
    async with (
        serve([Reply("", error=error), Reply("some text", error=error)]) as served,
        aiohttp.ClientSession() as http,
    ):
        async with http.post(**request(served, protocol, {})) as response:
            early, early_text = response.status, await response.text()
        async with http.post(**request(served, protocol, {})) as response:
            late, late_text = response.status, await response.text()
    assert early == 500 and late == 200
    assert "secret" not in early_text + late_text and "Traceback" not in early_text + late_text
    name, data = events(late_text)[-1]
    assert told(protocol, late_text) != ""
    if protocol == "anthropic":
        assert (name, data["type"], data["error"]["type"]) == ("error", "error", "api_error")
        assert "message_stop" not in late_text
    else:
        assert data["error"]["type"] == "server_error" and "[DONE]" not in late_text
    assert [turn.state for turn in served.turns] == ["aborted", "aborted"]
    assert served.count("call", outcome="failed") == 2 and served.count("call", outcome="delivered") == 0


@asynchronous
async def test_the_clients_raise_on_an_error_in_a_stream() -> None:
    anthropic, openai = pytest.importorskip("anthropic"), pytest.importorskip("openai")
    async with serve(Reply("some text", error=RuntimeError("x"))) as served:
        async with anthropic.AsyncAnthropic(base_url=served.root, api_key=served.session.token) as client:
            with pytest.raises(anthropic.APIStatusError):
                async with client.messages.stream(model="m", max_tokens=99, messages=USER) as stream:
                    await stream.get_final_message()
        base = served.proxy.openai_url(served.session)
        async with openai.AsyncOpenAI(base_url=base, api_key=served.session.token) as other:
            with pytest.raises(openai.APIError):
                async for _ in await other.chat.completions.create(model="m", messages=USER, stream=True):
                    pass


@pytest.mark.parametrize("protocol", PROTOCOLS)
@asynchronous
async def test_random_answers_read_the_same_streamed_and_whole(protocol: str) -> None:
    rng = random.Random(7)
    parts = [
        "<think>",
        "</think>",
        "\n\n",
        "a",
        " é",
        "🦊",
        "<tool_call>",
        "</tool_call>",
        '{"name": "f", "arguments": {}}',
        "<",
        "{",
    ]
    texts = ["".join(rng.choices(parts, k=rng.randint(0, 12))) for _ in range(40)]

    def script(number: int, prompt_ids: list[int], params: dict[str, Any]) -> Reply:
        return Reply(texts[number // 2], chunk=1 + number % 5)

    tools: Any = TOOLS if protocol == "openai" else [{"name": "f", "input_schema": {"type": "object"}}]
    async with serve(script) as served, aiohttp.ClientSession() as http:
        for index in range(len(texts)):
            # A body of its own for every answer, and delivered twice: siblings.
            body = {"messages": [{"role": "user", "content": str(index)}], "tools": tools}
            async with http.post(**request(served, protocol, body, stream=False)) as response:
                whole = await response.json()
            async with http.post(**request(served, protocol, body)) as response:
                streamed = await response.text()
            assert response.status == 200
            if protocol == "openai":
                message = whole["choices"][0]["message"]
                deltas = [data["choices"][0]["delta"] for _, data in events(streamed) if data != "[DONE]"]
                assert told(protocol, streamed) == (message["content"] or "")
                reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
                assert reasoning == message.get("reasoning_content", "")
                calls = {call["index"] for delta in deltas for call in delta.get("tool_calls", [])}
                assert len(calls) == len(message.get("tool_calls", []))
            else:
                text = "".join(block.get("text", "") for block in whole["content"])
                assert told(protocol, streamed) == text
                starts = [
                    data["content_block"]["type"] for name, data in events(streamed) if name == "content_block_start"
                ]
                assert starts.count("tool_use") == sum(block["type"] == "tool_use" for block in whole["content"])
            assert "<|im_end|>" not in streamed
    assert len(served.turns) == 2 * len(texts)


@asynchronous
async def test_an_engine_that_does_not_stream_gives_the_same_stream() -> None:
    texts = []
    for streams in (True, False):
        async with (
            serve("hello 🦊", streams=streams) as served,
            aiohttp.ClientSession() as http,
            http.post(**request(served, "anthropic", {})) as response,
        ):
            texts.append(told("anthropic", await response.text()))
    assert texts == ["hello 🦊", "hello 🦊"]


@asynchronous
async def test_a_slow_reader_gets_everything() -> None:
    async with (
        serve(Reply("x" * 3000, chunk=50)) as served,
        aiohttp.ClientSession() as http,
        http.post(**request(served, "openai", {})) as response,
    ):
        await until(lambda: served.engine.running == 0)
        text = await response.text()
    assert told("openai", text) == "x" * 3000 and served.turns[0].delivered
