"""Bodies, queues and sessions have bounds, and one session can't starve another."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from serving import Reply, asynchronous, serve, until

USER = [{"role": "user", "content": "hi"}]


async def read(*parts: bytes, encoding: str = "", limit: int = 1 << 20, timeout_s: float = 5.0) -> Any:
    from verl.experimental.agent_loop.chat_proxy.bodies import read_json

    async def chunks() -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    return await read_json(chunks(), encoding, limit, timeout_s)


def zstd(data: bytes) -> bytes:
    return bytes(pytest.importorskip("zstandard").ZstdCompressor().compress(data))


def raw_deflate(data: bytes) -> bytes:
    stream = zlib.compressobj(wbits=-15)
    return stream.compress(data) + stream.flush()


CODINGS = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
    "zstd": zstd,
    "GZIP": gzip.compress,
}


@pytest.mark.parametrize("name", CODINGS)
@pytest.mark.parametrize("size", [1, 100, 10**6])
@asynchronous
async def test_compressed_bodies_are_read(name: str, size: int) -> None:
    body = {"text": "é" * 10000}
    data = CODINGS[name](json.dumps(body, ensure_ascii=False).encode())
    parts = [data[start : start + size] for start in range(0, len(data), size)]
    assert await read(*parts, encoding=name) == body


@asynchronous
async def test_codings_are_undone_in_reverse_and_deflate_may_be_bare() -> None:
    data = b'{"a": 1}'
    assert await read(zstd(gzip.compress(data)), encoding="gzip, zstd") == {"a": 1}
    assert await read(raw_deflate(data), encoding="deflate") == {"a": 1}
    assert await read(gzip.compress(b'{"a"') + gzip.compress(b": 1}"), encoding="gzip") == {"a": 1}
    assert await read(zstd(b'{"a"') + zstd(b": 1}"), encoding="zstd") == {"a": 1}
    assert await read(data, encoding="identity") == {"a": 1}


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(
    "data",
    [
        b'{"a": [1, 2.5, true, null, "\\u00e9\\ud83e\\udd8a", {"b": {}}], "a": "last"}',
        b'{"a": 123456789012345678901234567890, "b": -0.0}',
        b'{"a": "\\ud800 lone"}',
        b'{"a": NaN}',
    ],
)
@asynchronous
async def test_a_body_reads_the_same_with_and_without_the_fast_parser(
    fast: bool, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl.experimental.agent_loop.chat_proxy import bodies

    if fast:
        monkeypatch.setattr(bodies, "_fast_decode", pytest.importorskip("msgspec").json.decode)
    else:
        monkeypatch.setattr(bodies, "_fast_decode", None)
    expected = repr(json.loads(data)).replace("\\ud800", "\ufffd")
    assert repr(await read(data)) == expected


@pytest.mark.parametrize(
    ("data", "encoding", "status"),
    [
        (gzip.compress(b'{"a": "' + b"x" * 5000 + b'"}')[:-20], "gzip", 400),
        (gzip.compress(b"{}")[:4], "gzip", 400),
        (gzip.compress(b"{}")[:-4], "gzip", 400),  # the text is whole, its check sum is not
        (b"not gzip at all", "gzip", 400),
        (b"not zstd at all", "zstd", 400),
        (zlib.compress(b"{}") + b"more", "deflate", 400),
        (b"{}", "br", 415),
        (b"{}", "gzip, gzip, gzip", 400),
        (b'{"a": "' + b"x" * 5000 + b'"}', "", 413),
        (gzip.compress(b'{"a": "' + b"x" * 5000 + b'"}'), "gzip", 413),
        (zlib.compress(b'{"a": "' + b"x" * 5000 + b'"}'), "deflate", 413),
        (b"ZSTD", "zstd", 413),
        (b"TWICE", "gzip, gzip", 413),
    ],
)
@asynchronous
async def test_bodies_that_lie_break_off_or_are_too_large_are_refused(data: bytes, encoding: str, status: int) -> None:
    from verl.experimental.agent_loop.chat_proxy.provider_errors import ApiError

    if data == b"ZSTD":
        data = zstd(b'{"a": "' + b"x" * 5000 + b'"}')
    if data == b"TWICE":
        data = gzip.compress(gzip.compress(b'{"a": "' + b"x" * 50000 + b'"}'))
    with pytest.raises(ApiError) as refused:
        await read(data, encoding=encoding, limit=4000)
    assert refused.value.status == status


@pytest.mark.parametrize("encoding", ["gzip", "zstd", "gzip, gzip"])
@asynchronous
async def test_a_bomb_is_stopped_at_the_limit(encoding: str) -> None:
    """64 MiB of zeros in a few kB, against a limit of 1 MiB: little more than that is ever held."""
    import tracemalloc

    from verl.experimental.agent_loop.chat_proxy.provider_errors import ApiError

    zeros = bytes(64 << 20)
    data = zstd(zeros) if encoding == "zstd" else gzip.compress(zeros, 1)
    if encoding == "gzip, gzip":
        data = gzip.compress(data)
    del zeros
    tracemalloc.start()
    with pytest.raises(ApiError) as refused:
        await read(data, encoding=encoding, limit=1 << 20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert refused.value.status == 413
    assert peak < (200 << 20 if encoding == "zstd" else 16 << 20)


@asynchronous
async def test_a_body_that_does_not_come_is_given_up() -> None:
    from verl.experimental.agent_loop.chat_proxy.bodies import read_json
    from verl.experimental.agent_loop.chat_proxy.provider_errors import ApiError

    async def never() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(3600)

    with pytest.raises(ApiError) as refused:
        await read_json(never(), "", 100, 0.02)
    assert refused.value.status == 408


@asynchronous
async def test_a_body_beyond_a_mebibyte_is_served_and_compressed_ones_too() -> None:
    text = "word " * 600_000  # 3 MB
    body = json.dumps({"messages": [{"role": "user", "content": text}], "max_tokens": 5}).encode()
    async with serve(context_limit=4_000_000, store=_unproved()) as served, aiohttp.ClientSession() as http:
        for data, encoding in ((body, None), (gzip.compress(body, 1), "gzip"), (zstd(body), "zstd")):
            headers = served.bearer | ({} if encoding is None else {"Content-Encoding": encoding})
            async with http.post(served.chat_url, data=data, headers=headers) as response:
                assert response.status == 200, await response.text()
    assert [len(ids) > 3_000_000 for ids, _ in served.engine.calls] == [True] * 3


def _unproved() -> Any:
    from verl.experimental.agent_loop.chat_proxy.trajectory import StoreConfig

    return StoreConfig(prove=False)


@pytest.mark.parametrize("protocol", ["openai", "anthropic"])
@asynchronous
async def test_a_body_beyond_the_limit_is_413_in_the_providers_words(protocol: str) -> None:
    from verl.experimental.agent_loop.chat_proxy.limits import Limits

    async with serve(service={"limits": Limits(body_bytes=2000)}) as served, aiohttp.ClientSession() as http:
        url, headers = (
            (served.chat_url, served.bearer) if protocol == "openai" else (served.messages_url, served.api_key)
        )
        async with http.post(url, json={"messages": USER, "pad": "x" * 5000}, headers=headers) as response:
            body = await response.json()
            assert response.status == 413
            kind = body["error"]["code"] if protocol == "openai" else body["error"]["type"]
            assert kind == "request_too_large"
        async with http.post(url, json={"messages": USER, "max_tokens": 5}, headers=headers) as response:
            assert response.status == 200  # the connection and the session are as before


@asynchronous
async def test_a_full_session_queues_then_refuses_and_others_are_served() -> None:
    from verl.experimental.agent_loop.chat_proxy.limits import Limits

    gate = asyncio.Event()
    limits = Limits(running_calls=2, queued_calls=3)

    def script(number: int, prompt_ids: list[int], params: dict[str, Any]) -> Reply:
        return Reply("ok", gate=gate if params["max_tokens"] == 7 else None)

    async with (
        serve(script, service={"limits": limits, "retry_after_s": 3.0}) as served,
        aiohttp.ClientSession() as http,
    ):

        async def call(number: int) -> tuple[int, Any, Any]:
            body = {"messages": [{"role": "user", "content": str(number)}], "max_tokens": 7}
            async with http.post(served.chat_url, json=body, headers=served.bearer) as response:
                return response.status, await response.json(), response.headers

        calls = [asyncio.create_task(call(number)) for number in range(5)]
        await until(lambda: served.engine.running == 2)
        await asyncio.sleep(0.1)
        status, body, headers = await call(5)
        assert status == 429 and body["error"]["code"] == "rate_limit_exceeded"
        assert headers["Retry-After"] == "3" and headers["x-should-retry"] == "true"
        assert served.engine.running == 2

        other = served.proxy.open_session()
        request = {"messages": USER, "max_tokens": 5}
        url = f"{served.proxy.openai_url(other)}/chat/completions"
        async with http.post(url, json=request, headers={"Authorization": f"Bearer {other.token}"}) as response:
            assert response.status == 200  # while the first session is full
        gate.set()
        assert [status for status, _, _ in await asyncio.gather(*calls)] == [200] * 5


@asynchronous
async def test_a_call_that_waited_while_its_session_was_stopped_is_not_served() -> None:
    from verl.experimental.agent_loop.chat_proxy.limits import Limits

    gate = asyncio.Event()
    limits = Limits(running_calls=1)
    async with serve(Reply("ok", gate=gate), service={"limits": limits}) as served, aiohttp.ClientSession() as http:
        running, waiting = (
            asyncio.create_task(http.post(served.chat_url, json={"messages": USER * count}, headers=served.bearer))
            for count in (1, 2)
        )
        await until(lambda: served.engine.running == 1)
        await asyncio.sleep(0.05)
        served.session.stop("overlong")
        gate.set()
        assert [(await call).status for call in (running, waiting)] == [200, 410]
        assert len(served.engine.calls) == 1


@asynchronous
async def test_a_client_that_waits_and_leaves_gives_its_place_back() -> None:
    from verl.experimental.agent_loop.chat_proxy.limits import Gate, Limits

    gate = Gate(Limits(running_calls=1, queued_calls=1), 1.0)
    async with gate.enter():
        waiting = asyncio.create_task(gate.enter().__aenter__())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        again = asyncio.create_task(gate.enter().__aenter__())
        await asyncio.sleep(0.01)
        assert not again.done()
    await again


@asynchronous
async def test_sessions_have_a_bound() -> None:
    from verl.experimental.agent_loop.chat_proxy.limits import Limits

    async with serve(service={"limits": Limits(sessions=2)}) as served:
        second = served.proxy.open_session()
        with pytest.raises(RuntimeError, match="2 sessions are open"):
            served.proxy.open_session()
        await served.proxy.close_session(second.id)
        served.proxy.open_session()


@asynchronous
async def test_a_slow_sender_keeps_nobody_waiting() -> None:
    from verl.experimental.agent_loop.chat_proxy.limits import Limits

    async with serve(service={"limits": Limits(body_timeout_s=0.2)}) as served, aiohttp.ClientSession() as http:

        async def drip() -> AsyncIterator[bytes]:
            yield b'{"messages": '
            await asyncio.sleep(3600)

        slow = asyncio.create_task(http.post(served.chat_url, data=drip(), headers=served.bearer))
        async with http.post(served.chat_url, json={"messages": USER}, headers=served.bearer) as response:
            assert response.status == 200
        assert (await slow).status == 408


@asynchronous
async def test_a_prompt_that_can_not_fit_is_refused_without_being_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.experimental.agent_loop.chat_proxy.tokens import Tokens

    async with serve(context_limit=4096) as served, aiohttp.ClientSession() as http:

        async def never(self: Any, text: str) -> list[int]:
            raise AssertionError(f"{len(text)} characters were encoded")

        monkeypatch.setattr(Tokens, "encode", never)
        body = json.dumps({"messages": [{"role": "user", "content": "word " * 4_000_000}]}).encode()  # 20 MB
        async with http.post(served.chat_url, data=body, headers=served.bearer) as response:
            told = await response.json()
    assert response.status == 400 and told["error"]["code"] == "context_length_exceeded"
    assert served.count("overflow") == 1


@asynchronous
async def test_one_sessions_prompts_are_made_one_at_a_time_and_anothers_beside_them() -> None:
    gate = asyncio.Event()
    async with serve() as served, aiohttp.ClientSession() as http:
        real, inside = served.session.trajectory.open_turn, []

        async def slow(request: Any) -> Any:
            inside.append(request)
            await gate.wait()
            return await real(request)

        served.session.trajectory.open_turn = slow
        calls = [
            asyncio.create_task(http.post(served.chat_url, json={"messages": USER * count}, headers=served.bearer))
            for count in (1, 2, 3)
        ]
        await until(lambda: len(inside) == 1)
        other = served.proxy.open_session()
        url, headers = f"{served.proxy.openai_url(other)}/chat/completions", {"Authorization": f"Bearer {other.token}"}
        async with http.post(url, json={"messages": USER}, headers=headers) as response:
            assert response.status == 200
        assert len(inside) == 1
        gate.set()
        assert [(await call).status for call in calls] == [200, 200, 200] and len(inside) == 3


@asynchronous
async def test_a_session_can_have_a_smaller_context_than_the_server() -> None:
    async with serve(context_limit=4096) as served, aiohttp.ClientSession() as http:
        small = served.proxy.open_session("small", context_limit=60)
        large = served.proxy.open_session("large", context_limit=10**6)
        for session, limit in ((small, 60), (large, 4096)):
            url, headers = served.proxy.openai_url(session), {"Authorization": f"Bearer {session.token}"}
            async with http.get(f"{url}/models", headers=headers) as response:
                assert (await response.json())["data"][0]["max_model_len"] == limit
            async with http.get(f"{url}/models/any", headers=headers) as response:
                assert (await response.json())["max_model_len"] == limit
            async with http.post(f"{url}/chat/completions", json={"messages": USER}, headers=headers) as response:
                assert response.status == 200
            prompt, params = served.engine.calls[-1]
            assert params["max_tokens"] == limit - len(prompt)
        for text in ("y" * 100, "y" * 10**5):  # one is refused by its tokens, the other before they are counted
            body = {"messages": [{"role": "user", "content": text}]}
            url, headers = served.proxy.openai_url(small), {"Authorization": f"Bearer {small.token}"}
            async with http.post(f"{url}/chat/completions", json=body, headers=headers) as response:
                error = (await response.json())["error"]
            assert (
                error["code"] == "context_length_exceeded" and "maximum context length is 60 tokens" in error["message"]
            )


@pytest.mark.parametrize(("room", "full"), [(10, True), (1000, False)])
@asynchronous
async def test_no_more_is_sampled_than_the_windows_of_training_hold(room: int, full: bool) -> None:
    """The limit depends on the conversation's first prompt, which shares the response's window where it is longer."""
    from verl.experimental.agent_loop.chat_proxy.trajectory import Window

    async with serve("ok", context_limit=4096) as served, aiohttp.ClientSession() as http:
        session = served.proxy.open_session("window", window=Window(prompt=room, response=35))
        url = f"{served.proxy.openai_url(session)}/chat/completions"
        headers = {"Authorization": f"Bearer {session.token}"}
        messages = list(USER)
        for turn in range(2):
            async with http.post(url, json={"messages": messages}, headers=headers) as response:
                answer = await response.json()
            if turn == 1 and full:
                assert answer["error"]["code"] == "context_length_exceeded"
                break
            first = len(served.engine.calls[0][0])
            prompt, params = served.engine.calls[turn]
            assert params["max_tokens"] == min(first, room) + 35 - len(prompt)
            messages += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "on"}]
