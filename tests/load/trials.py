"""Trials as agents have them, with clients that vanish, stall, retry and send rubbish."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

Body = dict[str, Any]
RUBBISH: tuple[tuple[str, bytes], ...] = (
    ("application/json", b"{"),
    ("application/json", b"[]"),
    ("application/json", b"\xff\xfe\x00"),
    ("application/json", b'{"messages": 3}'),
    ("application/json", b'{"messages": [{"role": "user"}], "n": "many"}'),
    ("application/json", b'{"messages": [{"role": "user", "content": "x"}], "temperature": "hot"}'),
    ("text/plain", b"hello"),
    ("application/json", b'{"messages": ' + b"[" * 5000),
)


class Wrong(Exception):
    """A client did not get what it must get."""


@dataclass
class Ledger:
    """What the clients know.

    Attributes:
        received: for each session the nonces of the answers that its client read to the end, in order.
        wrong: what was not as it must be.
    """

    received: dict[str, list[str]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Shape:
    """Of a trial: turns, mean seconds between them, characters of an answer, seconds that a slow reader waits."""

    turns: tuple[int, int] = (2, 8)
    think_s: float = 8.0
    answer: tuple[int, int] = (20, 400)
    stall_s: float = 3.0


class Trial:
    """One agent with one session.

    Args:
        ways: the ways of asking that are drawn from; all, if there are none.
    """

    def __init__(
        self,
        http: aiohttp.ClientSession,
        name: str,
        url: str,
        token: str,
        ledger: Ledger,
        shape: Shape,
        rng: random.Random,
        ways: Sequence[str] = (),
    ) -> None:
        self._http = http
        self._name = name
        self._ledger = ledger
        self._shape = shape
        self._rng = rng
        self._openai = rng.random() < 0.5
        self._url = url + ("/v1/chat/completions" if self._openai else "/v1/messages")
        self._headers = {"Authorization": f"Bearer {token}"}
        self._messages: list[Body] = []
        self._ways = ways

    async def run(self) -> None:
        """All turns; how each is asked is drawn by chance."""
        ways: dict[str, tuple[int, Callable[[Body], Awaitable[str | None]]]] = {
            "plain": (10, self._ask),
            "vanish and ask again": (3, self._vanish_and_ask),
            "stall": (2, self._stall),
            "repeat": (2, self._repeat),
            "twice at once": (2, self._twice),
            "rubbish before": (2, self._rubbish),
            "leave for good": (1, self._leave),
        }
        names = list(self._ways or ways)
        for number in range(self._rng.randint(*self._shape.turns)):
            nonce = f"{self._name}-{number}"
            length = self._rng.randint(*self._shape.answer)
            self._messages.append({"role": "user", "content": f"turn {number} [[{nonce},{length}]]"})
            body = {"model": "m", "max_tokens": 8000, "messages": self._messages}
            (way,) = self._rng.choices(names, [ways[name][0] for name in names])
            text = await ways[way][1](body)
            self._ledger.counts[way] += 1
            if text is None:
                return
            if not text.startswith(f"{nonce}: "):
                raise Wrong(f"{way}: asked for {nonce}, got {text[:60]!r}")
            self._ledger.received.setdefault(self._name, []).append(nonce)
            self._messages.append({"role": "assistant", "content": text})
            await asyncio.sleep(self._rng.expovariate(1 / self._shape.think_s) if self._shape.think_s else 0)

    def _post(self, body: Body, **headers: str) -> Any:
        return self._http.post(self._url, json=body, headers={**self._headers, **headers})

    async def _read(self, response: aiohttp.ClientResponse) -> str:
        raw = (await response.read()).decode()
        if response.status != 200:
            raise Wrong(f"status {response.status}: {raw[:200]}")
        return self._said(raw)

    def _said(self, raw: str) -> str:
        """The text of an answer, streamed or not, that is complete."""
        if raw.lstrip().startswith("{"):
            answer = json.loads(raw)
            if self._openai:
                return str(answer["choices"][0]["message"]["content"])
            return "".join(block["text"] for block in answer["content"])
        data = [json.loads(line[6:]) for line in raw.split("\n") if line.startswith("data: {")]
        if ("data: [DONE]" if self._openai else '"message_stop"') not in raw:
            raise Wrong(f"the stream has no end: {raw[-200:]!r}")
        if self._openai:
            return "".join(choice["delta"].get("content") or "" for item in data for choice in item["choices"])
        return "".join(item["delta"].get("text", "") for item in data if item["type"] == "content_block_delta")

    async def _ask(self, body: Body, **headers: str) -> str:
        async with self._post({**body, "stream": self._rng.random() < 0.6}, **headers) as response:
            return await self._read(response)

    async def _vanish(self, body: Body) -> None:
        """Close the connection before the first byte, or in mid-answer."""
        if self._rng.random() < 0.5:
            request = asyncio.ensure_future(self._post({**body, "stream": False}).__aenter__())
            await asyncio.sleep(self._rng.uniform(0, 0.4))
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
            if not request.cancelled() and request.exception() is None:
                request.result().close()
            return
        response = await self._post({**body, "stream": True})
        await response.content.readany()
        response.close()

    async def _vanish_and_ask(self, body: Body) -> str:
        await self._vanish(body)
        await asyncio.sleep(self._rng.uniform(0, 1.0))
        return await self._ask(body)

    async def _leave(self, body: Body) -> None:
        await self._vanish(body)

    async def _stall(self, body: Body) -> str:
        async with self._post({**body, "stream": True}) as response:
            if response.status != 200:
                return await self._read(response)
            raw = await response.content.readany()
            await asyncio.sleep(self._shape.stall_s)
            return self._said((raw + await response.read()).decode())

    async def _repeat(self, body: Body) -> str:
        first = await self._ask(body)
        again = await self._ask(body, **{"x-stainless-retry-count": "1"})
        if first != again:
            raise Wrong(f"the repeat of {first[:60]!r} is {again[:60]!r}")
        return first

    async def _twice(self, body: Body) -> str:
        key = f"{self._name}-{len(self._messages)}"
        first, again = await asyncio.gather(*(self._ask(body, **{"Idempotency-Key": key}) for _ in range(2)))
        if first != again:
            raise Wrong(f"one key, two answers: {first[:60]!r} and {again[:60]!r}")
        return first

    async def _rubbish(self, body: Body) -> str:
        for kind, raw in self._rng.sample(RUBBISH, 3):
            headers = {**self._headers, "Content-Type": kind}
            async with self._http.post(self._url, data=raw, headers=headers) as response:
                await response.read()
                if not 400 <= response.status < 500:
                    raise Wrong(f"{raw[:40]!r} was answered by {response.status}")
        async with self._http.post(self._url, json=body, headers={"Authorization": "Bearer no"}) as response:
            if response.status != 401:
                raise Wrong(f"a wrong token was answered by {response.status}")
        return await self._ask(body)


async def vandal(url: str, rng: random.Random, ledger: Ledger) -> None:
    """Opens connections for ever, and sends what is no HTTP, half of a request, or nothing."""
    host, port = url.removeprefix("http://").split(":")
    while True:
        try:
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(
                rng.choice(
                    (
                        bytes(rng.randrange(256) for _ in range(200)),
                        b"POST /sess/x/v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n{",
                        b"GET /health HTTP/1.1\r\nX: " + b"a" * 20000,
                        b"POST /v1/messages HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
                        b"",
                    )
                )
            )
            await writer.drain()
            await asyncio.sleep(rng.uniform(0.1, 2))
            writer.transport.abort()
            ledger.counts["connections with no request"] += 1
        except OSError as error:
            ledger.counts[f"connections refused ({type(error).__name__})"] += 1
            await asyncio.sleep(1)
