"""Single faults of clients, of the disk and of the engine, one at a time."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import server
from serving import Reply, asynchronous, serve, until

USER = [{"role": "user", "content": "hi"}]


@asynchronous
async def _clients_faults() -> None:
    async with serve(Reply("x" * 400, pace=0.01), service={"disconnect_grace_s": 0.1}) as served:
        address = served.proxy.url.removeprefix("http://").split(":")
        for raw in (b"\x00\x01\r\n\r\n", b"GET /health HTTP/1.1\r\nX: " + b"a" * 20000, b"GET / HTTP/1.1\r\n\r\n"):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(raw)
            await reader.read()
            writer.close()
        for stream in (True, False):
            async with aiohttp.ClientSession() as http:
                body = {"messages": USER, "stream": stream}
                asked = asyncio.ensure_future(http.post(served.chat_url, json=body, headers=served.bearer))
                await until(lambda: served.engine.running == 1)
                if stream:
                    (await asked).close()
                asked.cancel()
            await until(lambda: served.proxy.service.in_flight == 0)
        async with aiohttp.ClientSession() as http, http.get(f"{served.proxy.url}/health") as response:
            assert response.status == 200
        assert served.count("client_fault") >= 2


def test_what_clients_do_wrong_is_counted_and_leaves_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        _clients_faults()
    assert [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("stream", [True, False])
@asynchronous
async def test_an_answer_that_a_client_has_is_in_the_journal(tmp_path: Path, stream: bool) -> None:
    """However slow the disk is."""
    from verl.experimental.agent_loop.chat_proxy.archive import Archive, read_journal

    async with serve("done") as served, aiohttp.ClientSession() as http:
        served.proxy.service.store.writer = server.SlowDisk(0.1)
        archive = Archive(tmp_path)
        session = served.proxy.open_session(archive=archive)
        url = served.proxy.openai_url(session) + "/chat/completions"
        headers = {"Authorization": f"Bearer {session.token}"}
        async with http.post(url, json={"messages": USER, "stream": stream}, headers=headers) as response:
            await response.read()
        (turn,) = read_journal(archive.journal).turns
        assert (turn.state, turn.answer.text) == ("finished", "done")


@asynchronous
async def test_a_disk_that_stands_still_holds_up_no_agent_for_long(tmp_path: Path) -> None:
    from verl.experimental.agent_loop.chat_proxy.archive import Archive
    from verl.experimental.agent_loop.chat_proxy.trajectory import StoreConfig

    async with serve("done", store=StoreConfig(archive_timeout=0.05)) as served, aiohttp.ClientSession() as http:
        served.proxy.service.store.writer = server.SlowDisk(1.0)
        session = served.proxy.open_session(archive=Archive(tmp_path))
        url = served.proxy.openai_url(session) + "/chat/completions"
        headers = {"Authorization": f"Bearer {session.token}"}
        async with http.post(url, json={"messages": USER}, headers=headers) as response:
            assert response.status == 200
        assert served.count("archive", result="late") == 1


class Interrupted:
    """An engine that is aborted before its first token, then after two, then ends; the weights change each time."""

    streams = True

    def __init__(self) -> None:
        self._version = 6

    async def generate(self, request_id: str, prompt_ids: list[int], sampling_params: Any, **media: Any) -> Any:
        from verl.experimental.agent_loop.chat_proxy.engine import join

        return join([chunk async for chunk in self.stream(request_id, prompt_ids, sampling_params)])

    async def stream(
        self, request_id: str, prompt_ids: list[int], sampling_params: Any, **media: Any
    ) -> AsyncIterator[Any]:
        from verl.experimental.agent_loop.chat_proxy.engine import Generation

        self._version += 1
        tokens = {7: [], 8: [1, 2], 9: [3]}[self._version]
        if tokens:
            yield Generation(tokens, [-0.5] * len(tokens))
        reason = "completed" if self._version == 9 else "aborted"
        steps = {"min_global_steps": self._version, "max_global_steps": self._version}
        requests = {"request_id": f"r{self._version}", "request_chain": json.dumps([self._version])}
        yield Generation([], [], stop_reason=reason, extra=requests, **steps)


@asynchronous
async def test_an_answer_tells_nothing_of_requests_without_a_token_and_all_of_the_others() -> None:
    from verl.experimental.agent_loop.chat_proxy.engine import generate_resumed, join, stream_resumed

    params = {"max_tokens": 9}
    whole = await generate_resumed(Interrupted(), "s", [0], params, wait=0)
    pieces = join([chunk async for chunk in stream_resumed(Interrupted(), "s", [0], params, wait=0)])
    for answer in (whole, pieces):
        assert (answer.token_ids, answer.min_global_steps, answer.max_global_steps) == ([1, 2, 3], 8, 9)
        assert answer.extra == {"request_id": "r8", "request_chain": "[8, 9]"}
