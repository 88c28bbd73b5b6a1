"""A chat proxy on a scripted engine, for tests of what goes over the wire.

The tokenizer is byte level without merges, so that every character beyond ASCII is cut into several tokens.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

TEMPLATE = r"""
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- if tools %}
{{- '<|im_start|>system\n' + (system + '\n\n' if system else '') + '# Tools\n<tools>' }}
{%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}
{{- '\n</tools><|im_end|>\n' }}
{%- elif system %}{{- '<|im_start|>system\n' + system + '<|im_end|>\n' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\n' }}
{%- if message.reasoning_content %}{{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{%- endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif not (loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
END = "<|im_end|>"


def byte_tokenizer() -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(token, special=True) for token in ("<|im_start|>", END)])
    raw.add_tokens(
        [AddedToken(token, special=False) for token in ("<think>", "</think>", "<tool_call>", "</tool_call>")]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=END)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@dataclass
class Reply:
    """What the engine samples for one call.

    Attributes:
        text: sampled text, without the stop token.
        ids: token ids in place of ``text``, taken as they are.
        ends: the stop token follows; else the engine stops there by itself (``finish_reason``).
        finish_reason: the engine's own, for a reply without a stop token.
        error: raised after the text.
        aborted: the engine gives up after the text.
        gate: awaited before the first token.
        hold_at: number of tokens after which ``hold`` is awaited.
        chunk, pace: tokens of one chunk, seconds from one to the next.
    """

    text: str = ""
    ids: list[int] | None = None
    ends: bool = True
    finish_reason: str | None = None
    error: Exception | None = None
    aborted: bool = False
    gate: asyncio.Event | None = None
    hold_at: int | None = None
    hold: asyncio.Event | None = None
    chunk: int = 3
    pace: float = 0.0


Script = Callable[[int, list[int], dict[str, Any]], "Reply | str"]


@dataclass
class ScriptedEngine:
    """Samples what the script says; keeps what it was asked.

    Attributes:
        script: ``(number of the call, prompt ids, sampling parameters)`` to the reply.
        running: calls that are in the engine now.
        closed_early: streams that were closed before their end.
    """

    tokenizer: Any
    script: Script
    streams: bool = True
    calls: list[tuple[list[int], dict[str, Any]]] = field(default_factory=list)
    running: int = 0
    closed_early: int = 0

    def _reply(self, prompt_ids: list[int], params: dict[str, Any]) -> tuple[Reply, list[int]]:
        self.calls.append((list(prompt_ids), dict(params)))
        reply = self.script(len(self.calls) - 1, prompt_ids, params)
        if isinstance(reply, str):
            reply = Reply(reply)
        ids = reply.ids if reply.ids is not None else self.tokenizer.encode(reply.text, add_special_tokens=False)
        if reply.ends and reply.error is None and not reply.aborted:
            ids = [*ids, self.tokenizer.convert_tokens_to_ids(END)]
        return reply, ids[: params["max_tokens"]]

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], *, media: Any = None
    ) -> Any:
        from verl.experimental.agent_loop.chat_proxy.engine import join

        chunks = [chunk async for chunk in self.stream(request_id, prompt_ids, sampling_params, media=media)]
        return join(chunks)

    async def stream(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], *, media: Any = None
    ) -> AsyncIterator[Any]:
        from verl.experimental.agent_loop.chat_proxy.engine import Generation

        self.running += 1
        ended = False
        try:
            reply, ids = self._reply(prompt_ids, sampling_params)
            if reply.gate is not None:
                await reply.gate.wait()
            for start in range(0, len(ids), reply.chunk):
                if reply.hold is not None and reply.hold_at is not None and start >= reply.hold_at:
                    await reply.hold.wait()
                part = ids[start : start + reply.chunk]
                yield Generation(token_ids=part, log_probs=[-0.5 - 0.001 * token for token in part])
                await asyncio.sleep(reply.pace)
            if reply.error is not None:
                ended = True
                raise reply.error
            extra = {} if reply.finish_reason is None else {"finish_reason": reply.finish_reason}
            ended = True
            yield Generation(
                token_ids=[],
                log_probs=[],
                stop_reason="aborted" if reply.aborted else "completed",
                min_global_steps=3,
                max_global_steps=3,
                extra=extra,
            )
        finally:
            self.running -= 1
            self.closed_early += not ended

    async def score(self, request_id: str, ids: list[int]) -> tuple[list[float | None], int | None]:
        return [None, *(-0.25 for _ in ids[1:])], 3


@dataclass
class Served:
    """A running proxy, one session of it, and its engine."""

    proxy: Any
    session: Any
    engine: ScriptedEngine

    @property
    def root(self) -> str:
        return str(self.proxy.anthropic_url(self.session))

    @property
    def chat_url(self) -> str:
        return f"{self.root}/v1/chat/completions"

    @property
    def messages_url(self) -> str:
        return f"{self.root}/v1/messages"

    @property
    def bearer(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.session.token}"}

    @property
    def api_key(self) -> dict[str, str]:
        return {"x-api-key": self.session.token, "anthropic-version": "2023-06-01"}

    @property
    def turns(self) -> list[Any]:
        return list(self.session.trajectory.turns)

    def count(self, name: str, **labels: str) -> int:
        return int(self.proxy.service.events.total(name, **labels))


_TOKENIZER: list[Any] = []


@asynccontextmanager
async def serve(
    script: Script | list[Any] | str = "ok",
    *,
    streams: bool = True,
    context_limit: int = 4096,
    tokenizer: Any = None,
    service: dict[str, Any] | None = None,
    **config: Any,
) -> AsyncIterator[Served]:
    """Serves ``script``: a function, a list of replies in order (the last one for ever), or one reply."""
    from verl.experimental.agent_loop.chat_proxy.service import ServiceConfig
    from verl.experimental.agent_loop.vllm_chat_completion_proxy import ChatCompletionProxy, ProxyConfig

    if tokenizer is None:
        if not _TOKENIZER:
            _TOKENIZER.append(byte_tokenizer())
        tokenizer = _TOKENIZER[0]
    replies = script if isinstance(script, list) else [script]

    def in_order(number: int, prompt_ids: list[int], params: dict[str, Any]) -> Any:
        return replies[min(number, len(replies) - 1)]

    engine = ScriptedEngine(tokenizer, script if callable(script) else in_order, streams)
    settings = ProxyConfig(service=ServiceConfig(**(service or {})), **config)
    proxy = await ChatCompletionProxy.start(
        None, tokenizer, context_limit=context_limit, engine=engine, config=settings
    )
    try:
        yield Served(proxy, proxy.open_session(), engine)
    finally:
        await proxy.stop()


def asynchronous(test: Callable[..., Any]) -> Callable[..., Any]:
    """Runs an async test on a loop of its own."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 120))

    return run


def events(text: str) -> list[tuple[str, Any]]:
    """The server-sent events of a body: (name or "", parsed data); comments are left out."""
    found: list[tuple[str, Any]] = []
    for block in text.split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        if not lines:
            continue
        name = next((line[7:] for line in lines if line.startswith("event: ")), "")
        data = "".join(line[6:] for line in lines if line.startswith("data: "))
        found.append((name, data if data == "[DONE]" else json.loads(data)))
    return found


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Waits for a condition; the bound only ends a test that has failed."""
    for _ in range(int(timeout_s / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the condition did not come true")


def pass_time(seconds: float) -> None:
    """Makes the running loop's timers come due as if ``seconds`` had passed.

    A test sets a timeout that no machine is too slow for, waits until all is as it wants it, and then lets it pass.
    """
    loop = asyncio.get_running_loop()
    clock = loop.time
    loop.time = lambda: clock() + seconds  # type: ignore[method-assign]
