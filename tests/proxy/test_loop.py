"""The event loop is free while prompts are rendered, encoded and proved."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import aiohttp
import pytest
from serving import Reply, Served, asynchronous, events, pass_time, serve, until

USER = [{"role": "user", "content": "hi " * 200}]


async def healthy(http: aiohttp.ClientSession, served: Served) -> bool:
    async with http.get(f"{served.proxy.url}/health") as response:
        return response.status == 200


@pytest.mark.parametrize("work", ["apply", "encode_now", "prove"])
@asynchronous
async def test_health_answers_while_threads_work(work: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that stood on the loop in place of a thread would wait here for ever."""
    from verl.experimental.agent_loop.chat_proxy import proof
    from verl.experimental.agent_loop.chat_proxy.rendering import Renderer
    from verl.experimental.agent_loop.chat_proxy.tokens import Tokens

    owner: Any = {"apply": Renderer, "encode_now": Tokens, "prove": proof}[work]
    real, go, threads = getattr(owner, work), threading.Event(), []

    def slow(*args: Any, **kwargs: Any) -> Any:
        threads.append(threading.current_thread())
        assert threads[-1] is not threading.main_thread() and go.wait(60)
        return real(*args, **kwargs)

    async with serve("ok") as served, aiohttp.ClientSession() as http:
        monkeypatch.setattr(owner, work, slow)
        try:
            call = asyncio.create_task(http.post(served.chat_url, json={"messages": USER}, headers=served.bearer))
            if work == "prove":
                assert (await call).status == 200
            await until(lambda: bool(threads))
            assert await healthy(http, served)
            other = served.proxy.open_session()
            assert other.id and await healthy(http, served)
        finally:
            go.set()
        assert (await call).status == 200
        await served.session.trajectory.settle()
        assert [turn.proved for turn in served.turns] == [True]


@asynchronous
async def test_proofs_leave_the_loop_four_fifths_of_the_time_and_are_not_waited_for_at_the_end() -> None:
    async with serve("ok") as served, aiohttp.ClientSession() as http:
        service, first = served.proxy.service, served.session
        others = [served.proxy.open_session() for _ in range(3)]
        service.store.proofs.took(1000.0)  # the next one is due in more than an hour
        for session in (first, *others):
            url, headers = served.proxy.openai_url(session), {"Authorization": f"Bearer {session.token}"}
            async with http.post(f"{url}/chat/completions", json={"messages": USER}, headers=headers) as response:
                assert response.status == 200
        await asyncio.sleep(0.1)
        assert [session.trajectory.turns[0].proved for session in (first, *others)] == [None] * 4
        ended = await served.proxy.close_session(others[0].id)
        assert ended.turns[0].proved
        assert first.trajectory.turns[0].proved is None


@asynchronous
async def test_proofs_wait_while_the_loop_is_late_but_not_for_ever() -> None:
    from verl.experimental.agent_loop.chat_proxy.trajectory import _Pace

    pace, entered = _Pace(), asyncio.Event()

    async def prove() -> None:
        async with pace.turn():
            entered.set()

    async def hog() -> None:
        while not entered.is_set():
            time.sleep(0.05)
            await asyncio.sleep(0)

    pace.PATIENCE_S = 1.0
    began = time.perf_counter()
    waiting, busy = asyncio.create_task(prove()), asyncio.create_task(hog())
    await waiting
    assert time.perf_counter() - began >= 1.0  # a loop that is late all the time: the patience decides
    await busy


def test_no_generation_takes_too_long() -> None:
    """A turn has no time-out of its own: the engine may sample for hours."""

    async def go() -> None:
        gate = asyncio.Event()
        timeout = aiohttp.ClientTimeout(total=None)
        async with serve(Reply("at last", gate=gate)) as served, aiohttp.ClientSession(timeout=timeout) as http:
            calls = [
                asyncio.create_task(http.post(served.chat_url, json=body, headers=served.bearer))
                for body in ({"messages": USER}, {"messages": USER, "stream": True, "max_tokens": 99})
            ]
            await until(lambda: served.engine.running == 2)
            for _ in range(3):
                pass_time(3600.0)
                await asyncio.sleep(0.02)
            assert served.engine.running == 2
            gate.set()
            plain, stream = [await (await call).text() for call in calls]
        assert json.loads(plain)["choices"][0]["message"]["content"] == "at last"
        assert "".join(data["choices"][0]["delta"].get("content", "") for _, data in events(stream)[:-1]) == "at last"

    asyncio.run(go())
