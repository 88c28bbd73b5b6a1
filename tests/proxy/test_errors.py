"""Errors in each provider's own words, and what the real clients make of them."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest
from serving import Reply, Served, asynchronous, serve, until

USER = [{"role": "user", "content": "hi"}]
LONG = [{"role": "user", "content": "long " * 200}]


async def post(served: Served, protocol: str, body: Any = None, **headers: str) -> tuple[int, Any, dict[str, str]]:
    if protocol == "openai":
        url, own = served.chat_url, served.bearer
    else:
        url, own = served.messages_url, served.api_key
    data = {"messages": USER, "max_tokens": 9} if body is None else body
    async with aiohttp.ClientSession() as http, http.post(url, json=data, headers=own | headers) as response:
        return response.status, await response.json(), dict(response.headers)


def _openai(served: Served, **options: Any) -> Any:
    openai = pytest.importorskip("openai")
    return openai.AsyncOpenAI(base_url=served.proxy.openai_url(served.session), api_key=served.session.token, **options)


def _anthropic(served: Served, **options: Any) -> Any:
    anthropic = pytest.importorskip("anthropic")
    return anthropic.AsyncAnthropic(base_url=served.root, api_key=served.session.token, **options)


KINDS = {
    "wrong_token": (401, "invalid_request_error", "invalid_api_key", 401, "authentication_error"),
    "unknown_session": (404, "invalid_request_error", "not_found", 404, "not_found_error"),
    "ended": (410, "invalid_request_error", "session_ended", 410, "invalid_request_error"),
    "too_large": (413, "invalid_request_error", "request_too_large", 413, "request_too_large"),
    "too_many": (429, "rate_limit_error", "rate_limit_exceeded", 429, "rate_limit_error"),
    "overloaded": (503, "server_error", "service_unavailable", 529, "overloaded_error"),
    "internal": (500, "server_error", None, 500, "api_error"),
    "overflow": (400, "invalid_request_error", "context_length_exceeded", 400, "invalid_request_error"),
    "method": (405, "invalid_request_error", "method_not_allowed", 405, "invalid_request_error"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_error_has_both_providers_envelopes(kind: str) -> None:
    from verl.experimental.agent_loop.chat_proxy import provider_errors as errors

    error = {
        "wrong_token": errors.wrong_token(),
        "unknown_session": errors.not_found("This session"),
        "ended": errors.session_ended("the trial is over"),
        "too_large": errors.body_too_large(10),
        "too_many": errors.too_many_calls("slow down", 2.0),
        "overloaded": errors.overloaded("Weights.", 1.5),
        "internal": errors.internal_error(),
        "overflow": errors.context_overflow(10, 9),
        "method": errors.method_not_allowed("PUT", "/x"),
    }[kind]
    status, openai_type, code, anthropic_status, anthropic_type = KINDS[kind]
    openai, anthropic = errors.openai_error(error), errors.anthropic_error(error, "req_1")
    assert (openai.status, openai.body["error"]["type"], openai.body["error"]["code"]) == (status, openai_type, code)
    assert set(openai.body["error"]) == {"message", "type", "param", "code"}
    assert (anthropic.status, anthropic.body["error"]["type"]) == (anthropic_status, anthropic_type)
    assert anthropic.body["type"] == "error" and anthropic.body["request_id"] == "req_1"
    retryable = kind in ("too_many", "overloaded", "internal")
    assert openai.headers["x-should-retry"] == anthropic.headers["x-should-retry"] == str(retryable).lower()
    assert ("Retry-After" in openai.headers) == retryable
    if kind == "overloaded":
        assert (openai.headers["Retry-After"], openai.headers["retry-after-ms"]) == ("2", "1500")


def test_overflow_has_the_words_that_clients_look_for() -> None:
    from verl.experimental.agent_loop.chat_proxy import provider_errors as errors

    error = errors.context_overflow(16500, 16384)
    message = errors.openai_error(error).body["error"]["message"]
    assert "maximum context length is 16384 tokens" in message and "16500 tokens" in message
    said = errors.anthropic_error(error, "r").body["error"]["message"]
    assert said == "prompt is too long: 16500 tokens > 16384 maximum"
    # A prompt of just the context's length is too long as well, and must say so.
    assert (
        errors.anthropic_error(errors.context_overflow(9, 9), "r")
        .body["error"]["message"]
        .endswith("10 tokens > 9 maximum")
    )


@asynchronous
async def test_overflow_is_one_request_and_the_clients_own_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")
    openai, anthropic = pytest.importorskip("openai"), pytest.importorskip("anthropic")
    async with serve(context_limit=300) as served:
        async with _openai(served) as client:
            with pytest.raises(openai.BadRequestError) as told:
                await client.chat.completions.create(model="m", messages=LONG)
        assert told.value.code == "context_length_exceeded"
        async with _anthropic(served) as other:
            with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 300 maximum"):
                await other.messages.create(model="m", max_tokens=5, messages=LONG)
        with pytest.raises(litellm.ContextWindowExceededError):
            await litellm.acompletion(
                model="hosted_vllm/m",
                messages=LONG,
                api_base=served.proxy.openai_url(served.session),
                api_key=served.session.token,
            )
        assert served.count("overflow") == 3 and not served.engine.calls and served.turns == []


@asynchronous
async def test_a_pause_for_new_weights_is_retried_by_the_clients_and_leaves_no_action(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from verl.experimental.agent_loop.chat_proxy import service

    async def once(*args: Any, **kwargs: Any) -> Any:
        from verl.experimental.agent_loop.chat_proxy.errors import EngineAborted

        raise EngineAborted("weights")
        yield

    real = service.stream_resumed
    attempts: list[str] = []

    def stream(*args: Any, **kwargs: Any) -> Any:
        attempts.append(args[1])
        return once() if len(attempts) % 2 else real(*args, **kwargs)

    monkeypatch.setattr(service, "stream_resumed", stream)
    async with serve("ok", service={"retry_after_s": 0.05}) as served:
        async with _openai(served) as client:
            answer = await client.chat.completions.create(model="m", messages=USER)
        async with _anthropic(served) as other:
            message = await other.messages.create(model="m", max_tokens=50, messages=[*USER, *USER])
        status, body, headers = await post(served, "anthropic", {"messages": [*USER] * 3, "max_tokens": 5})
    assert answer.choices[0].message.content == "ok" and message.content[0].text == "ok"
    assert [turn.state for turn in served.turns] == ["aborted", "finished", "aborted", "finished", "aborted"]
    assert status == 529 and body["error"]["type"] == "overloaded_error"
    assert headers["x-should-retry"] == "true" and headers["retry-after-ms"] == "50"


@asynchronous
async def test_an_abort_of_the_engine_is_resumed_and_never_a_finished_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.experimental.agent_loop.chat_proxy import service

    real = service.stream_resumed
    monkeypatch.setattr(service, "stream_resumed", lambda *args, **kwargs: real(*args, wait=0.01, **kwargs))
    async with serve([Reply("first half, ", aborted=True), "second half"]) as served:
        _, body, _ = await post(served, "openai", {"messages": USER})
    assert body["choices"][0]["message"]["content"] == "first half, second half"
    assert body["choices"][0]["finish_reason"] == "stop"
    (first, _), (second, params) = served.engine.calls
    half = served.engine.tokenizer.encode("first half, ", add_special_tokens=False)
    assert second == first + half and params["max_tokens"] == 4096 - len(second)
    (turn,) = served.turns
    assert turn.sampled.tolist()[: len(half)] == half and len(turn.log_probs) == len(turn.sampled)


@asynchronous
async def test_dead_engine_actors_are_worth_a_retry_and_other_failures_tell_nothing() -> None:
    RayActorError = type("RayActorError", (Exception,), {})
    errors = [ConnectionResetError("10.0.0.7"), RayActorError("node 10.0.0.7 died"), ValueError("/secret/path: boom")]
    async with serve([Reply(error=error) for error in errors]) as served:
        gone, _, _ = await post(served, "anthropic")
        assert gone == 529
        dead, dead_body, dead_headers = await post(served, "openai", {"messages": USER})
        broken, broken_body, _ = await post(served, "openai", {"messages": [*USER, *USER]})
    assert dead == 503 and dead_headers["x-should-retry"] == "true"
    assert broken == 500
    said = json.dumps([dead_body, broken_body])
    assert "10.0.0.7" not in said and "secret" not in said and "Traceback" not in said


@asynchronous
async def test_an_ended_session_is_410_at_once_and_nobody_retries() -> None:
    openai, anthropic = pytest.importorskip("openai"), pytest.importorskip("anthropic")
    async with serve() as served:
        await served.proxy.close_session(served.session.id)
        async with _openai(served) as client:
            with pytest.raises(openai.APIStatusError) as told:
                await client.chat.completions.create(model="m", messages=USER)
        async with _anthropic(served) as other:
            with pytest.raises(anthropic.APIStatusError) as said:
                await other.messages.create(model="m", max_tokens=5, messages=USER)
        assert told.value.status_code == said.value.status_code == 410
        assert served.count("error", kind="ended") == 2  # one request each
        assert served.proxy.service.sessions == 0  # and no session came back to life


@pytest.mark.parametrize("protocol", ["openai", "anthropic"])
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": "Bearer wrong", "x-api-key": "wrong"}, 401),
        ({"Authorization": "Basic abc", "x-api-key": ""}, 401),
        ({"Authorization": "", "x-api-key": ""}, 401),
        ({"Authorization": "Bearer é", "x-api-key": "é"}, 401),
    ],
)
@asynchronous
async def test_a_wrong_token_is_401_and_reads_nothing(protocol: str, headers: dict[str, str], status: int) -> None:
    async with serve() as served:
        got, body, _ = await post(served, protocol, None, **headers)
        assert got == status and not served.turns
        kind = body["error"]["code"] if protocol == "openai" else body["error"]["type"]
        assert kind == ("invalid_api_key" if protocol == "openai" else "authentication_error")
        assert served.session.token not in json.dumps(body)


ODD_BODIES = [
    b"",
    b"null",
    b"7",
    b"[]",
    b'"text"',
    b"{",
    b"\xff\xfe{}",
    b"{}",
    b'{"messages": null}',
    b'{"messages": [null]}',
    b'{"messages": {"role": "user"}}',
    b'{"messages": [{"role": ["user"], "content": "x"}]}',
    b'{"messages": [{"role": "user", "content": {"a": 1}}], "max_tokens": 5}',
    b'{"messages": [{"role": "user", "content": [null]}], "max_tokens": 5}',
    b'{"messages": [{"role": "user", "content": [{"type": ["text"]}]}], "max_tokens": 5}',
    b'{"messages": [{"role": "user", "content": [{"type": "image", "source": 3}]}], "max_tokens": 5}',
    b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": 3}]}], "max_tokens": 5}',
    b'{"messages": [{"role": "assistant", "tool_calls": {"a": 1}}], "max_tokens": 5}',
    b'{"messages": [{"role": "assistant", "tool_calls": [7]}], "max_tokens": 5}',
    b'{"messages": [{"role": "tool", "content": "r"}], "max_tokens": 5}',
    b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1e400}',
    b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": NaN}',
    b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "temperature": NaN}',
    b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "temperature": Infinity}',
    b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "tools": [{"function": 3}]}',
    b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "tools": [{"name": 3, "input_schema": {}}]}',
    b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "tool_choice": 3}',
    b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "stop": 3, "stop_sequences": 3}',
    b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "modalities": 3}',
    b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "response_format": 3, "output_config": 3}',
    b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "output_config": {"format": 3}}',
    b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "system": {"a": 1}}',
    b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "system": [null]}',
    b'{"messages": [{"role": "user", "content": "\\ud800 lone"}], "max_tokens": 5}',
    b'{"messages": [{"role": "user", "content": "\\udc00", "\\ud800": 1}], "max_tokens": 5, "model": "\\ud800"}',
    b'{"messages": [{"role": "user", "content": "<|im_end|>\\u0000"}], "max_tokens": 5}',
    b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "n": [1], "stream_options": []}',
    b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "seed": 99999999999999999999999}',
    b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "tools": '
    + b'{"a":' * 900
    + b"1"
    + b"}" * 900
    + b"}",
    b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "tools": [{"name": "f", "input_schema": '
    + b'{"a":' * 500
    + b"1"
    + b"}" * 500
    + b"}]}",
    b'{"max_tokens": 5, "messages": [{"role": "user", "content": "'
    + b"9" * 5000
    + b'"}], "top_k": '
    + b"9" * 5000
    + b"}",
]


@pytest.mark.parametrize("protocol", ["openai", "anthropic"])
@pytest.mark.parametrize("path", ["", "/count_tokens"])
@asynchronous
async def test_no_body_crashes_the_server_or_leaks_a_traceback(protocol: str, path: str) -> None:
    if protocol == "openai" and path:
        return
    async with serve(context_limit=20_000) as served, aiohttp.ClientSession() as http:
        url = served.chat_url if protocol == "openai" else served.messages_url + path
        headers = (served.bearer if protocol == "openai" else served.api_key) | {"Content-Type": "application/json"}
        for body in ODD_BODIES:
            async with http.post(url, data=body, headers=headers) as response:
                text = await response.text()
                assert response.status in (200, 400), (body[:200], response.status, text)
                assert "Traceback" not in text and 'File "' not in text
                told = json.loads(text)
                if response.status == 400:
                    assert told["error"]["type"] == "invalid_request_error" and told["error"]["message"], body[:200]
        async with http.get(f"{served.proxy.url}/health") as response:
            assert response.status == 200
        assert served.proxy.service.in_flight == 0
        assert all(turn.state == "finished" for turn in served.turns)


@asynchronous
async def test_paths_and_methods_that_are_not_there_keep_the_envelope() -> None:
    async with serve() as served, aiohttp.ClientSession() as http:
        async with http.get(served.chat_url) as response:
            assert response.status == 405
            assert (await response.json())["error"]["code"] == "method_not_allowed"
        async with http.post(f"{served.root}/v1/nothing", json={}, headers=served.bearer) as response:
            assert response.status == 404 and (await response.json())["error"]["code"] == "not_found"
        async with http.post(f"{served.root}/v1/nothing", json={}, headers=served.api_key) as response:
            assert response.status == 404 and (await response.json())["error"]["type"] == "not_found_error"
        async with http.post(
            f"{served.proxy.url}/sess/guessed/v1/messages", json={}, headers=served.api_key
        ) as response:
            assert response.status == 404 and (await response.json())["error"]["type"] == "not_found_error"


@asynchronous
async def test_a_client_that_overflows_for_ever_is_stopped_and_its_trajectory_kept() -> None:
    """OpenCode compacts and overflows in a circle: 80 requests in 75 s, if nobody stops it."""
    from verl.experimental.agent_loop.chat_proxy.limits import Limits

    async with serve(context_limit=300, service={"limits": Limits(overflows_in_a_row=3)}) as served:
        await post(served, "openai", {"messages": USER})
        statuses = [(await post(served, "openai", {"messages": LONG}))[0] for _ in range(5)]
        _, body, headers = await post(served, "openai", {"messages": USER})
        assert statuses == [400, 400, 400, 410, 410]
        assert body["error"]["code"] == "session_ended" and headers["x-should-retry"] == "false"
        assert "context length" not in body["error"]["message"] and "too long" not in body["error"]["message"]
        assert served.session.stop_reason == "overlong" and served.session.stopped.is_set()
        trajectory = await served.proxy.close_session(served.session.id)
        assert [turn.state for turn in trajectory.turns] == ["finished"]


@asynchronous
async def test_a_summary_between_two_overflows_does_not_reset_the_count() -> None:
    """What OpenCode 1.18 does: its summarizing agent gets its answer, the next prompt is as long as before."""
    from verl.experimental.agent_loop.chat_proxy.limits import Limits

    summary = [{"role": "system", "content": "You are a context summarization agent. You are given ..."}, *USER]
    async with serve(context_limit=300, service={"limits": Limits(overflows_in_a_row=3)}) as served:
        statuses = []
        for _ in range(4):
            statuses.append((await post(served, "openai", {"messages": LONG}))[0])
            statuses.append((await post(served, "openai", {"messages": summary}))[0])
    assert statuses == [400, 200, 400, 200, 400, 410, 410, 410]


@asynchronous
async def test_overflows_with_answers_in_between_are_counted_too() -> None:
    from verl.experimental.agent_loop.chat_proxy.limits import Limits

    limits = Limits(overflows_in_a_row=3, overflows=4)
    async with serve(context_limit=300, service={"limits": limits}) as served:
        for _ in range(4):
            assert (await post(served, "openai", {"messages": LONG}))[0] == 400
            if served.session.stop_reason is None:
                assert (await post(served, "openai", {"messages": USER}))[0] == 200
        assert served.session.stop_reason == "overlong"


@asynchronous
async def test_a_session_may_have_a_number_of_calls() -> None:
    from verl.experimental.agent_loop.chat_proxy.limits import Limits

    async with serve(service={"limits": Limits(calls=2)}) as served:
        statuses = [(await post(served, "anthropic"))[0] for _ in range(4)]
        assert statuses == [200, 200, 410, 410] and served.session.stop_reason == "max_calls"
        await until(lambda: served.proxy.service.in_flight == 0)
