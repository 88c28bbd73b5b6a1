"""The server's life, its routes, and the walls between sessions."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import socket
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from serving import Reply, asynchronous, byte_tokenizer, serve, until

USER = [{"role": "user", "content": "hi"}]
BODY = {"messages": USER, "max_tokens": 20}


@asynchronous
async def test_it_listens_on_loopback_at_any_free_port_and_says_where() -> None:
    async with serve() as served:
        match = re.fullmatch(r"http://127\.0\.0\.1:(\d+)", served.proxy.url)
        assert match and int(match[1]) == served.proxy.port > 0
        assert served.proxy.ready
        environment = served.proxy.environment(served.session)
        assert environment["ANTHROPIC_BASE_URL"] == f"{served.proxy.url}/sess/{served.session.id}"
        assert environment["OPENAI_API_BASE"] == f"{served.proxy.url}/sess/{served.session.id}/v1"
        assert environment["OPENAI_API_KEY"] == environment["ANTHROPIC_API_KEY"] == served.session.token


def _free_ports() -> tuple[int, int]:
    """Two neighbouring ports that are free now."""
    for _ in range(50):
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = int(one.getsockname()[1])
            with socket.socket() as other:
                try:
                    other.bind(("127.0.0.1", port + 1))
                except OSError:
                    continue
                return port, port + 1
    pytest.skip("no two neighbouring ports are free")


@asynchronous
async def test_a_port_range_is_used_in_order_and_its_end_is_an_error_that_says_so() -> None:
    ports = _free_ports()
    async with serve(ports=ports) as first, serve(ports=ports) as second:
        assert (first.proxy.port, second.proxy.port) == ports
        with pytest.raises(OSError, match=f"no free port from {ports[0]} to {ports[1]} on 127.0.0.1; widen the range"):
            async with serve(ports=ports):
                pass
    async with serve(ports=ports) as again:
        assert again.proxy.port == ports[0]  # stopping gives the port back


@asynchronous
async def test_the_advertised_host_is_in_the_urls() -> None:
    async with serve(advertised_host="trainer.local") as served:
        assert served.proxy.url == f"http://trainer.local:{served.proxy.port}"
    async with serve(advertised_host="fd00::1") as served:
        assert served.proxy.url == f"http://[fd00::1]:{served.proxy.port}"


@asynchronous
async def test_a_wildcard_is_advertised_as_this_nodes_address(monkeypatch: pytest.MonkeyPatch) -> None:
    ray, util = types.ModuleType("ray"), types.ModuleType("ray.util")
    util.get_node_ip_address = lambda: "10.1.2.3"  # type: ignore[attr-defined]
    ray.util = util  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.util", util)
    async with serve(host="0.0.0.0") as served:
        assert served.proxy.url == f"http://10.1.2.3:{served.proxy.port}"
    async with serve(host="localhost") as served:
        assert served.proxy.url == f"http://localhost:{served.proxy.port}"


@pytest.mark.parametrize("method", ["HEAD", "GET"])
@pytest.mark.parametrize("slash", ["", "/"])
@asynchronous
async def test_the_session_root_answers_probes_without_a_key(method: str, slash: str) -> None:
    async with serve() as served, aiohttp.ClientSession() as http:
        async with http.request(method, served.root + slash) as response:
            assert response.status == 200
            text = await response.text()
            assert served.session.token not in text and served.session.id not in text
        async with http.request(method, f"{served.proxy.url}/sess/unknown{slash}") as response:
            assert response.status == 404
        await served.proxy.close_session(served.session.id)
        async with http.request(method, served.root + slash) as response:
            assert response.status == 410


@asynchronous
async def test_models_are_a_list_for_both_protocols_clients() -> None:
    openai, anthropic = pytest.importorskip("openai"), pytest.importorskip("anthropic")
    async with serve(service={"model": "policy"}) as served, aiohttp.ClientSession() as http:
        async with http.get(f"{served.proxy.url}/v1/models") as response:
            assert [model["id"] for model in (await response.json())["data"]] == ["policy"]
        async with http.get(f"{served.root}/v1/models") as response:
            assert response.status == 401
        base = served.proxy.openai_url(served.session)
        async with openai.AsyncOpenAI(base_url=base, api_key=served.session.token) as client:
            assert [model.id async for model in await client.models.list()] == ["policy"]
        async with anthropic.AsyncAnthropic(base_url=served.root, api_key=served.session.token) as other:
            assert [model.id async for model in await other.models.list()] == ["policy"]
            assert (await other.models.retrieve("claude-opus-4-8")).id == "claude-opus-4-8"


@asynchronous
async def test_health_and_metrics_tell_the_state_and_no_secrets() -> None:
    async with serve() as served, aiohttp.ClientSession() as http:
        async with http.post(served.chat_url, json=BODY, headers=served.bearer) as response:
            assert response.status == 200
        async with http.post(served.messages_url, json=BODY) as response:
            assert response.status == 401
        async with http.get(f"{served.proxy.url}/health") as response:
            assert response.status == 200 and (await response.json())["status"] == "ok"
        async with http.get(f"{served.proxy.url}/metrics") as response:
            assert response.content_type == "text/plain"
            page = await response.text()
    assert served.session.id not in page and served.session.token not in page
    values = prometheus(page)
    call = 'chat_proxy_call_total{outcome="delivered",protocol="openai",stream="false"}'
    assert values[call] == 1 and values["chat_proxy_sessions"] == 1 and values["chat_proxy_turns_in_flight"] == 0
    assert values['chat_proxy_error_total{kind="unauthorized",status="401"}'] == 1
    assert values['chat_proxy_call_seconds_count{protocol="openai",stream="false"}'] == 1
    assert values['chat_proxy_call_seconds_bucket{protocol="openai",stream="false",le="+Inf"}'] == 1


def prometheus(page: str) -> dict[str, float]:
    """The samples of a page of metrics, after its format has been checked."""
    values: dict[str, float] = {}
    typed: dict[str, str] = {}
    for line in page.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in typed and kind in ("counter", "gauge", "histogram")
            typed[name] = kind
        elif not line.startswith("# HELP "):
            match = re.fullmatch(r'([a-z_]+)(\{(?:[a-z_]+="(?:[^"\\\n]|\\.)*",?)+\})? (\S+)', line)
            assert match, line
            name = match[1]
            assert any(
                name == known or (kind == "histogram" and name.startswith(known)) for known, kind in typed.items()
            )
            assert match[1] + (match[2] or "") not in values
            values[match[1] + (match[2] or "")] = float(match[3])
    assert page.endswith("\n")
    return values


def test_metrics_escape_labels_and_count_up_buckets() -> None:
    from verl.experimental.agent_loop.chat_proxy.metrics import Histogram, counter_lines, page

    histogram = Histogram("h_seconds", "x", (0.5, 1.0))
    for value in (0.1, 0.5, 0.7, 99.0):
        histogram.observe(value)
    lines = [*counter_lines("p", {("odd", (("label", 'a"b\\c\nd'),)): 2, ("even", ()): 1}), *histogram.lines()]
    values = prometheus(page(lines))
    assert values['p_odd_total{label="a\\"b\\\\c\\nd"}'] == 2 and values["p_even_total"] == 1
    assert [values[f'h_seconds_bucket{{le="{bound}"}}'] for bound in ("0.5", "1", "+Inf")] == [2, 3, 4]
    assert values["h_seconds_count"] == 4 and values["h_seconds_sum"] == pytest.approx(100.3)


@asynchronous
async def test_no_session_reaches_another() -> None:
    async with serve(["one", "two"]) as served, aiohttp.ClientSession() as http:
        other = served.proxy.open_session()
        assert other.id != served.session.id and other.token != served.session.token
        assert min(len(other.id), len(other.token)) >= 24
        for path in ("v1/chat/completions", "v1/messages", "v1/messages/count_tokens"):
            url = f"{served.root}/{path}"
            for headers in ({"Authorization": f"Bearer {other.token}"}, {"x-api-key": other.token}):
                async with http.post(url, json=BODY, headers=headers) as response:
                    assert response.status == 401
        async with http.post(served.chat_url, json=BODY, headers=served.bearer | {"Idempotency-Key": "k"}) as response:
            assert (await response.json())["choices"][0]["message"]["content"] == "one"
        url = f"{served.proxy.openai_url(other)}/chat/completions"
        headers = {"Authorization": f"Bearer {other.token}", "Idempotency-Key": "k", "x-stainless-retry-count": "1"}
        async with http.post(url, json=BODY, headers=headers) as response:
            assert (await response.json())["choices"][0]["message"]["content"] == "two"  # no replay across sessions
        assert len(served.turns) == 1 and len(other.trajectory.turns) == 1
        await served.proxy.close_session(other.id)
        async with http.post(served.chat_url, json=BODY, headers=served.bearer) as response:
            assert response.status == 200


@asynchronous
async def test_an_unknown_or_ended_session_leaves_nothing_behind() -> None:
    async with serve() as served, aiohttp.ClientSession() as http:
        await served.proxy.close_session(served.session.id)
        for name in (served.session.id, "unknown", "..%2f..", "a" * 3000):
            async with http.post(f"{served.proxy.url}/sess/{name}/v1/messages", json=BODY) as response:
                assert response.status == (410 if name == served.session.id else 404)
        assert served.proxy.service.sessions == 0
        with pytest.raises(KeyError):
            await served.proxy.close_session(served.session.id)


@asynchronous
async def test_closing_a_session_ends_its_running_calls() -> None:
    gate = asyncio.Event()
    async with serve(Reply("never", gate=gate)) as served, aiohttp.ClientSession() as http:
        whole = asyncio.create_task(http.post(served.chat_url, json=BODY, headers=served.bearer))
        stream = asyncio.create_task(
            http.post(served.messages_url, json=BODY | {"stream": True}, headers=served.api_key)
        )
        await until(lambda: served.engine.running == 2)
        trajectory = await served.proxy.close_session(served.session.id)
        assert [(await task).status for task in (whole, stream)] == [410, 410]
        assert served.engine.running == 0
        assert [(turn.state, turn.error) for turn in trajectory.turns] == [("aborted", "ended")] * 2


@asynchronous
async def test_closing_in_the_middle_of_a_stream_is_told_in_the_stream() -> None:
    hold = asyncio.Event()
    async with (
        serve(Reply("some text", hold_at=6, hold=hold)) as served,
        aiohttp.ClientSession() as http,
        http.post(served.messages_url, json=BODY | {"stream": True}, headers=served.api_key) as response,
    ):
        seen = await response.content.readany()
        await served.proxy.close_session(served.session.id)
        text = (seen + await response.read()).decode()
    assert "event: error" in text and "message_stop" not in text


@asynchronous
async def test_draining_lets_running_calls_end_and_starts_none() -> None:
    gate = asyncio.Event()
    async with serve(Reply("ok", gate=gate)) as served, aiohttp.ClientSession() as http:
        running = asyncio.create_task(http.post(served.chat_url, json=BODY, headers=served.bearer))
        await until(lambda: served.engine.running == 1)
        assert not await served.proxy.drain(0.05)
        assert not served.proxy.ready
        async with http.get(f"{served.proxy.url}/health") as response:
            assert response.status == 503
        async with http.post(served.messages_url, json=BODY, headers=served.api_key) as response:
            assert response.status == 529 and response.headers["x-should-retry"] == "true"
        with pytest.raises(RuntimeError, match="shutting down"):
            served.proxy.open_session()
        gate.set()
        assert await served.proxy.drain(5)
        assert (await running).status == 200


@asynchronous
async def test_stopping_ends_what_still_runs_and_may_be_said_twice() -> None:
    async with serve(Reply("never", gate=asyncio.Event()), drain_s=0.05) as served, aiohttp.ClientSession() as http:
        running = asyncio.create_task(http.post(served.chat_url, json=BODY, headers=served.bearer))
        await until(lambda: served.engine.running == 1)
        await served.proxy.stop()
        await served.proxy.stop()
        assert (await running).status == 410
        assert served.engine.running == 0 and not served.proxy.ready
        with pytest.raises(aiohttp.ClientConnectionError):
            await http.get(f"{served.proxy.url}/health")
        assert [turn.state for turn in served.turns] == ["aborted"]  # and the trajectory can still be read


@asynchronous
async def test_many_sessions_at_once_each_get_their_own_answers() -> None:
    def script(number: int, prompt_ids: list[int], params: dict[str, Any]) -> str:
        text = tokenizer.decode(prompt_ids)
        return f"to {text.rpartition('from ')[2].split('<')[0]}"

    tokenizer = byte_tokenizer()
    async with serve(script, tokenizer=tokenizer) as served, aiohttp.ClientSession() as http:

        async def trial(number: int) -> None:
            session = served.proxy.open_session()
            messages: list[dict[str, str]] = []
            for turn in range(3):
                messages.append({"role": "user", "content": f"from {number}.{turn}"})
                url, headers = (
                    f"{served.proxy.openai_url(session)}/chat/completions",
                    {"Authorization": f"Bearer {session.token}"},
                )
                async with http.post(url, json={"messages": messages}, headers=headers) as response:
                    text = (await response.json())["choices"][0]["message"]["content"]
                assert text == f"to {number}.{turn}"
                messages.append({"role": "assistant", "content": text})
            trajectory = await served.proxy.close_session(session.id)
            assert [turn.kind for turn in trajectory.turns] == ["root", "append", "append"]

        await asyncio.gather(*(trial(number) for number in range(40)))
        assert served.proxy.service.sessions == 1


def test_neither_ray_nor_torch_nor_vllm_is_needed_to_import_it(proxy_tree: Path) -> None:
    program = (
        "import sys, json; sys.path.insert(0, sys.argv[1])\n"
        "from bare_import import import_from; from pathlib import Path\n"
        "import_from(Path(sys.argv[2]))\n"
        "import verl.experimental.agent_loop.vllm_chat_completion_proxy\n"
        "print(json.dumps([name for name in ('ray', 'torch', 'vllm', 'zstandard') if name in sys.modules]))"
    )
    command = [sys.executable, "-c", program, str(Path(__file__).parent), str(proxy_tree)]
    run = subprocess.run(command, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"})
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == []


@asynchronous
async def test_the_interpreter_is_tuned_while_it_serves_and_no_longer() -> None:
    before = sys.getswitchinterval(), gc.get_threshold()
    async with serve() as served:
        assert sys.getswitchinterval() == 0.001 and gc.get_threshold() == (20_000, *before[1][1:])
        await served.proxy.stop()
        assert (pytest.approx(sys.getswitchinterval()), gc.get_threshold()) == before
    gc.set_threshold(0)  # the process does without
    try:
        async with serve():
            assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before[1])
