"""Random trials on real templates: what the engine sampled is what training reads, once, under its true prefix.

A trial is several agents with one session. They ask, call tools, repeat, rewrite their history, run calls in parallel,
lose connections; the engine aborts and resumes. At the end every id, mask, log-probability and expert row is compared
with what the engine itself remembers.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted_engine import ScriptedEngine, log_prob_of, route_of

FAMILIES = [
    "qwen3",
    "qwen3_old",
    "qwen3_5",
    "llama3_1",
    "deepseek_v3",
    "deepseek_v3_trl",
    "glm4_6",
    "gemma3",
    "gptoss",
]
TRIALS = int(os.environ.get("PROXY_TRIALS", "200" if os.environ.get("PROXY_TESTS") == "all" else "25"))
WORDS = [
    "alpha",
    "beta 世界",
    "naïve\n\nline",
    "x = {'a': 1}",
    "  spaced ",
    "👩‍👩‍👧 ok",
    "<b>",
    "\tcode();\n",
    "1.5e3",
    "ends\n",
]


def say(renderer: Any, message: Any, setting: Any) -> str:
    """The text that a model trained on this template would sample for `message`, without the stop token."""
    from verl.experimental.agent_loop.chat_proxy.errors import RenderError
    from verl.experimental.agent_loop.chat_proxy.messages import text_message

    base = [text_message("user", "y")]
    try:
        closed = renderer.apply(
            renderer._dicts([*base, message], setting, {}), setting.tool_dicts, False, setting.kwargs
        )
    except RenderError:
        return str(message.text)
    bare = renderer.apply(renderer._dicts(base, setting, {}), setting.tool_dicts, False, setting.kwargs)
    body: str = closed[len(bare) :].removeprefix(setting.profile.header)
    for closer in setting.profile.closers:
        if body.rstrip().endswith(closer):
            body = body.rstrip().removesuffix(closer)
    return body


FIGURES: Counter[str] = Counter()
"""What all trials of a run were made of; told at its end."""


@dataclass
class Agent:
    """One conversation of a client."""

    system: str | None
    lineage: Any
    messages: list[Any] = field(default_factory=list)
    tools: tuple[Any, ...] = ()
    last: Any = None


class Trial:
    """Drives one session at random; `check` compares with the engine's memory."""

    def __init__(self, renderer: Any, rng: random.Random, folder: Path, moe: bool) -> None:
        from verl.experimental.agent_loop.chat_proxy.archive import Archive
        from verl.experimental.agent_loop.chat_proxy.messages import Tool
        from verl.experimental.agent_loop.chat_proxy.trajectory import StoreConfig, TrajectoryStore

        self.renderer, self.rng, self.folder = renderer, rng, folder
        self.engine = ScriptedEngine(self.reply, moe=moe, seed=rng.randrange(1 << 30))
        self.store = TrajectoryStore(
            renderer, context_limit=6000, engine=self.engine, config=StoreConfig(recompute=True)
        )
        self.session = self.store.open("trial", Archive(folder))
        schema = {"type": "object", "properties": {"path": {"type": "string"}, "n": {"type": "integer"}}}
        tools = (Tool("read", "Read a file.", schema), Tool("run", "Run.", {"type": "object", "properties": {}}))
        self.tools = tools if renderer.profile.family is not None and renderer.profile.supports_tool_role else ()
        self.truth: dict[str, tuple[list[int], list[int], list[float]]] = {}
        self.next_ids: list[int] = []
        self.agents = [self.agent("You are the agent.")]

    # -- what the model says -------------------------------------------------------------------------------------

    def reply(self, prompt_ids: list[int], params: dict[str, Any]) -> list[int]:
        return self.next_ids

    def answer_ids(self, setting: Any, generation_prompt: str) -> list[int]:
        from verl.experimental.agent_loop.chat_proxy.messages import Message, Text, ToolCall

        rng, tokens = self.rng, self.renderer.tokens
        roll = rng.random()
        if roll < 0.08:
            raw = [rng.randrange(200, 5000) for _ in range(rng.randrange(0, 12))]
        elif roll < 0.16:
            text = rng.choice(["<tool_call>\n{bad", "<think>half", '<tool_call>{"name": 1}</tool_call>', "", " \n"])
            raw = tokens.encode_now(text)
        else:
            calls = ()
            if self.tools and rng.random() < 0.6:
                calls = tuple(
                    ToolCall("call_x", rng.choice(["read", "run"]), json.dumps(self.arguments()))
                    for _ in range(rng.choice([1, 1, 1, 2]))
                )
            text = rng.choice(WORDS) if not calls or rng.random() < 0.4 else ""
            thought = rng.choice(WORDS) if rng.random() < 0.4 else ""
            message = Message("assistant", (Text(text),) if text else (), reasoning=thought, tool_calls=calls)
            whole = say(self.renderer, message, setting)
            opened = generation_prompt.removeprefix(setting.profile.header)
            whole = whole.removeprefix(opened)
            marks = setting.profile.reasoning
            if marks is not None and opened.rfind(marks[0]) > opened.rfind(marks[1]) and marks[1] not in whole:
                whole = f"why\n{marks[1]}\n\n{whole}"  # the template drops reasoning that its own prompt opens
            raw = tokens.encode_now(whole)
        raw = [token for token in raw if token not in tokens.stop_ids]
        if rng.random() < 0.2 and len(raw) > 2:
            # Not every sampled sequence is what the tokenizer would make of its text.
            at = rng.randrange(len(raw) - 1)
            pieces = [tokens.encode_now(char) for char in tokens.decode(raw[at : at + 1])]
            if "\ufffd" not in tokens.decode(raw[at : at + 1]):
                raw[at : at + 1] = [token for piece in pieces for token in piece if token not in tokens.stop_ids]
        if rng.random() < 0.85:
            raw.append(rng.choice(sorted(tokens.stop_ids)))
        return raw or [sorted(tokens.stop_ids)[0]]

    def arguments(self) -> dict[str, Any]:
        rng = self.rng
        return rng.choice(
            [{}, {"path": rng.choice(WORDS)}, {"n": rng.randrange(99), "path": "b"}, {"deep": {"k": [1, None]}}]
        )

    # -- what the clients do -------------------------------------------------------------------------------------

    def agent(self, system: str | None, **lineage: Any) -> Agent:
        from verl.experimental.agent_loop.chat_proxy.messages import Lineage, text_message

        tools = self.tools if self.rng.random() < 0.9 else ()
        agent = Agent(system, Lineage(**lineage), tools=tools)
        if system is not None:
            agent.messages.append(text_message("system", system))
        agent.messages.append(text_message("user", self.rng.choice(WORDS)))
        return agent

    def request(self, agent: Agent, **fields: Any) -> Any:
        from verl.experimental.agent_loop.chat_proxy.messages import Request

        limit = self.rng.choice([None, None, None, 3, 400])
        return Request(
            tuple(agent.messages),
            tools=agent.tools,
            max_tokens=limit,
            lineage=agent.lineage,
            sampling={"temperature": 1.0},
            **fields,
        )

    async def open(self, agent: Agent, request: Any = None) -> Any:
        from verl.experimental.agent_loop.chat_proxy.errors import ContextOverflow, RenderError

        try:
            return await self.session.open_turn(request or self.request(agent))
        except (RenderError, ContextOverflow):
            # A template may refuse a shape, or the context is full: the agent begins anew.
            before = len(self.session.turns)
            agent.messages = self.agent(agent.system).messages
            assert len(self.session.turns) == before
            return None

    async def sample(self, prompt: Any, resume: bool = False) -> Any:
        from verl.experimental.agent_loop.chat_proxy.engine import generate_resumed

        self.next_ids = self.answer_ids(prompt.turn.setting, prompt.turn.generation_prompt)
        calls = len(self.engine.sampled)
        if resume:
            whole = list(self.next_ids)
            cut = self.rng.randrange(0, len(whole))
            self.engine.abort_after = [cut, None]
            at = len(prompt.ids)
            self.engine.reply = lambda prompt_ids, params: whole[len(prompt_ids) - at :]
        try:
            generation = await generate_resumed(self.engine, "s", prompt.ids, prompt.sampling_params(), wait=0)
        finally:
            self.engine.reply, self.engine.abort_after = self.reply, []
        parts = self.engine.sampled[calls:]
        assert all(part.prompt_ids[: len(prompt.ids)] == prompt.ids for part in parts)
        sampled = [token for part in parts for token in part.token_ids]
        values = [value for part in parts for value in part.log_probs]
        self.truth[prompt.turn.id] = (list(prompt.ids), sampled, values)
        return generation

    async def ask(self, agent: Agent) -> None:
        """A turn from question to delivered answer."""
        rng, session = self.rng, self.session
        prompt = await self.open(agent)
        if prompt is None:
            return
        roll = rng.random()
        if roll < 0.06:
            session.abort_turn(prompt.turn, "disconnected")
            return
        generation = await self.sample(prompt, resume=roll < 0.16)
        if roll > 0.96:
            session.abort_turn(prompt.turn, "engine_error")
            self.truth.pop(prompt.turn.id)
            return
        parser = None
        if rng.random() < 0.5:
            parser, detokenizer = prompt.parser(), prompt.detokenizer()
            for start in range(0, len(generation.token_ids), 3):
                parser.feed(detokenizer.push(generation.token_ids[start : start + 3]))
            parser.feed(detokenizer.finish())
            parser.finish()
        answer = await session.finish_turn(prompt.turn, generation, parser=parser)
        if roll > 0.9:
            # Not delivered: the client asks again and gets this very turn, or never asks.
            repeat = replace(prompt.turn.request, messages=tuple(agent.messages))
            assert session.find_replay(repeat) is prompt.turn
            if rng.random() < 0.5:
                return
        session.mark_delivered(prompt.turn)
        assert session.find_replay(replace(prompt.turn.request, messages=tuple(agent.messages))) is not prompt.turn
        self.go_on(agent, answer)

    def go_on(self, agent: Agent, answer: Any) -> None:
        """The client echoes the answer in its own way and adds what is new."""
        from verl.experimental.agent_loop.chat_proxy.messages import text_message

        rng = self.rng
        agent.messages.append(self.echo(answer.message))
        results = [
            text_message("tool", rng.choice(WORDS), tool_call_id=call.id, name=call.name, is_error=rng.random() < 0.1)
            for call in answer.message.tool_calls
        ]
        agent.messages += results
        roll = rng.random()
        if not results or roll < 0.15:
            agent.messages.append(text_message("user", rng.choice(WORDS)))
        if roll > 0.93:
            agent.messages.append(text_message("user", "and " + rng.choice(WORDS)))
        if 0.85 < roll < 0.93:
            agent.messages.append(text_message("system", "<late>" + rng.choice(WORDS)))

    def echo(self, message: Any) -> Any:
        from verl.experimental.agent_loop.chat_proxy.messages import Text

        rng = self.rng
        message = replace(message, anchor=message.anchor if rng.random() < 0.3 else None)
        roll = rng.random()
        if roll < 0.25:
            message = replace(message, reasoning="")
        elif roll < 0.35 and message.reasoning:
            text = f"<think>\n{message.reasoning}\n</think>\n\n{message.text}"
            message = replace(message, reasoning="", parts=(Text(text),))
        if message.text and rng.random() < 0.2:
            message = replace(message, parts=(Text(message.text + "\n"),))
        calls = []
        for call in message.tool_calls:
            mapping = call.mapping()
            if mapping is not None and rng.random() < 0.5:
                text = json.dumps(dict(reversed(mapping.items())), indent=1)
                call = replace(call, arguments=text)
            if rng.random() < 0.1:
                call = replace(call, name="renamed_" + call.name)
            calls.append(call)
        return replace(message, tool_calls=tuple(calls))

    def rewrite(self, agent: Agent) -> None:
        from verl.experimental.agent_loop.chat_proxy.messages import Text, text_message

        rng, messages = self.rng, agent.messages
        roll = rng.random()
        users = [i for i, message in enumerate(messages) if message.role == "user"]
        answers = [i for i, message in enumerate(messages) if message.role == "assistant"]
        if roll < 0.3:
            head = messages[:1] if messages[0].role == "system" else []
            agent.messages = [*head, text_message("user", "summary: " + rng.choice(WORDS))]
        elif roll < 0.6 and users:
            at = rng.choice(users)
            messages[at] = text_message("user", messages[at].text + " [edited]")
        elif roll < 0.8 and answers:
            at = rng.choice(answers)
            if not messages[at].tool_calls:
                messages[at] = replace(messages[at], parts=(Text("rewritten " + rng.choice(WORDS)),), anchor=None)
        else:
            tools = [i for i, message in enumerate(messages) if message.role == "tool"]
            if tools:
                at = rng.choice(tools)
                messages[at] = replace(messages[at], parts=(Text("[cleared]"),))

    async def parallel(self, agent: Agent) -> None:
        """Two calls of one conversation in flight at once; the client goes on with one of them."""
        first, second = await self.open(agent), None
        if first is None:
            return
        other = self.request(agent)
        second = await self.open(
            agent, replace(other, sampling={"temperature": 1.0, "seed": self.rng.randrange(1 << 20)})
        )
        prompts = [prompt for prompt in (first, second) if prompt is not None]
        generations = [(prompt, await self.sample(prompt)) for prompt in prompts]
        self.rng.shuffle(generations)
        answers = []
        for prompt, generation in generations:
            answers.append(await self.session.finish_turn(prompt.turn, generation))
            self.session.mark_delivered(prompt.turn)
        self.go_on(agent, self.rng.choice(answers))

    async def run(self, steps: int) -> None:
        rng = self.rng
        for _ in range(steps):
            agent = rng.choice(self.agents)
            roll = rng.random()
            if roll < 0.1 and len(self.agents) < 4:
                self.agents.append(
                    rng.choice(
                        [
                            lambda: self.agent("You are a helper.", agent_id="a1"),
                            lambda: self.agent(None, kind="title"),
                            lambda: self.agent("You are the agent."),
                        ]
                    )()
                )
            elif roll < 0.22 and len(agent.messages) > 2:
                self.rewrite(agent)
                await self.ask(agent)
            elif roll < 0.3:
                await self.parallel(agent)
            else:
                await self.ask(agent)

    # -- the comparison ------------------------------------------------------------------------------------------

    async def check(self) -> None:
        from verl.experimental.agent_loop.chat_proxy.archive import read_archive
        from verl.experimental.agent_loop.chat_proxy.export import export_all

        session = await self.store.close("trial")
        finished = {turn.id: turn for turn in session.turns if turn.state == "finished"}
        assert finished.keys() == self.truth.keys()
        for turn in finished.values():
            prompt_ids, sampled, values = self.truth[turn.id]
            path = [token for t in turn.path() for part in (t.context_ids, t.sampled) for token in part.tolist()]
            assert path == prompt_ids + sampled, "the path is what the engine saw and sampled"
            assert turn.log_probs.tolist() == values
        accumulators = export_all(session)
        self.check_exports(session, accumulators)
        FIGURES.update(trials=1, turns=len(session.turns), branches=len(accumulators))
        FIGURES.update(f"{turn.kind} turns" for turn in session.turns)
        FIGURES.update(f"{turn.state} turns" for turn in session.turns if turn.state != "finished")
        FIGURES["sampled tokens"] += sum(len(turn.sampled) for turn in finished.values())
        FIGURES["recomputed rewrites"] += session.events.total("recompute", result="done")
        FIGURES["proved prompts"] += session.events.total("proof", result="proved")
        again = read_archive(self.folder)
        assert again.complete and again.lost == 0
        self.check_exports(again, again.accumulators())
        events = session.events
        assert events.total("drift") == 0, session.errors
        assert events.total("proof", result="refused") == 0, session.errors
        assert all(turn.proved for turn in finished.values())

    def check_exports(self, session: Any, accumulators: list[Any]) -> None:
        by_id = {turn.id: turn for turn in session.turns}
        actions: dict[str, int] = {}
        for acc in accumulators:
            n = len(acc.traj_acc_ids) - acc.prompt_length
            lengths = {len(acc.traj_response_mask), len(acc.traj_response_logprobs), len(acc.source), n}
            assert lengths == {n}
            mask = [0] * acc.prompt_length + acc.traj_response_mask
            values = [0.0] * acc.prompt_length + acc.traj_response_logprobs
            source = ["none"] * acc.prompt_length + acc.traj_response_source
            assert acc.spans[0]["start"] == 0 and acc.spans[-1]["end"] == len(acc.traj_acc_ids)
            for span in acc.spans:
                turn, part = by_id[span["turn"]], slice(span["start"], span["end"])
                if span["kind"] == "sampled":
                    prompt_ids, sampled, truth = self.truth[turn.id]
                    assert acc.traj_acc_ids[: span["end"]] == prompt_ids + sampled
                    assert values[part] == truth and set(source[part]) == {"sampled"}
                    if set(mask[part]) == {1}:
                        assert turn.delivered
                        actions[turn.id] = actions.get(turn.id, 0) + 1
                    else:
                        assert set(mask[part]) == {0}
                else:
                    assert not any(mask[part])
                    for at in range(max(span["start"], acc.prompt_length), span["end"]):
                        if turn.recomputed is not None and at > 0:
                            assert source[at] == "recomputed"
                            assert values[at] == log_prob_of(at, acc.traj_acc_ids[at])
                        else:
                            assert source[at] == "none" and values[at] == 0.0
            if self.engine.moe:
                routes = acc.routing
                assert routes is not None and len(routes) == len(acc.traj_acc_ids)
                assert routes.valid[:-1].all()
                for at, token in enumerate(acc.traj_acc_ids[:-1]):
                    assert (routes.experts[at] == route_of(at, token)).all()
        delivered = {turn.id for turn in session.turns if turn.state == "finished" and turn.delivered}
        assert actions == dict.fromkeys(delivered, 1), "every delivered answer is trained on exactly once"


@pytest.mark.parametrize("renderer", FAMILIES, indirect=True)
def test_what_was_sampled_is_what_training_reads(renderer: Any) -> None:
    @settings(
        max_examples=TRIALS,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.integers(0, 2**32), st.integers(3, 18), st.booleans())
    def trial(seed: int, steps: int, moe: bool) -> None:
        async def go() -> None:
            folder = Path(tempfile.mkdtemp())
            try:
                trial = Trial(renderer, random.Random(seed), folder, moe)
                await trial.run(steps)
                await trial.check()
            finally:
                shutil.rmtree(folder, ignore_errors=True)

        asyncio.run(go())

    trial()
