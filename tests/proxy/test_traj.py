"""The graph of turns: branches, rewrites, repeats, what is an action and what is not."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted_engine import EXPERTS, log_prob_of, route_of
from test_render import Chat

QWEN = pytest.mark.parametrize("renderer", ["qwen3"], indirect=True)


def exported(session: Any, **options: Any) -> list[Any]:
    from verl.experimental.agent_loop.chat_proxy.export import export_all

    return export_all(session, **options)


def actions(accumulator: Any) -> list[int]:
    return [i for i, m in zip(accumulator.response_ids, accumulator.traj_response_mask, strict=True) if m]


async def three_turns(renderer: Any, **config: Any) -> Chat:
    chat = Chat(renderer, **config)
    chat.add("system", "You are the agent.")
    for number in range(3):
        chat.add("user", f"question {number}")
        await chat.turn(f"answer {number}")
    return chat


# -- echoes --------------------------------------------------------------------------------------------------------


@QWEN
def test_an_echo_in_other_words_is_the_same_turn(renderer: Any) -> None:
    """Key order, spacing, defaults, renamed tools, null content, dropped or inline reasoning: the sampled ids stand."""
    from verl.experimental.agent_loop.chat_proxy.messages import Message, Text

    said = '<think>\nwhy\n</think>\n\nok\n<tool_call>\n{"name": "read", "arguments": {"b":1,"a":"x"}}\n</tool_call>'

    async def go(change: Any) -> str:
        chat = Chat(renderer)
        chat.tools = (chat.tool,)
        chat.add("user", "hi")
        first, answer = await chat.turn(ids=renderer.tokens.encode_now(said))
        assert json.loads(answer.message.tool_calls[0].arguments) == {"b": 1, "a": "x"}
        chat.messages[-1] = change(replace(answer.message, anchor=None))
        chat.add("tool", "result", tool_call_id=answer.message.tool_calls[0].id)
        prompt = await chat.open()
        if prompt.kind == "append":
            assert prompt.ids[: len(first.ids) + len(answer.token_ids)] == first.ids + answer.token_ids
        return str(prompt.kind)

    def call(**fields: Any) -> Any:
        return lambda message: replace(message, tool_calls=(replace(message.tool_calls[0], **fields),))

    same = [
        lambda message: message,
        lambda message: replace(message, reasoning=""),
        lambda message: replace(message, reasoning="other"),
        lambda message: replace(message, parts=()),
        lambda message: replace(message, parts=(Text("ok"), Text("\n"))),
        lambda message: replace(message, reasoning="", parts=(Text("<think>\nwhy\n</think>\n\nok"),)),
        call(arguments='{"a": "x", "b": 1}'),
        call(arguments='{"a": "x ", "b": "1"}'),
        call(arguments='{"a": "x", "b": 1, "timeout": 30}'),
        call(arguments='{"a": "x"}'),
        call(name="Read"),
    ]
    other = [
        lambda message: replace(message, parts=(Text("not ok"),)),
        call(id="call_other"),
        call(arguments='{"a": "y", "b": 1}'),
        call(arguments='{"c": 1}'),
        lambda message: replace(message, tool_calls=()),
        lambda message: Message("assistant", (Text("summary"),)),
    ]
    for change in same:
        assert asyncio.run(go(change)) == "append", same.index(change)
    for change in other:
        assert asyncio.run(go(change)) != "append", other.index(change)


# -- rewritten history ---------------------------------------------------------------------------------------------


def test_only_an_assistants_text_can_be_an_echo() -> None:
    from verl.experimental.agent_loop.chat_proxy.messages import Image, Message, Text, same_assistant

    ours = Message("assistant", (Text("yes"),))
    assert same_assistant(ours, ours) == "exact"
    assert same_assistant(ours, replace(ours, role="user")) is None
    assert same_assistant(ours, replace(ours, parts=(Text("yes"), Image("data:image/png;base64,AA==")))) is None


@QWEN
def test_rewritten_history_keeps_what_stands_and_recomputes_the_rest(renderer: Any) -> None:
    """The second question is edited: the first answer keeps its sampled values, the two after it are recomputed."""

    async def go() -> None:
        chat = await three_turns(renderer)
        old = list(chat.session.turns)
        chat.messages[3] = replace(chat.messages[3], parts=(type(chat.messages[3].parts[0])("question 1, edited"),))
        chat.add("user", "and now")
        prompt, _ = await chat.turn("final")
        assert prompt.kind == "rewrite" and prompt.turn.parent is old[0]
        await chat.session.settle()
        assert chat.engine.scored == [prompt.ids], "once a rewrite, over the very prompt"
        assert chat.session.events.total("recompute", result="done") == 1
        first, second = exported(chat.session)
        assert first.primary and first.traj_acc_ids[: len(prompt.ids)] == prompt.ids
        begin = first.prompt_length
        versions = [span.get("recomputed_global_steps") for span in first.spans if span["kind"] == "echo"]
        assert versions == [1, 1]
        assert {span["max_global_steps"] for span in first.spans if span["kind"] == "sampled"} == {1}
        for at, (source, value, mask) in enumerate(
            zip(first.traj_response_source, first.traj_response_logprobs, first.traj_response_mask, strict=True), begin
        ):
            if at < old[0].end:
                assert (source, mask) == ("sampled", 1) and value == old[0].log_probs[at - begin]
            elif at < len(prompt.ids):
                assert (source, mask, value) == ("recomputed", 0, log_prob_of(at, first.traj_acc_ids[at]))
            else:
                assert (source, mask) == ("sampled", 1)
        # The two answers of the old branch are trained there, the shared one is not trained twice.
        assert actions(second) == [*old[1].sampled.tolist(), *old[2].sampled.tolist()]
        trained = exported(chat.session, train_recomputed=True)[0]
        assert actions(trained) == [t for turn in [*old, prompt.turn] for t in turn.sampled.tolist()]

    asyncio.run(go())


@QWEN
def test_recompute_is_marked_when_it_is_not_the_behaviour_policy(renderer: Any) -> None:
    async def go(**sampling: Any) -> bool:
        chat = Chat(renderer)
        chat.add("user", "a")
        await chat.turn("one", sampling=sampling)
        chat.messages[0] = replace(chat.messages[0], parts=())
        chat.add("user", "b")
        await chat.turn("two", sampling=sampling)
        await chat.session.settle()
        return bool(exported(chat.session)[0].behaviour)

    assert asyncio.run(go()) is True
    assert asyncio.run(go(temperature=1.0, top_p=1.0, top_k=-1)) is True
    assert asyncio.run(go(temperature=0.7)) is False
    assert asyncio.run(go(top_p=0.9)) is False
    assert asyncio.run(go(top_k=20)) is False


@QWEN
def test_recompute_fails_without_harm(renderer: Any) -> None:
    async def go() -> None:
        chat = await three_turns(renderer)
        chat.engine.score_error = RuntimeError("no prompt_logprobs here")
        chat.messages[1] = replace(chat.messages[1], parts=())
        chat.add("user", "and now")
        await chat.turn("final")
        await chat.session.settle()
        assert chat.session.events.total("recompute", result="failed") == 1
        assert chat.session.errors[-1]["message"] == "no prompt_logprobs here"
        first = exported(chat.session)[0]
        assert set(first.traj_response_source) == {"none", "sampled"}
        assert len(first.traj_response_logprobs) == len(first.traj_response_mask) == len(first.response_ids)

    asyncio.run(go())


@QWEN
def test_recompute_has_a_kill_switch(renderer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> int:
        chat = await three_turns(renderer)
        chat.messages[1] = replace(chat.messages[1], parts=())
        chat.add("user", "and now")
        await chat.turn("final")
        await chat.session.settle()
        return len(chat.engine.scored)

    assert asyncio.run(go()) == 1
    monkeypatch.setenv("HARBOR_RECOMPUTE_MISMATCH_LOGPROBS", "0")
    assert asyncio.run(go()) == 0


@QWEN
def test_compaction_begins_a_new_root_and_recomputes_nothing(renderer: Any) -> None:
    async def go() -> None:
        chat = await three_turns(renderer)
        before = [turn.sampled.tolist() for turn in chat.session.turns]
        chat.messages = chat.messages[:1]
        chat.add("user", "summary of what happened")
        prompt, answer = await chat.turn("go on")
        await chat.session.settle()
        assert prompt.kind == "root" and not chat.engine.scored
        new, old = exported(chat.session)
        assert new.primary and new.label == old.label == "main"
        assert actions(new) == answer.token_ids and actions(old) == [t for ids in before for t in ids]

    asyncio.run(go())


@QWEN
def test_an_answer_that_nobody_sampled_is_no_action(renderer: Any) -> None:
    async def go() -> None:
        chat = Chat(renderer)
        chat.add("user", "a")
        chat.add("assistant", "written by hand")
        chat.add("user", "b")
        _, answer = await chat.turn("sampled")
        assert actions(exported(chat.session)[0]) == answer.token_ids
        await chat.session.settle()
        assert not chat.engine.scored

    asyncio.run(go())


# -- branches and lineage ------------------------------------------------------------------------------------------


@QWEN
def test_the_title_call_that_comes_first_is_not_the_main_branch(renderer: Any) -> None:
    from verl.experimental.agent_loop.chat_proxy.messages import Lineage

    async def go() -> None:
        chat = Chat(renderer)
        chat.add("system", "Write a title.")
        chat.add("user", "fix the bug")
        await chat.turn("Bug fix")
        chat.messages, chat.tools = [], (chat.tool,)
        chat.add("system", "You are the agent.")
        chat.add("user", "fix the bug")
        _, answer = await chat.turn("", 1)
        chat.add("tool", "content", tool_call_id=answer.message.tool_calls[0].id)
        await chat.turn("done")
        main = list(chat.messages)
        chat.messages = []
        chat.add("system", "You are a helper.")
        chat.add("user", "look here")
        for number in range(5):
            await chat.turn(f"looked {number} " * 9, lineage=Lineage(agent_id="a1"))
            chat.add("user", "further")
        labels = [(a.label, a.primary) for a in exported(chat.session)]
        assert labels == [("main", True), ("subagent", False), ("side", False)]
        branch = chat.session.main_branch()
        assert [turn.answer.message for turn in branch.turns] == [m for m in main if m.role == "assistant"]
        assert [a.label for a in exported(chat.session, labels={"main"})] == ["main"]

    asyncio.run(go())


@QWEN
def test_the_main_branch_does_not_depend_on_the_order_of_arrival(renderer: Any) -> None:
    async def go(first: str, second: str) -> list[str]:
        chat = Chat(renderer)
        for system in (first, second):
            chat.messages = []
            chat.add("system", system)
            chat.add("user", "go")
            for number in range(3 if system == "agent" else 1):
                await chat.turn(f"{system} {number}")
                chat.add("user", "further")
        branch = chat.session.main_branch()
        return [turn.answer.message.text for turn in branch.turns]

    assert asyncio.run(go("agent", "other")) == asyncio.run(go("other", "agent")) == ["agent 0", "agent 1", "agent 2"]


@QWEN
def test_parallel_calls_of_one_conversation_are_siblings(renderer: Any) -> None:
    async def go() -> None:
        chat = await three_turns(renderer)
        chat.add("user", "one more")
        first = await chat.open()
        second = await chat.open(sampling={"seed": 1})
        assert first.ids == second.ids and first.turn.parent is second.turn.parent
        for prompt, text in ((second, "second"), (first, "first")):
            chat.next = [*renderer.tokens.encode_now(text), chat.stop_id("")]
            generation = await chat.engine.generate("s", prompt.ids, prompt.sampling_params())
            await chat.session.finish_turn(prompt.turn, generation)
            chat.session.mark_delivered(prompt.turn)
        masks = [sum(a.traj_response_mask) for a in exported(chat.session)]
        assert sum(masks) == sum(len(turn.sampled) for turn in chat.session.turns)

    asyncio.run(go())


# -- delivery ------------------------------------------------------------------------------------------------------


@QWEN
def test_what_was_not_delivered_is_no_action_until_it_is_replayed(renderer: Any) -> None:
    from verl.experimental.agent_loop.chat_proxy.messages import Request

    async def go() -> None:
        chat = Chat(renderer)
        chat.add("user", "a")
        request = Request(tuple(chat.messages), stream=True)
        prompt = await chat.session.open_turn(request)
        assert chat.session.find_replay(request) is prompt.turn and prompt.turn.state == "open"
        chat.next = [*renderer.tokens.encode_now("yes"), chat.stop_id("")]
        generation = await chat.engine.generate("s", prompt.ids, prompt.sampling_params())
        await chat.session.finish_turn(prompt.turn, generation)
        assert exported(chat.session) == [] and chat.session.main_branch() is None
        again = replace(request, stream=False)
        assert chat.session.find_replay(again) is prompt.turn
        chat.session.mark_delivered(prompt.turn)
        assert len(exported(chat.session)) == 1
        assert chat.session.find_replay(again) is None, "the same request after delivery is a new sample"
        assert chat.session.find_replay(replace(again, retry_count=1)) is prompt.turn
        assert chat.session.find_replay(replace(again, retry_count=1, max_tokens=5)) is None

    asyncio.run(go())


@QWEN
def test_an_idempotency_key_replays_and_an_aborted_turn_never_does(renderer: Any) -> None:
    from verl.experimental.agent_loop.chat_proxy.messages import Request

    async def go() -> None:
        chat = Chat(renderer)
        chat.add("user", "a")
        request = Request(tuple(chat.messages), idempotency_key="k")
        prompt = await chat.session.open_turn(request)
        chat.session.abort_turn(prompt.turn, "engine died")
        assert prompt.turn.error == "engine died" and chat.session.find_replay(request) is None
        prompt = await chat.session.open_turn(request)
        assert chat.session.find_replay(request) is prompt.turn

    asyncio.run(go())


@QWEN
def test_a_client_that_goes_on_has_the_answer(renderer: Any) -> None:
    async def go() -> None:
        chat = Chat(renderer)
        chat.add("user", "a")
        _, answer = await chat.turn("yes")
        turn = chat.session.turns[0]
        turn.delivered = False
        chat.add("user", "b")
        await chat.open()
        assert turn.delivered and actions(exported(chat.session)[0]) == answer.token_ids

    asyncio.run(go())


# -- what the engine gives -----------------------------------------------------------------------------------------


@QWEN
def test_an_aborted_generation_is_no_answer(renderer: Any) -> None:
    from verl.experimental.agent_loop.chat_proxy.engine import Generation
    from verl.experimental.agent_loop.chat_proxy.errors import EngineAborted

    async def go() -> None:
        chat = Chat(renderer)
        chat.add("user", "a")
        prompt = await chat.open()
        with pytest.raises(EngineAborted):
            await chat.session.finish_turn(prompt.turn, Generation([1, 2], [-1.0, -1.0], stop_reason="aborted"))
        assert prompt.turn.state == "aborted" and exported(chat.session) == []

    asyncio.run(go())


@QWEN
def test_an_abort_is_resumed_behind_what_was_sampled(renderer: Any) -> None:
    from verl.experimental.agent_loop.chat_proxy.engine import EngineAborted, generate_resumed

    async def go() -> None:
        chat = Chat(renderer)
        chat.engine.moe = True
        chat.add("user", "a")
        prompt = await chat.open()
        whole = [*renderer.tokens.encode_now("one two three four five six"), chat.stop_id("")]
        chat.engine.reply = lambda ids, params: whole[len(ids) - len(prompt.ids) :]
        chat.engine.abort_after = [2, 0, 1, None]
        chat.engine.global_steps = 4
        generation = await generate_resumed(chat.engine, "s", prompt.ids, prompt.sampling_params(), wait=0)
        assert generation.token_ids == whole
        assert generation.log_probs == [v for part in chat.engine.sampled for v in part.log_probs]
        assert [call["max_tokens"] for call in chat.engine.calls] == [prompt.max_tokens - n for n in (0, 2, 2, 3)]
        await chat.session.finish_turn(prompt.turn, generation)
        routes = prompt.turn.routes
        assert routes.valid.tolist() == [True] * (len(routes) - 1) + [False]
        for at, token in enumerate([*prompt.ids, *whole][:-1]):
            assert (routes.experts[at] == route_of(at, token)).all()
        chat.engine.abort_after = [0, 0, 0]
        with pytest.raises(EngineAborted):
            await generate_resumed(chat.engine, "s", prompt.ids, prompt.sampling_params(), wait=0, attempts=3)

    asyncio.run(go())


@QWEN
def test_a_stream_is_resumed_to_the_budget_and_no_further(renderer: Any) -> None:
    """An abort when all tokens are there is a length; one that brings no token is tried a number of times."""
    from verl.experimental.agent_loop.chat_proxy.engine import (
        EngineAborted,
        Generation,
        generate_resumed,
        stream_resumed,
    )

    class Engine:
        def __init__(self, parts: list[list[int]]) -> None:
            self.parts = parts
            self.asked: list[tuple[list[int], int]] = []

        async def generate(self, request_id: str, ids: list[int], params: dict[str, Any], *, media: Any = None) -> Any:
            self.asked.append((ids, params["max_tokens"]))
            part = self.parts.pop(0)
            return Generation(part, [-1.0] * len(part), stop_reason="aborted")

        async def stream(self, *args: Any, **kwargs: Any) -> Any:
            yield await self.generate(*args, **kwargs)

    async def streamed(engine: Engine) -> list[Any]:
        return [chunk async for chunk in stream_resumed(engine, "s", [7], {"max_tokens": 3}, wait=0, attempts=2)]  # type: ignore[arg-type]

    async def whole(engine: Engine) -> list[Any]:
        return [await generate_resumed(engine, "s", [7], {"max_tokens": 3}, wait=0, attempts=2)]  # type: ignore[arg-type]

    for run in (streamed, whole):
        engine = Engine([[1, 2], [], [3]])
        chunks = asyncio.run(run(engine))
        assert [token for chunk in chunks for token in chunk.token_ids] == [1, 2, 3]
        assert chunks[-1].stop_reason == "length" and not any(chunk.aborted for chunk in chunks)
        assert engine.asked == [([7], 3), ([7, 1, 2], 1), ([7, 1, 2], 1)]
        with pytest.raises(EngineAborted, match="2 times"):
            asyncio.run(run(Engine([[1], [], []])))


def test_parts_of_a_generation_are_joined_without_a_shift() -> None:
    """Rows that an earlier part had stay (their weights ran them); a part without log-probabilities leaves none."""
    from verl.experimental.agent_loop.chat_proxy.engine import Generation, join

    def rows(n: int, value: int) -> np.ndarray:
        return np.full((n, 1, 1), value)

    parts = [
        Generation([1, 2], [-1.0, -2.0], rows(4, 1), "aborted", 3, 3, 1),
        Generation([], None, rows(4, 2), "aborted", 4, 4, None),
        Generation([3], [-3.0], rows(5, 3), "completed", 5, 6, 2, {"request_id": "last"}),
    ]
    whole = join(parts)
    assert whole.token_ids == [1, 2, 3] and whole.log_probs == [-1.0, -2.0, -3.0]
    assert whole.routed_experts.ravel().tolist() == [1, 1, 1, 1, 3]
    assert (whole.min_global_steps, whole.max_global_steps, whole.num_preempted) == (3, 6, 3)
    assert whole.stop_reason == "completed" and whole.extra == {"request_id": "last"}
    assert join([parts[0], Generation([9], None), parts[2]]).log_probs is None
    assert join([parts[0], Generation([9, 8], [-1.0]), parts[2]]).log_probs is None


@QWEN
@pytest.mark.parametrize("values", [None, [], [-1.0]])
def test_log_probs_that_do_not_fit_are_none(renderer: Any, values: Any) -> None:
    from verl.experimental.agent_loop.chat_proxy.engine import Generation

    async def go() -> None:
        chat = Chat(renderer)
        chat.add("user", "a")
        prompt = await chat.open()
        answer = await chat.session.finish_turn(prompt.turn, Generation([9, chat.stop_id("")], values))
        chat.session.mark_delivered(prompt.turn)
        assert answer.log_probs is None
        (acc,) = exported(chat.session)
        assert acc.traj_response_mask == [1, 1] and acc.traj_response_source == ["none", "none"]
        assert chat.session.events.total("logprobs_missing") == 1

    asyncio.run(go())


@QWEN
def test_finish_reasons(renderer: Any) -> None:
    """verl says "completed" for a stop and for a length: it is told by the last token and the limit."""
    from verl.experimental.agent_loop.chat_proxy.engine import Generation

    async def go(ids: list[int], reason: Any = "completed", stop: tuple[str, ...] = (), **fields: Any) -> Any:
        chat = Chat(renderer)
        chat.tools = (chat.tool,)
        chat.add("user", "a")
        prompt = await chat.open(stop=stop, **fields)
        assert prompt.sampling_params().get("stop", []) == list(stop)
        answer = await chat.session.finish_turn(prompt.turn, Generation(ids, None, stop_reason=reason))
        return answer

    encode, end = renderer.tokens.encode_now, 151645
    call = '<tool_call>\n{"name": "read", "arguments": {}}\n</tool_call>'
    assert asyncio.run(go([*encode("yes"), end])).finish_reason == "stop"
    assert asyncio.run(go(encode("a b c"), max_tokens=3)).finish_reason == "length"
    assert asyncio.run(go(encode("a b c"), "length")).finish_reason == "length"
    assert asyncio.run(go([*encode("a b"), end], max_tokens=3)).finish_reason == "stop"
    assert asyncio.run(go([*encode(call), end])).finish_reason == "tool_calls"
    cut = asyncio.run(go(encode("a STOP"), stop=("STOP",)))
    assert (cut.finish_reason, cut.stop_sequence, cut.message.text, cut.text) == ("stop", "STOP", "a ", "a STOP")
    assert asyncio.run(go([end])).message.text == ""
    assert asyncio.run(go([])).finish_reason == "stop"


@QWEN
def test_a_stop_token_in_the_middle_of_an_answer_is_one_of_its_tokens(renderer: Any) -> None:
    """An engine told to ignore it goes on behind it; nothing is cut and the next prompt has it where it was sampled."""

    async def go() -> None:
        chat = Chat(renderer)
        chat.add("user", "a")
        end = chat.stop_id("")
        ids = [*renderer.tokens.encode_now("one"), end, *renderer.tokens.encode_now("two"), end]
        first, answer = await chat.turn(ids=ids, stop=None)
        assert answer.token_ids == ids and answer.finish_reason == "stop"
        assert answer.message.text == "one<|im_end|>two"
        detokenizer = first.detokenizer()
        assert detokenizer.push(ids) + detokenizer.finish() == answer.message.text
        chat.add("user", "b")
        second = await chat.open()
        assert second.kind == "append" and second.ids[: len(first.ids) + len(ids)] == first.ids + ids
        await chat.session.settle()
        (acc,) = exported(chat.session)
        assert actions(acc) == ids

    asyncio.run(go())


@QWEN
def test_max_tokens_is_explicit_and_fits_the_context(renderer: Any) -> None:
    from verl.experimental.agent_loop.chat_proxy.errors import ContextOverflow
    from verl.experimental.agent_loop.chat_proxy.messages import Request, text_message

    async def go() -> None:
        chat = Chat(renderer)
        chat.session.context_limit = 100
        chat.add("user", "a")
        n = len((await chat.open()).ids)
        assert (await chat.open()).max_tokens == 100 - n
        assert (await chat.open(max_tokens=32000)).max_tokens == 100 - n
        assert (await chat.open(max_tokens=7)).sampling_params()["max_tokens"] == 7
        turns = len(chat.session.turns)
        chat.session.context_limit = n
        with pytest.raises(ContextOverflow) as caught:
            await chat.open()
        assert (caught.value.prompt_tokens, caught.value.limit, len(chat.session.turns)) == (n, n, turns)
        request = Request((text_message("user", "word " * 500),))
        assert await chat.session.count_tokens(request) > 500 and len(chat.session.turns) == turns

    asyncio.run(go())


@QWEN
def test_counting_is_what_opening_gives(renderer: Any) -> None:
    from verl.experimental.agent_loop.chat_proxy.messages import Request

    async def go() -> None:
        chat = await three_turns(renderer)
        chat.add("user", "more")
        request = Request(tuple(chat.messages))
        await chat.session.settle()
        before = chat.session.events.snapshot()
        count = await chat.session.count_tokens(request)
        assert chat.session.events.snapshot() == before
        assert count == len((await chat.session.open_turn(request)).ids)

    asyncio.run(go())


@QWEN
def test_a_session_that_ended_takes_nothing(renderer: Any) -> None:
    from verl.experimental.agent_loop.chat_proxy.engine import Generation
    from verl.experimental.agent_loop.chat_proxy.errors import ProxyError, SessionEnded

    async def go() -> None:
        chat = Chat(renderer)
        chat.add("user", "a")
        prompt = await chat.open()
        await chat.store.close("chat")
        assert prompt.turn.error == "session_ended"
        with pytest.raises(ProxyError):
            await chat.session.finish_turn(prompt.turn, Generation([1], [-1.0]))
        with pytest.raises(SessionEnded):
            await chat.open()
        assert chat.store.get("chat") is None and chat.store.ended("chat")
        with pytest.raises(ValueError, match="opened before"):
            chat.store.open("chat")

    asyncio.run(go())


# -- expert routing ------------------------------------------------------------------------------------------------


@QWEN
def test_the_last_tokens_experts_come_from_the_next_prefill(renderer: Any) -> None:
    async def go() -> None:
        chat = Chat(renderer)
        chat.engine.moe = True
        chat.add("user", "a")
        await chat.turn("yes")
        (acc,) = exported(chat.session)
        assert acc.routing.valid.tolist() == [True] * (len(acc.traj_acc_ids) - 1) + [False]
        chat.add("user", "b")
        await chat.turn("no")
        (acc,) = exported(chat.session)
        assert acc.routing.valid.tolist() == [True] * (len(acc.traj_acc_ids) - 1) + [False]
        assert len(acc.traj_response_routing) == len(acc.response_ids)
        assert acc.routing.experts.dtype == np.uint8

    asyncio.run(go())


def test_rows_of_experts_are_placed_by_their_number() -> None:
    from verl.experimental.agent_loop.chat_proxy.routing import as_rows, dtype_for, place_rows

    assert place_rows(15, 10, 5) == 0 and place_rows(14, 10, 5) == 0
    assert place_rows(5, 10, 5) == 9 and place_rows(4, 10, 5) == 10 and place_rows(0, 10, 5) == 14
    with pytest.raises(ValueError):
        place_rows(16, 10, 5)
    assert dtype_for(256) == np.uint8 and dtype_for(257) == np.int16
    assert as_rows(np.full((1, 2, 2), 300)).dtype == np.int16
    assert as_rows(np.full((1, 2, 2), 3), EXPERTS).dtype == np.uint8
    for bad in (np.zeros((2, 2)), np.zeros((1, 2, 2)), np.full((1, 2, 2), -1), np.full((1, 2, 2), EXPERTS)):
        with pytest.raises(ValueError):
            as_rows(bad, EXPERTS)


@QWEN
def test_experts_that_do_not_fit_are_refused_and_the_turn_stands(renderer: Any) -> None:
    from verl.experimental.agent_loop.chat_proxy.engine import Generation

    async def go() -> None:
        chat = Chat(renderer)
        chat.add("user", "a")
        prompt = await chat.open()
        rows = np.zeros((len(prompt.ids) + 9, 2, 2), np.int64)
        await chat.session.finish_turn(prompt.turn, Generation([9], [-1.0], routed_experts=rows))
        assert prompt.turn.routes is None and chat.session.events.total("routes", result="refused") == 1

    asyncio.run(go())


# -- verl's own clients --------------------------------------------------------------------------------------------

PROGRAM = """
import asyncio, json
from types import SimpleNamespace
from verl.experimental.agent_loop.chat_proxy.engine import VerlEngine
from verl.experimental.fully_async_policy.fully_async_rollouter import FullyAsyncLLMServerClient
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

class Remote:
    def __init__(self, function): self.remote = function

async def acquire(request_id): return "s", server
async def generate(request_id, prompt_ids, sampling_params, image_data=None, video_data=None, **rest):
    seen.append(dict(sampling_params))
    extra = {"global_steps": 5}
    if sampling_params.get("prompt_logprobs") is not None:
        extra["prompt_ids"] = [[i] for i in prompt_ids[1:]] + [[0]]
        extra["prompt_logprobs"] = [[-float(i)] for i in prompt_ids[1:]] + [[0.0]]
        if wrong: extra["prompt_ids"][0] = [1]
    sampling_params.clear()
    return TokenOutput(token_ids=[7], log_probs=[-0.5], stop_reason="completed", extra_fields=extra)

seen, wrong = [], False
server = SimpleNamespace(generate=Remote(generate))
balancer = SimpleNamespace(acquire_server=Remote(acquire), release_server=Remote(lambda server_id: None))
config = SimpleNamespace(
    async_training=SimpleNamespace(partial_rollout=True),
    actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(full_determinism=False)),
)
result = {}
for kind in (LLMServerClient, FullyAsyncLLMServerClient):
    engine = VerlEngine(kind(config, balancer))
    params = {"max_tokens": 4, "temperature": 1.0}
    wrong = False
    scored = asyncio.run(engine.score("r", [11, 12, 13]))
    generation = asyncio.run(engine.generate("r", [11], params))
    wrong = True
    try:
        asyncio.run(engine.score("r", [11, 12, 13])); refused = ""
    except ValueError as error:
        refused = str(error)
    result[kind.__name__] = {"scored": scored, "ids": generation.token_ids, "steps": generation.max_global_steps,
                             "params": params, "refused": refused}
print("RESULT " + json.dumps(result))
"""


def test_verls_clients_score_the_tokens_that_were_asked(verl_tree: Path) -> None:
    """The fully-async client drops prompt log-probabilities; they are asked of its parent, and shifted by one."""
    pytest.importorskip("ray")
    environment = {**os.environ, "PYTHONPATH": str(verl_tree)}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    line = next((line for line in run.stdout.splitlines() if line.startswith("RESULT ")), None)
    assert line is not None, run.stderr[-3000:]
    for told in json.loads(line.removeprefix("RESULT ")).values():
        assert told["scored"] == [[None, -12.0, -13.0], 5]
        assert told["ids"] == [7] and told["steps"] == 5
        assert told["params"] == {"max_tokens": 4, "temperature": 1.0}, "the caller's parameters stay as they are"
        assert "belong to other tokens" in told["refused"]
