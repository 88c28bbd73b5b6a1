"""A relay between an agent and the proxy, whose connections can be broken while an answer is on its way."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

_HOP = {"connection", "keep-alive", "transfer-encoding", "host", "content-length"}


@dataclass
class Relay:
    """
    Args:
        target: URL of the proxy, asked for at every call.

    Attributes:
        seen: (method and path, status or "cut") of every call.
        bodies: the request bodies of these, None for those without.
    """

    target: Callable[[], str]
    port: int = 0
    seen: list[list[Any]] = field(default_factory=list)
    bodies: list[Any] = field(default_factory=list)
    _open: dict[int, tuple[web.Request, asyncio.Task[Any], bytes]] = field(default_factory=dict)

    async def cut(self, mark: bytes) -> None:
        """Breaks the connections of all calls whose body has ``mark`` in it, on both sides."""
        for http, task, body in list(self._open.values()):
            if mark in body and http.transport is not None:
                http.transport.abort()
                task.cancel()
        await asyncio.sleep(0.05)

    async def handle(self, http: web.Request) -> web.StreamResponse:
        """Passes one call on."""
        body = await http.read()
        entry: list[Any] = [f"{http.method} /{http.path.split('/', 3)[-1]}", None]
        self.seen.append(entry)
        with contextlib.suppress(ValueError):
            self.bodies.append(json.loads(body) if body else None)
        task = asyncio.current_task()
        assert task is not None
        self._open[id(http)] = (http, task, body)
        headers = {name: value for name, value in http.headers.items() if name.lower() not in _HOP}
        try:
            async with aiohttp.ClientSession(auto_decompress=False, timeout=aiohttp.ClientTimeout()) as client:
                url = self.target() + http.raw_path
                async with client.request(http.method, url, data=body, headers=headers) as answer:
                    response = web.StreamResponse(status=answer.status)
                    entry[1] = answer.status
                    for name, value in answer.headers.items():
                        if name.lower() not in _HOP:
                            response.headers[name] = value
                    await response.prepare(http)
                    async for data in answer.content.iter_any():
                        await response.write(data)
                    await response.write_eof()
                    return response
        except asyncio.CancelledError:
            entry[1] = "cut"
            raise
        finally:
            del self._open[id(http)]


@asynccontextmanager
async def relaying(target: Callable[[], str]) -> AsyncIterator[Relay]:
    """A running relay on loopback."""
    relay = Relay(target)
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", relay.handle)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    relay.port = runner.addresses[0][1]
    try:
        yield relay
    finally:
        await runner.cleanup()
