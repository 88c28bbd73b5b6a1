"""A chat proxy on a scripted engine, and a control port through which a load run opens and closes its sessions.

    python tests/load/server.py TREE ARCHIVES

Prints one line of JSON: {"proxy": URL, "control": URL}. The engine answers `[[nonce,length]]` in the last message with
the nonce and filler, in chunks as an engine would, and keeps nothing.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tokenizers import pre_tokenizers

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "proxy"))

import serving  # noqa: E402
from bare_import import import_from  # noqa: E402

WORDS = "alpha beta gamma delta epsilon zeta eta theta iota kappa "
CONTEXT = 32768
TOKENIZER = serving.byte_tokenizer()
# Text is cut into words, as by every real tokenizer; without that its cache would hold ten thousand whole messages.
TOKENIZER.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def answer_text(nonce: str, length: int) -> str:
    """What the engine says to `[[nonce,length]]`."""
    return f"{nonce}: " + (WORDS * (length // len(WORDS) + 1))[:length]


def log_prob(position: int, token: int) -> float:
    """The log-probability that the engine gives to a token at a position of the whole sequence."""
    return -((position * 31 + token) % 4093 + 1) / 512


class Engine:
    """See the module.

    Attributes:
        running: calls that are in the engine now.
        pace_s: seconds between chunks.
    """

    streams = True

    def __init__(self, pace_s: tuple[float, float]) -> None:
        self.running = 0
        self.pace_s = pace_s
        self._letters = TOKENIZER.convert_ids_to_tokens(range(len(TOKENIZER)))

    def _ids(self, prompt_ids: list[int]) -> list[int]:
        tail = "".join(self._letters[token] for token in prompt_ids[-400:])
        nonce, _, length = tail.rpartition("[[")[2].partition("]]")[0].partition(",")
        text = answer_text(nonce, int(length or 0))
        return list(TOKENIZER.encode(text + serving.END, add_special_tokens=False))

    async def stream(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], *, media: Any = None
    ) -> AsyncIterator[Any]:
        from verl.experimental.agent_loop.chat_proxy.engine import Generation

        self.running += 1
        try:
            ids = self._ids(prompt_ids)[: sampling_params["max_tokens"]]
            at = len(prompt_ids)
            for start in range(0, len(ids), 40):
                await asyncio.sleep(random.uniform(*self.pace_s))
                part = ids[start : start + 40]
                values = [log_prob(at + start + index, token) for index, token in enumerate(part)]
                yield Generation(token_ids=part, log_probs=values)
            yield Generation(
                token_ids=[], log_probs=[], stop_reason="completed", min_global_steps=3, max_global_steps=3
            )
        finally:
            self.running -= 1

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **more: Any
    ) -> Any:
        from verl.experimental.agent_loop.chat_proxy.engine import join

        return join([chunk async for chunk in self.stream(request_id, prompt_ids, sampling_params, **more)])

    async def score(self, request_id: str, ids: list[int]) -> tuple[list[float | None], int | None]:
        return [None, *(-0.25 for _ in ids[1:])], 3


def resident_bytes() -> int:
    """Resident memory, after all that is free was given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class SlowDisk(ThreadPoolExecutor):
    """The archives' writing thread, on a disk that takes its time."""

    def __init__(self, seconds: float) -> None:
        super().__init__(max_workers=1)
        self._seconds = seconds

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        def late() -> Any:
            time.sleep(self._seconds)
            return function(*args, **kwargs)

        return super().submit(late)


async def start(
    archives: Path, pace_s: tuple[float, float] = (0.05, 0.3), disk_s: float | None = None
) -> tuple[dict[str, str], Any]:
    """Serves on the running loop; the URLs and the proxy.

    Args:
        disk_s: seconds that the disk takes for each line of an archive.
    """
    from aiohttp import web
    from verl.experimental.agent_loop.chat_proxy.archive import Archive
    from verl.experimental.agent_loop.vllm_chat_completion_proxy import ChatCompletionProxy

    engine = Engine(pace_s)
    proxy = await ChatCompletionProxy.start(None, TOKENIZER, context_limit=CONTEXT, engine=engine)
    if disk_s is not None:
        proxy.service.store.writer = SlowDisk(disk_s)

    async def open_session(http: web.Request) -> web.Response:
        name = http.match_info["name"]
        session = proxy.open_session(name, archive=Archive(archives / name))
        return web.json_response({"url": proxy.anthropic_url(session), "token": session.token})

    async def close_session(http: web.Request) -> web.Response:
        await proxy.close_session(http.match_info["name"])
        return web.json_response({})

    async def stats(http: web.Request) -> web.Response:
        return web.json_response(
            {
                "resident": resident_bytes(),
                "blocks": sys.getallocatedblocks(),
                "sessions": proxy.service.sessions,
                "in_flight": proxy.service.in_flight,
                "running": engine.running,
                "threads": len(list(Path("/proc/self/task").iterdir())),
                "files": len(list(Path("/proc/self/fd").iterdir())),
                "tasks": len(asyncio.all_tasks()),
                "client_faults": int(proxy.service.events.total("client_fault")),
            }
        )

    app = web.Application()
    app.router.add_post("/sessions/{name}", open_session)
    app.router.add_delete("/sessions/{name}", close_session)
    app.router.add_get("/stats", stats)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    return {"proxy": proxy.url, "control": f"http://{host}:{port}"}, proxy


async def main(archives: Path) -> None:
    urls, _ = await start(archives)
    print(json.dumps(urls), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    import_from(Path(sys.argv[1]))
    asyncio.run(main(Path(sys.argv[2])))
