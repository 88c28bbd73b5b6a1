"""Which answer a repeat gets, and what becomes of an answer that nobody received."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from typing import Any

import aiohttp
import pytest
from serving import Reply, Served, asynchronous, events, serve, until

USER = [{"role": "user", "content": "hi"}]
ANSWERS = [f"answer {number}" for number in range(20)]


def arguments(
    served: Served, protocol: str, stream: bool = False, messages: Any = None, **headers: str
) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "m", "messages": messages or USER, "max_tokens": 200}
    if stream:
        body["stream"] = True
    openai = protocol == "openai"
    return {
        "url": served.chat_url if openai else served.messages_url,
        "headers": (served.bearer if openai else served.api_key) | headers,
        "json": body,
    }


async def said(response: aiohttp.ClientResponse) -> str:
    """The answer's text, however it comes."""
    text = await response.text()
    assert response.status == 200, text
    if response.content_type == "application/json":
        body = json.loads(text)
        return str(body["choices"][0]["message"]["content"] if "choices" in body else body["content"][0]["text"])
    pieces = []
    for _, data in events(text):
        if data != "[DONE]":
            choices = data.get("choices") or [{"delta": {"content": data.get("delta", {}).get("text")}}]
            pieces.append(choices[0]["delta"].get("content") or "")
    return "".join(pieces)


async def call(http: aiohttp.ClientSession, served: Served, protocol: str, **options: Any) -> str:
    async with http.post(**arguments(served, protocol, **options)) as response:
        return await said(response)


async def leave(served: Served, protocol: str, *, stream: bool, after_first: bool) -> None:
    """A client that goes away in the middle of an answer."""
    async with aiohttp.ClientSession() as http:
        request = asyncio.create_task(http.post(**arguments(served, protocol, stream=stream)).__aenter__())
        await until(lambda: served.engine.running > 0)
        if after_first:
            await (await request).content.readany()
        else:
            await asyncio.sleep(0.05)
            request.cancel()
    await asyncio.sleep(0)


@pytest.mark.parametrize("protocol", ["openai", "anthropic"])
@asynchronous
async def test_the_same_body_after_delivery_is_a_sibling(protocol: str) -> None:
    async with serve(ANSWERS) as served, aiohttp.ClientSession() as http:
        texts = [await call(http, served, protocol) for _ in range(3)]
    assert texts == ANSWERS[:3]
    assert len(served.turns) == 3 and all(turn.delivered for turn in served.turns)
    assert len({turn.digest for turn in served.turns}) == 1


@pytest.mark.parametrize("protocol", ["openai", "anthropic"])
@asynchronous
async def test_an_idempotency_key_replays_even_what_was_delivered(protocol: str) -> None:
    async with serve(ANSWERS) as served, aiohttp.ClientSession() as http:
        first = await call(http, served, protocol, **{"Idempotency-Key": "k1"})
        again = await call(http, served, protocol, stream=True, **{"Idempotency-Key": "k1"})
        other = await call(http, served, protocol, **{"Idempotency-Key": "k2"})
        async with http.post(
            **arguments(served, protocol, messages=[*USER, *USER], **{"Idempotency-Key": "k1"})
        ) as misuse:
            status, text = misuse.status, await misuse.text()
    assert (first, again, other) == ("answer 0", "answer 0", "answer 1")
    assert status == 400 and "Idempotency-Key" in text
    assert len(served.turns) == 2 and served.count("replay", how="finished") == 1


@pytest.mark.parametrize("count", ["1", "2"])
@asynchronous
async def test_a_retry_count_above_zero_replays(count: str) -> None:
    async with serve(ANSWERS) as served, aiohttp.ClientSession() as http:
        first = await call(http, served, "openai", **{"x-stainless-retry-count": "0"})
        again = await call(http, served, "openai", **{"x-stainless-retry-count": count})
        fresh = await call(http, served, "openai", **{"x-stainless-retry-count": "0"})
    assert (first, again, fresh) == ("answer 0", "answer 0", "answer 1")
    assert len(served.turns) == 2


@pytest.mark.parametrize("value", ["many", "-1", "", "1" * 50, "²"])
@asynchronous
async def test_a_retry_count_that_is_none_is_ignored(value: str) -> None:
    async with serve(ANSWERS) as served, aiohttp.ClientSession() as http:
        await call(http, served, "openai")
        assert await call(http, served, "openai", **{"x-stainless-retry-count": value}) == "answer 1"


@pytest.mark.parametrize("after_first", [True, False])
@asynchronous
async def test_a_stream_that_broke_is_taken_up_by_a_plain_request_of_the_same_body(after_first: bool) -> None:
    """Claude Code's fallback: the stream is silent, the same body comes again without ``stream``, retry count 0."""
    hold = asyncio.Event()
    script = [Reply("the one answer", hold_at=3 if after_first else 0, hold=hold), "a second sample"]
    async with serve(script) as served, aiohttp.ClientSession() as http:
        await leave(served, "anthropic", stream=True, after_first=after_first)
        repeat = asyncio.create_task(call(http, served, "anthropic"))
        await until(lambda: served.count("replay", how="joined") == 1)
        hold.set()
        assert await repeat == "the one answer"
    assert len(served.engine.calls) == 1
    (turn,) = served.turns
    assert turn.state == "finished" and turn.delivered


@pytest.mark.parametrize("protocol", ["openai", "anthropic"])
@pytest.mark.parametrize("stream", [True, False])
@asynchronous
async def test_a_client_that_leaves_frees_the_engine_and_its_answer_is_no_action(protocol: str, stream: bool) -> None:
    hold = asyncio.Event()
    script = [Reply("never read", hold_at=3, hold=hold), "a fresh answer"]
    async with serve(script, service={"disconnect_grace_s": 0.05}) as served, aiohttp.ClientSession() as http:
        await leave(served, protocol, stream=stream, after_first=stream)
        await until(lambda: served.engine.running == 0)
        assert served.engine.closed_early == 1
        await until(lambda: served.count("call", outcome="disconnected") == 1)
        assert await call(http, served, protocol) == "a fresh answer"
        trajectory = await served.proxy.close_session(served.session.id)
    assert [turn.state for turn in trajectory.turns] == ["aborted", "finished"]
    from verl.experimental.agent_loop.chat_proxy.export import export_all

    sampled = sum(sum(part.traj_response_mask) for part in export_all(trajectory))
    assert sampled == len("a fresh answer") + 1


@pytest.mark.parametrize("at", ["body", "plain", "stream", "late"])
@asynchronous
async def test_a_client_that_leaves_is_no_error_in_the_log(at: str, caplog: pytest.LogCaptureFixture) -> None:
    hold = asyncio.Event()
    service = {"disconnect_grace_s": 0.0, "whole_heartbeat_s": 0.05 if at == "late" else None, "heartbeat_s": 0.05}
    async with serve(Reply("some text", hold_at=3, hold=hold), service=service) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.proxy.port)
        body = json.dumps({"messages": USER, "stream": at == "stream"}).encode()
        head = f"POST {served.chat_url.partition(str(served.proxy.port))[2]} HTTP/1.1\r\nHost: x\r\n"
        head += (
            f"Authorization: {served.bearer['Authorization']}\r\nContent-Length: {len(body) + (at == 'body')}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        free = served.session.gate._free
        await until(lambda: free._value == 15 if at == "body" else served.engine.running == 1)
        if at in ("stream", "late"):
            assert await reader.readline()
        writer.transport.abort()
        await until(lambda: served.engine.running == 0 and free._value == 16)
        await asyncio.sleep(0.05)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


@asynchronous
async def test_an_engine_that_can_not_be_stopped_keeps_the_answer_for_a_repeat() -> None:
    hold = asyncio.Event()
    script = [Reply("kept", hold_at=0, hold=hold), "a second sample"]
    async with serve(script, streams=False, service={"disconnect_grace_s": 0.01}) as served:
        await leave(served, "openai", stream=False, after_first=False)
        await asyncio.sleep(0.05)
        assert served.engine.running == 1
        hold.set()
        await until(lambda: served.turns[0].state == "finished")
        assert not served.turns[0].delivered
        async with aiohttp.ClientSession() as http:
            assert await call(http, served, "openai", stream=True) == "kept"
            assert served.turns[0].delivered
            assert await call(http, served, "openai") == "a second sample"
    assert served.count("replay", how="finished") == 1 and served.count("error") == 0


@asynchronous
async def test_an_answer_that_nobody_received_is_on_record_but_not_trained() -> None:
    hold = asyncio.Event()
    async with serve([Reply("lost", hold_at=0, hold=hold), "other"], streams=False) as served:
        await leave(served, "openai", stream=False, after_first=False)
        hold.set()
        await until(lambda: served.turns[0].state == "finished")
        async with aiohttp.ClientSession() as http:
            await call(http, served, "openai", messages=[{"role": "user", "content": "something else"}])
        trajectory = await served.proxy.close_session(served.session.id)
    from verl.experimental.agent_loop.chat_proxy.export import export_all

    assert [(turn.state, turn.delivered) for turn in trajectory.turns] == [("finished", False), ("finished", True)]
    assert sum(sum(part.traj_response_mask) for part in export_all(trajectory)) == len("other") + 1


@asynchronous
async def test_equal_calls_of_clients_that_are_both_there_are_siblings() -> None:
    gate = asyncio.Event()
    script = [Reply(f"sample {number}", gate=gate) for number in range(4)]
    async with serve(script) as served, aiohttp.ClientSession() as http:
        calls = [asyncio.create_task(call(http, served, "openai")) for _ in range(4)]
        await until(lambda: served.engine.running == 4)
        gate.set()
        assert sorted(await asyncio.gather(*calls)) == [f"sample {number}" for number in range(4)]
    assert len(served.turns) == 4 and all(turn.delivered for turn in served.turns)


@asynchronous
async def test_a_declared_repeat_joins_a_call_that_is_still_running() -> None:
    gate = asyncio.Event()
    async with serve([Reply("once", gate=gate), "twice"]) as served, aiohttp.ClientSession() as http:
        first = asyncio.create_task(call(http, served, "openai", **{"Idempotency-Key": "k"}))
        await until(lambda: served.engine.running == 1)
        second = asyncio.create_task(call(http, served, "openai", stream=True, **{"Idempotency-Key": "k"}))
        third = asyncio.create_task(
            call(http, served, "openai", **{"Idempotency-Key": "k", "x-stainless-retry-count": "1"})
        )
        await until(lambda: served.count("replay", how="joined") == 2)
        gate.set()
        assert await asyncio.gather(first, second, third) == ["once"] * 3
    assert len(served.engine.calls) == 1 and len(served.turns) == 1


@asynchronous
async def test_one_of_two_listeners_may_leave() -> None:
    gate = asyncio.Event()
    async with (
        serve([Reply("kept", gate=gate), "x"], service={"disconnect_grace_s": 0.01}) as served,
        aiohttp.ClientSession() as http,
    ):
        stays = asyncio.create_task(call(http, served, "openai", **{"Idempotency-Key": "k"}))
        await until(lambda: served.engine.running == 1)
        leaves = asyncio.create_task(call(http, served, "openai", **{"Idempotency-Key": "k"}))
        await until(lambda: served.count("replay", how="joined") == 1)
        leaves.cancel()
        await until(lambda: served.count("call", outcome="disconnected") == 1)
        await asyncio.sleep(0.05)
        gate.set()
        assert await stays == "kept"
    assert served.engine.closed_early == 0


@asynchronous
async def test_a_call_that_failed_is_sampled_anew() -> None:
    async with serve([Reply("half", error=RuntimeError("x")), "whole"]) as served, aiohttp.ClientSession() as http:
        async with http.post(**arguments(served, "anthropic")) as response:
            assert response.status == 500
        assert await call(http, served, "anthropic") == "whole"  # retry count 0, as Claude Code sends it
    assert [turn.state for turn in served.turns] == ["aborted", "finished"]


@asynchronous
async def test_the_retry_of_a_call_that_failed_is_not_given_its_siblings_answer() -> None:
    """A best-of-n client: the second sample fails, the SDK repeats it with its retry count."""
    script = ["one", Reply("half", error=RuntimeError("x")), "two", "three"]
    async with serve(script) as served, aiohttp.ClientSession() as http:
        assert await call(http, served, "openai") == "one"
        async with http.post(**arguments(served, "openai")) as response:
            assert response.status == 500
        assert await call(http, served, "openai", **{"x-stainless-retry-count": "1"}) == "two"
        assert await call(http, served, "openai", **{"x-stainless-retry-count": "1"}) == "two"  # this one was answered


@asynchronous
async def test_an_answer_that_is_being_written_is_not_given_to_another_client() -> None:
    big = "x" * 60_000
    async with serve([Reply(big, chunk=5000), "other"], context_limit=200_000) as served:
        _reader, writer = await asyncio.open_connection("127.0.0.1", served.proxy.port, limit=1024)
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        request = arguments(served, "openai", stream=True)
        body = json.dumps(
            request["json"] | {"max_tokens": 100_000, "logprobs": True, "return_token_ids": True}
        ).encode()
        head = (
            f"POST /sess/{served.session.id}/v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        )
        writer.write(head.encode() + f"Authorization: Bearer {served.session.token}\r\n\r\n".encode() + body)
        await until(lambda: bool(served.turns) and served.turns[0].state == "finished")
        await asyncio.sleep(0.2)
        assert not served.turns[0].delivered  # more than the sockets hold
        async with aiohttp.ClientSession() as http:
            other = request["json"] | {"max_tokens": 100_000}
            async with http.post(served.chat_url, json=other, headers=served.bearer) as response:
                assert await said(response) == "other"
        writer.close()


@pytest.mark.parametrize("stream", [True, False])
@asynchronous
async def test_a_repeat_has_thoughts_text_and_calls(stream: bool) -> None:
    call = '<tool_call>\n{"name": "bash", "arguments": {"n": 1}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
    async with serve(f"<think>\nwhy\n</think>\n\nok\n{call}") as served, aiohttp.ClientSession() as http:
        found = []
        for streamed in (not stream, stream):
            asked = arguments(served, "openai", stream=streamed, **{"Idempotency-Key": "k"})
            asked["json"]["tools"] = tools
            async with http.post(**asked) as response:
                text = await response.text()
            if not streamed:
                message = json.loads(text)["choices"][0]["message"]
                calls = [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in message["tool_calls"]]
                found.append((message["reasoning_content"], message["content"], calls))
                continue
            deltas = [data["choices"][0]["delta"] for _, data in events(text) if data != "[DONE]"]
            parts = [part for delta in deltas for part in delta.get("tool_calls", [])]
            arguments_ = "".join(part["function"]["arguments"] for part in parts)
            found.append(
                (
                    "".join(delta.get("reasoning_content", "") for delta in deltas),
                    "".join(delta.get("content") or "" for delta in deltas),
                    [(parts[0]["id"], parts[0]["function"]["name"], arguments_)],
                )
            )
        assert len(served.engine.calls) == 1
    assert found[0] == found[1] and found[0][0].strip() == "why" and found[0][1].strip() == "ok"


@asynchronous
async def test_a_repeat_in_the_other_form_has_the_same_id() -> None:
    async with serve(ANSWERS) as served, aiohttp.ClientSession() as http:
        async with http.post(**arguments(served, "anthropic", **{"Idempotency-Key": "k"})) as response:
            first = (await response.json())["id"]
        async with http.post(**arguments(served, "anthropic", stream=True, **{"Idempotency-Key": "k"})) as response:
            text = await response.text()
    assert events(text)[0][1]["message"]["id"] == first


@asynchronous
async def test_equal_bodies_of_two_agents_are_two_calls() -> None:
    gate = asyncio.Event()
    script = [Reply("main", gate=gate), Reply("sub", gate=gate)]
    async with serve(script) as served, aiohttp.ClientSession() as http:
        one = asyncio.create_task(call(http, served, "anthropic"))
        await until(lambda: served.engine.running == 1)
        two = asyncio.create_task(
            call(http, served, "anthropic", **{"x-claude-code-agent-id": "a1", "x-stainless-retry-count": "1"})
        )
        await until(lambda: served.engine.running == 2)
        gate.set()
        assert await asyncio.gather(one, two) == ["main", "sub"]


@asynchronous
async def test_the_sdks_own_retry_gets_the_answer_that_was_lost() -> None:
    """A client whose read times out repeats with its retry count; the engine samples once."""
    openai = pytest.importorskip("openai")
    hold = asyncio.Event()
    async with serve(
        [Reply("patience", hold_at=0, hold=hold), "second"], service={"disconnect_grace_s": 5.0}
    ) as served:
        base = served.proxy.openai_url(served.session)
        async with openai.AsyncOpenAI(base_url=base, api_key=served.session.token, timeout=0.4) as client:
            answer = asyncio.create_task(client.chat.completions.create(model="m", messages=USER))
            await until(lambda: served.count("call", outcome="disconnected") > 0)
            hold.set()
            assert (await answer).choices[0].message.content == "patience"
    assert len(served.engine.calls) == 1 and served.count("replay") >= 1
