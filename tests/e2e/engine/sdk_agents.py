"""Two agents on the real SDKs, which keep their history as those clients do."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
DESCRIPTION = "Run a command."


@dataclass
class Said:
    """One answer as the client got it."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str, Any]] = field(default_factory=list)
    finish: str | None = None


class OpenAIAgent:
    """The openai package, on chat completions."""

    def __init__(self, proxy: Any, session: Any, streamed: bool) -> None:
        import openai

        self.session = session
        self.name = f"openai {'streamed' if streamed else 'whole'}"
        self._streamed = streamed
        self._client = openai.AsyncOpenAI(
            base_url=proxy.openai_url(session), api_key=session.token, max_retries=0, timeout=300
        )
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": "You run commands."}]
        self.said: list[Said] = []

    def hear(self, text: str) -> None:
        """The user's next message."""
        self.messages.append({"role": "user", "content": text})

    def result(self, call: tuple[str, str, Any], text: str) -> None:
        """What came of a tool call."""
        self.messages.append({"role": "tool", "tool_call_id": call[0], "content": text})

    def edit(self, number: int, text: str) -> None:
        """Rewrite an answer of the history, as an agent that shortens its context does."""
        answers = [message for message in self.messages if message["role"] == "assistant"]
        answers[number]["content"] = text

    async def answer(self, max_tokens: int, stop: list[str] | None = None) -> Said:
        """Ask for the next answer and put it into the history."""
        tools = [{"type": "function", "function": {"name": "run", "description": DESCRIPTION, "parameters": SCHEMA}}]
        more = {"stop": stop} if stop else {}
        asked = self._client.chat.completions.create(
            model="m", messages=self.messages, max_tokens=max_tokens, tools=tools, stream=self._streamed, **more
        )
        message, finish = await (self._stream(asked) if self._streamed else self._whole(asked))
        self.messages.append(message)
        calls = [
            (call["id"], call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in message.get("tool_calls", ())
        ]
        said = Said(message.get("content") or "", message.get("reasoning_content") or "", calls, finish)
        self.said.append(said)
        return said

    async def _whole(self, asked: Any) -> tuple[dict[str, Any], str]:
        (choice,) = (await asked).choices
        return {k: v for k, v in choice.message.to_dict().items() if v is not None}, choice.finish_reason

    async def _stream(self, asked: Any) -> tuple[dict[str, Any], str]:
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        finish = None
        async for chunk in await asked:
            for choice in chunk.choices:
                delta = choice.delta.to_dict()
                for name in ("content", "reasoning_content"):
                    if delta.get(name):
                        message[name] = message.get(name, "") + delta[name]
                for call in delta.get("tool_calls") or ():
                    calls = message.setdefault("tool_calls", [])
                    if call["index"] == len(calls):
                        calls.append({"id": call["id"], "type": "function", "function": {"name": "", "arguments": ""}})
                    for name in ("name", "arguments"):
                        calls[call["index"]]["function"][name] += call["function"].get(name) or ""
                finish = choice.finish_reason or finish
        assert finish is not None, "the stream ended without a finish reason"
        return message, finish

    async def close(self) -> None:
        await self._client.close()


class AnthropicAgent:
    """The anthropic package, on messages."""

    def __init__(self, proxy: Any, session: Any, streamed: bool) -> None:
        import anthropic

        self.session = session
        self.name = f"anthropic {'streamed' if streamed else 'whole'}"
        self._streamed = streamed
        self._client = anthropic.AsyncAnthropic(
            base_url=proxy.anthropic_url(session), api_key=session.token, max_retries=0, timeout=300
        )
        self.messages: list[dict[str, Any]] = []
        self.said: list[Said] = []

    def hear(self, text: str) -> None:
        """The user's next message."""
        self.messages.append({"role": "user", "content": text})

    def result(self, call: tuple[str, str, Any], text: str) -> None:
        """What came of a tool call."""
        block = {"type": "tool_result", "tool_use_id": call[0], "content": text}
        self.messages.append({"role": "user", "content": [block]})

    def edit(self, number: int, text: str) -> None:
        """Rewrite an answer of the history, as an agent that shortens its context does."""
        answers = [message for message in self.messages if message["role"] == "assistant"]
        answers[number]["content"] = [{"type": "text", "text": text}]

    async def answer(self, max_tokens: int, stop: list[str] | None = None) -> Said:
        """Ask for the next answer and put it into the history."""
        more: dict[str, Any] = {"stop_sequences": stop} if stop else {}
        body = {
            "model": "m",
            "system": "You run commands.",
            "messages": self.messages,
            "max_tokens": max_tokens,
            "tools": [{"name": "run", "description": DESCRIPTION, "input_schema": SCHEMA}],
            "thinking": {"type": "adaptive"},
            **more,
        }
        if self._streamed:
            async with self._client.messages.stream(**body) as stream:
                answer = await stream.get_final_message()
        else:
            answer = await self._client.messages.create(**body)
        self.messages.append({"role": "assistant", "content": [block.to_dict() for block in answer.content]})
        said = Said(finish=answer.stop_reason)
        for block in answer.content:
            if block.type == "text":
                said.text += block.text
            elif block.type == "thinking":
                said.reasoning += block.thinking
            elif block.type == "tool_use":
                said.calls.append((block.id, block.name, block.input))
        self.said.append(said)
        return said

    async def close(self) -> None:
        await self._client.close()


Agent = OpenAIAgent | AnthropicAgent


def agent(number: int, proxy: Any, session: Any) -> Agent:
    """One of four kinds, in turn: each protocol, streamed and not."""
    return (OpenAIAgent, AnthropicAgent)[number % 2](proxy, session, number // 2 % 2 == 0)
