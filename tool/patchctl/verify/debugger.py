"""Which statements of a file drive msprobe's debugger, and which write the log line of a step."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from patchctl.verify.source import Function, Source, dotted, own_expressions

NAMES = frozenset({"debugger", "_debugger", "PrecisionDebugger"})
# The second is what the published recipe calls it in the training engines.
LOG_METHODS = frozenset({"log_step", "_log_update_actor_step"})
ANY_CASE = (b"debugger", b"Debugger")
_UNCALLED_STOP = re.compile(rb"[dD]ebugger\s*\.\s*stop\b(?!\s*\()")


@dataclass(frozen=True, eq=False)
class DebuggerCall:
    """A `debugger.start()`, `.stop()` or `.step()`.

    Attributes:
        receiver: the debugger as written, such as `self.debugger`.
    """

    verb: str
    receiver: str
    call: ast.Call
    statement: ast.stmt
    function: Function


def is_debugger(node: ast.AST, aliases: frozenset[str] = frozenset()) -> bool:
    """Whether an expression is a debugger, by its last name or as another name for one in its function."""
    if isinstance(node, ast.Name):
        return node.id in NAMES or node.id in aliases
    return isinstance(node, ast.Attribute) and node.attr in NAMES


def aliases(function: Function) -> frozenset[str]:
    """The local names that a function gives to a debugger."""
    found: set[str] = set()
    for statement in function.mentioning(b"debugger", b"Debugger"):
        if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
            continue
        value = statement.value
        fetched = (
            isinstance(value, ast.Call)
            and dotted(value.func) == "getattr"
            and len(value.args) >= 2
            and isinstance(value.args[1], ast.Constant)
            and value.args[1].value in NAMES
        )
        if fetched or is_debugger(value):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            found.update(target.id for target in targets if isinstance(target, ast.Name))
    return frozenset(found)


def debugger_calls(function: Function) -> Iterator[DebuggerCall]:
    """The start, stop and step calls of a function itself, not of those nested in it."""
    other_names = aliases(function)
    for statement in function.mentioning(b"start", b"stop", b"step"):
        for call in function.calls[statement]:
            target = call.func
            if (
                isinstance(target, ast.Attribute)
                and target.attr in ("start", "stop", "step")
                and is_debugger(target.value, other_names)
            ):
                receiver = dotted(target.value) or ast.unparse(target.value)
                yield DebuggerCall(target.attr, receiver, call, statement, function)


def uncalled_stops(source: Source) -> Iterator[ast.Attribute]:
    """Where `debugger.stop` is taken as a value: what calls it later can't be seen from here."""
    if not _UNCALLED_STOP.search(source.data):
        return
    for function in source.functions_with(*ANY_CASE):
        for statement in function.mentioning(b"stop"):
            called = {call.func for call in function.calls[statement]}
            for node in own_expressions(statement):
                if (
                    isinstance(node, ast.Attribute)
                    and node.attr == "stop"
                    and node not in called
                    and is_debugger(node.value)
                ):
                    yield node


def throws_away(call: ast.Call) -> bool:
    """Whether a call of a helper that stops throws the step away."""
    return any(
        word.arg == "dump" and isinstance(word.value, ast.Constant) and word.value.value is False
        for word in call.keywords
    )


def is_log_call(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr in LOG_METHODS
