"""Small sources for the rules: what upstream's files look like, as far as a rule can tell."""

from __future__ import annotations

import ast
import textwrap

from patchctl.verify.findings import Finding
from patchctl.verify.source import Source


def source(text: str, path: str = "pkg/runner.py", **others: str) -> Source:
    """A file with this text; `others` are further files of its tree, by dotted module with `__` for the dot."""
    return _Tree({name.replace("__", "."): other for name, other in others.items()}).parsed(path, text)


class _Tree:
    def __init__(self, modules: dict[str, str]) -> None:
        self.modules = modules

    def parsed(self, path: str, text: str) -> Source:
        data = textwrap.dedent(text).encode()
        return Source(path, data, ast.parse(data), self.load)

    def load(self, module: str) -> Source | None:
        text = self.modules.get(module)
        return None if text is None else self.parsed(module.replace(".", "/") + ".py", text)


def rules(findings: list[Finding]) -> list[tuple[str, int | None]]:
    return [(finding.rule, finding.line) for finding in findings]


LOGGER = """
    class DispatchLogger:
        def log_step(self, scheduler_output, attn_state):
            pass

    def attach(debugger) -> DispatchLogger:
        return DispatchLogger()
"""


def runner(body: str, *, parameters: str = "self, scheduler_output", init: str = "", more: str = "") -> Source:
    """A model runner whose execute_model, from line 13 on, has this body."""
    text = f"""\
from pkg.worker.dispatch_logger import DispatchLogger, attach


class Runner(GPURunner):
    def __init__(self, config):
        self.attn_state = None
        self.debugger = None
        self._dispatch_logger = None
        if config.dump:
            self.debugger = PrecisionDebugger(config.dump)
            self._dispatch_logger = attach(self.debugger){init or " "}
    def execute_model({parameters}):
{textwrap.indent(textwrap.dedent(body).strip(chr(10)), " " * 8)}

{textwrap.indent(textwrap.dedent(more).strip(chr(10)), " " * 4)}
"""
    return source(text, pkg__worker__dispatch_logger=textwrap.dedent(LOGGER))


GOOD = """
    if self.debugger is not None:
        if self._dispatch_logger is not None:
            self._dispatch_logger.log_step(scheduler_output, self.attn_state)
        self.debugger.stop()
        self.debugger.step()
"""

# Clients: one that sends, whole and in pieces, and one that resumes what was aborted.
SENDS = """
    class LLMServerClient:
        async def generate(self, request_id, *, prompt_ids, **kwargs):
            server_id, server = await self._acquire_server(request_id)
            try:
                sent = uuid4().hex
                output: TokenOutput = await server.generate.remote(
                    request_id=sent, prompt_ids=prompt_ids, **kwargs
                )
                output.extra_fields["request_id"] = sent
                return output
            finally:
                self._release_server(server_id)
"""
RESUMES = """
    class ResumingLLMServerClient(LLMServerClient):
        async def generate(self, request_id, *, prompt_ids, **kwargs):
            first, final = None, TokenOutput([])
            chain = []
            while True:
                output = await super().generate(request_id, prompt_ids=prompt_ids + final.token_ids, **kwargs)
                chain.append({"request_id": output.extra_fields.get("request_id"), "num_tokens": len(output.token_ids)})
                final.token_ids.extend(output.token_ids)
                steps = output.extra_fields.get("global_steps")
                if first is None:
                    first = steps
                if output.stop_reason != "aborted":
                    break
            final.extra_fields["min_global_steps"] = first
            final.extra_fields["max_global_steps"] = final.extra_fields["global_steps"] = steps
            chosen = next((part for part in chain if part["num_tokens"] > 0), chain[-1])
            final.extra_fields["request_id"] = chosen["request_id"]
            final.extra_fields["request_chain"] = json.dumps(chain)
            return final
"""


STREAMS = """
    class LLMServerClient:
        async def generate_stream(self, request_id, *, prompt_ids, **kwargs):
            server_id, server = await self._acquire_server(request_id)
            try:
                sent = uuid4().hex
                request = {
                    "request_id": sent,
                    "prompt_ids": prompt_ids,
                    **kwargs,
                }
                pieces = server.generate_stream.options(num_returns="streaming").remote(**request)
                async for reference in pieces:
                    piece: TokenOutput = await reference
                    if piece.stop_reason is not None or piece.extra_fields:
                        piece.extra_fields["request_id"] = sent
                    yield piece
            finally:
                self._release_server(server_id)
"""
RESUMES_STREAM = """
    class ResumingLLMServerClient(LLMServerClient):
        async def generate_stream(self, request_id, *, prompt_ids, **kwargs):
            chain = []
            steps = []
            while True:
                async with aclosing(
                    super().generate_stream(request_id, prompt_ids=prompt_ids, **kwargs)
                ) as pieces:
                    async for piece in pieces:
                        if piece.stop_reason is None and not piece.extra_fields:
                            yield piece
                        else:
                            last = piece
                chain.append({"request_id": last.extra_fields.get("request_id"), "num_tokens": 1})
                steps.append(last.extra_fields.get("global_steps"))
                if last.stop_reason != "aborted":
                    break
                yield last
            chosen = next((part for part in chain if part["num_tokens"] > 0), chain[-1])
            last.extra_fields.update(
                min_global_steps=steps[0],
                max_global_steps=steps[-1],
                global_steps=steps[-1],
                request_id=chosen["request_id"],
                request_chain=json.dumps(chain),
            )
            yield last
"""
