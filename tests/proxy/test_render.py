"""Prompts of real templates: turn by turn they are what one render of the whole conversation gives."""

from __future__ import annotations

import asyncio
import datetime
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import real_tokenizers
from scripted_engine import ScriptedEngine
from test_property import say

ALL = [
    "qwen3",
    "qwen3_old",
    "qwen3_instruct",
    "qwen2_5",
    "qwen3_5",
    "llama3_1",
    "deepseek_v3",
    "deepseek_v3_trl",
    "glm4_6",
]
ALL += ["gemma3", "gptoss"]
WITH_TOOLS = ["qwen3", "qwen3_instruct", "qwen2_5", "qwen3_5", "llama3_1", "glm4_6", "gptoss"]


class Chat:
    """A client and an engine that samples what the template itself would write."""

    def __init__(self, renderer: Any, **config: Any) -> None:
        from verl.experimental.agent_loop.chat_proxy.messages import Tool
        from verl.experimental.agent_loop.chat_proxy.trajectory import StoreConfig, TrajectoryStore

        self.renderer = renderer
        self.engine = ScriptedEngine(lambda prompt, params: self.next)
        self.next: list[int] = []
        self.store = TrajectoryStore(renderer, context_limit=20000, engine=self.engine, config=StoreConfig(**config))
        self.session = self.store.open("chat")
        schema = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
        self.tool = Tool("read", "Read a file.", schema)
        self.tools: tuple[Any, ...] = ()
        self.messages: list[Any] = []

    def add(self, role: Any, text: str, **fields: Any) -> None:
        from verl.experimental.agent_loop.chat_proxy.messages import text_message

        self.messages.append(text_message(role, text, **fields))

    async def open(self, **fields: Any) -> Any:
        from verl.experimental.agent_loop.chat_proxy.messages import Request

        return await self.session.open_turn(Request(tuple(self.messages), tools=self.tools, **fields))

    async def turn(self, text: str = "", calls: int = 0, stop: str | None = "", ids: Any = None, **fields: Any) -> Any:
        """One turn; its answer is `text` and `calls` as the template writes them. `stop`: None for no stop token."""
        from verl.experimental.agent_loop.chat_proxy.messages import Message, Text, ToolCall

        prompt = await self.open(**fields)
        tokens, setting = self.renderer.tokens, prompt.turn.setting
        made = tuple(ToolCall("x", "read", json.dumps({"path": f"/{i}"})) for i in range(calls))
        message = Message("assistant", (Text(text),) if text else (), tool_calls=made)
        opened = prompt.turn.generation_prompt.removeprefix(setting.profile.header)
        body = say(self.renderer, message, setting).removeprefix(opened)
        self.next = tokens.encode_now(body) if ids is None else list(ids)
        if stop is not None:
            self.next.append(self.stop_id(stop, calls))
        generation = await self.engine.generate("s", prompt.ids, prompt.sampling_params())
        answer = await self.session.finish_turn(prompt.turn, generation)
        self.session.mark_delivered(prompt.turn)
        self.messages.append(answer.message)
        return prompt, answer

    def stop_id(self, text: str, calls: int = 0) -> int:
        tokens = self.renderer.tokens
        names = [text] if text else ["<|call|>", "<|observation|>"] if calls else ["<|return|>", "<|user|>"]
        for name in [*names, "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<｜end▁of▁sentence｜>"]:
            found = tokens.special_id(name)
            if found in tokens.stop_ids:
                return int(found)
        raise AssertionError("no stop token")

    def one_shot(self) -> list[int]:
        """What verl's own call gives for the whole conversation."""
        setting = next(iter(self.session._settings.values()))
        kwargs = dict(setting.kwargs)
        dicts = self.renderer._dicts(self.messages, setting, {})
        ids = self.renderer.tokens.hf.apply_chat_template(
            dicts, tools=setting.tool_dicts, add_generation_prompt=True, tokenize=True, return_dict=False, **kwargs
        )
        return list(ids)


@pytest.mark.parametrize("renderer", ALL, indirect=True)
def test_the_first_prompt_is_verls_own(renderer: Any) -> None:
    """verl's function for prompts, asked with the client's own messages, gives the ids of a session's first prompt."""
    from verl.utils.chat_template import apply_chat_template
    from verl.utils.tokenizer import normalize_token_ids

    async def go() -> None:
        chat = Chat(renderer)
        tools = None
        if renderer.profile.supports_tools:
            chat.tools = (chat.tool,)
            tools = [chat.tool.openai()]
        raw = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one 世界"}]
        raw += [{"role": "assistant", "content": "two"}, {"role": "user", "content": " three\n"}]
        for message in raw:
            chat.add(message["role"], message["content"])
        prompt = await chat.open()
        assert prompt.ids == normalize_token_ids(apply_chat_template(renderer.tokens.hf, raw, tools=tools))

    asyncio.run(go())


# Templates whose one-shot render leaves the turns as they were sampled, without any reasoning.
CLEAN = ["qwen3_instruct", "qwen2_5", "llama3_1", "deepseek_v3", "gemma3", "glm4_6"]


@pytest.mark.parametrize("renderer", CLEAN, indirect=True)
def test_ids_equal_one_shot_ids(renderer: Any) -> None:
    """Canonical answers: the accumulated ids are those of one call of apply_chat_template over the conversation."""

    async def go() -> None:
        chat = Chat(renderer)
        chat.add("system", "Be brief.")
        for number in range(4):
            chat.add("user", f"question {number} 世界\n\n")
            prompt, _ = await chat.turn(f"answer {number}\nwith lines")
        chat.add("user", "last")
        prompt = await chat.open()
        mine, theirs = prompt.ids, chat.one_shot()
        if renderer.profile.reasoning is not None:  # GLM writes an empty reasoning into history
            drop = {renderer.tokens.special_id(mark) for mark in renderer.profile.reasoning}
            mine, theirs = ([i for i in ids if i not in drop] for ids in (mine, theirs))
            newline = renderer.tokens.encode_now("\n")[0]
            mine, theirs = ([i for i in ids if i != newline] for ids in (mine, theirs))
        assert mine == theirs
        await chat.session.settle()
        assert chat.session.events.total("drift") == 0

    asyncio.run(go())


@pytest.mark.parametrize("renderer", ["qwen3_instruct", "qwen2_5", "llama3_1"], indirect=True)
def test_ids_equal_one_shot_ids_with_tools(renderer: Any) -> None:
    """Separators at every answer-to-tool boundary, tool results merged or not: as one call gives them."""

    async def go() -> None:
        chat = Chat(renderer)
        chat.tools = (chat.tool,)
        chat.add("system", "Be brief.")
        chat.add("user", "go")
        for number in range(3):
            calls = 1 if not renderer.profile.supports_parallel or number != 1 else 2
            _, answer = await chat.turn("", calls)
            assert len(answer.message.tool_calls) == calls and answer.finish_reason == "tool_calls"
            for call in answer.message.tool_calls:
                chat.add("tool", f"result {number}", tool_call_id=call.id)
        await chat.turn("done")
        chat.add("user", "more")
        prompt = await chat.open()
        assert prompt.ids == chat.one_shot()

    asyncio.run(go())


@pytest.mark.parametrize("renderer", ALL, indirect=True)
def test_stop_token_and_bos_stand_once(renderer: Any) -> None:
    async def go() -> None:
        chat = Chat(renderer)
        chat.add("user", "hi")
        first, _ = await chat.turn("yes")
        chat.add("user", "and")
        second, _ = await chat.turn("no")
        tokens = renderer.tokens
        between = tokens.decode(second.ids[len(first.ids) :])
        between = between[between.index("yes") : between.index("and")]
        assert sum(between.count(closer) for closer in renderer.profile.closers) == 1
        bos = tokens.hf.bos_token_id
        rendered = tokens.decode(second.ids)
        if bos is not None and rendered.startswith(tokens.text_of(bos)):
            assert second.ids.count(bos) == 1

    asyncio.run(go())


@pytest.mark.parametrize("renderer", ALL, indirect=True)
def test_an_answer_without_stop_token_is_closed_by_the_template(renderer: Any) -> None:
    async def go() -> None:
        chat = Chat(renderer)
        chat.add("user", "hi")
        _first, _ = await chat.turn("yes")
        chat.add("user", "and")
        closed, _ = await chat.turn("no", stop=None)
        chat.add("user", "more")
        third = await chat.open()
        text = renderer.tokens.decode(third.ids[closed.turn.end :])
        closers = renderer.profile.closers
        assert text.startswith(closers) and text.endswith(third.turn.generation_prompt)
        assert sum(text[: text.index("more")].count(closer) for closer in closers) == 1

    asyncio.run(go())


@pytest.mark.parametrize("renderer", ["glm4_6"], indirect=True)
def test_a_stop_token_that_opens_the_next_message(renderer: Any) -> None:
    """GLM stops with the next message's first token. If that is another message than came, it stands as sampled."""

    async def go() -> None:
        user, observation = (renderer.tokens.special_id(text) for text in ("<|user|>", "<|observation|>"))
        for stop, opened in (("<|user|>", []), ("<|observation|>", [user]), ("<|endoftext|>", [user]), (None, [user])):
            chat = Chat(renderer)
            chat.add("user", "hi")
            _, _answer = await chat.turn("yes", stop=stop)
            chat.add("user", "and")
            prompt = await chat.open()
            new = prompt.ids[prompt.cached :]
            assert [token for token in new if token in (user, observation)] == opened, stop

    asyncio.run(go())


@pytest.mark.parametrize("renderer", ALL, indirect=True)
def test_a_late_system_message_stands_where_it_came_and_stays(renderer: Any) -> None:
    async def go() -> None:
        chat = Chat(renderer)
        chat.add("system", "first rule")
        chat.add("user", "hi")
        await chat.turn("yes")
        chat.add("system", "second rule")
        chat.add("user", "and")
        prompt, _ = await chat.turn("no")
        text = renderer.tokens.decode(prompt.ids)
        assert text.index("first rule") < text.index("hi") < text.index("yes") < text.index("second rule")
        assert prompt.kind == "append"
        chat.add("user", "more")
        later = await chat.open()
        assert later.ids[: len(prompt.ids)] == prompt.ids

    asyncio.run(go())


@pytest.mark.parametrize("renderer", WITH_TOOLS, indirect=True)
def test_history_with_calls_that_nobody_sampled(renderer: Any) -> None:
    """A conversation may begin with calls: objects where the template wants them, and text that is no object."""
    from verl.experimental.agent_loop.chat_proxy.messages import Message, ToolCall

    async def go() -> None:
        for arguments, shown in (('{"path": "/x y"}', "/x y"), ("{broken", "{broken")):
            chat = Chat(renderer)
            chat.tools = (chat.tool,)
            chat.add("user", "hi")
            chat.messages.append(Message("assistant", tool_calls=(ToolCall("call_1", "read", arguments),)))
            chat.add("tool", "result", tool_call_id="call_1")
            prompt = await chat.open()
            text = renderer.tokens.decode(prompt.ids)
            assert shown in text and text.index("read") < text.rindex("result")

    asyncio.run(go())


@pytest.mark.parametrize("renderer", ["llama3_1", "gptoss"], indirect=True)
def test_several_calls_where_the_template_renders_one(renderer: Any) -> None:
    """The model may call more than the template can write; its answer stands as sampled, and all results follow it."""

    async def go() -> None:
        assert not renderer.profile.supports_parallel
        chat = Chat(renderer)
        chat.tools = (chat.tool,)
        chat.add("user", "hi")
        text = {
            "llama3_json": '{"name": "read", "parameters": {}}; {"name": "read", "parameters": {"path": "b"}}',
            "gpt-oss": "<|channel|>commentary to=functions.read <|constrain|>json<|message|>{}<|end|><|start|>assistant"
            '<|channel|>commentary to=functions.read <|constrain|>json<|message|>{"path": "b"}',
        }[renderer.profile.family]
        _, answer = await chat.turn(ids=renderer.tokens.encode_now(text))
        assert len(answer.message.tool_calls) == 2
        for number, call in enumerate(answer.message.tool_calls):
            chat.add("tool", f"result {number}", tool_call_id=call.id)
        prompt = await chat.open()
        new = renderer.tokens.decode(prompt.ids[prompt.cached :])
        assert prompt.kind == "append" and new.index("result 0") < new.index("result 1")
        await chat.session.settle()
        assert chat.session.events.total("drift") == 0

    asyncio.run(go())


@pytest.mark.parametrize("renderer", ["gemma3"], indirect=True)
def test_a_tool_result_without_a_place_is_told_as_the_users(renderer: Any) -> None:
    async def go() -> None:
        chat = Chat(renderer)
        chat.add("user", "hi")
        await chat.turn("look")
        chat.add("tool", "what I found", tool_call_id="x", is_error=True)
        chat.add("user", "and now?")
        prompt = await chat.open()
        new = renderer.tokens.decode(prompt.ids[prompt.cached :])
        assert "user\nError: what I found\n\nand now?<end_of_turn>" in new

    asyncio.run(go())


@pytest.mark.parametrize("renderer", ["gemma3"], indirect=True)
def test_tools_without_a_place_in_the_template_are_refused(renderer: Any) -> None:
    from verl.experimental.agent_loop.chat_proxy.errors import RenderError

    async def go() -> None:
        chat = Chat(renderer)
        chat.tools = (chat.tool,)
        chat.add("user", "hi")
        with pytest.raises(RenderError, match="no place for tools"):
            await chat.open()
        assert not chat.session.turns

    asyncio.run(go())


@pytest.mark.parametrize("renderer", ["deepseek_v3"], indirect=True)
def test_tools_that_the_template_does_not_show_are_counted(renderer: Any) -> None:
    async def go() -> None:
        chat = Chat(renderer)
        chat.tools = (chat.tool,)
        chat.add("user", "hi")
        await chat.open()
        assert chat.session.events.total("tools_unseen") == 1

    asyncio.run(go())


@pytest.mark.parametrize("renderer", ["qwen3"], indirect=True)
def test_images_are_refused_by_a_text_model(renderer: Any) -> None:
    from verl.experimental.agent_loop.chat_proxy.errors import RenderError
    from verl.experimental.agent_loop.chat_proxy.messages import Image, Message, Text

    async def go() -> None:
        chat = Chat(renderer)
        chat.messages = [Message("user", (Text("what is this?"), Image("data:image/png;base64,AAAA")))]
        with pytest.raises(RenderError, match="text only"):
            await chat.open()
        chat.messages = [Message("user", (Text("hi"),))]
        await chat.turn("yes")
        image = Message("tool", (Text("shot"), Image("data:image/png;base64,AAAA")), tool_call_id="c")
        chat.messages.append(image)
        with pytest.raises(RenderError, match="text only"):
            await chat.open()
        assert len(chat.session.turns) == 1

    asyncio.run(go())


@pytest.mark.parametrize("renderer", ["gptoss"], indirect=True)
def test_the_date_of_a_session_stands_still(renderer: Any) -> None:
    async def go() -> None:
        chat = Chat(renderer, today=datetime.date(2031, 5, 6))
        chat.add("user", "hi")
        prompt, _ = await chat.turn("yes")
        assert "2031-05-06" in renderer.tokens.decode(prompt.ids)
        chat.add("user", "and")
        prompt, _ = await chat.turn("no")
        await chat.session.settle()
        assert [turn.proved for turn in chat.session.turns] == [True, True]

    asyncio.run(go())


@pytest.mark.parametrize("renderer", ["deepseek_v3", "deepseek_v3_trl"], indirect=True)
def test_a_template_whose_new_text_depends_on_history(renderer: Any) -> None:
    """The first tool result is written in another way than the later ones: not to be rendered without the history."""

    async def go() -> None:
        assert renderer.profile.modes["tool"] == "full" and renderer.profile.modes["user"] == "two_sided"
        chat = Chat(renderer)
        chat.add("user", "hi")
        for number in range(3):
            await chat.turn(f"step {number}", stop="")
            chat.add("tool", f"result {number}", tool_call_id="c")
        prompt = await chat.open()
        assert renderer.tokens.decode(prompt.ids).count("<｜tool▁outputs▁begin｜>") == 1
        await chat.session.settle()
        assert chat.session.events.total("drift") == 0

    asyncio.run(go())


@pytest.mark.parametrize("renderer", ["qwen3"], indirect=True)
def test_thinking_is_kept_or_dropped_as_declared(renderer: Any) -> None:
    async def go(policy: str) -> Any:
        chat = Chat(renderer, thinking=policy)
        chat.add("user", "hi")
        tokens = renderer.tokens
        await chat.turn(ids=tokens.encode_now("<think>\nsecret\n</think>\n\nyes"))
        assert chat.messages[-1].reasoning == "secret"
        chat.add("user", "and")
        prompt = await chat.open()
        return prompt, tokens.decode(prompt.ids), chat.session

    prompt, text, session = asyncio.run(go("keep"))
    assert prompt.kind == "append" and "secret" in text
    prompt, text, session = asyncio.run(go("template"))
    assert prompt.kind == "segment" and "secret" not in text and "yes" in text
    assert session.events.total("segment", reason="thinking_dropped") == 1


@pytest.mark.parametrize("renderer", ["qwen3", "llama3_1", "gptoss", "qwen3_5"], indirect=True)
def test_an_assistant_prefix_is_gone_on_with(renderer: Any) -> None:
    async def go() -> None:
        chat = Chat(renderer)
        chat.add("user", "count")
        chat.add("assistant", "one, two,")
        prompt = await chat.open(continue_final=True)
        assert renderer.tokens.decode(prompt.ids).endswith("one, two,")
        await chat.session.settle()
        chat = Chat(renderer)
        chat.add("user", "count")
        first, answer = await chat.turn("one, two,", stop=None)
        prompt = await chat.open(continue_final=True)
        assert prompt.ids == first.ids + answer.token_ids, "an answer that was cut is gone on with as it was sampled"

    asyncio.run(go())


@pytest.mark.parametrize("renderer", ["qwen3"], indirect=True)
def test_the_proof_finds_a_wrong_prompt(renderer: Any) -> None:
    """The proof is no tautology: another text in any part of the path is found and named."""
    from verl.experimental.agent_loop.chat_proxy.proof import prove

    async def go() -> None:
        chat = Chat(renderer, prove=False)
        chat.add("system", "s")
        chat.add("user", "hi")
        await chat.turn("yes")
        chat.add("user", "and")
        prompt, _ = await chat.turn("no")
        messages = chat.messages[:-1]
        assert prove(renderer, prompt.turn, messages) is None
        right = prompt.turn.spans[0]
        prompt.turn.spans = (replace(right, text=right.text.replace("\n<|im_start|>user", "<|im_start|>user")),)
        drift = prove(renderer, prompt.turn, messages)
        assert drift is not None and drift.kind == "new_text"
        prompt.turn.spans = (right,)
        root = prompt.turn.parent
        root.spans = (replace(root.spans[0], text="x" + root.spans[0].text),)
        drift = prove(renderer, prompt.turn, messages)
        assert drift is not None and drift.kind == "history" and drift.part == 0
        assert root.id in drift.describe(root.id) and "'x<|im_start|>" in drift.describe(root.id)
        root.spans = (replace(root.spans[0], text=root.spans[0].text[1:]),)
        prompt.turn.spans = (right, right)
        drift = prove(renderer, prompt.turn, messages)
        assert drift is not None and drift.kind == "parts"

    asyncio.run(go())


@pytest.mark.parametrize("renderer", ["qwen3"], indirect=True)
@pytest.mark.parametrize("broken", ["wrong", "refused", "failed"])
def test_a_prompt_that_is_not_proved_is_told(renderer: Any, broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the turn, in the counters and among the errors; the trial goes on."""
    from verl.experimental.agent_loop.chat_proxy import proof
    from verl.experimental.agent_loop.chat_proxy.errors import RenderError
    from verl.experimental.agent_loop.chat_proxy.rendering import Context

    async def go() -> Any:
        chat = Chat(renderer)
        chat.add("user", "hi")
        await chat.turn("yes")
        await chat.session.settle()
        chat.add("user", "and")
        if broken == "wrong":
            real = renderer.delta
            monkeypatch.setattr(
                renderer, "delta", lambda *args, **kwargs: Context("", False, real(*args, **kwargs).text + "?")
            )
        else:
            error = RenderError("template", "no") if broken == "refused" else KeyError("a bug")

            def fails(*args: Any) -> None:
                raise error

            monkeypatch.setattr(proof, "prove", fails)
        await chat.turn("no")
        await chat.session.settle()
        chat.add("user", "on")
        await chat.turn("and on")
        return chat.session

    session = asyncio.run(go())
    assert [turn.proved for turn in session.turns[:2]] == [True, False if broken == "wrong" else None]
    result = {"wrong": "drift", "refused": "refused", "failed": "failed"}[broken]
    assert session.events.total("proof", result=result) == 1
    assert session.events.total("drift") == (broken == "wrong")
    assert [error["kind"] for error in session.errors] == ["drift" if broken == "wrong" else "proof"]
    assert len(session.turns) == 3


class Slow:
    """A tokenizer without a fast backend, as those of tiktoken vocabularies are."""

    def __init__(self, fast: Any) -> None:
        self._fast = fast

    def __getattr__(self, name: str) -> Any:
        if name == "backend_tokenizer":
            raise AttributeError(name)
        return getattr(self._fast, name)


@pytest.mark.parametrize("name", ["qwen3_instruct", "llama3_1"])
def test_a_tokenizer_without_a_fast_backend_gives_the_same(name: str, proxy_tree: Path) -> None:
    from verl.experimental.agent_loop.chat_proxy.rendering import Renderer

    try:
        fast, stops = real_tokenizers.load(name)
    except real_tokenizers.Unavailable as reason:
        pytest.skip(str(reason))
    text = "ok 🦊 naïve\n\n世界 <b>"

    async def go(tokenizer: Any) -> Any:
        chat = Chat(Renderer(tokenizer, stop_ids=stops))
        chat.add("system", "be brief")
        for number in range(3):
            chat.add("user", f"question {number} 世界\n")
            prompt, answer = await chat.turn(text)
        detokenizer = prompt.detokenizer()
        pieces = [detokenizer.push([token]) for token in answer.token_ids] + [detokenizer.finish()]
        await chat.session.settle()
        assert all(turn.proved for turn in chat.session.turns)
        return prompt.ids, answer.token_ids, answer.message.text, "".join(pieces), "\ufffd" in "".join(pieces)

    mine, theirs = asyncio.run(go(Slow(fast))), asyncio.run(go(fast))
    assert mine == theirs and mine[2] == text == mine[3] and not mine[4]


@pytest.mark.parametrize("renderer", ["qwen3"], indirect=True)
def test_a_turn_costs_what_its_new_text_costs(renderer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No text is encoded twice, and what is rendered for a turn does not grow with the history."""

    async def go() -> None:
        chat = Chat(renderer, prove=False)
        chat.add("system", "s " * 50)
        encoded: list[str] = []
        rendered: list[int] = []
        real, apply = renderer.tokens.encode_now, renderer.apply
        chat.add("user", "hi")
        await chat.turn("yes")
        for number in range(20):
            chat.add("user", f"question {number:03d} " * 40)
            with monkeypatch.context() as patch:
                patch.setattr(renderer.tokens, "encode_now", lambda text: encoded.append(text) or real(text))
                patch.setattr(renderer, "apply", lambda m, *rest: rendered.append(len(m)) or apply(m, *rest))
                await chat.open()
            await chat.turn("yes")
        assert all(text.count("question") == 40 for text in encoded)
        assert set(rendered) == {4}

    asyncio.run(go())


def test_a_vocabulary_that_begins_texts_with_a_space() -> None:
    """No space comes into the middle of a prompt where its parts are encoded one by one."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from verl.experimental.agent_loop.chat_proxy.tokens import Tokens

    letters = {letter: number for number, letter in enumerate("▁abcdefghijklmnopqrstuvwxyz\n")}
    for scheme in ("first", "always", "never"):
        raw = Tokenizer(models.BPE(vocab=letters, merges=[]))
        raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        raw.decoder = decoders.Metaspace(prepend_scheme=scheme)
        raw.add_special_tokens([AddedToken("</s>", special=True)])
        tokens = Tokens(PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>"))
        joint = tokens.encode_now("one</s>two three")
        assert tokens.encode_now("one</s>") + tokens.encode_behind("two three") == joint
        naive = tokens.encode_now("one</s>") + tokens.encode_now("two three")
        assert (naive == joint) is (scheme != "first")


@pytest.mark.parametrize("renderer", ALL, indirect=True)
def test_the_self_test_tells_what_it_found(renderer: Any) -> None:
    report = renderer.report
    assert report["same_ids_as_transformers"] is True
    assert report["modes"]["user"] == "two_sided" and not report["failures"]


class Processor:
    """A multi-modal processor on a text tokenizer: a picture is as many tokens as it has columns of 8 pixels."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.chat_template = tokenizer.chat_template
        self.calls: list[tuple[str, int]] = []

    def apply_chat_template(self, messages: Any, **kwargs: Any) -> Any:
        flat = [{**message, "content": self.flat(message["content"])} for message in messages]
        return self.tokenizer.apply_chat_template(flat, **kwargs)

    @staticmethod
    def flat(content: Any) -> Any:
        if not isinstance(content, list):
            return content
        return "".join(part["text"] if part["type"] == "text" else "<|image_pad|>" for part in content)

    def __call__(self, text: list[str], images: Any, videos: Any = None, **kwargs: Any) -> dict[str, Any]:
        self.calls.append((text[0], len(images)))
        pieces = text[0].split("<|image_pad|>")
        assert len(pieces) == len(images) + 1
        for image, piece in zip(images, pieces[1:], strict=True):
            pieces[0] += "<|image_pad|>" * (image.width // 8) + piece
        return {"input_ids": [self.tokenizer.encode(pieces[0], add_special_tokens=False)]}


def picture(width: int) -> str:
    """A PNG as a data URL."""
    import base64
    import io

    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (width, 8)).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def test_images_reach_the_processor_turn_by_turn() -> None:
    import real_tokenizers
    from verl.experimental.agent_loop.chat_proxy.errors import RenderError
    from verl.experimental.agent_loop.chat_proxy.messages import Image, Media, Message, Text
    from verl.experimental.agent_loop.chat_proxy.rendering import Renderer

    try:
        tokenizer, stops = real_tokenizers.load("qwen2_5")
    except real_tokenizers.Unavailable as reason:
        pytest.skip(str(reason))

    async def go() -> None:
        processor = Processor(tokenizer)
        renderer = Renderer(tokenizer, processor, stop_ids=stops)
        pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")
        chat = Chat(renderer)
        chat.tools = (chat.tool,)
        chat.messages = [Message("user", (Text("what is this?"), Image(picture(24))))]
        first, answer = await chat.turn("", 1)
        assert first.ids.count(pad) == 3 and [image.width for image in first.media.images] == [24]
        call = answer.message.tool_calls[0]
        chat.messages.append(Message("tool", (Text("shot"), Image(picture(40))), tool_call_id=call.id))
        processor.calls.clear()
        second, _ = await chat.turn("a page")
        assert second.ids[: len(first.ids)] == first.ids and second.ids.count(pad) == 8
        assert [image.width for image in second.media.images] == [24, 40]
        ((text, images),) = processor.calls
        assert images == 1 and "what is this" not in text, "only the new picture is processed"
        await chat.session.settle()
        assert chat.session.events.total("drift") == 0
        chat.messages.append(Message("user", (Image("data:image/png;base64,!!!"),)))
        with pytest.raises(RenderError, match="image cannot be read"):
            await chat.open()
        chat.messages[-1] = Message("user", (Media("audio", "data:audio/wav;base64,AAAA"),))
        with pytest.raises(RenderError, match="audio"):
            await chat.open()
        chat.messages[-1] = Message("user", (Image("http://127.0.0.1:1/x.png"),))
        with pytest.raises(RenderError, match="not fetched"):
            await chat.open()

    asyncio.run(go())


def test_a_tool_format_that_nobody_knows_is_refused_at_the_start() -> None:
    from verl.experimental.agent_loop.chat_proxy.rendering import Renderer

    template = "{% for m in messages %}<|a|>{{ m.role }}:{{ m.content }}<|b|>{% endfor %}<|a|>"
    tokenizer = real_tokenizers.byte_level(template)
    with pytest.raises(ValueError, match="unknown tool call format"):
        Renderer(tokenizer, tool_format="nobody")
    with pytest.raises(Exception, match="no chat template"):
        tokenizer.chat_template = None
        Renderer(tokenizer)


@pytest.mark.parametrize(
    ("name", "stops"),
    [("qwen3", ["<|im_end|>"]), ("llama3_1", ["<|eot_id|>"]), ("glm4_6", ["<|user|>", "<|observation|>"])],
)
def test_stop_tokens_are_found_in_the_template_where_no_configuration_lists_them(
    name: str, stops: list[str], proxy_tree: Path
) -> None:
    from verl.experimental.agent_loop.chat_proxy.rendering import Renderer

    try:
        tokenizer, _ = real_tokenizers.load(name)
    except real_tokenizers.Unavailable as reason:
        pytest.skip(str(reason))
    tokenizer.eos_token = None
    renderer = Renderer(tokenizer)
    assert renderer.tokens.stop_ids >= {tokenizer.convert_tokens_to_ids(stop) for stop in stops}
    assert set(stops) <= set(renderer.profile.closers)
    assert renderer.profile.openers == {stop for stop in stops if name == "glm4_6"}


@pytest.mark.parametrize("written", ["<think>\nwhy\n</think>\n\n", "why</think>"])
def test_reasoning_is_known_by_either_of_its_marks(written: str, proxy_tree: Path) -> None:
    """Some templates open it in the generation prompt of the engine's choice and write its end alone."""
    from serving import TEMPLATE
    from verl.experimental.agent_loop.chat_proxy.rendering import Renderer

    opening, _, closing = written.partition("why")
    template = TEMPLATE.replace(
        r"'<think>\n' + message.reasoning_content + '\n</think>\n\n'",
        f"{opening!r} + message.reasoning_content + {closing!r}",
    )
    assert template != TEMPLATE or opening
    assert Renderer(real_tokenizers.byte_level(template)).profile.reasoning == ("<think>", "</think>")
