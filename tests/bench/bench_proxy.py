"""The chat proxy beside two gateways from PyPI, on one scripted engine.

    python tests/bench/bench_proxy.py [--quick] [--only NAME...] [--tree TREE] [--json OUT]

Peers are rllm-model-gateway (memory and sqlite store), which records what passes, and the LiteLLM proxy, which only
passes it on; both forward to a scripted server over HTTP. The chat proxy has the same script as its engine, in its own
process as in training, and renders and tokenizes with Qwen3's template and vocabulary, proves every prompt and writes
its archive. Answers have 200 tokens and come at once, unless a load says otherwise. Loads:

    alone      one session of 20 turns: what a call costs beyond the bare server's
    together   64 sessions of 20 turns to 17k tokens, each calling again at once
    long       one session of 100 turns to 128k tokens: turn 100 against turn 10; memory of a trajectory
    grown      256 sessions of 100 turns to 128k tokens; engine 2 s, agent 3 s a turn (peers: not run, see the figures
               of `long` for what it would take)

Servers run on one core and the load on another, where the machine has two. Every load is run on all of them in turn.
`long` also shows what the chat proxy itself takes from a call's body to its prompt ids: the rest of a late turn is the
transport and the parsing of its ever longer body. Prints a table, and exits with 1 where the chat proxy misses a
target. Figures are marked, and fail nothing, where the machine was not theirs: its timers were late (`noise`), or
others worked on the servers' core (`others`, a share of its time).
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import http.client
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
ROOT = HERE.parents[2]
ENVIRONMENTS = ROOT / "build" / "bench-proxy"
PEERS = ("rllm-model-gateway==0.1.0", "litellm[proxy]==1.108.7")
ANSWER_TOKENS = 200
TURN_TOKENS = 1280  # answer and new text together: 100 turns are 128k
KEY = "sk-bench-7f3c9a51d2e84b60"
NOISE_MS, OTHERS = 20.0, 0.1
TEXT = """def return value index for in range len self config token batch sequence policy reward sample import from
class None True False assert if else while with open path print error file line test result update model layer hidden"""
WORDS = tuple(TEXT.split())


# -- the servers, each a process of its own ---------------------------------------------------------------------------


def answer_text(number: int) -> str:
    rng = random.Random(number)
    return " ".join(rng.choice(WORDS) for _ in range(ANSWER_TOKENS - 20))


async def serve_upstream(port: int, delay_s: float) -> None:
    """An OpenAI server that answers by the script, with token ids and log-probabilities where they are asked for."""
    from aiohttp import web

    logprobs = {"content": [{"token": "x", "logprob": -0.5, "bytes": None, "top_logprobs": []}] * ANSWER_TOKENS}
    calls = 0

    async def chat(request: web.Request) -> web.Response:
        nonlocal calls
        raw = await request.read()
        # The body isn't parsed: the engine of a comparison must not be what costs.
        calls += 1
        if delay_s:
            await asyncio.sleep(delay_s)
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": answer_text(calls % 64)},
        }
        body: dict[str, Any] = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        body["usage"] = {"prompt_tokens": len(raw) // 4, "completion_tokens": ANSWER_TOKENS, "total_tokens": 1}
        if b'"return_token_ids"' in raw:
            body["prompt_token_ids"] = list(range(len(raw) // 4))
            choice["token_ids"] = list(range(ANSWER_TOKENS))
            choice["logprobs"] = logprobs
        return web.json_response(body)

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_get("/health", health)
    app.router.add_get("/v1/models", health)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


async def serve_ours(tree: Path, port: int, delay_s: float, chunks: int, sessions: int, archive: Path) -> None:
    """The chat proxy. Prints the sessions' URLs and tokens, and for every line on stdin its statistics."""
    sys.path[:0] = [str(ROOT / "tests" / "proxy")]
    import real_tokenizers
    from bare_import import import_from

    import_from(tree)
    from verl.experimental.agent_loop.chat_proxy.archive import Archive
    from verl.experimental.agent_loop.chat_proxy.engine import Generation
    from verl.experimental.agent_loop.vllm_chat_completion_proxy import ChatCompletionProxy, ProxyConfig

    tokenizer, stops = real_tokenizers.load("qwen3_instruct")
    scripts = []
    for number in range(64):
        ids = [*tokenizer.encode(answer_text(number), add_special_tokens=False)[: ANSWER_TOKENS - 1], stops[0]]
        scripts.append((ids, [-0.5] * len(ids)))

    class Engine:
        streams = True
        calls = 0

        async def stream(self, request_id: str, prompt_ids: list[int], params: Any, *, media: Any = None) -> Any:
            self.calls += 1
            ids, log_probs = scripts[self.calls % 64]
            size = -(-len(ids) // chunks)
            for at in range(0, len(ids), size):
                if delay_s:
                    await asyncio.sleep(delay_s / chunks)
                last = at + size >= len(ids)
                yield Generation(
                    ids[at : at + size], log_probs[at : at + size], stop_reason="completed" if last else None
                )

        async def generate(self, *arguments: Any, **options: Any) -> Any:
            raise NotImplementedError

        async def score(self, request_id: str, ids: list[int]) -> Any:
            return [None, *(-0.5 for _ in ids[1:])], 1

    proxy = await ChatCompletionProxy.start(
        None,
        tokenizer,
        context_limit=200_000,
        stop_ids=stops,
        engine=Engine(),
        config=ProxyConfig(ports=(port, port)),
    )
    opened = [proxy.open_session(f"s{number}", archive=Archive(archive / str(number))) for number in range(sessions)]
    gc.collect()
    gc.freeze()  # as the agent loop does
    print(json.dumps([[proxy.openai_url(session), session.token] for session in opened]), flush=True)

    lags: list[float] = []
    pauses: list[float] = []

    def collecting(phase: str, info: dict[str, int]) -> None:
        now = time.perf_counter() * 1000
        if phase == "start":
            pauses.append(-now)
        else:
            pauses[-1] += now

    gc.callbacks.append(collecting)

    async def tick() -> None:
        while True:
            started = time.perf_counter()
            await asyncio.sleep(0.01)
            lags.append((time.perf_counter() - started - 0.01) * 1000)

    ticker = asyncio.create_task(tick())
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.readline():
        print(json.dumps({"lags": lags, "pauses": pauses, "loop_cpu_s": time.thread_time()}), flush=True)
        gc.collect()
        await asyncio.sleep(0)
        lags.clear()
        pauses.clear()
    ticker.cancel()


def poll(port: int, path: str) -> None:
    """Asks for a server's health every 50 ms until stdin closes; prints the times and how late its own timer was."""
    times, late = [], []
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    os.set_blocking(0, False)
    print("polling", flush=True)
    while True:
        try:
            if os.read(0, 1) == b"":
                break
        except BlockingIOError:
            pass
        started = time.perf_counter()
        time.sleep(0.05)
        late.append((time.perf_counter() - started - 0.05) * 1000)
        started = time.perf_counter()
        connection.request("GET", path)
        connection.getresponse().read()
        times.append((time.perf_counter() - started) * 1000)
    print(json.dumps({"times": times, "late": late}))


# -- starting them ----------------------------------------------------------------------------------------------------


def our_python() -> Path:
    """The interpreter of the environment of the chat proxy's tests, made if need be."""
    if given := os.environ.get("BENCH_PROXY_PYTHON"):
        return Path(given)
    sys.path[:0] = [str(ROOT / "tests" / "proxy")]
    import setup_proxy

    try:
        return Path(setup_proxy.ensure(setup_proxy.INTO))
    except setup_proxy.setup_env.SetupError as error:
        raise SystemExit(str(error)) from None


def peers_python() -> Path:
    """The interpreter of a virtual environment with ``PEERS``, made once."""
    if given := os.environ.get("BENCH_PROXY_PEERS_PYTHON"):
        return Path(given)
    folder = ENVIRONMENTS / "peers"
    stamp = folder / ".packages"
    if not stamp.exists() or stamp.read_text() != repr(PEERS):
        shutil.rmtree(folder, ignore_errors=True)
        print(f"making {folder} with {', '.join(PEERS)}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        install = [folder / "bin" / "python", "-m", "pip", "install", "-q", *PEERS]
        done = subprocess.run(install, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(PEERS)} can't be installed: {done.stderr.strip().splitlines()[-1]}")
        stamp.write_text(repr(PEERS))
    return folder / "bin" / "python"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def pinned(core: int) -> list[str]:
    return ["taskset", "-c", str(core)] if shutil.which("taskset") and (os.cpu_count() or 1) > 1 else []


@contextmanager
def running(command: list[Any], core: int, **options: Any) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([*pinned(core), *map(str, command)], text=True, start_new_session=True, **options)
    try:
        yield process
    finally:
        try:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(10)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@dataclass
class Target:
    """A server under load.

    Attributes:
        url, headers: of a session's calls, by its number.
        pids: whose memory and time count.
        statistics: the chat proxy's own.
    """

    name: str
    port: int
    health: str
    url: Callable[[int], str]
    headers: Callable[[int], dict[str, str]]
    pids: list[int]
    statistics: Callable[[], dict[str, Any]] | None = None

    def memory_mb(self) -> float:
        return sum(_status(pid, "VmRSS") for pid in self.pids) / 1024

    def cpu_s(self) -> float:
        total = 0
        for pid in self.pids:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
        return total / os.sysconf("SC_CLK_TCK")


def busy_s(core: int) -> float:
    """For how long a core has worked, on whatever."""
    fields = next(
        line for line in Path("/proc/stat").read_text().splitlines() if line.startswith(f"cpu{core} ")
    ).split()
    user, nice, system, _, _, irq, softirq, *_ = map(int, fields[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _status(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


class NotServing(Exception):
    """A server isn't there in time; says which."""


def _wait_for(port: int, path: str, process: subprocess.Popen[str], timeout_s: float = 300) -> None:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end and process.poll() is None:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", path)
            if connection.getresponse().status == 200:
                return
        except OSError:
            time.sleep(0.2)
    raise NotServing(f"{process.args!r} did not come up")


@contextmanager
def upstream(ours: Path, delay_s: float) -> Iterator[tuple[int, int]]:
    """The scripted server: its port and process id."""
    port = free_port()
    with running([ours, HERE, "--role", "upstream", "--port", port, "--delay", delay_s], 0) as process:
        _wait_for(port, "/health", process)
        yield port, process.pid


@contextmanager
def target(
    name: str, options: argparse.Namespace, sessions: int, delay_s: float = 0.0, chunks: int = 1
) -> Iterator[Target]:
    """The server of that name, started afresh."""
    ours = our_python()
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="bench-proxy-") as scratch:
        if name == "chat proxy":
            command = [ours, HERE, "--role", "ours", "--port", port, "--tree", options.tree, "--archive", scratch]
            command += ["--delay", delay_s, "--chunks", chunks, "--sessions", sessions]
            with running(command, 1, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
                assert process.stdin is not None and process.stdout is not None
                line = process.stdout.readline()
                if not line:
                    raise SystemExit("the chat proxy did not start")
                opened = json.loads(line)

                def ask() -> dict[str, Any]:
                    assert process.stdin is not None and process.stdout is not None
                    process.stdin.write("\n")
                    process.stdin.flush()
                    return dict(json.loads(process.stdout.readline()))

                yield Target(
                    name,
                    port,
                    "/health",
                    lambda number: f"{opened[number][0]}/chat/completions",
                    lambda number: {"Authorization": f"Bearer {opened[number][1]}"},
                    [process.pid],
                    ask,
                )
            return
        with upstream(ours, delay_s) as (below, pid):
            if name == "bare server":
                yield Target(
                    name,
                    below,
                    "/health",
                    lambda number: f"http://127.0.0.1:{below}/v1/chat/completions",
                    lambda number: {},
                    [pid],
                )
                return
            peers = peers_python().parent
            if name.startswith("rllm"):
                store = name.split()[-1]
                command = [peers / "rllm-model-gateway", "--host", "127.0.0.1", "--port", port, "--store", store]
                command += ["--worker", f"http://127.0.0.1:{below}/v1", "--log-level", "warning"]
                command += ["--db-path", f"{scratch}/traces.db"]
                path = "/sessions/s{}/v1/chat/completions"
                health, environment = "/health", dict(os.environ)
            else:
                config = Path(scratch) / "litellm.yaml"
                model = {"model": "hosted_vllm/m", "api_base": f"http://127.0.0.1:{below}/v1", "api_key": "none"}
                config.write_text(json.dumps({"model_list": [{"model_name": "m", "litellm_params": model}]}))
                command = [peers / "litellm", "--config", config, "--port", port, "--host", "127.0.0.1"]
                command += ["--num_workers", 1, "--telemetry", "False"]
                path, health = "/v1/chat/completions", "/health/liveliness"
                environment = {
                    **os.environ,
                    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
                    "LITELLM_LOG": "ERROR",
                    "LITELLM_MASTER_KEY": KEY,
                }
            log = (Path(scratch) / "log").open("w")
            with log, running(command, 1, env=environment, stdout=log, stderr=log) as process:
                _wait_for(port, health, process)
                yield Target(
                    name,
                    port,
                    health,
                    lambda number: f"http://127.0.0.1:{port}{path.format(number)}",
                    lambda number: {"Authorization": f"Bearer {KEY}"},
                    [process.pid],
                )


# -- the load ---------------------------------------------------------------------------------------------------------


class Conversation:
    """One agent's history as the bytes of its JSON: what a turn costs here is what is new in it."""

    def __init__(self, number: int, turn_tokens: int) -> None:
        self._rng = random.Random(number)
        self._new = max(16, turn_tokens - ANSWER_TOKENS - 16)
        self._parts: list[bytes] = []
        self._say("system", f"You are agent {number}. " + self._text(200))
        self._say("user", self._text(self._new))

    def _text(self, tokens: int) -> str:
        return " ".join(self._rng.choices(WORDS, k=tokens))

    def _say(self, role: str, text: str) -> None:
        self._parts.append(json.dumps({"role": role, "content": text}).encode())

    def body(self) -> bytes:
        return b'{"model": "m", "max_tokens": 256, "messages": [' + b", ".join(self._parts) + b"]}"

    def answered(self, text: str) -> None:
        self._say("assistant", text)
        self._say("user", self._text(self._new))


@dataclass
class Load:
    """What one load measured; times in milliseconds, by turn."""

    turns: list[list[float]] = field(default_factory=list)
    seconds: float = 0.0
    failed: int = 0
    health: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    loop_cpu_s: float = 0.0
    cpu_s: float = 0.0
    others: float = 0.0
    memory_before: float = 0.0
    memory_after: float = 0.0
    body_bytes: int = 0
    prepared: list[tuple[float, int]] = field(default_factory=list)

    @property
    def calls(self) -> int:
        return sum(map(len, self.turns))

    @property
    def all(self) -> list[float]:
        return [value for turn in self.turns for value in turn]


def quantile(values: list[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))] if values else float("nan")


async def put_load(
    on: Target, sessions: int, turns: int, turn_tokens: int, engine_s: float = 0.0, think_s: float = 0.0
) -> Load:
    """Has ``sessions`` agents talk; of a single one, ``prepared`` gets the chat proxy's own figures at every turn."""
    import aiohttp

    load = Load(turns=[[] for _ in range(turns)])
    command = [sys.executable, HERE, "--role", "poll", "--port", on.port, "--path", on.health]
    loop_cpu_s = on.statistics()["loop_cpu_s"] if on.statistics is not None else 0.0
    core = 1 if pinned(1) else 0
    began, busy = time.perf_counter(), busy_s(core)
    load.memory_before, cpu = on.memory_mb(), on.cpu_s()
    conversations = [Conversation(number, turn_tokens) for number in range(sessions)]
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=600)
    with running(command, 0, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as poller:
        assert poller.stdin is not None and poller.stdout is not None
        poller.stdout.readline()
        await asyncio.sleep(0.3)  # some figures without load, too
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client:

            async def agent(number: int) -> None:
                conversation = conversations[number]
                url = on.url(number)
                headers = {**on.headers(number), "Content-Type": "application/json"}
                if think_s:
                    await asyncio.sleep((engine_s + think_s) * number / sessions)
                for turn in range(turns):
                    body = conversation.body()
                    started = time.perf_counter()
                    async with client.post(url, data=body, headers=headers) as response:
                        raw = await response.read()
                    took = (time.perf_counter() - started - engine_s) * 1000
                    if response.status != 200:
                        load.failed += 1
                        if load.failed == 1:
                            print(f"{on.name}: {response.status} {raw[:300]!r}", file=sys.stderr)
                        return
                    load.turns[turn].append(took)
                    load.body_bytes = max(load.body_bytes, len(body))
                    conversation.answered(json.loads(raw)["choices"][0]["message"]["content"])
                    if sessions == 1 and on.statistics is not None:
                        load.prepared.append(prepared(on.port))
                    if think_s:
                        await asyncio.sleep(think_s)

            started = time.perf_counter()
            await asyncio.gather(*map(agent, range(sessions)))
            load.seconds = time.perf_counter() - started
        poller.stdin.close()
        polled = json.loads(poller.stdout.readline())
    load.health, load.late = polled["times"], polled["late"]
    load.cpu_s = on.cpu_s() - cpu
    load.others = max(0.0, busy_s(core) - busy - load.cpu_s) / (time.perf_counter() - began)
    if on.statistics is not None:
        figures = on.statistics()
        load.lags, load.pauses = figures["lags"], figures["pauses"]
        load.loop_cpu_s = figures["loop_cpu_s"] - loop_cpu_s
        on.statistics()  # what it collected is free now
    load.memory_after = on.memory_mb()
    return load


def prepared(port: int) -> tuple[float, int]:
    """Milliseconds from bodies to prompt ids, and for how many calls, as the chat proxy counts them."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    values = {name: value for name, _, value in (line.rpartition(" ") for line in lines) if name[:1] != "#"}
    name = "chat_proxy_prepare_seconds"
    return float(values[f"{name}_sum"]) * 1000, int(float(values[f"{name}_count"]))


def between(first: tuple[float, int], last: tuple[float, int]) -> float:
    return (last[0] - first[0]) / max(1, last[1] - first[1])


# -- the report -------------------------------------------------------------------------------------------------------

PEER_NAMES = ("rllm memory", "rllm sqlite", "litellm")
NAMES = ("bare server", "chat proxy", *PEER_NAMES)
CLOSED_LOOP = (("calls_per_s", max), ("p99", min), ("health_p99", min))


LOADS = ("alone", "together", "long", "grown")


def measure(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name in options.only or NAMES:
        found[name] = {}
        for load, run in (("alone", alone), ("together", together), ("long", long), ("grown", grown)):
            if load in (options.loads or LOADS) and (load != "grown" or name == "chat proxy"):
                print(f"{name}: {load} ...", file=sys.stderr, flush=True)
                try:
                    found[name][load] = run(name, options)
                except NotServing as error:
                    print(f"{name}: {load}: {error}", file=sys.stderr)
    return found


def _warm_up(on: Target, number: int) -> None:
    """Fills caches and opens connections with a session of its own."""
    asyncio.run(put_load(_numbered(on, number), 1, 3, 800))


def alone(name: str, options: argparse.Namespace) -> dict[str, Any]:
    with target(name, options, 2) as on:
        _warm_up(on, 1)
        load = asyncio.run(put_load(on, 1, 20, 840))
    return {"p50": quantile(load.all, 0.5), "p99": quantile(load.all, 0.99)} | _common(load)


def together(name: str, options: argparse.Namespace) -> dict[str, Any]:
    sessions, turns = (16, 10) if options.quick else (64, 20)
    with target(name, options, sessions + 1) as on:
        _warm_up(on, sessions)
        load = asyncio.run(put_load(on, sessions, turns, 840))
    return {
        "calls_per_s": load.calls / load.seconds,
        "p50": quantile(load.all, 0.5),
        "p99": quantile(load.all, 0.99),
        "cpu_ms_per_call": load.cpu_s / max(1, load.calls) * 1000,
        "memory_growth_mb": load.memory_after - load.memory_before,
    } | _common(load)


def long(name: str, options: argparse.Namespace) -> dict[str, Any]:
    turns = 30 if options.quick else 100
    with target(name, options, 2) as on:
        # A first trajectory of full length, so that only the second one's memory is counted.
        asyncio.run(put_load(_numbered(on, 1), 1, turns, TURN_TOKENS))
        load = asyncio.run(put_load(on, 1, turns, TURN_TOKENS))
    early = [value for turn in load.turns[8:13] for value in turn]
    late = [value for turn in load.turns[-5:] for value in turn]
    return {
        "turn_10": statistics.median(early) if early else None,
        "turn_last": statistics.median(late) if late else None,
        "ratio": statistics.median(late) / statistics.median(early) if late and early else None,
        "prepare_10": between(load.prepared[7], load.prepared[12]) if load.prepared else None,
        "prepare_last": between(load.prepared[-6], load.prepared[-1]) if load.prepared else None,
        "memory_mb": load.memory_after - load.memory_before,
        "last_body_kb": load.body_bytes / 1000,
    } | _common(load)


def grown(name: str, options: argparse.Namespace) -> dict[str, Any]:
    sessions = options.sessions or (32 if options.quick else 256)
    turns = options.turns or (20 if options.quick else 100)
    with target(name, options, sessions, options.engine_s, options.chunks) as on:
        load = asyncio.run(put_load(on, sessions, turns, 128_000 // turns, options.engine_s, options.think_s))
        total, count = prepared(on.port)
    return {
        "sessions": sessions,
        "turns": turns,
        "calls_per_s": load.calls / load.seconds,
        "p50": quantile(load.all, 0.5),
        "p99": quantile(load.all, 0.99),
        "lag_p50": quantile(load.lags, 0.5),
        "lag_p99": quantile(load.lags, 0.99),
        "lag_max": max(load.lags, default=None),
        "collector_max": max(load.pauses, default=None),
        "collector_share": sum(load.pauses) / 1000 / load.seconds,
        "cpu_ms_per_call": load.cpu_s / max(1, load.calls) * 1000,
        "loop_ms_per_call": load.loop_cpu_s / max(1, load.calls) * 1000,
        "memory_mb_per_trajectory": (load.memory_after - load.memory_before) / sessions,
        "last_turns_p50": quantile([value for turn in load.turns[-5:] for value in turn], 0.5),
        "prepare_ms": total / count,
    } | _common(load)


def _numbered(on: Target, shift: int) -> Target:
    """The target with other session numbers."""
    return dataclasses.replace(on, url=lambda n: on.url(n + shift), headers=lambda n: on.headers(n + shift))


def _common(load: Load) -> dict[str, Any]:
    return {
        "failed": load.failed,
        "health_p50": quantile(load.health, 0.5),
        "health_p99": quantile(load.health, 0.99),
        "noise_p99": quantile(load.late, 0.99),
        "others": load.others,
    }


def targets(found: dict[str, dict[str, Any]]) -> list[tuple[str, bool, bool]]:
    """(what, met, measured on a quiet machine) for what was measured."""
    ours = found.get("chat proxy")
    if ours is None:
        return []
    result = []

    def check(what: str, met: bool, *loads: dict[str, Any]) -> None:
        result.append((what, met, all(load["noise_p99"] < NOISE_MS and load["others"] < OTHERS for load in loads)))

    if "grown" in ours:
        mine = ours["grown"]
        check(f"grown: event-loop lag p99 {mine['lag_p99']:.1f} ms < 50 ms", mine["lag_p99"] < 50, mine)
        check(f"grown: /health p99 {mine['health_p99']:.1f} ms < 50 ms", mine["health_p99"] < 50, mine)
    if "long" in ours:
        mine = ours["long"]
        ratio = mine["prepare_last"] / mine["prepare_10"]
        check(f"long: prompt ids of the last turn at {ratio:.2f} x turn 10, at most 1.5", ratio <= 1.5, mine)
        check(f"long: the last turn at {mine['ratio']:.2f} x turn 10, at most 1.5", mine["ratio"] <= 1.5, mine)
    for name, load, figure, better in (
        *((peer, "alone", figure, min) for peer in PEER_NAMES for figure in ("p50", "p99")),
        *((peer, "together", figure, better) for peer in PEER_NAMES for figure, better in CLOSED_LOOP),
        ("rllm memory", "long", "memory_mb", min),  # the others keep no trajectory in memory
    ):
        if load in ours and load in found.get(name, {}):
            mine, its = ours[load], found[name][load]
            values = mine[figure], its[figure]
            what = f"{load}: {figure} {values[0]:.1f}, {name} {values[1]:.1f}"
            check(what, better(values) == values[0], mine, its)
    return result


def show(found: dict[str, dict[str, Any]]) -> None:
    rows = [
        ("alone: p50 ms", "alone", "p50"),
        ("alone: p99 ms", "alone", "p99"),
        ("together: calls/s", "together", "calls_per_s"),
        ("together: p50 ms", "together", "p50"),
        ("together: p99 ms", "together", "p99"),
        ("together: CPU ms/call", "together", "cpu_ms_per_call"),
        ("together: /health p99 ms", "together", "health_p99"),
        ("together: memory growth MB", "together", "memory_growth_mb"),
        ("long: turn 10 ms", "long", "turn_10"),
        ("long: last turn ms", "long", "turn_last"),
        ("long: last / 10", "long", "ratio"),
        ("long: prompt ids, turn 10 ms", "long", "prepare_10"),
        ("long: prompt ids, last ms", "long", "prepare_last"),
        ("long: memory growth MB", "long", "memory_mb"),
        ("noise: worst timer p99 ms", "", "noise_p99"),
        ("others: most of the core", "", "others"),
    ]
    print(f"{'':30}" + "".join(f"{name:>14}" for name in found))
    for title, load, figure in rows:
        values = []
        for measured in found.values():
            if load:
                value = measured.get(load, {}).get(figure)
            else:
                value = max((each[figure] for each in measured.values()), default=None)
            values.append("-" if value is None else f"{value:.2f}" if value < 100 else f"{value:.0f}")
        print(f"{title:30}" + "".join(f"{value:>14}" for value in values))
    if grown := found.get("chat proxy", {}).get("grown"):
        print(f"\n{grown['sessions']} sessions of {grown['turns']} turns on the chat proxy:")
        for name, value in grown.items():
            print(f"  {name:26} {value:.2f}" if isinstance(value, float) else f"  {name:26} {value}")
    print()
    for what, met, quiet in targets(found):
        print(f"{'ok  ' if met else 'MISS'} {what}{'' if quiet else '   (not on a quiet machine)'}")


def default_tree() -> Path:
    if listed := os.environ.get("PATCHED_VERL_TREES"):
        return Path(listed.split(":")[0])
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tool")]
    import trees

    for pin in trees.PROJECT.pins.of("verl"):
        try:
            return Path(trees.applied(pin))
        except trees.Unavailable:
            continue
    raise SystemExit("no patched tree of verl can be had here")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small loads: a minute or two, for a first look")
    parser.add_argument("--only", nargs="+", choices=NAMES)
    parser.add_argument("--loads", nargs="+", choices=LOADS)
    parser.add_argument("--tree", type=Path, help="a patched tree of verl")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sessions", type=int, help="sessions of `grown`")
    parser.add_argument("--turns", type=int, help="turns of `grown`, to 128k tokens in all")
    parser.add_argument("--engine-s", type=float, default=2.0)
    parser.add_argument("--think-s", type=float, default=3.0)
    parser.add_argument("--chunks", type=int, default=8, help="pieces in which the engine of `grown` streams")
    parser.add_argument("--role", choices=("upstream", "ours", "poll"), help=argparse.SUPPRESS)
    for name, kind in (("port", int), ("delay", float), ("path", str), ("archive", Path)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == "upstream":
        asyncio.run(serve_upstream(options.port, options.delay))
    elif options.role == "ours":
        asyncio.run(
            serve_ours(options.tree, options.port, options.delay, options.chunks, options.sessions, options.archive)
        )
    elif options.role == "poll":
        poll(options.port, options.path)
    if options.role:
        return 0
    python = our_python()
    if Path(sys.executable) != python and "BENCH_PROXY_INSIDE" not in os.environ:
        # The load needs aiohttp too.
        os.environ["BENCH_PROXY_INSIDE"] = "1"
        tree = [] if options.tree else ["--tree", str(default_tree())]
        return subprocess.run([python, HERE, *sys.argv[1:], *tree]).returncode
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers are ended, too
    options.tree = (options.tree or default_tree()).absolute()
    if pin := pinned(0):
        os.sched_setaffinity(0, {int(pin[-1])})
    found = measure(options)
    show(found)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(any(not met and quiet for _, met, quiet in targets(found)))


if __name__ == "__main__":
    sys.exit(main())
