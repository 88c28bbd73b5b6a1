"""The events of a streamed response: their order, their agreement with the whole answer, and how a stream fails."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import aiohttp
import pytest
from serving import Reply, asynchronous, events, serve
from test_responses import BASH, CALL, SECOND, THOUGHT, TOOLS, USER, call, client, post, strict

SHOWN = {"output_text": "text", "reasoning_text": "text", "reasoning_summary_text": "text"}
FILLED = {"function_call_arguments": "arguments", "custom_tool_call_input": "input"}


def check_order(told: list[tuple[str, Any]]) -> dict[str, Any]:
    """Checks the stream against the grammar that clients rely on; returns the last response.

    Each item is added, filled and done before the next one; each delta belongs to the part that is open; what the
    deltas say together is what the parts, the items and the last response say.
    """
    names = [name for name, _ in told]
    assert names[:2] == ["response.created", "response.in_progress"]
    assert all(name == data["type"] for name, data in told)
    assert [data["sequence_number"] for _, data in told] == list(range(len(told)))
    items: list[dict[str, Any]] = []
    item: dict[str, Any] | None = None
    part: str | None = None
    said = ""
    for name, data in told[1:-1]:
        kind, _, step = name.removeprefix("response.").rpartition(".")
        if name == "response.in_progress":
            assert data["response"]["status"] == "in_progress"
            continue
        assert data["output_index"] == len(items)
        if name == "response.output_item.added":
            assert item is None and data["item"]["status"] == "in_progress"
            item, said = data["item"], ""
            continue
        assert item is not None
        if name == "response.output_item.done":
            assert part is None and data["item"]["id"] == item["id"] and data["item"]["type"] == item["type"]
            items.append(data["item"])
            item = None
            continue
        assert data["item_id"] == item["id"]
        if kind in ("content_part", "reasoning_summary_part"):
            assert (part is None) == (step == "added")
            part = data["part"]["type"] if step == "added" else None
            assert data["part"]["text"] == said
        elif step == "delta":
            assert (part is not None) == (kind in SHOWN) and data["delta"]
            said += data["delta"]
        else:
            assert step == "done" and data[(SHOWN | FILLED)[kind]] == said
    assert item is None
    last = told[-1][1]["response"]
    assert told[-1][0] == f"response.{last['status']}" and last["output"] == items
    assert len({one["id"] for one in items}) == len(items)
    return dict(last)


def same(whole: list[dict[str, Any]], streamed: list[dict[str, Any]]) -> None:
    """A whole answer has its texts in one message; a stream has them where they were said."""

    def read(items: list[dict[str, Any]]) -> tuple[str, str, list[Any]]:
        text = "".join(part["text"] for one in items if one["type"] == "message" for part in one["content"])
        thoughts = "".join(part["text"] for one in items if one["type"] == "reasoning" for part in one["content"])
        calls = [(one["name"], one["arguments"]) for one in items if one["type"] == "function_call"]
        return text, thoughts, calls

    assert read(whole) == read(streamed)


@pytest.mark.parametrize("chunk", [1, 5, 1000])
@asynchronous
async def test_each_item_is_opened_filled_and_closed_in_its_turn(chunk: int) -> None:
    async with serve(Reply(THOUGHT + "One é🦊." + CALL + " Two." + SECOND, chunk=chunk)) as served:
        _, told, _ = await post(served, {"input": "hi", "tools": TOOLS, "stream": True})
        last = check_order(told)
        assert [item["type"] for item in last["output"]] == [
            "reasoning",
            "message",
            "function_call",
            "message",
            "function_call",
        ]
        assert last["tools"] == TOOLS and last["usage"]["output_tokens"] == len(served.turns[0].sampled)
        # The client sends its items back, two texts among them, and stands where it stood.
        outputs = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "x"}
            for item in last["output"]
            if item["type"] == "function_call"
        ]
        await post(served, {"input": [*USER, *last["output"], *outputs], "tools": TOOLS})
    assert served.turns[1].parent is served.turns[0]


@asynchronous
async def test_the_clients_own_stream_reads_it() -> None:
    async with serve(THOUGHT + "Both." + CALL + call("note", input="keep")) as served, strict(served) as openai:
        tools: Any = [BASH, {"type": "custom", "name": "note"}]
        async with openai.responses.stream(model="m", input="hi", tools=tools, reasoning={"summary": "auto"}) as told:
            kinds = [event.type async for event in told]
            answer = await told.get_final_response()
    assert answer.output_text == "Both."
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "custom_tool_call"]
    assert answer.output[0].summary[0].text == "I look first." and answer.output[3].input == "keep"
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.reasoning_summary_part.added",
    ]
    assert kinds.count("response.function_call_arguments.done") == 1
    assert kinds[-4:] == [
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert served.turns[0].delivered


@pytest.mark.parametrize("text", ["", THOUGHT, "text", CALL])
@asynchronous
async def test_a_stream_that_is_cut_or_empty_is_in_order_too(text: str) -> None:
    for cut in (False, True):
        async with serve(Reply(text, ends=not cut, finish_reason="length" if cut else None)) as served:
            _, told, _ = await post(served, {"input": "hi", "tools": TOOLS, "stream": True})
        last = check_order(told)
        assert last["status"] == ("incomplete" if cut else "completed")
        assert last["incomplete_details"] == ({"reason": "max_output_tokens"} if cut else None)
        assert any(item["type"] != "reasoning" for item in last["output"])
        assert last["output"][-1]["status"] == ("completed" if text == CALL else last["status"])


@asynchronous
async def test_random_answers_read_the_same_streamed_and_whole() -> None:
    rng = random.Random(11)
    parts = ["<think>", "</think>", "\n\n", "a", " é", "🦊", CALL, "<tool_call>", "</tool_call>", "<", "{"]
    texts = ["".join(rng.choices(parts, k=rng.randint(0, 9))) for _ in range(60)]

    def script(number: int, prompt_ids: list[int], params: dict[str, Any]) -> Reply:
        return Reply(texts[number // 2], chunk=1 + number % 5)

    async with serve(script) as served:
        for index in range(len(texts)):
            body = {"input": str(index), "tools": TOOLS}
            _, whole, _ = await post(served, body)
            _, told, _ = await post(served, body | {"stream": True})
            last = check_order(told)
            same(whole["output"], last["output"])
            for items in (whole["output"], last["output"]):
                # Either form sent back is recognised as what was sampled.
                before = len(served.turns)
                reader_body = {"input": [{"role": "user", "content": str(index)}, *items, *USER], "tools": TOOLS}
                messages = read(served, reader_body)
                assert matched(served, messages), (texts[index], items)
                assert len(served.turns) == before


def read(served: Any, body: dict[str, Any]) -> Any:
    from verl.experimental.agent_loop.chat_proxy.responses import InputReader, Seal

    return InputReader(served.session.trajectory, Seal(served.session.token)).read(body)


def matched(served: Any, messages: Any) -> bool:
    """Whether the assistant's message is one that was sampled in this session, word for word."""
    from verl.experimental.agent_loop.chat_proxy.messages import same_assistant

    (echo,) = [message for message in messages if message.role == "assistant"]
    turn = next((turn for turn in served.turns if turn.id == echo.anchor), None)
    return turn is not None and turn.answer is not None and same_assistant(turn.answer.message, echo) == "exact"


# Silence and failure


@asynchronous
async def test_silence_is_broken_by_events_since_clients_time_these() -> None:
    gate = asyncio.Event()
    reply = Reply("late", gate=gate)
    async with serve(reply, service={"heartbeat_s": 0.01}) as served, aiohttp.ClientSession() as http:
        url, body = f"{served.root}/v1/responses", {"input": "hi", "stream": True}
        raw = b""
        async with http.post(url, json=body, headers=served.bearer) as response:
            async for part in response.content.iter_any():
                raw += part
                if raw.count(b"event: response.in_progress") >= 4:
                    gate.set()
    assert check_order(events(raw.decode()))["output"][0]["content"][0]["text"] == "late"


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        (Reply("half", error=RuntimeError("secret")), "server_error"),
        (Reply("half", error=ConnectionError("gone")), "rate_limit_exceeded"),
    ],
)
@asynchronous
async def test_a_stream_that_fails_says_so_and_when_to_come_back(reply: Reply, code: str) -> None:
    async with serve([reply, "whole"]) as served:
        status, told, _ = await post(served, {"input": "hi", "stream": True})
        assert status == 200 and told[-1][0] == "response.failed"
        failed = told[-1][1]["response"]
        assert failed["status"] == "failed" and failed["error"]["code"] == code
        assert failed["error"]["message"].endswith("s.") and "Please try again in" in failed["error"]["message"]
        assert "secret" not in str(told)
        _, again, _ = await post(served, {"input": "hi", "stream": True})
    assert check_order(again)["output"][0]["content"][0]["text"] == "whole"
    assert [turn.state for turn in served.turns] == ["aborted", "finished"]


@asynchronous
async def test_the_end_of_a_session_ends_its_stream_for_good() -> None:
    hold = asyncio.Event()
    async with serve(Reply("text that hangs", hold_at=3, hold=hold)) as served, aiohttp.ClientSession() as http:
        url, body = f"{served.root}/v1/responses", {"input": "hi", "stream": True}
        async with http.post(url, json=body, headers=served.bearer) as response:
            raw = await response.content.readuntil(b"output_text.delta")
            await served.proxy.close_session(served.session.id)
            raw += await response.read()
    name, data = events(raw.decode())[-1]
    assert name == "response.failed" and data["response"]["error"]["code"] == "invalid_prompt"
    assert "Please try again" not in data["response"]["error"]["message"]


@asynchronous
async def test_an_answer_whose_stream_was_dropped_is_given_to_the_repeat() -> None:
    async with serve(["the answer", "another"]) as served, client(served) as openai:
        stream = await openai.responses.create(model="m", input="hi", stream=True)
        first = await anext(aiter(stream))
        await stream.response.aclose()
        again = await openai.responses.create(model="m", input="hi")
    assert first.response.id == again.id and again.output_text == "the answer"
    assert len(served.engine.calls) == 1 and served.count("replay") == 1
