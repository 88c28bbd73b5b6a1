"""Answers that are not streamed and take long: white space goes ahead, so that nobody takes the connection for dead."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from serving import Reply, Served, asynchronous, serve, until

USER = [{"role": "user", "content": "hi"}]
SOON = {"whole_heartbeat_s": 0.05, "heartbeat_s": 0.05}


def call(served: Served, protocol: str) -> dict[str, Any]:
    """The arguments of a plain call."""
    if protocol == "openai":
        return {"url": served.chat_url, "json": {"messages": USER}, "headers": served.bearer}
    return {"url": served.messages_url, "json": {"messages": USER, "max_tokens": 9}, "headers": served.api_key}


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("protocol", ["openai", "anthropic"])
@asynchronous
async def test_white_space_goes_ahead_of_a_late_answer(protocol: str, streams: bool) -> None:
    gate = asyncio.Event()
    async with (
        serve(Reply("late", gate=gate), streams=streams, service=SOON) as served,
        aiohttp.ClientSession() as http,
        http.post(**call(served, protocol)) as response,
    ):
        assert (response.status, response.content_type) == (200, "application/json")
        assert response.headers["x-request-id"] == f"req_{served.turns[0].id}"
        seen = b""
        while len(seen) < 3:
            seen += await response.content.readany()
        assert seen.strip() == b"" and not served.turns[0].delivered
        gate.set()
        body = json.loads(seen + await response.read())
        await until(lambda: served.turns[0].delivered)
    text = body["choices"][0]["message"]["content"] if protocol == "openai" else body["content"][0]["text"]
    assert text == "late"


@asynchronous
async def test_the_clients_read_a_late_answer() -> None:
    openai, anthropic = pytest.importorskip("openai"), pytest.importorskip("anthropic")
    async with serve([Reply("late", hold_at=0, hold=asyncio.Event()), "x"], service=SOON) as served:
        reply = Reply("late", hold_at=0)
        served.engine.script = lambda number, ids, params: reply
        for number, client in enumerate(
            (
                openai.AsyncOpenAI(base_url=served.proxy.openai_url(served.session), api_key=served.session.token),
                anthropic.AsyncAnthropic(base_url=served.root, api_key=served.session.token),
            )
        ):
            reply.hold = asyncio.Event()
            create = client.chat.completions.create if number == 0 else client.messages.create
            task = asyncio.create_task(create(model="m", messages=USER, max_tokens=9))
            await until(lambda: len(served.engine.calls) == number + 1)  # noqa: B023
            await asyncio.sleep(0.2)
            reply.hold.set()
            answer = await task
            assert (answer.choices[0].message.content if number == 0 else answer.content[0].text) == "late"


@asynchronous
async def test_an_error_that_comes_too_late_for_a_status_breaks_the_answer_off() -> None:
    hold = asyncio.Event()
    broken = Reply("half", hold_at=1, hold=hold, error=RuntimeError("out of memory"))
    async with serve([broken, "whole"], service=SOON) as served, aiohttp.ClientSession() as http:
        with pytest.raises(aiohttp.ClientPayloadError):
            async with http.post(**call(served, "openai")) as response:
                assert await response.content.readany() == b" "
                hold.set()
                await response.read()
        assert [turn.state for turn in served.turns] == ["aborted"]
        assert served.count("error", status="broken_off") == 1
        async with http.post(**call(served, "openai")) as response:
            assert (await response.json())["choices"][0]["message"]["content"] == "whole"


@asynchronous
async def test_an_error_in_time_has_its_status() -> None:
    async with (
        serve(Reply("half", error=RuntimeError("out of memory"))) as served,
        aiohttp.ClientSession() as http,
        http.post(**call(served, "anthropic")) as response,
    ):
        assert response.status == 500 and (await response.json())["error"]["type"] == "api_error"


@asynchronous
async def test_a_client_that_leaves_a_late_answer_frees_its_slot() -> None:
    async with serve(Reply("never", gate=asyncio.Event()), service={**SOON, "disconnect_grace_s": 0.0}) as served:
        async with aiohttp.ClientSession() as http, http.post(**call(served, "openai")) as response:
            assert await response.content.readany()
            response.close()
        await until(lambda: served.engine.running == 0)
        assert [turn.state for turn in served.turns] == ["aborted"]
