"""The OpenAI chat API, through the real openai and litellm clients and by hand."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from serving import END, Reply, Served, asynchronous, events, serve

USER = [{"role": "user", "content": "hi"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "runs a command",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}, "n": {"type": "integer"}}},
        },
    }
]
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls -l", "n": 1}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "bash", "arguments": {"command": "é🦊", "n": 2}}\n</tool_call>'


@asynccontextmanager
async def client(served: Served, **options: Any) -> AsyncIterator[Any]:
    openai = pytest.importorskip("openai")
    async with openai.AsyncOpenAI(
        base_url=served.proxy.openai_url(served.session), api_key=served.session.token, **options
    ) as found:
        yield found


async def post(served: Served, body: Any, **headers: str) -> tuple[int, Any, dict[str, str]]:
    async with (
        aiohttp.ClientSession() as http,
        http.post(served.chat_url, json=body, headers=served.bearer | headers) as response,
    ):
        text = await response.text()
        is_json = response.content_type == "application/json"
        return response.status, json.loads(text) if is_json else events(text), dict(response.headers)


@asynchronous
async def test_an_answer_has_its_text_its_usage_and_no_stop_token() -> None:
    async with serve("hello 🦊") as served, client(served) as openai:
        answer = await openai.chat.completions.create(model="any-name", messages=USER)
    prompt_ids, params = served.engine.calls[0]
    choice = answer.choices[0]
    assert choice.message.content == "hello 🦊" and choice.finish_reason == "stop"
    assert answer.model == "any-name" and answer.object == "chat.completion"
    assert answer.usage.prompt_tokens == len(prompt_ids)
    assert answer.usage.completion_tokens == len("hello 🦊".encode()) + 1  # and the stop token
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert params["max_tokens"] == 4096 - len(prompt_ids)  # always explicit, though the client sent none
    assert served.turns[0].delivered


@asynchronous
async def test_a_stream_is_role_text_finish_and_done() -> None:
    async with serve("hello") as served:
        status, found, _ = await post(served, {"messages": USER, "stream": True})
    assert status == 200
    data = [body for _, body in found]
    assert data[-1] == "[DONE]" and data.count("[DONE]") == 1
    chunks = data[:-1]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "hello"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


@asynchronous
async def test_usage_is_one_last_chunk_without_choices_if_and_only_if_asked_for() -> None:
    async with serve("hello") as served, client(served) as openai:
        stream = await openai.chat.completions.create(
            model="m", messages=USER, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        plain = await openai.chat.completions.create(model="m", messages=[*USER, *USER], stream=True)
        without = [chunk async for chunk in plain]
    assert [bool(chunk.choices) for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert chunks[-1].usage.completion_tokens == 6
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert all(chunk.choices and chunk.usage is None for chunk in without)


@asynchronous
async def test_tool_calls_have_id_and_name_first_then_arguments_at_a_stable_index() -> None:
    async with serve("I look.\n" + CALL + "\n" + SECOND) as served:
        _, found, _ = await post(served, {"messages": USER, "tools": TOOLS, "stream": True})
    deltas = [body["choices"][0]["delta"] for _, body in found if body != "[DONE]"]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    opened: dict[int, dict[str, Any]] = {}
    for call in calls:
        if call["index"] not in opened:
            assert call["id"].startswith("call_") and call["type"] == "function"
            assert call["function"] == {"name": "bash", "arguments": ""}
            opened[call["index"]] = {"id": call["id"], "arguments": ""}
        else:
            assert "id" not in call and "name" not in call["function"]
            opened[call["index"]]["arguments"] += call["function"]["arguments"]
    assert sorted(opened) == [0, 1] and opened[0]["id"] != opened[1]["id"]
    assert json.loads(opened[0]["arguments"]) == {"command": "ls -l", "n": 1}
    assert json.loads(opened[1]["arguments"]) == {"command": "é🦊", "n": 2}
    assert found[-2][1]["choices"][0]["finish_reason"] == "tool_calls"
    assert "".join(delta.get("content", "") for delta in deltas).strip() == "I look."


@asynchronous
async def test_the_stream_says_what_the_whole_answer_says() -> None:
    text = "<think>\nwhy\n</think>\n\nI look.\n" + CALL
    async with serve(text) as served, client(served) as openai:
        whole = await openai.chat.completions.create(model="m", messages=USER, tools=TOOLS)
        async with openai.chat.completions.stream(model="m", messages=[*USER, *USER], tools=TOOLS) as stream:
            final = await stream.get_final_completion()
    one, other = whole.choices[0], final.choices[0]
    assert one.finish_reason == other.finish_reason == "tool_calls"
    assert one.message.content == other.message.content
    assert one.message.reasoning_content.strip() == "why"
    calls = one.message.tool_calls[0], other.message.tool_calls[0]
    assert calls[0].function.name == calls[1].function.name == "bash"
    assert calls[0].function.arguments == calls[1].function.arguments


@asynchronous
async def test_text_that_only_looks_like_a_call_stays_text() -> None:
    broken = '<tool_call>\n{"name": "bash", "arguments": {"command": }\n</tool_call>'
    async with serve(broken) as served:
        _, body, _ = await post(served, {"messages": USER, "tools": TOOLS})
        _, found, _ = await post(served, {"messages": [*USER, *USER], "tools": TOOLS, "stream": True})
    assert body["choices"][0]["message"]["content"] == broken
    assert "tool_calls" not in body["choices"][0]["message"] and body["choices"][0]["finish_reason"] == "stop"
    deltas = [data["choices"][0]["delta"] for _, data in found if data != "[DONE]"]
    assert "".join(delta.get("content", "") for delta in deltas) == broken


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("n", "two"),
        ("messages", []),
        ("messages", "hi"),
        ("messages", ["hi"]),
        ("max_tokens", 0),
        ("max_tokens", "many"),
        ("max_tokens", True),
        ("temperature", "hot"),
        ("temperature", 5),
        ("temperature", -0.1),
        ("top_p", 0),
        ("stop", [""]),
        ("stop", {"a": 1}),
        ("stream", "yes"),
        ("stream_options", 3),
        ("tools", "bash"),
        ("tools", [{"type": "web_search"}]),
        ("tools", [{"type": "function", "function": {"description": "no name"}}]),
        ("tool_choice", "sometimes"),
        ("messages", [{"role": "wizard", "content": "hi"}]),
        ("messages", [{"role": "user", "content": 7}]),
        ("messages", [{"role": "user", "content": [{"type": "hologram"}]}]),
        ("messages", [{"role": "assistant", "tool_calls": [{"id": "x"}]}]),
    ],
)
@asynchronous
async def test_a_wrong_field_is_an_error_that_names_it(field: str, value: Any) -> None:
    async with serve() as served:
        status, body, headers = await post(served, {"messages": USER} | {field: value})
    assert status == 400 and not served.engine.calls
    assert body["error"]["type"] == "invalid_request_error" and body["error"]["param"] == field
    assert headers["x-should-retry"] == "false"


@asynchronous
async def test_max_tokens_is_clamped_to_the_context_and_a_cut_is_told() -> None:
    async with serve(Reply("x" * 9000, ends=False), context_limit=100) as served, client(served) as openai:
        answer = await openai.chat.completions.create(model="m", messages=USER, max_tokens=32000)
        short = await openai.chat.completions.create(
            model="m", messages=[*USER, *USER], max_tokens=50, max_completion_tokens=7
        )
    prompt_ids, params = served.engine.calls[0]
    assert params["max_tokens"] == 100 - len(prompt_ids)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == 100
    assert served.engine.calls[1][1]["max_tokens"] == 7 and short.choices[0].finish_reason == "length"


@asynchronous
async def test_a_stop_string_ends_the_text_and_is_no_part_of_it() -> None:
    async with serve(Reply("one STOP two", ends=False, finish_reason="stop")) as served:
        _, body, _ = await post(served, {"messages": USER, "stop": "STOP"})
        _, found, _ = await post(served, {"messages": [*USER, *USER], "stop": ["STOP", "never"], "stream": True})
    assert body["choices"][0]["message"]["content"] == "one " and body["choices"][0]["finish_reason"] == "stop"
    deltas = [data["choices"][0]["delta"] for _, data in found if data != "[DONE]"]
    assert "".join(delta.get("content", "") for delta in deltas) == "one "
    assert served.engine.calls[0][1]["stop"] == ["STOP"]


@pytest.mark.parametrize(
    ("owner", "temperature", "top_p"), [("pinned", 0.6, None), ("default", 1.5, None), ("client", 1.5, None)]
)
@asynchronous
async def test_sampling_belongs_to_whom_the_policy_says(owner: str, temperature: float, top_p: float | None) -> None:
    from verl.experimental.agent_loop.chat_proxy.fields import SamplingPolicy

    policy = SamplingPolicy({"temperature": 0.6, "top_k": 20}, owner)
    async with serve(service={"sampling": policy}) as served:
        await post(served, {"messages": USER, "temperature": 1.5})
        await post(served, {"messages": [*USER, *USER]})
    sent, silent = (params for _, params in served.engine.calls)
    assert sent["temperature"] == temperature
    assert sent.get("top_k") == (None if owner == "client" else 20)
    assert silent.get("temperature") == (None if owner == "client" else 0.6)
    assert served.turns[0].request.sampling["temperature"] == temperature  # and it's on record


def test_a_policy_of_nobody_is_refused() -> None:
    from verl.experimental.agent_loop.chat_proxy.fields import SamplingPolicy

    with pytest.raises(ValueError, match="pinned, default or client"):
        SamplingPolicy({}, "nobody")


@asynchronous
async def test_token_ids_and_log_probabilities_are_told_on_request() -> None:
    """What Terminus' client asks for: it keeps its own rollout from them."""
    body = {"messages": USER, "logprobs": True, "return_token_ids": True}
    async with serve("hé") as served:
        _, whole, _ = await post(served, body)
        _, found, _ = await post(served, body | {"stream": True, "messages": [*USER, *USER]})
        _, bare, _ = await post(served, {"messages": [*USER, *USER, *USER]})
    ids = served.engine.tokenizer.encode("hé" + END, add_special_tokens=False)
    choice = whole["choices"][0]
    assert choice["token_ids"] == ids and whole["prompt_token_ids"] == served.engine.calls[0][0]
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [-0.5 - 0.001 * token for token in ids]
    last = found[-2][1]
    assert last["choices"][0]["token_ids"] == ids and last["prompt_token_ids"] == served.engine.calls[1][0]
    assert len(last["choices"][0]["logprobs"]["content"]) == len(ids)
    assert "token_ids" not in bare["choices"][0] and "prompt_token_ids" not in bare
    assert bare["choices"][0]["logprobs"] is None


@asynchronous
async def test_tools_are_hidden_by_tool_choice_none_and_what_is_not_followed_is_said() -> None:
    async with serve("no") as served:
        await post(served, {"messages": USER, "tools": TOOLS, "tool_choice": "none"})
        body = {"messages": USER, "tools": TOOLS, "parallel_tool_calls": False, "logit_bias": {"5": 1}}
        _, _, headers = await post(served, body)
        _, _, quiet = await post(served, {"messages": USER, "response_format": {"type": "text"}, "tool_choice": "auto"})
    texts = [served.engine.tokenizer.decode(ids) for ids, _ in served.engine.calls]
    assert "runs a command" not in texts[0] and "runs a command" in texts[1]
    assert headers["x-proxy-ignored"] == "logit_bias, parallel_tool_calls"
    assert "x-proxy-ignored" not in quiet
    assert served.count("ignored", field="logit_bias") == 1


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "bash"}}}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}}, "response_format"),
        ({"web_search_options": {}}, "web_search_options"),
    ],
)
@asynchronous
async def test_a_promise_that_sampling_cannot_keep_is_refused_or_said_to_be_ignored(
    fields: dict[str, Any], told: str
) -> None:
    openai = pytest.importorskip("openai")
    async with serve() as served, client(served) as sdk:
        with pytest.raises(openai.BadRequestError, match=f"'{told}' is not supported") as refused:
            await sdk.chat.completions.create(model="m", messages=USER, **fields)
        assert (refused.value.param, refused.value.type) == (told, "invalid_request_error")
        assert served.engine.calls == [] and served.turns == []
    async with serve(service={"constraints": "tell"}) as served:
        status, _, headers = await post(served, {"messages": USER, **fields})
    assert (status, headers["x-proxy-ignored"]) == (200, told)
    assert served.count("ignored", field=told) == 1


@pytest.mark.parametrize("theirs", [True, False])
@asynchronous
async def test_the_templates_switches_are_the_clients_only_if_they_are_given_to_it(theirs: bool) -> None:
    """They change the prompt's beginning; the trial's own would not stay append-only if an agent toggled them."""
    from serving import TEMPLATE, byte_tokenizer

    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{{- enable_thinking | default('unset') }}{{- reasoning_effort | default('') }}" + TEMPLATE
    )
    async with serve(tokenizer=tokenizer, service={"client_template_kwargs": theirs}) as served:
        openai = {"messages": USER, "chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "high"}
        anthropic = {"messages": USER, "max_tokens": 9, "thinking": {"type": "adaptive"}}
        await post(served, openai)
        async with (
            aiohttp.ClientSession() as http,
            http.post(served.messages_url, json=anthropic, headers=served.api_key) as response,
        ):
            assert response.status == 200
    texts = [tokenizer.decode(ids).partition("<|im_start|>")[0] for ids, _ in served.engine.calls]
    assert texts == (["Falsehigh", "True"] if theirs else ["unset", "unset"])


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None, "tool_calls": "CALLS"},
        {"role": "assistant", "content": "", "tool_calls": "CALLS"},
        {"role": "assistant", "tool_calls": "CALLS"},
        {"role": "assistant", "content": [], "tool_calls": "CALLS", "refusal": None, "annotations": []},
    ],
)
def test_null_absent_and_empty_content_are_one_message(message: dict[str, Any]) -> None:
    from verl.experimental.agent_loop.chat_proxy.openai_chat import convert

    calls = [{"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"command":  "ls"}'}}]
    (converted,) = convert(message | {"tool_calls": calls})
    (plain,) = convert({"role": "assistant", "content": "", "tool_calls": calls})
    assert converted == plain and converted.text == ""
    assert converted.tool_calls[0].arguments == '{"command":  "ls"}'  # as the client wrote it


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking", "thinking_blocks"])
def test_reasoning_comes_back_under_any_name(field: str) -> None:
    from verl.experimental.agent_loop.chat_proxy.openai_chat import convert

    value: Any = [{"type": "thinking", "thinking": "why"}] if field == "thinking_blocks" else "why"
    (message,) = convert({"role": "assistant", "content": "a", field: value})
    assert message.reasoning == "why" and message.text == "a"


def test_arguments_that_are_no_json_are_kept() -> None:
    from verl.experimental.agent_loop.chat_proxy.openai_chat import convert

    calls = [
        {"id": "c", "function": {"name": "x", "arguments": '{"a": '}},
        {"id": "d", "function": {"name": "x", "arguments": {"a": 1}}},
    ]
    (message,) = convert({"role": "assistant", "tool_calls": calls})
    assert message.tool_calls[0].arguments == '{"a": ' and message.tool_calls[0].mapping() is None
    assert message.tool_calls[1].mapping() == {"a": 1}


def test_text_parts_are_joined_and_other_spellings_are_read() -> None:
    from verl.experimental.agent_loop.chat_proxy.openai_chat import convert, convert_tool, read_tools

    (parts,) = convert({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]})
    assert parts == convert({"role": "user", "content": "a\nb"})[0]
    (echo,) = convert({"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]})
    assert echo.text == "ab"
    assert convert({"role": "developer", "content": "S"})[0].role == "system"
    (old,) = convert({"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}})
    assert old.tool_calls[0].name == "f"
    (result,) = convert({"role": "function", "name": "f", "content": "r"})
    assert result.role == "tool" and result.tool_call_id == "f"
    (tool,) = read_tools({"functions": [{"name": "f", "parameters": {"type": "object"}}]})
    assert convert_tool(tool).name == "f"


def test_media_keep_their_place_and_their_source() -> None:
    from verl.experimental.agent_loop.chat_proxy.messages import Image, Media, Text
    from verl.experimental.agent_loop.chat_proxy.openai_chat import convert

    content = [
        {"type": "text", "text": "look"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "text", "text": "and"},
        {"type": "text", "text": "listen"},
        {"type": "input_audio", "input_audio": {"data": "BBBB", "format": "mp3"}},
    ]
    (message,) = convert({"role": "user", "content": content})
    assert message.parts == (
        Text("look"),
        Image("data:image/png;base64,AAAA", "image/png"),
        Text("and\nlisten"),
        Media("audio", "data:audio/mp3;base64,BBBB", "audio/mp3"),
    )


@pytest.mark.parametrize(
    "url", ["http://169.254.169.254/latest", "https://example.com/x.png", "file:///etc/passwd", "/etc/passwd"]
)
@asynchronous
async def test_no_url_and_no_file_is_opened_because_a_client_says_so(url: str) -> None:
    content = [{"type": "image_url", "image_url": {"url": url}}]
    block = [{"type": "image", "source": {"type": "url", "url": url}}]
    async with serve() as served, aiohttp.ClientSession() as http:
        status, body, _ = await post(served, {"messages": [{"role": "user", "content": content}]})
        anthropic = {"messages": [{"role": "user", "content": block}], "max_tokens": 5}
        async with http.post(served.messages_url, json=anthropic, headers=served.api_key) as response:
            other = await response.json()
    assert status == response.status == 400 and not served.engine.calls
    assert "data: URLs" in body["error"]["message"] and "data: URLs" in other["error"]["message"]


@asynchronous
async def test_an_image_without_a_processor_is_refused_and_not_dropped() -> None:
    content = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, {"type": "text", "text": "?"}]
    async with serve() as served:
        status, body, _ = await post(served, {"messages": [{"role": "user", "content": content}]})
    assert status == 400 and body["error"]["param"] == "messages" and not served.engine.calls


@asynchronous
async def test_models_are_listed_and_any_name_is_served() -> None:
    async with serve(service={"model": "policy"}) as served, client(served) as openai:
        listed = [model.id async for model in await openai.models.list()]
        one = await openai.models.retrieve("Qwen/any")
    assert listed == ["policy"] and one.id == "Qwen/any"


@asynchronous
async def test_a_conversation_goes_on_behind_the_sampled_tokens() -> None:
    async with serve([CALL, "done"]) as served, client(served) as openai:
        messages: list[Any] = list(USER)
        first = await openai.chat.completions.create(model="m", messages=messages, tools=TOOLS)
        call = first.choices[0].message.tool_calls[0]
        assert first.choices[0].message.content is None  # as OpenAI writes it, and not ""
        echo = first.choices[0].message.model_dump(exclude_none=True)
        echo["tool_calls"][0]["function"]["arguments"] = '{"n":1,"command":"ls -l"}'  # written again by the client
        messages += [echo, {"role": "tool", "tool_call_id": call.id, "content": "a.txt"}]
        second = await openai.chat.completions.create(model="m", messages=messages, tools=TOOLS)
    assert second.choices[0].message.content == "done"
    (first_ids, _), (second_ids, _) = served.engine.calls
    sampled = served.engine.tokenizer.encode(CALL + END, add_special_tokens=False)
    assert second_ids[: len(first_ids) + len(sampled)] == first_ids + sampled
    assert second.usage.prompt_tokens_details.cached_tokens == len(first_ids) + len(sampled)


@asynchronous
async def test_litellm_gets_text_calls_and_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")
    async with serve(["<think>\nwhy\n</think>\n\nhello", CALL, "streamed"]) as served:
        options = {
            "model": "hosted_vllm/m",
            "api_base": served.proxy.openai_url(served.session),
            "api_key": served.session.token,
        }
        text = await litellm.acompletion(messages=USER, **options)
        call = await litellm.acompletion(messages=[*USER, *USER], tools=TOOLS, **options)
        stream = await litellm.acompletion(messages=[*USER, *USER, *USER], stream=True, **options)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    assert text.choices[0].message.content == "hello"
    assert text.choices[0].message.reasoning_content.strip() == "why"
    assert call.choices[0].finish_reason == "tool_calls"
    assert json.loads(call.choices[0].message.tool_calls[0].function.arguments) == {"command": "ls -l", "n": 1}
    assert "".join(pieces) == "streamed"
