"""The OpenAI Responses API, through the real openai client, by hand, and with what Codex sends."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from serving import END, Reply, Served, asynchronous, byte_tokenizer, events, serve

USER = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}, "n": {"type": "integer"}}}
BASH = {"type": "function", "name": "bash", "description": "runs a command", "parameters": PARAMETERS}
TOOLS = [BASH]
CHAT_TOOLS = [{"type": "function", "function": {key: BASH[key] for key in ("name", "description", "parameters")}}]
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls -l", "n": 1}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "bash", "arguments": {"command": "é🦊", "n": 2}}\n</tool_call>'
THOUGHT = "<think>\nI look first.\n</think>\n\n"


@asynccontextmanager
async def client(served: Served, **options: Any) -> AsyncIterator[Any]:
    openai = pytest.importorskip("openai")
    async with openai.AsyncOpenAI(
        base_url=served.proxy.openai_url(served.session), api_key=served.session.token, **options
    ) as found:
        yield found


@asynccontextmanager
async def strict(served: Served) -> AsyncIterator[Any]:
    """A client that checks every field of every answer against its own types."""
    async with client(served, _strict_response_validation=True) as found:
        yield found


async def post(served: Served, body: Any, **headers: str) -> tuple[int, Any, dict[str, str]]:
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{served.root}/v1/responses", json=body, headers=served.bearer | headers) as response,
    ):
        text = await response.text()
        is_json = response.content_type == "application/json"
        return response.status, json.loads(text) if is_json else events(text), dict(response.headers)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def goes_on(served: Served, *texts: str) -> None:
    """Every prompt but the first stands right behind the prompt before it and what was sampled there."""
    for (before, _), (after, _), text in zip(served.engine.calls, served.engine.calls[1:], texts, strict=False):
        whole = before + served.engine.tokenizer.encode(text + END, add_special_tokens=False)
        assert after[: len(whole)] == whole


# The answer


@asynchronous
async def test_an_answer_has_its_text_its_usage_and_what_was_asked() -> None:
    async with serve("hello 🦊") as served, strict(served) as openai:
        answer = await openai.responses.create(
            model="any-name", input="hi", instructions="be kind", metadata={"a": "b"}
        )
    prompt_ids, params = served.engine.calls[0]
    assert answer.output_text == "hello 🦊" and answer.status == "completed" and answer.object == "response"
    assert (answer.model, answer.instructions, answer.metadata) == ("any-name", "be kind", {"a": "b"})
    assert answer.usage.input_tokens == len(prompt_ids)
    assert answer.usage.output_tokens == len("hello 🦊".encode()) + 1  # and the stop token
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert params["max_tokens"] == 4096 - len(prompt_ids)  # always explicit, though the client sent none
    assert "be kind" in served.engine.tokenizer.decode(prompt_ids)
    assert served.turns[0].delivered


@asynchronous
async def test_reasoning_text_and_calls_are_items_in_this_order() -> None:
    async with serve(THOUGHT + "Both." + CALL + SECOND) as served, strict(served) as openai:
        answer = await openai.responses.create(model="m", input="hi", tools=TOOLS)
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "function_call"]
    reasoning, message, first, second = answer.output
    assert [part.text for part in reasoning.content] == ["I look first."] and reasoning.summary == []
    assert message.content[0].text == "Both."
    assert json.loads(first.arguments) == {"command": "ls -l", "n": 1} and first.name == "bash"
    assert json.loads(second.arguments) == {"command": "é🦊", "n": 2}
    assert len({item.id for item in answer.output}) == 4 and first.call_id != second.call_id
    assert answer.usage.output_tokens_details.reasoning_tokens > 0


@asynchronous
async def test_reasoning_is_its_own_summary_for_who_asks_for_one() -> None:
    async with serve(THOUGHT + "yes") as served, strict(served) as openai:
        answer = await openai.responses.create(model="m", input="hi", reasoning={"summary": "auto", "effort": "low"})
    assert [part.text for part in answer.output[0].summary] == ["I look first."] and not answer.output[0].content
    assert answer.reasoning.effort == "low"


@asynchronous
async def test_an_answer_that_is_cut_is_incomplete() -> None:
    async with serve("a long answer") as served, strict(served) as openai:
        answer = await openai.responses.create(model="m", input="hi", max_output_tokens=6)
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output_text == "a long" and answer.output[-1].status == "incomplete"
    assert answer.usage.output_tokens == 6 == served.engine.calls[0][1]["max_tokens"]


@asynchronous
async def test_an_empty_answer_is_a_message_that_can_be_sent_back() -> None:
    async with serve(["", "more"]) as served, strict(served) as openai:
        answer = await openai.responses.create(model="m", input="hi")
        assert answer.output_text == "" and [item.type for item in answer.output] == ["message"]
        echo = [item.model_dump(exclude_none=True) for item in answer.output]
        await openai.responses.create(model="m", input=[*USER, *echo, *USER])
    assert served.turns[1].parent is served.turns[0]


@asynchronous
async def test_sampling_is_the_sessions_and_the_answer_says_so() -> None:
    from verl.experimental.agent_loop.chat_proxy.fields import SamplingPolicy

    policy = SamplingPolicy({"temperature": 0.7, "top_p": 0.9}, "pinned")
    async with serve(service={"sampling": policy}) as served, strict(served) as openai:
        answer = await openai.responses.create(model="m", input="hi", temperature=0.1)
    assert (answer.temperature, answer.top_p) == (0.7, 0.9)
    assert served.engine.calls[0][1]["temperature"] == 0.7


# The conversation

ANSWERS = [THOUGHT + "Both." + CALL + SECOND, "Looking again." + CALL, THOUGHT + "Done.", "bye"]


async def by_chat(answers: list[str]) -> Served:
    """A conversation of three calls and two users' turns, over chat completions."""
    async with serve(list(answers)) as served, client(served) as openai:
        messages: list[Any] = [{"role": "system", "content": "be brief"}, *USER]
        for index in range(len(answers)):
            answer = (await openai.chat.completions.create(model="m", messages=messages, tools=CHAT_TOOLS)).choices[0]
            messages.append(answer.message.model_dump(exclude_none=True))
            calls = answer.message.tool_calls or []
            messages += [{"role": "tool", "tool_call_id": one.id, "content": f"{index}: ok"} for one in calls]
            messages += [] if calls else [{"role": "user", "content": f"{index}: and now?"}]
    return served


def bare(items: list[Any]) -> list[Any]:
    """Items as clients send them that drop the server's ids, status and reasoning."""
    return [
        {key: value for key, value in item.items() if key not in ("id", "status")}
        for item in items
        if item["type"] != "reasoning"
    ]


def woven(items: list[Any]) -> list[Any]:
    """Each call with its output right behind it."""
    outputs = {item["call_id"]: item for item in items if item.get("type") == "function_call_output"}
    found: list[Any] = []
    for item in items:
        if item.get("type") != "function_call_output":
            found.append(item)
        if item.get("type") == "function_call":
            found.append(outputs[item["call_id"]])
    return found


async def by_responses(answers: list[str], how: str, stream: bool) -> Served:
    """The same conversation over responses."""
    async with serve(list(answers)) as served, strict(served) as openai:
        items: list[Any] = list(USER)
        since: list[Any] = list(USER)
        previous = None
        for index in range(len(answers)):
            sent = items if how == "input" else woven(items) if how == "woven" else since
            more = {"previous_response_id": previous} if how == "previous" and previous else {}
            if stream:
                async with openai.responses.stream(
                    model="m", input=sent if how != "previous" else since, tools=TOOLS, instructions="be brief", **more
                ) as events_:
                    async for _ in events_:
                        pass
                    answer = await events_.get_final_response()
            else:
                answer = await openai.responses.create(
                    model="m", input=sent, tools=TOOLS, instructions="be brief", **more
                )
            output = [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in answer.output]
            calls = [item for item in output if item["type"] == "function_call"]
            new = [
                {"type": "function_call_output", "call_id": one["call_id"], "output": f"{index}: ok"} for one in calls
            ]
            new += [] if calls else [{"role": "user", "content": f"{index}: and now?"}]
            if how == "bare":
                output = bare(output)
            if how == "reference":
                output = [{"type": "item_reference", "id": item["id"]} for item in output]
            items += [*output, *new]
            since = new if how == "previous" else items
            previous = answer.id
    return served


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["input", "bare", "woven", "reference", "previous"])
@asynchronous
async def test_a_conversation_has_the_tokens_that_it_has_over_chat(how: str, stream: bool) -> None:
    chat, responses = await by_chat(ANSWERS), await by_responses(ANSWERS, how, stream)
    assert [ids for ids, _ in responses.engine.calls] == [ids for ids, _ in chat.engine.calls]
    assert [turn.kind for turn in responses.turns] == ["root", "append", "append", "append"]
    goes_on(responses, *ANSWERS)
    trajectory = await responses.proxy.close_session(responses.session.id)
    assert [turn.proved for turn in trajectory.turns] == [True] * 4


@asynchronous
async def test_instructions_belong_to_one_response_and_not_to_those_that_go_on_from_it() -> None:
    async with serve(["one", "two", "three"]) as served, strict(served) as openai:
        first = await openai.responses.create(model="m", input="hi", instructions="speak French")
        second = await openai.responses.create(
            model="m", input="again", instructions="speak Latin", previous_response_id=first.id
        )
        await openai.responses.create(model="m", input="last", previous_response_id=second.id)
    prompts = [served.engine.tokenizer.decode(ids) for ids, _ in served.engine.calls]
    assert "French" in prompts[0] and "French" not in prompts[1] + prompts[2]
    assert "Latin" in prompts[1] and "Latin" not in prompts[2]
    assert all(text in prompts[2] for text in ("hi", "one", "again", "two", "last"))


@asynchronous
async def test_a_response_that_is_not_this_sessions_is_not_found() -> None:
    async with serve() as served:
        _, body, _ = await post(replace(served, session=served.proxy.open_session()), {"input": "hi"})
        theirs = body["id"]
        for previous in (theirs, "resp_123", "resp_" + "0" * 32, "x" * 10_000):
            status, body, _ = await post(served, {"input": "hi", "previous_response_id": previous})
            assert (status, body["error"]["code"]) == (400, "previous_response_not_found")
        reference = {"type": "item_reference", "id": "msg_" + theirs.removeprefix("resp_")}
        status, body, _ = await post(served, {"input": [reference, *USER]})
        assert status == 400 and "not found" in body["error"]["message"]
    assert not served.turns


@asynchronous
async def test_reasoning_of_another_session_is_tolerated_and_its_text_is_kept() -> None:
    async with serve([THOUGHT + "one", THOUGHT + "two", "three"]) as served, strict(served) as openai:
        ours = await openai.responses.create(model="m", input="hi")
        async with strict(replace(served, session=served.proxy.open_session())) as elsewhere:
            theirs = await elsewhere.responses.create(model="m", input="hi")
        echo = [item.model_dump(exclude_none=True) for item in theirs.output]
        status, _, headers = await post(served, {"input": [*USER, *echo, *USER]})
        assert status == 200 and headers["x-proxy-ignored"] == "input.reasoning.encrypted_content"
        assert served.count("ignored", field="input.reasoning.encrypted_content") == 1
        assert "<think>\nI look first.\n</think>\n\ntwo" in served.engine.tokenizer.decode(served.engine.calls[-1][0])
        assert ours.output[0].encrypted_content != theirs.output[0].encrypted_content
        for content in ("not base64 \ud83e", "b3BhcXVl", "", ours.output[0].encrypted_content[:-4] + "AAAA"):
            item = {"type": "reasoning", "summary": [], "encrypted_content": content}
            status, _, headers = await post(served, {"input": [*USER, item, *echo[1:], *USER]})
            assert status == 200 and ("x-proxy-ignored" in headers) == bool(content)


@asynchronous
async def test_two_answers_with_the_same_text_are_told_apart_by_their_ids() -> None:
    async with serve([THOUGHT + "same", "same", "end"]) as served, strict(served) as openai:
        first = await openai.responses.create(model="m", input="hi")
        await openai.responses.create(model="m", input="hi")
        echo = [item.model_dump(exclude_none=True) for item in first.output]
        await openai.responses.create(model="m", input=[*USER, *echo, *USER])
    assert served.turns[2].parent is served.turns[0]


@asynchronous
async def test_an_answer_right_behind_one_that_was_cut_is_another_one() -> None:
    async with serve(["a long story", CALL, "end"]) as served, strict(served) as openai:
        first = await openai.responses.create(model="m", input="hi", tools=TOOLS, max_output_tokens=6)
        items = [*USER, *(item.model_dump(exclude_none=True) for item in first.output)]
        second = await openai.responses.create(model="m", input=items, tools=TOOLS)
        items += [item.model_dump(exclude_none=True) for item in second.output]
        items += [{"type": "function_call_output", "call_id": second.output[0].call_id, "output": "x"}]
        await openai.responses.create(model="m", input=items, tools=TOOLS)
    assert [turn.parent for turn in served.turns] == [None, *served.turns[:2]]


@asynchronous
async def test_a_history_without_ids_is_read_by_its_order() -> None:
    from verl.experimental.agent_loop.chat_proxy.responses import InputReader, Seal

    items = [
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "r1"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        {"type": "function_call", "call_id": "c1", "name": "bash", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "bash", "arguments": {"n": 1}},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "x"}]},
        {"type": "function_call_output", "call_id": "c2", "output": {"content": "y", "success": True}},
        {"type": "message", "role": "assistant", "content": "b"},
        {"type": "message", "role": "assistant", "content": "c"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "r2"}], "summary": []},
        {"type": "message", "role": "assistant", "content": "d"},
    ]
    async with serve() as served:
        messages = InputReader(served.session.trajectory, Seal("x")).read({"input": items})
    assert [(message.role, message.reasoning, message.text, len(message.tool_calls)) for message in messages] == [
        ("user", "", "hi", 0),
        ("assistant", "r1", "a", 2),
        ("tool", "", "x", 0),
        ("tool", "", "y", 0),
        ("assistant", "", "b", 0),
        ("assistant", "", "c", 0),
        ("assistant", "r2", "d", 0),
    ]
    assert messages[1].tool_calls[1].mapping() == {"n": 1}


@asynchronous
async def test_the_trial_on_disk_is_read_by_patchctl_while_it_goes_and_when_it_ended(tmp_path: Path) -> None:
    from verl.experimental.agent_loop.chat_proxy.archive import Archive

    from patchctl.trajectory.page import write_page
    from patchctl.trajectory.summary import summary
    from patchctl.trajectory.trial import read_trial

    tokenizer = byte_tokenizer()
    tokenizer.name_or_path = "/models/scripted"
    async with serve([THOUGHT + CALL, "done", "again"], tokenizer=tokenizer) as plain:
        archive = Archive(tmp_path)
        served = replace(plain, session=plain.proxy.open_session(archive=archive))
        async with strict(served) as openai:
            first = await openai.responses.create(model="m", input="hi", tools=TOOLS)
            output = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "x"}
            body = {"model": "m", "input": [output], "tools": TOOLS, "previous_response_id": first.id}
            await openai.responses.create(**body)
            await openai.responses.create(**body, extra_headers={"x-stainless-retry-count": "1"})
        assert await archive.written(10)
        going = read_trial(tmp_path)
        await served.proxy.close_session(served.session.id)
    ended = read_trial(tmp_path)
    assert (going.whole, ended.whole) == (False, True) and going.tokenizer == ended.tokenizer == "/models/scripted"
    assert [turn.sampled for turn in going.turns] == [turn.sampled for turn in ended.turns]
    assert [turn.sampled for turn in ended.turns] == [turn.sampled.tolist() for turn in served.turns]
    assert [turn.log_probs for turn in ended.turns] == [turn.log_probs.tolist() for turn in served.turns]
    found = summary(ended)
    assert found["turns"] == found["proved"] == 2 and found["branches"] == {"main": 1}
    assert found["trained"] == sum(len(turn.sampled) for turn in served.turns)
    assert found["events"]["replay"] == 1
    write_page(ended, {}, tmp_path / "page.html", "today")


@asynchronous
async def test_a_repeat_gets_the_answer_that_did_not_arrive_and_a_key_gets_its_own() -> None:
    async with serve(["one", "two", "three"]) as served:
        body = {"input": "hi"}
        _, first, _ = await post(served, body, **{"Idempotency-Key": "k"})
        _, again, _ = await post(served, body, **{"Idempotency-Key": "k"})
        _, retried, _ = await post(served, body, **{"x-stainless-retry-count": "1"})
        _, sibling, _ = await post(served, body)
        _, streamed, _ = await post(served, body | {"stream": True}, **{"Idempotency-Key": "k"})
    assert first["id"] == again["id"] == retried["id"] == streamed[-1][1]["response"]["id"] != sibling["id"]
    assert len(served.engine.calls) == 2 and served.count("replay") == 3


# Codex

FOLDER = Path(__file__).parent / "captures"


def codex_requests() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((FOLDER / "cx_default.json").read_text())
    return found


@asynchronous
async def test_codex_goes_on_exactly_and_its_hosted_tool_is_left_out() -> None:
    requests = codex_requests()
    sampled = "<think>\nthinking\n</think>\n\n" + call("exec_command", cmd="echo hello")
    async with serve([sampled, "hello"], context_limit=400_000) as served:
        status, told, headers = await post(served, requests[0]["body"], **{"thread-id": "t1"})
        assert status == 200 and headers["x-proxy-ignored"] == "tools.web_search"
        done = [data["item"] for name, data in told if name == "response.output_item.done"]
        assert [item["type"] for item in done] == ["reasoning", "function_call"]
        body = requests[1]["body"]
        echo = {"reasoning": done[0], "function_call": done[1]}
        # What Codex keeps of an item: its own fields. The ids of calls are the server's to make.
        for item in body["input"]:
            if item["type"] in echo:
                item |= {key: echo[item["type"]][key] for key in item if key in echo[item["type"]]}
            if item["type"] == "function_call_output":
                item["call_id"] = done[1]["call_id"]
        status, told, _ = await post(served, body, **{"thread-id": "t1"})
        assert status == 200 and told[-1][1]["response"]["output"][-1]["content"][0]["text"] == "hello"
        trajectory = await served.proxy.close_session(served.session.id)
    assert [turn.kind for turn in trajectory.turns] == ["root", "append"]
    assert [turn.proved for turn in trajectory.turns] == [True, True]
    goes_on(served, sampled)
    prompt = served.engine.tokenizer.decode(served.engine.calls[0][0])
    assert (
        "multi_agent_v1__spawn_agent" in prompt and "web_search" not in prompt.split("# Tools")[1].split("</tools>")[0]
    )
    assert prompt.count("Tools for spawning and managing sub-agents.") == 1


@asynchronous
async def test_codex_names_its_sub_agents_and_its_summaries() -> None:
    kinds = [
        ({"thread-id": "main"}, (None, None, None)),
        (
            {"thread-id": "sub", "x-openai-subagent": "collab_spawn", "x-codex-parent-thread-id": "main"},
            ("sub", "main", "subagent"),
        ),
        ({"thread-id": "main", "x-codex-turn-metadata": '{"request_kind":"compaction"}'}, (None, None, "compaction")),
        ({"thread-id": "main", "x-codex-turn-metadata": "[" * 5000}, (None, None, None)),
    ]
    async with serve() as served:
        for headers, _ in kinds:
            assert (await post(served, {"input": "hi"}, **headers))[0] == 200
    told = [turn.request.lineage for turn in served.turns]
    assert [(one.agent_id, one.parent_id, one.kind) for one in told] == [expected for _, expected in kinds]


@asynchronous
async def test_a_websocket_is_refused_so_that_codex_takes_http() -> None:
    async with serve() as served, aiohttp.ClientSession() as http:
        url = f"{served.root}/v1/responses"
        with pytest.raises(aiohttp.WSServerHandshakeError) as refusal:
            await http.ws_connect(url, headers=served.bearer)
        assert refusal.value.status == 426
        async with http.get(url, headers=served.bearer) as response:
            assert response.status == 405
        async with http.get(url) as response:
            assert response.status == 401


@asynchronous
async def test_a_prompt_beyond_the_context_has_the_code_that_codex_looks_for() -> None:
    openai_module = pytest.importorskip("openai")
    async with serve(context_limit=60) as served, client(served, max_retries=3) as openai:
        for stream in (False, True):
            with pytest.raises(openai_module.BadRequestError) as caught:
                await openai.responses.create(model="m", input="hi " * 60, stream=stream)
            assert caught.value.code == "context_length_exceeded"
    assert served.count("overflow") == 2 and not served.engine.calls


@asynchronous
async def test_an_ended_session_is_410() -> None:
    async with serve() as served:
        await served.proxy.close_session(served.session.id)
        status, body, headers = await post(served, {"input": "hi"})
    assert (status, body["error"]["code"], headers["x-should-retry"]) == (410, "session_ended", "false")


@asynchronous
async def test_a_reply_that_fails_once_is_retried_by_the_client() -> None:
    replies = [Reply("", error=RuntimeError("down")), "up"]
    async with serve(replies) as served, client(served, max_retries=1) as openai:
        assert (await openai.responses.create(model="m", input="hi")).output_text == "up"
    assert [turn.state for turn in served.turns] == ["aborted", "finished"]
