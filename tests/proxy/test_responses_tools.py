"""Tools and bodies of the Responses API: what the model is shown, what comes back, and what no body may do."""

from __future__ import annotations

import copy
import json
from typing import Any

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import asynchronous, serve
from test_responses import BASH, USER, call, client, goes_on, post

GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'}
PATCH = {"type": "custom", "name": "apply_patch", "description": "edits files", "format": GRAMMAR}
NOTE = {"type": "custom", "name": "note", "description": "keeps a note"}
SPACE = {
    "type": "namespace",
    "name": "team",
    "description": "All about helpers.",
    "tools": [
        {"type": "function", "name": "spawn", "description": "starts one", "parameters": {"type": "object"}},
        {"type": "function", "name": "wait", "description": "waits", "parameters": {"type": "object"}},
        {"type": "custom", "name": "tell", "description": "says something"},
        {"type": "mcp", "name": "far"},
    ],
}
SHELL = {"type": "local_shell"}
HOSTED = [{"type": "web_search"}, {"type": "file_search", "vector_store_ids": []}, {"type": "image_generation"}]
ALL = [BASH, PATCH, NOTE, SPACE, SHELL, *HOSTED]


@asynchronous
async def test_every_tool_that_the_client_runs_is_a_function_for_the_model() -> None:
    async with serve() as served:
        status, _, headers = await post(served, {"input": "hi", "tools": ALL})
    assert status == 200
    shown = served.turns[0].setting.tools
    names = [tool.name for tool in shown]
    assert names == ["bash", "apply_patch", "note", "team__spawn", "team__wait", "team__tell", "local_shell"]
    told = {tool.name: tool.description for tool in shown}
    assert told["apply_patch"].endswith('It follows this lark grammar:\nstart: "*** Begin Patch"')
    assert told["team__spawn"] == "All about helpers.\n\nstarts one" and told["team__wait"] == "waits"
    assert headers["x-proxy-ignored"] == "tools.file_search, tools.image_generation, tools.mcp, tools.web_search"
    assert served.count("ignored", field="tools.web_search") == 1


@asynchronous
async def test_tools_that_come_with_the_input_are_shown_too() -> None:
    async with serve() as served:
        late = {"type": "additional_tools", "role": "developer", "tools": [PATCH, {"type": "web_search"}]}
        status, _, headers = await post(served, {"input": [late, *USER], "tools": None})
        assert status == 200 and headers["x-proxy-ignored"] == "tools.web_search"
        assert (await post(served, {"input": USER, "tools": ALL, "tool_choice": "none"}))[0] == 200
    assert [tool.name for tool in served.turns[0].setting.tools] == ["apply_patch"]
    assert served.turns[1].setting.tools == ()


PATCH_TEXT = "*** Begin Patch\n*** Add File: a.py\n+print('🦊')\n*** End Patch"
SHELL_ACTION = {"type": "exec", "command": ["ls", "-l"], "env": {}}
CALLS: list[tuple[str, dict[str, Any]]] = [
    (
        call("apply_patch", input=PATCH_TEXT),
        {"type": "custom_tool_call", "name": "apply_patch", "input": PATCH_TEXT, "namespace": None},
    ),
    # A model that doesn't write its patch as it should: the client gets all that there is.
    (
        call("apply_patch", patch="x", dry=True),
        {"type": "custom_tool_call", "name": "apply_patch", "input": '{"patch": "x", "dry": true}'},
    ),
    (
        call("team__spawn", n=1),
        {"type": "function_call", "name": "spawn", "namespace": "team", "arguments": '{"n": 1}'},
    ),
    (call("spawn", n=1), {"type": "function_call", "name": "spawn", "namespace": "team", "arguments": '{"n": 1}'}),
    (call("tell", input="hi"), {"type": "custom_tool_call", "name": "tell", "namespace": "team", "input": "hi"}),
    (call("local_shell", command=["ls", "-l"]), {"type": "local_shell_call", "action": SHELL_ACTION}),
    (
        call("local_shell", command="ls | wc", working_directory="/", timeout_ms=5, user="root"),
        {
            "type": "local_shell_call",
            "action": SHELL_ACTION | {"command": ["bash", "-lc", "ls | wc"], "working_directory": "/", "timeout_ms": 5},
        },
    ),
    (call("local_shell", cmd="ls"), {"type": "function_call", "name": "local_shell", "arguments": '{"cmd": "ls"}'}),
    (call("unheard_of"), {"type": "function_call", "name": "unheard_of", "namespace": None}),
]
OUTPUT = {
    "function_call": "function_call_output",
    "custom_tool_call": "custom_tool_call_output",
    "local_shell_call": "local_shell_call_output",
}


@pytest.mark.parametrize(("sampled", "expected"), CALLS)
@pytest.mark.parametrize("stream", [False, True])
@asynchronous
async def test_a_call_has_the_clients_form_and_its_echo_the_sampled_tokens(
    sampled: str, expected: dict[str, Any], stream: bool
) -> None:
    async with serve([sampled, "done"]) as served, client(served) as openai:
        body: dict[str, Any] = {"model": "m", "input": "hi", "tools": ALL}
        if stream:
            told = await openai.responses.create(stream=True, **body)
            done = [event.item async for event in told if event.type == "response.output_item.done"]
        else:
            done = (await openai.responses.create(**body)).output
        (item,) = [one.model_dump(exclude_none=True) for one in done]
        assert {key: item.get(key) for key in expected} == expected
        for dropped in ((), ("id", "status")):
            kept = {key: value for key, value in item.items() if key not in dropped}
            output = {"type": OUTPUT[item["type"]], "call_id": item["call_id"], "output": "fine"}
            await openai.responses.create(model="m", input=[*USER, kept, output], tools=ALL)
    assert [turn.parent for turn in served.turns[1:]] == [served.turns[0]] * 2
    goes_on(served, sampled)
    assert served.engine.calls[1][0] == served.engine.calls[2][0]


@asynchronous
async def test_images_and_other_media_are_told_of_and_never_dropped() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    async with serve() as served:
        for content in ([image], [{"type": "input_image", "file_id": "f"}], [{"type": "input_file", "file_id": "f"}]):
            for items in (
                [{"role": "user", "content": content}],
                [*USER, {"type": "function_call_output", "call_id": "c", "output": content}],
            ):
                status, body, _ = await post(served, {"input": items})
                assert status == 400 and body["error"]["type"] == "invalid_request_error"
    assert not served.engine.calls


@asynchronous
async def test_what_cant_be_followed_is_told_by_a_header_and_counted() -> None:
    body: dict[str, Any] = {
        "input": [*USER, {"type": "web_search_call", "action": {}}, {"type": "compaction", "encrypted_content": "x"}],
        "tools": [BASH],
        "parallel_tool_calls": False,
        "truncation": "auto",
        "max_tool_calls": 3,
        "text": {"verbosity": "low"},
        "include": ["message.output_text.logprobs", "reasoning.encrypted_content"],
    }
    async with serve() as served:
        status, _, headers = await post(served, body)
        assert status == 200
        told = headers["x-proxy-ignored"].split(", ")
        plain = {"text": {"format": {"type": "text"}}, "truncation": "disabled", "user": "u", "service_tier": "auto"}
        assert "x-proxy-ignored" not in (await post(served, {"input": "hi", **plain}))[2]
    assert sorted(told) == [
        "include",
        "input.compaction",
        "input.web_search_call",
        "max_tool_calls",
        "parallel_tool_calls",
        "text.verbosity",
        "truncation",
    ]
    assert all(served.count("ignored", field=name) == 1 for name in told)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"tool_choice": "required", "tools": [BASH]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "bash"}, "tools": [BASH]}, "tool_choice"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}}, "text.format"),
    ],
)
@asynchronous
async def test_a_promise_that_sampling_cannot_keep_is_refused_or_said_to_be_ignored(
    fields: dict[str, Any], name: str
) -> None:
    async with serve() as served:
        status, body, _ = await post(served, {"input": "hi", **fields})
        assert (status, body["error"]["param"]) == (400, name) and not served.engine.calls
    async with serve(service={"constraints": "tell"}) as served:
        status, _, headers = await post(served, {"input": "hi", **fields})
        assert (status, headers["x-proxy-ignored"]) == (200, name)


BAD: list[tuple[dict[str, Any], str | None]] = [
    ({}, "input"),
    ({"input": ""}, "input"),
    ({"input": []}, "input"),
    ({"input": 7}, "input"),
    ({"input": [None]}, "input"),
    ({"input": [{"type": "message", "role": "critic", "content": "x"}]}, "input"),
    ({"input": [{"role": "user", "content": {"a": 1}}]}, "input"),
    ({"input": [{"role": "user", "content": [{"type": ["text"]}]}]}, "input"),
    ({"input": [{"type": "telepathy"}]}, "input"),
    ({"input": [{"type": ["message"]}]}, "input"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input"),
    ({"input": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]}, "input"),
    ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "f", "input": 3}]}, "input"),
    ({"input": [{"type": "local_shell_call", "call_id": "c", "action": "ls"}]}, "input"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": 3}]}, "input"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input"),
    ({"input": [{"type": "item_reference"}]}, "input"),
    ({"input": "x", "instructions": ["be kind"]}, "instructions"),
    ({"input": "x", "previous_response_id": 3}, "previous_response_id"),
    ({"input": "x", "background": True}, "background"),
    ({"input": "x", "conversation": "conv_1"}, "conversation"),
    ({"input": "x", "prompt": {"id": "p"}}, "prompt"),
    ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
    ({"input": "x", "max_output_tokens": True}, "max_output_tokens"),
    ({"input": "x", "stream": "yes"}, "stream"),
    ({"input": "x", "temperature": 9}, "temperature"),
    ({"input": "x", "reasoning": "high"}, "reasoning"),
    ({"input": "x", "text": []}, "text"),
    ({"input": "x", "metadata": "m"}, "metadata"),
    ({"input": "x", "include": [3]}, "include"),
    ({"input": "x", "tool_choice": 3}, "tool_choice"),
    ({"input": "x", "tools": {"a": 1}}, "tools"),
    ({"input": "x", "tools": [{"type": "function"}]}, "tools"),
    ({"input": "x", "tools": [{"type": "function", "name": "f", "parameters": []}]}, "tools"),
    ({"input": "x", "tools": [{"type": "custom", "name": ""}]}, "tools"),
    ({"input": "x", "tools": [{"type": "namespace", "tools": []}]}, "tools"),
    ({"input": "x", "tools": [{"type": "namespace", "name": "n", "tools": [3]}]}, "tools"),
    ({"input": [{"type": "additional_tools", "tools": 3}]}, "tools"),
]


@pytest.mark.parametrize(("body", "param"), BAD)
@asynchronous
async def test_a_wrong_field_is_named(body: dict[str, Any], param: str | None) -> None:
    async with serve() as served:
        status, told, _ = await post(served, body)
    assert (status, told["error"]["type"], told["error"]["param"]) == (400, "invalid_request_error", param), told
    assert not served.engine.calls


# Random bodies

RICH: dict[str, Any] = {
    "model": "m",
    "instructions": "be kind",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "d"}]},
        {"role": "user", "content": "hi"},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "r"}],
            "encrypted_content": "e",
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "bash", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": "x"},
        {"type": "local_shell_call", "id": "c3", "status": "completed", "action": SHELL_ACTION},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "o"}]},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "o"},
        {"type": "local_shell_call_output", "id": "c3", "output": "o"},
        {"type": "agent_message", "content": [{"type": "encrypted_content", "data": "x"}]},
        {"type": "additional_tools", "tools": [NOTE]},
        {"type": "item_reference", "id": "msg_" + "0" * 32},
    ],
    "tools": ALL,
    "reasoning": {"effort": "low", "summary": "auto"},
    "text": {"format": {"type": "text"}},
    "include": ["reasoning.encrypted_content"],
    "previous_response_id": None,
    "stream": False,
    "max_output_tokens": 5,
    "metadata": {"k": "v"},
}
ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8) | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        found += places(item, (*path, key))
    return found


PLACES = places(RICH)


@st.composite
def bodies(draw: st.DrawFn) -> dict[str, Any]:
    """A rich request with some of its values lost or replaced by anything."""
    body = copy.deepcopy(RICH)
    if draw(st.booleans()):
        del body["input"][-1]
    for _ in range(draw(st.integers(1, 4))):
        *way, last = draw(st.sampled_from(PLACES))
        holder: Any = body
        try:
            for key in way:
                holder = holder[key]
            if draw(st.booleans()):
                holder[last] = draw(ODD)
            else:
                del holder[last]
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change took it away
    return body


def test_no_body_crashes_the_server_or_leaks_a_traceback() -> None:
    seen: dict[int, int] = {}

    async def send(body: dict[str, Any]) -> None:
        async with serve("ok") as served, aiohttp.ClientSession() as http:
            url, data = f"{served.root}/v1/responses", json.dumps(body)
            headers = served.bearer | {"Content-Type": "application/json"}
            async with http.post(url, data=data, headers=headers) as response:
                text = await response.text()
        seen[response.status] = seen.get(response.status, 0) + 1
        assert response.status in (200, 400), (body, text)
        assert "Traceback" not in text
        if response.status == 400:
            error = json.loads(text)["error"]
            assert error["type"] == "invalid_request_error" and error["message"] and "\n" not in error["message"]
        assert served.proxy.service.in_flight == 0 and all(turn.state == "finished" for turn in served.turns)

    @settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(bodies())
    def run(body: dict[str, Any]) -> None:
        asynchronous(lambda: send(body))()

    run()
    assert min(seen[200], seen[400]) >= 10, seen  # both kinds were tried


# The same conversation in both of OpenAI's forms

TEXTS = st.text(max_size=12)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A conversation as chat messages, and as items without ids."""
    chat: list[dict[str, Any]] = []
    items: list[dict[str, Any]] = []
    for number in range(draw(st.integers(1, 6))):
        role = draw(st.sampled_from(["user", "developer", "system"]))
        texts = draw(st.lists(TEXTS, min_size=1, max_size=3))
        chat.append({"role": role, "content": [{"type": "text", "text": text} for text in texts]})
        items.append({"role": role, "content": [{"type": "input_text", "text": text} for text in texts]})
        if draw(st.booleans()):
            continue
        text, reasoning = draw(TEXTS), draw(TEXTS)
        calls = [(f"c{number}_{index}", draw(TEXTS)) for index in range(draw(st.integers(0, 3)))]
        answer: dict[str, Any] = {"role": "assistant", "content": text, "reasoning_content": reasoning}
        if calls:
            answer["tool_calls"] = [
                {"id": call_id, "function": {"name": "bash", "arguments": arguments}} for call_id, arguments in calls
            ]
        chat += [answer, *({"role": "tool", "tool_call_id": call_id, "content": "r"} for call_id, _ in calls)]
        if reasoning:
            items.append({"type": "reasoning", "summary": [{"type": "summary_text", "text": reasoning}]})
        if text or not calls:
            part = {"type": "output_text", "text": text}
            items.append({"type": "message", "role": "assistant", "content": [part]})
        for call_id, arguments in calls:
            items.append({"type": "function_call", "call_id": call_id, "name": "bash", "arguments": arguments})
        items += [{"type": "function_call_output", "call_id": call_id, "output": "r"} for call_id, _ in calls]
    return chat, items


@asynchronous
async def test_items_and_chat_messages_are_the_same_conversation() -> None:
    from verl.experimental.agent_loop.chat_proxy import openai_chat
    from verl.experimental.agent_loop.chat_proxy.responses import InputReader, Seal

    async with serve() as served:

        @settings(max_examples=200, deadline=None, derandomize=True)
        @given(conversations())
        def run(both: tuple[list[dict[str, Any]], list[dict[str, Any]]]) -> None:
            chat, items = both
            trajectory = served.session.trajectory
            expected = trajectory.convert(chat, openai_chat.convert)
            read = InputReader(trajectory, Seal("x")).read({"input": items})
            assert [message.key for message in read] == [message.key for message in expected]

        run()
