"""What models write, read: tool calls of every family, reasoning, and streams that say what whole answers say."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "deep": {"type": "object", "properties": {"n": {"type": "integer"}}},
        "all": {"type": "boolean"},
        "items": {"type": "array", "items": {"type": "integer"}},
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    },
}


def tools() -> tuple[Any, ...]:
    from verl.experimental.agent_loop.chat_proxy.messages import Tool

    return (Tool("edit", "Edit.", SCHEMA), Tool("list", "List.", {"type": "object", "properties": {}}))


def read(family: str | None, text: str, *, opened: bool = False, given: Any = None, reasoning: Any = "think") -> Any:
    from verl.experimental.agent_loop.chat_proxy.parsing import THINK, OutputParser, parse

    marks = THINK if reasoning == "think" else reasoning
    return parse(OutputParser(family, marks, tools() if given is None else given, opened), text)


def calls(message: Any) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in message.tool_calls]


ONE = [("edit", {"path": "a b", "count": 3})]
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "edit", "arguments": {"path": "a b", "count": 3}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=edit>\n<parameter=path>\na b\n</parameter>\n<parameter=count>\n3\n"
    "</parameter>\n</function>\n</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=edit>\n<parameter=path>a b</parameter>\n<parameter=count>3</parameter>\n"
    "</function>\n</seed:tool_call>",
    "llama3_json": '{"name": "edit", "parameters": {"path": "a b", "count": 3}}',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>edit\n```json\n"
    '{"path": "a b", "count": 3}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="edit">\n'
    '<｜DSML｜parameter name="path" string="true">a b'
    '</｜DSML｜parameter>\n<｜DSML｜parameter name="count" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    "</｜DSML｜function_calls>",
    "glm45": "<tool_call>edit\n<arg_key>path</arg_key>\n<arg_value>a b</arg_value>\n<arg_key>count</arg_key>\n"
    "<arg_value>3</arg_value>\n</tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.edit:0<|tool_call_argument_begin|>"
    '{"path": "a b", "count": 3}<|tool_call_end|><|tool_calls_section_end|>',
    "minimax_m2": '<minimax:tool_call>\n<invoke name="edit">\n<parameter name="path">a b</parameter>\n'
    '<parameter name="count">3</parameter>\n</invoke>\n</minimax:tool_call>',
    "mistral": '[TOOL_CALLS][{"name": "edit", "arguments": {"path": "a b", "count": 3}}]',
    "gpt-oss": '<|channel|>commentary to=functions.edit <|constrain|>json<|message|>{"path": "a b", "count": 3}',
}


@pytest.mark.parametrize("family", sorted(WRITTEN))
def test_a_call_of_every_family(family: str) -> None:
    message = read(family, WRITTEN[family], reasoning=None)
    assert calls(message) == ONE and message.text == ""
    assert message.tool_calls[0].id.startswith("call_") and len(message.tool_calls[0].id) == 29


@pytest.mark.parametrize("family", sorted(set(WRITTEN) - {"llama3_json", "mistral", "gpt-oss"}))
def test_text_before_and_after_a_call_is_kept(family: str) -> None:
    message = read(family, f"<think>\nwhy\n</think>\n\nfirst\n{WRITTEN[family]}\n{WRITTEN[family]}\nlast ")
    assert message.reasoning == "why" and calls(message) == ONE * 2
    assert message.text.split() == ["first", "last"] and message.text.startswith("first")


@pytest.mark.parametrize("family", sorted(WRITTEN))
def test_without_tools_nothing_is_a_call(family: str) -> None:
    message = read(family, WRITTEN[family], given=(), reasoning=None)
    assert not message.tool_calls
    assert "a b" in message.text


def test_v3_1_and_mistral_write_several_calls() -> None:
    text = (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>edit<｜tool▁sep｜>{"path": "x"}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>list<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    )
    assert calls(read("deepseek_v3", text)) == [("edit", {"path": "x"}), ("list", {})]
    text = '[TOOL_CALLS]edit[ARGS]{"path": "x"}[TOOL_CALLS]list[ARGS]{}'
    assert calls(read("mistral", text)) == [("edit", {"path": "x"}), ("list", {})]
    text = '<|python_tag|>{"name": "list", "parameters": {}}; {"name": "edit", "parameters": {"count": "7"}}'
    assert calls(read("llama3_json", text)) == [("list", {}), ("edit", {"count": 7})]


def test_the_models_own_call_id_is_kept_beside_ours() -> None:
    call = read("kimi_k2", WRITTEN["kimi_k2"]).tool_calls[0]
    assert call.model_id == "functions.edit:0" and call.id != call.model_id


MALFORMED = [
    ("hermes", '<tool_call>\n{"name": "edit", "arguments": {"path": \n</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "edit", "arguments": [1]}</tool_call>'),
    ("hermes", "<tool_call>\nnever closed"),
    ("qwen3_coder", "<tool_call>\n<function=>\n</function></tool_call>"),
    ("qwen3_coder", "<tool_call>nothing</tool_call>"),
    ("glm45", '<tool_call>{"name": "edit"}</tool_call>'),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>oops<｜tool▁calls▁end｜>"),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_calls_section_end|>"),
    ("mistral", "[TOOL_CALLS] not json"),
    ("llama3_json", '{"name": "edit", "parameters": '),
]


@pytest.mark.parametrize(("family", "text"), MALFORMED)
def test_a_malformed_call_stays_the_text_that_it_is(family: str, text: str) -> None:
    message = read(family, f"before {text}" if family != "llama3_json" else text)
    assert not message.tool_calls
    assert message.text == (f"before {text}" if family != "llama3_json" else text)


def test_a_malformed_call_does_not_take_the_next_one_with_it() -> None:
    message = read("hermes", f"<tool_call>{{bad</tool_call>{WRITTEN['hermes']}")
    assert message.text == "<tool_call>{bad</tool_call>" and calls(message) == ONE


def test_json_as_models_write_it() -> None:
    for body in (
        '{"name": "edit", "arguments": {"path": "two\nlines"}}',
        '{"name": "edit", "arguments": {"path": "two\\nlines"}}}',
        "{'name': 'edit', 'arguments': {'path': 'two\\nlines'}}",
    ):
        message = read("hermes", f"<tool_call>{body}</tool_call>")
        assert calls(message) == [("edit", {"path": "two\nlines"})], body


def test_the_last_call_may_lack_its_end() -> None:
    assert calls(read("hermes", '<tool_call>\n{"name": "list", "arguments": {}}')) == [("list", {})]


def test_arguments_are_coerced_by_the_schema() -> None:
    given = {
        "path": 5, "count": "7", "ratio": "0.5", "deep": '{"n": "2"}', "all": "True", "items": '["1", 2]',
        "maybe": "null",
        "unknown": "8",
    }  # fmt: skip
    wanted = {
        "path": "5", "count": 7, "ratio": 0.5, "deep": {"n": 2}, "all": True, "items": [1, 2], "maybe": None,
        "unknown": "8",
    }  # fmt: skip
    text = f"<tool_call>{json.dumps({'name': 'edit', 'arguments': given})}</tool_call>"
    assert calls(read("hermes", text)) == [("edit", wanted)]
    kept = '{"path":"x",  "count":1}'
    message = read("hermes", f'<tool_call>{{"name": "edit", "arguments": {kept}}}</tool_call>')
    assert json.loads(message.tool_calls[0].arguments) == json.loads(kept)


def test_a_value_that_does_not_fit_its_schema_stays() -> None:
    text = '<tool_call>{"name": "edit", "arguments": {"count": "many", "deep": "[1]", "all": 3}}</tool_call>'
    assert calls(read("hermes", text)) == [("edit", {"count": "many", "deep": "[1]", "all": 3})]


def test_reasoning() -> None:
    for text, opened, reasoning, content in (
        ("<think>\na\n</think>\n\nb", False, "a", "b"),
        ("a\n</think>\n\nb", True, "a", "b"),
        ("<think>\na\n</think>b", True, "a", "b"),
        ("a </think> b", False, "", "a </think> b"),
        ("<think>never closed", False, "never closed", ""),
        ("cut", True, "cut", ""),
        ("b <think>a</think>", False, "", "b <think>a</think>"),
        ("<think>\n\n</think>\n\nb", False, "", "b"),
        ("  b\n", False, "", "  b\n"),
        ("", False, "", ""),
    ):
        message = read("hermes", text, opened=opened)
        assert (message.reasoning, message.text) == (reasoning, content), text


def test_gpt_oss_channels() -> None:
    text = (
        "<|channel|>analysis<|message|>think<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant to=functions.list<|channel|>commentary json<|message|>{}"
    )
    message = read("gpt-oss", text, reasoning=None)
    assert (message.reasoning, message.text, calls(message)) == ("think", "I look.", [("list", {})])
    message = read("gpt-oss", "<|channel|>final<|message|>done", reasoning=None)
    assert (message.text, message.tool_calls) == ("done", ())
    message = read("gpt-oss", "<|channel|>commentary to=functions.edit<|message|>{bad", reasoning=None)
    assert (message.text, message.tool_calls) == ("{bad", ())
    assert read("gpt-oss", "plain text", reasoning=None).text == "plain text"


PARTS = [
    "CALL", "CALL", "CALL",
    "<think>", "</think>", "\n", " ", "text", "<tool_call>", "</tool_call>", '{"name": "list", "arguments": {}}', "<",
    "{",
    '{"name"', "<function=list>", "</function>", "<|python_tag|>", "[TOOL_CALLS]", "<|channel|>analysis<|message|>",
    "<|end|>", "<|start|>assistant", "<|channel|>commentary to=functions.list <|message|>{}", "<tool", "é",
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<arg_key>", "edit\n",
]  # fmt: skip


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(st.sampled_from([*sorted(WRITTEN), None]), st.lists(st.sampled_from(PARTS), max_size=12), st.integers(0, 2**20),
       st.booleans())  # fmt: skip
def test_a_stream_says_what_the_whole_answer_says(
    family: str | None, parts: list[str], seed: int, opened: bool
) -> None:
    from verl.experimental.agent_loop.chat_proxy.parsing import (
        THINK,
        CallPiece,
        OutputParser,
        ReasoningPiece,
        TextPiece,
    )

    written = [WRITTEN.get(family or "", "") if part == "CALL" else part for part in parts]
    text, rng = "".join(written), random.Random(seed)
    whole = read(family, text, opened=opened)
    parser = OutputParser(family, THINK, tools(), opened)
    pieces, at = [], 0
    while at < len(text):
        step = rng.choice([1, 1, 2, 5, 40])
        pieces += parser.feed(text[at : at + step])
        at += step
    pieces += parser.finish()
    assert parser.finish() == []
    said = {kind: "".join(p.text for p in pieces if isinstance(p, kind)) for kind in (TextPiece, ReasoningPiece)}
    assert said[TextPiece] == whole.text and said[ReasoningPiece] == whole.reasoning
    found = [(p.call.name, p.call.arguments) for p in pieces if isinstance(p, CallPiece)]
    assert found == [(call.name, call.arguments) for call in whole.tool_calls]


@pytest.mark.parametrize("renderer", ["qwen3", "llama3_1", "gptoss", "gemma3"], indirect=True)
def test_detokenizer_gives_whole_characters_and_the_whole_text(renderer: Any) -> None:
    tokens = renderer.tokens
    stop = sorted(tokens.stop_ids)[0]
    for text in ("ok 👩‍👩‍👧 flags 🇩🇪", "𝒳 日本語 é á", " \n\n  code()\n", "<think>x</think>", "��"):
        ids = tokens.encode_now(text)
        for cut in range(len(ids) + 1):
            detokenizer = tokens.detokenizer()
            shown = [detokenizer.push([token]) for token in ids[:cut]]
            if "\ufffd" not in text:
                assert all("\ufffd" not in piece for piece in shown)
            shown.append(detokenizer.push([stop]))
            shown.append(detokenizer.finish())
            assert "".join(shown) == tokens.decode(ids[:cut])


@pytest.mark.parametrize("renderer", ["qwen3"], indirect=True)
def test_detokenizer_cuts_at_a_stop_string(renderer: Any) -> None:
    tokens = renderer.tokens
    ids = tokens.encode_now("one two STOP three")
    detokenizer = tokens.detokenizer(["STOP", "never"])
    text = "".join(detokenizer.push([token]) for token in ids) + detokenizer.finish()
    assert text == "one two " and detokenizer.stop_sequence == "STOP"
    detokenizer = tokens.detokenizer(["STOP"])
    text = "".join(detokenizer.push([token]) for token in tokens.encode_now("one STO")) + detokenizer.finish()
    assert text == "one STO" and detokenizer.stop_sequence is None


def vllm_with(parser: Any, monkeypatch: pytest.MonkeyPatch, *, newer: bool) -> None:
    """Modules of the names under which vLLM keeps its parsers, with one parser in them."""
    import sys
    import types

    def module(name: str, **content: Any) -> None:
        made = types.ModuleType(name)
        made.__dict__.update(content)
        made.__path__ = []
        monkeypatch.setitem(sys.modules, name, made)

    class Manager:
        @staticmethod
        def get_tool_parser(name: str) -> Any:
            return {"mine": parser}[name]

    class Request:
        def __init__(self, **fields: Any) -> None:
            self.fields = fields

    for name in ("vllm", "vllm.entrypoints", "vllm.entrypoints.openai"):
        module(name)
    module("vllm.tool_parsers" if newer else "vllm.entrypoints.openai.tool_parsers", ToolParserManager=Manager)
    path = "vllm.entrypoints.openai." + ("chat_completion.protocol" if newer else "protocol")
    if newer:
        module("vllm.entrypoints.openai.chat_completion")
    module(path, ChatCompletionRequest=Request)


@pytest.mark.parametrize("newer", [True, False])
def test_a_parser_of_vllms_registry(newer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    class Parser:
        def __init__(self, tokenizer: Any) -> None:
            pass

        def extract_tool_calls(self, text: str, request: Any) -> Any:
            assert request.fields["tools"][0]["function"]["name"] == "edit"
            content, _, rest = text.partition("CALL ")
            found = [SimpleNamespace(id="v1", function=SimpleNamespace(name="edit", arguments=rest))] if rest else []
            return SimpleNamespace(tools_called=bool(found), tool_calls=found, content=content)

    vllm_with(Parser, monkeypatch, newer=newer)
    message = read("vllm:mine", '<think>a</think>\n\nfirst CALL {"count": "3"}')
    assert (message.reasoning, message.text, calls(message)) == ("a", "first", [("edit", {"count": 3})])
    assert message.tool_calls[0].model_id == "v1"
    assert read("vllm:mine", "first CALL {broken").text == "first CALL {broken"
    assert read("vllm:mine", "only text").text == "only text"
    with pytest.raises(ValueError, match="no tool parser named 'other'"):
        read("vllm:other", "x")


def test_a_parser_of_vllm_without_vllm_says_so() -> None:
    pytest.importorskip("transformers")
    try:
        import vllm  # noqa: F401
    except ImportError:
        with pytest.raises(ValueError, match="needs vLLM"):
            read("vllm:hermes", "x")
    with pytest.raises(ValueError, match="unknown tool call format 'nobody'"):
        read("nobody", "x")
