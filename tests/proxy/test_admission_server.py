"""Admission through the real server: who waits hears of it, and every way out of the queue gives the place back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
import serving
from serving import Reply, asynchronous, pass_time, serve, until


def body(served: Any, **more: Any) -> dict[str, Any]:
    """A prompt of about 340 tokens that is the session's own: the cache below has room for one of them."""
    return {"messages": [{"role": "user", "content": served.session.id + "hi " * 100}], "max_tokens": 20} | more


class Client:
    """verl's client, as far as admission asks it."""

    def __init__(self) -> None:
        self.held = 0

    async def hold_server(self, request_id: str, *, timeout_s: float) -> tuple[str, str]:
        self.held += 1
        return "s", "handle"

    def leave_server(self, server_id: str) -> None:
        self.held -= 1

    async def kv_cache_usage(self, server: str, *, timeout_s: float) -> tuple[float, int]:
        return 0.0, 500

    async def resident_prefix_tokens(self, server: str, prompt_ids: list[int], *, timeout_s: float) -> int:
        return 0


class Engine(serving.ScriptedEngine):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.client = Client()


@asynccontextmanager
async def two_sessions(monkeypatch: pytest.MonkeyPatch, script: Any = "ok", **kwargs: Any) -> AsyncIterator[Any]:
    """A server with admission, a session of it, and another one."""
    monkeypatch.setattr(serving, "ScriptedEngine", Engine)
    monkeypatch.setenv("HARBOR_SESSION_LEVEL_SCHEDULER", "1")
    async with serve(script, **kwargs) as served, aiohttp.ClientSession() as http:
        yield served, serving.Served(served.proxy, served.proxy.open_session(), served.engine), http
        # A turn is done a moment before its task has let go of the server.
        await until(lambda: not served.proxy.service.in_flight and served.engine.client.held == 0)
        assert not served.proxy.service.admission._waiters


async def ask(http: aiohttp.ClientSession, served: Any, **more: Any) -> tuple[int, str]:
    async with http.post(served.chat_url, json=body(served, **more), headers=served.bearer) as response:
        return response.status, await response.text()


async def metric(http: aiohttp.ClientSession, served: Any, name: str) -> float:
    async with http.get(f"{served.proxy.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"chat_proxy_admission{name} "))


async def waiting(http: aiohttp.ClientSession, served: Any, number: int = 1) -> None:
    while await metric(http, served, "_waiting") != number:
        await asyncio.sleep(0.01)


@asynchronous
async def test_it_is_off_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "ScriptedEngine", Engine)
    async with serve() as served, aiohttp.ClientSession() as http:
        assert (await ask(http, served))[0] == 200
        async with http.get(f"{served.proxy.url}/metrics") as response:
            assert "admission" not in await response.text()


@pytest.mark.parametrize("name, value", [("LEVEL_SCHEDULER", "on"), ("SCHEDULER_HIGH_WATERMARK", "1.5")])
@asynchronous
async def test_a_setting_that_makes_no_sense_keeps_the_server_from_starting(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv("HARBOR_SESSION_LEVEL_SCHEDULER", "1")
    monkeypatch.setenv(f"HARBOR_SESSION_{name}", value)
    with pytest.raises(ValueError, match=f"HARBOR_SESSION_{name} is "):
        async with serve():
            pass


@asynchronous
async def test_an_engine_that_cannot_be_asked_serves_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARBOR_SESSION_LEVEL_SCHEDULER", "1")
    async with serve() as served, aiohttp.ClientSession() as http:
        other = serving.Served(served.proxy, served.proxy.open_session(), served.engine)
        assert [(await ask(http, each))[0] for each in (served, other)] == [200, 200]


@asynchronous
async def test_a_session_waits_until_another_one_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async with two_sessions(monkeypatch) as (first, second, http):
        assert (await ask(http, first))[0] == 200
        turn = first.turns[0]
        assert 300 < await metric(http, first, "_leased_tokens") == turn.end
        late = asyncio.ensure_future(ask(http, second))
        await waiting(http, first)
        assert (await ask(http, first))[0] == 200  # its lease lets it pass
        assert not late.done() and len(first.engine.calls) == 2
        await first.proxy.close_session(first.session.id)
        assert (await late)[0] == 200
        assert await metric(http, first, '_total{how="open"}') == 2
        assert await metric(http, first, '_total{how="reserved"}') == 1


@asynchronous
async def test_a_session_waits_until_the_grace_of_another_one_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    async with two_sessions(monkeypatch) as (first, second, http):
        assert (await ask(http, first))[0] == 200
        late = asyncio.ensure_future(ask(http, second))
        await waiting(http, first)
        pass_time(61)
        assert (await late)[0] == 200
        assert await metric(http, first, '_lease_ended_total{how="expired"}') == 1


@asynchronous
async def test_a_stream_that_waits_has_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    service = {"heartbeat_s": 0.05}
    async with two_sessions(monkeypatch, service=service) as (first, second, http):
        assert (await ask(http, first))[0] == 200
        async with http.post(second.chat_url, json=body(second, stream=True), headers=second.bearer) as response:
            while not (await response.content.readline()).startswith(b":"):
                continue
            assert len(first.engine.calls) == 1  # it waits
            await first.proxy.close_session(first.session.id)
            assert b"[DONE]" in await response.read()


@pytest.mark.parametrize("streams", [True, False])
@asynchronous
async def test_a_client_that_goes_leaves_the_queue(monkeypatch: pytest.MonkeyPatch, streams: bool) -> None:
    service = {"disconnect_grace_s": 0.05}
    async with two_sessions(monkeypatch, service=service, streams=streams) as (first, second, http):
        assert (await ask(http, first))[0] == 200
        late = asyncio.ensure_future(ask(http, second))
        await waiting(http, first)
        late.cancel()
        if streams:
            await waiting(http, first, 0)
            assert first.count("admission", how="left") == 1 and len(first.engine.calls) == 1
        else:  # an answer of an engine that does not stream is kept for a repeat
            await first.proxy.close_session(first.session.id)
            await until(lambda: len(first.engine.calls) == 2)


@asynchronous
async def test_a_repeat_takes_the_place_of_the_call_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    async with two_sessions(monkeypatch, service={"disconnect_grace_s": 60}) as (first, second, http):
        assert (await ask(http, first))[0] == 200
        gone = asyncio.ensure_future(ask(http, second))
        await waiting(http, first)
        gone.cancel()
        await until(lambda: all(live.listeners == 0 for live in second.session.deliveries._live))
        repeat = asyncio.ensure_future(ask(http, second))
        await until(lambda: any(live.listeners for live in second.session.deliveries._live))
        assert await metric(http, first, "_waiting") == 1
        await first.proxy.close_session(first.session.id)
        assert (await repeat)[0] == 200 and len(first.engine.calls) == 2


@asynchronous
async def test_a_session_that_ends_while_it_waits_leaves_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    async with two_sessions(monkeypatch) as (first, second, http):
        assert (await ask(http, first))[0] == 200
        late = asyncio.ensure_future(ask(http, second))
        await waiting(http, first)
        await first.proxy.close_session(second.session.id)
        assert (await late)[0] == 410
        assert await metric(http, first, "_waiting") == 0 and len(first.engine.calls) == 1


@asynchronous
async def test_a_server_that_stops_ends_those_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    async with two_sessions(monkeypatch, drain_s=0.05) as (first, second, http):
        assert (await ask(http, first))[0] == 200
        late = asyncio.ensure_future(ask(http, second))
        await waiting(http, first)
        await first.proxy.stop()
        assert (await late)[0] == 410 and len(first.engine.calls) == 1


@asynchronous
async def test_a_call_that_fails_keeps_the_lease_of_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [Reply("x", error=RuntimeError("broken")), Reply("x", error=ConnectionError("gone")), "ok"]
    async with two_sessions(monkeypatch, failures) as (first, second, http):
        assert (await ask(http, first))[0] == 500
        assert (await ask(http, first))[0] >= 500
        late = asyncio.ensure_future(ask(http, second))
        await waiting(http, first)
        assert (await ask(http, first))[0] == 200
        assert await metric(http, first, '_total{how="reserved"}') == 2
        leases = first.proxy.service.admission._scheduler.leases
        assert leases and all(lease.calls == 0 for lease in leases)
        late.cancel()


@asynchronous
async def test_a_generation_that_is_resumed_is_one_stay_in_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async with two_sessions(monkeypatch, [Reply("half", aborted=True), "ok"]) as (first, second, http):
        answer = asyncio.ensure_future(ask(http, first))
        await until(lambda: len(first.engine.calls) == 1)
        late = asyncio.ensure_future(ask(http, second))
        await waiting(http, first)
        pass_time(2)  # before it is resumed
        assert (await answer)[0] == 200
        assert len(first.engine.calls) == 2 and not late.done()
        assert await metric(http, first, '_total{how="open"}') == 1
        late.cancel()
