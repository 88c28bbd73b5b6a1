"""What broke the proxy once: numbers, headers and histories out of the ordinary, and clients that outlive a session."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from serving import Served, asynchronous, serve, until

USER = [{"role": "user", "content": "hi"}]
BODY = json.dumps({"messages": USER, "max_tokens": 9}).encode()


async def raw(served: Served, path: str, headers: list[tuple[bytes, bytes]], body: bytes = BODY) -> tuple[int, Any]:
    """A POST with headers that no client's library would send; the status and the parsed body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.proxy.port)
    lines = [b"POST /sess/%s/v1/%s HTTP/1.1" % (served.session.id.encode(), path.encode()), b"Host: x"]
    lines += [name + b": " + value for name, value in headers]
    lines += [b"Connection: close", b"Content-Length: %d" % len(body), b"", body]
    writer.write(b"\r\n".join(lines))
    head, _, answer = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return int(head.split()[1]), json.loads(answer)


@pytest.mark.parametrize("digits", [309, 400, 4000])
@asynchronous
async def test_a_number_that_no_float_holds_is_the_clients_error(digits: int) -> None:
    async with serve() as served, aiohttp.ClientSession() as http:
        body = f'{{"messages": {json.dumps(USER)}, "repetition_penalty": 1{"0" * digits}}}'
        async with http.post(served.chat_url, data=body, headers=served.bearer) as response:
            assert response.status == 400
            assert "repetition_penalty" in (await response.json())["error"]["message"]


@pytest.mark.parametrize("header", [b"x-api-key", b"Authorization"])
@asynchronous
async def test_a_token_that_is_no_text_is_a_wrong_one(header: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with serve() as served:
        for token in (b"\xff\xfe", b"\xed\xa0\x80", served.session.token.encode() + b"\xff"):
            value = token if header == b"x-api-key" else b"Bearer " + token
            for path in ("chat/completions", "messages", "responses"):
                assert (await raw(served, path, [(header, value)]))[0] == 401
    assert not caplog.records


@pytest.mark.parametrize("expectation", [b"\xff", b"something", b"200-ok"])
@asynchronous
async def test_an_expectation_that_is_not_known_is_passed_over(
    expectation: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve() as served:
        own = [(name.encode(), value.encode()) for name, value in served.bearer.items()]
        status, answer = await raw(served, "chat/completions", [*own, (b"Expect", expectation)])
    assert (status, answer["object"]) == (200, "chat.completion")
    assert not caplog.records


@asynchronous
async def test_a_client_may_wait_to_be_told_to_go_on() -> None:
    async with serve() as served, aiohttp.ClientSession() as http:
        data = {"data": BODY, "headers": served.bearer, "expect100": True}
        async with http.post(served.chat_url, **data) as response:
            assert response.status == 200


def test_a_history_of_reasoning_is_gone_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.experimental.agent_loop.chat_proxy import responses

    looked = 0
    kind = responses._kind

    def counted(item: Any) -> str:
        nonlocal looked
        looked += 1
        return kind(item)

    class Session:
        def answer(self, turn_id: str) -> None:
            return None

        call = answer

    monkeypatch.setattr(responses, "_kind", counted)
    reader = responses.InputReader(Session(), responses.Seal("secret"))  # type: ignore[arg-type]
    items = [{"type": "reasoning", "summary": []}] * 1000
    spoken = {"type": "message", "role": "assistant", "content": "a"}
    units = reader._units([*items, spoken, *items, spoken])
    assert [len(unit) for unit in units] == [1001, 1001]
    assert looked < 20 * 2002


@asynchronous
async def test_a_session_that_is_being_closed_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.experimental.agent_loop.chat_proxy.delivery import Deliveries

    settled = asyncio.Event()
    monkeypatch.setattr(Deliveries, "settled", lambda self: settled.wait())
    async with serve() as served, aiohttp.ClientSession() as http:
        closing = asyncio.ensure_future(served.proxy.close_session(served.session.id))
        await asyncio.sleep(0)
        async with http.post(served.chat_url, data=BODY, headers=served.bearer) as response:
            assert response.status == 410
        settled.set()
        await closing


@asynchronous
async def test_an_answer_that_arrives_after_the_end_leaves_the_archive_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from verl.experimental.agent_loop.chat_proxy import handlers
    from verl.experimental.agent_loop.chat_proxy.archive import Archive

    written, ended = asyncio.Event(), asyncio.Event()

    async def slowly(response: Any) -> None:
        written.set()
        await ended.wait()

    monkeypatch.setattr(handlers.web.StreamResponse, "write_eof", slowly)
    async with serve() as served, aiohttp.ClientSession() as http:
        session = served.proxy.open_session(archive=Archive(tmp_path))
        own = Served(served.proxy, session, served.engine)
        body = {"messages": USER, "stream": True}
        asked = asyncio.ensure_future(http.post(own.chat_url, json=body, headers=own.bearer))
        await written.wait()
        trajectory = await served.proxy.close_session(session.id)
        ended.set()
        await until(lambda: own.count("call", outcome="delivered") == 1)
        asked.cancel()
    (turn,) = trajectory.turns
    (kept,) = json.loads((tmp_path / "proxy_trajectory.json").read_text())["turns"]
    assert turn.delivered == kept["delivered"] is False
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [path.name for path in tmp_path.iterdir()] == ["proxy_trajectory.json"]
