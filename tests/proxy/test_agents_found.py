"""What real agents did that the proxy had not expected, each as its smallest case."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest
from serving import Served, asynchronous, serve

TOOL = {"name": "Bash", "description": "runs it", "input_schema": {"type": "object", "properties": {}}}
SUMMARIZE = (
    "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.\n\nYour task is to create a detailed summary of the "
    "conversation so far"
)


async def ask(served: Served, messages: list[dict[str, Any]], **fields: Any) -> str:
    body = {"model": "m", "max_tokens": 64, "system": "You are an agent.", "tools": [TOOL], "messages": messages}
    async with (
        aiohttp.ClientSession() as http,
        http.post(served.messages_url, json=body | fields, headers=served.api_key) as response,
    ):
        assert response.status == 200, await response.text()
        content = (await response.json())["content"]
        return "".join(block["text"] for block in content if block["type"] == "text")


def user(*texts: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": text} for text in texts]}


def labels(served: Served) -> list[tuple[str, bool, str]]:
    """Label, primary and the last answer of every branch."""
    return [(b.label, b.primary, b.leaf.answer.message.text) for b in served.session.trajectory.branches()]


@asynchronous
async def test_a_summary_with_the_agents_own_tools_is_a_side_call() -> None:
    """Claude Code summarizes after an overflow, with its tools, and ends if the prompt is still too long."""
    async with serve(["one", "two", "summary"]) as served:
        first = [user("go"), {"role": "assistant", "content": await ask(served, [user("go")])}]
        await ask(served, [*first, user("on")])
        await ask(served, [*first, user("on", SUMMARIZE)])
    assert labels(served) == [("main", True, "two"), ("side", False, "summary")]


@asynchronous
async def test_a_conversation_that_goes_on_behind_a_summary_is_still_the_main_one() -> None:
    async with serve(["summary", "two"]) as served:
        asked = [user("go", SUMMARIZE)]
        asked += [{"role": "assistant", "content": await ask(served, asked)}, user("on")]
        await ask(served, asked)
    assert labels(served) == [("main", True, "two")]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (SUMMARIZE, "compaction"),
        ("You are about to hand off your work to another AI agent.\n Please", "compaction"),
        ("What does 'Your task is to create a detailed summary of the conversation so far' do?", None),
    ],
)
def test_calls_for_a_summary(text: str, kind: str | None) -> None:
    from multidict import CIMultiDict
    from verl.experimental.agent_loop.chat_proxy.lineage import read_lineage

    for content in (text, [{"type": "text", "text": "result"}, {"type": "text", "text": text}]):
        body = {"tools": [TOOL], "messages": [{"role": "user", "content": content}]}
        assert read_lineage(CIMultiDict(), body).kind == kind
    assert read_lineage(CIMultiDict(), {"messages": [{"role": "assistant", "content": text}]}).kind is None


@asynchronous
async def test_a_summary_appended_to_the_conversation_leaves_it_a_branch_of_its_own() -> None:
    """Terminus 2 summarizes its whole history, and goes on with a new one."""
    async with serve(["one", "summary", "three"]) as served:
        first = [user("go"), {"role": "assistant", "content": await ask(served, [user("go")])}]
        await ask(served, [*first, user(SUMMARIZE)])
        assert labels(served) == [("main", True, "one"), ("side", False, "summary")]
        await ask(served, [user("go", "done so far: summary")])
    assert labels(served) == [("main", True, "three"), ("main", False, "one"), ("side", False, "summary")]
    exported = served.session.trajectory
    from verl.experimental.agent_loop.chat_proxy.export import export_all

    trained = [sum(branch.traj_response_mask) for branch in export_all(exported)]
    assert trained == [len("three") + 1, len("one") + 1, len("summary") + 1]


@pytest.mark.parametrize("alone", [True, False])
@asynchronous
async def test_reasoning_that_is_left_of_a_stream_that_broke_is_not_an_answer(alone: bool) -> None:
    """Codex sends the same call again, with the reasoning that had arrived."""
    answers = ["<think>\nwhy\n</think>\n\n", "<think>\nwhy\n</think>\n\none", "two"]
    async with serve(answers[not alone :]) as served:
        body: dict[str, Any] = {"model": "m", "input": "go", "store": False}
        body["include"] = ["reasoning.encrypted_content"]
        async with aiohttp.ClientSession() as http:
            url, headers = f"{served.root}/v1/responses", served.bearer
            async with http.post(url, json=body, headers=headers) as response:
                output = (await response.json())["output"]
            kept = [item for item in output if item["type"] == "reasoning"]
            assert len(kept) == 1
            body["input"] = [{"type": "message", "role": "user", "content": "go"}, *kept]
            async with http.post(url, json=body, headers=headers) as response:
                assert response.status == 200, await response.text()
    prompts = [prompt for prompt, _ in served.engine.calls]
    # An answer of reasoning alone is an answer; the reasoning of one with more in it is what is left of it.
    assert (prompts[1] == prompts[0]) == (not alone)


@pytest.mark.parametrize("alone", [True, False])
@asynchronous
async def test_reasoning_that_is_left_of_a_broken_stream_in_the_history_is_dropped(alone: bool) -> None:
    """OpenCode keeps it in its history in front of the answer that it got at last."""
    thought = "<think>\nwhy\n</think>\n\n"
    async with serve([thought if alone else "one", "two", "three"]) as served, aiohttp.ClientSession() as http:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
        for _ in range(2):
            body = {"model": "m", "messages": messages}
            async with http.post(served.chat_url, json=body, headers=served.bearer) as response:
                answer = (await response.json())["choices"][0]["message"]
            broken = {"role": "assistant", "content": "", "reasoning_content": "because"}
            messages = [*messages, broken, answer, {"role": "user", "content": "on"}]
        async with http.post(served.chat_url, json=body | {"messages": messages}, headers=served.bearer) as response:
            assert response.status == 200, await response.text()
    first, second, third = served.turns
    assert (second.parent, third.parent) == (first, second)
    assert [turn.kind for turn in served.turns] == ["root", "append", "append"]
    # An answer that was nothing but reasoning is no leftover.
    assert served.session.trajectory.events.total("broken_answer") == 3


@asynchronous
async def test_a_title_is_not_trained_on_where_the_agent_got_no_answer() -> None:
    """OpenCode asks for a title before its first prompt turns out to be too long."""
    from verl.experimental.agent_loop.chat_proxy.export import main_branch

    async with serve(["a title", "one"]) as served:
        await ask(served, [user("go")], system="You are a title generator.", tools=[])
        assert main_branch(served.session.trajectory) is None
        await ask(served, [user("go")])
    assert labels(served) == [("main", True, "one"), ("side", False, "a title")]


@asynchronous
async def test_a_conversation_that_another_one_asked_for_is_a_sub_agents() -> None:
    """OpenHands' sub-agents have another system prompt and other tools, and say nothing else of themselves."""
    call = '<tool_call>\n{"name": "Bash", "arguments": {"prompt": " look there", "who": "go"}}\n</tool_call>'
    async with serve([call, "a long answer of the sub-agent", "one"]) as served:
        await ask(served, [user("go")], max_tokens=200)
        await ask(served, [user("look there")], system="You are another agent.")
        # What goes on behind a summary begins with the same task, and with a text that the agent itself has written.
        await ask(served, [user("go", "done so far: nothing")])
    found = labels(served)
    assert found[0] == ("main", True, "one") and found[2] == ("subagent", False, "a long answer of the sub-agent")
    assert [label for label, _, _ in found] == ["main", "main", "subagent"]
