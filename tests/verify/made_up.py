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
