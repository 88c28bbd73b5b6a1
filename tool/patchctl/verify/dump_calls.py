"""Rule `log-before-stop`: every `debugger.stop()` is preceded, in its block and on every path, by a guarded `log_step`.

Why: the log line is what says which requests a dumped step holds. A step without its line, or a line without its step,
can't be paired with the other side; after the stop, msprobe no longer tells which step it was.

How to fix: directly before the stop, in the same block, with nothing but assertions or plain assignments between:

    if self._dispatch_logger is not None:
        self._dispatch_logger.log_step(scheduler_output, self.attn_state)
    self.debugger.stop()
    self.debugger.step()

The guard must be about the logger; it may also ask for what the line needs (an argument that is not None, a micro
batch that was completed). The logger must be one that has a `log_step`, and every argument bound in that function on
every path. A helper that stops (`_finalize_dump_data`) either logs itself or is only called after a log; a call with
`dump=False` throws the step away and needs none. In the training engines the published recipe's
`_log_update_actor_step` directly after `stop()` and `step()` counts too.

Rule `step-after-stop`: the stop is followed by `debugger.step()`, without which every dump goes into one folder.

Rule `stop-count`: there are as many stops as the pin has. One more is a new way out of upstream's step that no patch
knows.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from patchctl.verify import loggers
from patchctl.verify.bound import bound_at
from patchctl.verify.conditions import Condition, implied, passed, subject, tests_presence
from patchctl.verify.debugger import (
    ANY_CASE,
    DebuggerCall,
    debugger_calls,
    is_debugger,
    is_log_call,
    throws_away,
    uncalled_stops,
)
from patchctl.verify.findings import Finding
from patchctl.verify.source import Function, Source, dotted, flat, method_owner

RULE = "log-before-stop"
STEP_RULE = "step-after-stop"
COUNT_RULE = "stop-count"
RECIPE_LOG = "_log_update_actor_step"
_FIX = "put `if <logger> is not None: <logger>.log_step(...)` directly before the stop, in the same block"
_DEPTH = 3
_SAYS = ("debug", "info", "warn", "warning", "warning_once", "error", "exception", "print")


@dataclass(frozen=True, eq=False)
class LogSite:
    """A log call that a statement makes.

    Attributes:
        statement: of `function`, the one that makes the call.
        conditions: those that the statement searched has put around it.
        within: the statement searched, which may reach the call through a helper.
    """

    call: ast.Call
    statement: ast.stmt
    function: Function
    conditions: tuple[Condition, ...] = ()
    problem: str | None = None
    within: ast.stmt | None = None


def check(source: Source) -> list[Finding]:
    """What is wrong with the stops of a file and their log lines."""
    return _Checker(source).check()


def stops(source: Source) -> list[DebuggerCall]:
    """The stops of a file, in its order."""
    found = [
        call
        for function in source.functions_with(*ANY_CASE)
        for call in debugger_calls(function)
        if call.verb == "stop"
    ]
    return sorted(found, key=lambda stop: stop.call.lineno)


def check_count(sources: list[Source], expected: int) -> list[Finding]:
    """Whether the files have as many stops together as the pin."""
    lines = [f"{source.path}:{stop.call.lineno}" for source in sources for stop in stops(source)]
    if len(lines) == expected or not sources:
        return []
    place = next((source for source in sources if stops(source)), sources[0])
    known = f" ({', '.join(lines)})" if lines else ""
    return [
        Finding(
            COUNT_RULE,
            place.path,
            None,
            f"{len(lines)} calls of debugger.stop(){known}, but this pin has {expected}",
            "restore the one that is gone, or give a new one its log_step and port the series to it",
        )
    ]


class _Checker:
    def __init__(self, source: Source) -> None:
        self.source = source
        self.findings: list[Finding] = []
        self.used: set[ast.Call] = set()

    def check(self) -> list[Finding]:
        for stop in stops(self.source):
            self._stop(stop)
            self._step_after(stop)
        for function in self.source.functions_with(b"log_step"):
            for statement in function.mentioning(b"log_step"):
                for call in function.calls[statement]:
                    if is_log_call(call) and call not in self.used:
                        self._report(call, "this log_step has no debugger.stop() after it in its block")
        for node in uncalled_stops(self.source):
            self._report(
                node, "debugger.stop is not called here but handed on, so that no log_step can be seen before it"
            )
        return self.findings

    def _report(self, node: ast.expr | ast.stmt, message: str, fix: str = _FIX, rule: str = RULE) -> None:
        finding = Finding(rule, self.source.path, node.lineno, message, fix)
        if finding not in self.findings:
            self.findings.append(finding)

    # -- a stop and the log before it

    def _stop(self, stop: DebuggerCall) -> None:
        own = self._judge_before(stop.function, stop.statement)
        callers = self._callers(stop.function)
        if own:
            for caller, statement, call in callers:
                if throws_away(call):
                    continue
                before = self._before(caller, statement)
                if isinstance(before, LogSite):
                    self.used.add(before.call)
                    self._report(
                        before.call, f"logs the step that `{stop.function.name}` logs too, so that it has two lines"
                    )
                self._argument_given(stop.function, call)
            return
        if self._recipe_log_after(stop):
            return
        closing = [(caller, statement) for caller, statement, call in callers if not throws_away(call)]
        unlogged = [statement for caller, statement in closing if not self._judge_before(caller, statement)]
        if len(unlogged) == len(closing):
            self._report(stop.call, f"`{stop.receiver}.stop()` has no log_step before it{self._hint(stop)}")
        else:
            for statement in unlogged:
                self._report(
                    statement, f"`{stop.function.name}` stops the debugger, and no log_step is before this call"
                )

    def _hint(self, stop: DebuggerCall) -> str:
        place = stop.function.places[stop.statement]
        for later in place.block[place.index + 1 :]:
            if self._log_in(stop.function, later, 0) is not None:
                return f": the one in line {later.lineno} comes after it"
        before = self._before(stop.function, stop.statement)
        return f", back to line {before.lineno}" if isinstance(before, ast.stmt) else " in its block"

    def _judge_before(self, function: Function, statement: ast.stmt) -> bool:
        """Whether there is a log before a statement that stops; reports what is wrong with it."""
        site = self._before(function, statement)
        if not isinstance(site, LogSite):
            return False
        self.used.add(site.call)
        self._judge(function, site)
        again = self._before(function, site.within or site.statement)
        if isinstance(again, LogSite):
            self.used.add(again.call)
            self._report(
                again.call, f"the step is logged here and again in line {site.call.lineno}, so that it has two lines"
            )
        return True

    def _before(self, function: Function, statement: ast.stmt) -> LogSite | ast.stmt | None:
        """What a block does before a statement: its log, or the statement that stands in the way of finding one."""
        while True:
            place = function.places[statement]
            found = self._last_in(function, place.block[: place.index])
            if found is not None:
                return found
            parent = place.parent
            if isinstance(parent, ast.Try) and place.role == "finalbody":
                # What the body ends with comes before, unless the body failed: then there is no step to pair.
                return self._last_in(function, parent.orelse or parent.body)
            if parent is None or not self._always_enters(function, parent, place.role):
                return None
            statement = parent

    def _last_in(self, function: Function, block: list[ast.stmt]) -> LogSite | ast.stmt | None:
        """The log that a statement list ends with, or the statement after which it has none."""
        for statement in reversed(block):
            site = self._log_in(function, statement, 0)
            if site is not None:
                return replace(site, within=statement)
            if not self._harmless(function, statement):
                return statement
        return None

    def _always_enters(self, function: Function, parent: ast.stmt, role: str) -> bool:
        """Whether what comes before a compound statement also comes before what is in one of its lists.

        A test of the debugger alone makes no difference: without a debugger there is nothing to log.
        """
        if isinstance(parent, ast.With | ast.AsyncWith | ast.Try):
            return role == "body"
        if isinstance(parent, ast.If):
            return all(self._about_debugger(leaf) for leaf, _ in implied(parent.test, True))
        return False

    def _harmless(self, function: Function, statement: ast.stmt) -> bool:
        """Whether a statement between the log and the stop leaves the step as it is.

        It runs nothing of the model, and no path leaves through it.
        """
        if isinstance(statement, ast.Return | ast.Raise | ast.Break | ast.Continue | ast.Delete):
            return False
        if isinstance(statement, ast.If):
            inner = [*statement.body, *statement.orelse]
            return self._calls_nothing(function, statement) and all(self._harmless(function, one) for one in inner)
        if isinstance(statement, ast.For | ast.AsyncFor | ast.While | ast.With | ast.AsyncWith | ast.Try | ast.Match):
            return False
        return self._calls_nothing(function, statement)

    def _calls_nothing(self, function: Function, statement: ast.stmt) -> bool:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return True
        return all(_says_something(call) or _asks_about(call) for call in function.calls[statement])

    def _callers(self, function: Function) -> list[tuple[Function, ast.stmt, ast.Call]]:
        """Where the file calls a function."""
        return [
            (caller, statement, call)
            for caller in self.source.functions_with(f"{function.name}(".encode())
            if caller is not function
            for statement in caller.mentioning(f"{function.name}(".encode())
            for call in caller.calls[statement]
            if self.source.callee(caller, call) is function
        ]

    # -- finding the log in a statement

    def _log_in(self, function: Function, statement: ast.stmt, depth: int) -> LogSite | None:
        """The log call that a statement makes on its straight way, with the conditions it puts around it."""
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return None
        if self._stops_inside(function, statement):
            return None  # a log in there is of the step that is stopped in there
        if isinstance(statement, ast.If):
            site = self._log_in_block(function, statement.body, depth)
            if site is not None:
                added = tuple(
                    Condition(leaf, wanted, function, statement) for leaf, wanted in implied(statement.test, True)
                )
                return replace(site, conditions=(*added, *site.conditions))
            site = self._log_in_block(function, statement.orelse, depth)
            if site is not None:
                added = tuple(
                    Condition(leaf, wanted, function, statement) for leaf, wanted in implied(statement.test, False)
                )
                return replace(site, conditions=(*added, *site.conditions))
            return None
        if isinstance(statement, ast.With | ast.AsyncWith | ast.Try):
            return self._log_in_block(function, statement.body, depth)
        if isinstance(statement, ast.For | ast.AsyncFor | ast.While | ast.Match):
            for inner in flat([statement]):
                for call in function.calls[inner]:
                    if is_log_call(call):
                        return LogSite(
                            call, inner, function, problem="is in a loop or a `match`, not once on every path"
                        )
            return None
        calls = function.calls[statement]
        for call in calls:
            if is_log_call(call) and not self._is_own(function, call):
                return LogSite(call, statement, function)
        for call in calls:
            callee = self.source.callee(function, call) if depth < _DEPTH else None
            if callee is not None and callee is not function and not any(debugger_calls(callee)):
                site = self._log_in_block(callee, callee.node.body, depth + 1)
                if site is not None:
                    return site
        return None

    def _stops_inside(self, function: Function, statement: ast.stmt) -> bool:
        stopping = {call.statement for call in self._debugger_calls.get(function, ()) if call.verb == "stop"}
        return bool(stopping) and any(inner in stopping for inner in flat([statement]))

    def _log_in_block(self, function: Function, block: list[ast.stmt], depth: int) -> LogSite | None:
        before: list[Condition] = []
        for statement in block:
            site = self._log_in(function, statement, depth)
            if site is not None:
                return replace(site, conditions=(*before, *site.conditions))
            before += passed(function, statement)
        return None

    def _is_own(self, function: Function, call: ast.Call) -> bool:
        """Whether a log call reaches a function of the file that logs in turn, so that the call is only a helper's."""
        callee = self.source.callee(function, call)
        return callee is not None and callee.name != "log_step"

    # -- judging a log

    def _judge(self, function: Function, site: LogSite) -> None:
        call = site.call
        assert isinstance(call.func, ast.Attribute)
        receiver = call.func.value
        name = dotted(receiver) or ast.unparse(receiver)
        if site.problem:
            self._report(call, f"log_step {site.problem}")
        if not loggers.log_methods(self.source, site.function, receiver):
            self._report(
                call,
                f"`{name}` is no logger in `{site.function.name}`: nothing with a log_step is assigned to it",
                "call log_step of the attribute that the logger is assigned to",
            )
        self._judge_guard(site, receiver, name)
        self._judge_arguments(site)

    def _judge_guard(self, site: LogSite, receiver: ast.expr, name: str) -> None:
        around = [*site.conditions, *self._conditions_around(site)]
        wanted = self._same_as(site.function, receiver)
        if not any(
            condition.wanted and self._is_about(condition, wanted) and tests_presence(condition.test)
            for condition in around
        ):
            self._report(site.call, f"log_step is called without a test that `{name}` is not None")
        for condition in site.conditions:
            if not self._belongs(condition, site, wanted):
                written = ast.unparse(condition.test)
                negated = "" if condition.wanted else "not "
                self._report(
                    site.call,
                    f"log_step is called only if {negated}`{written}`, which is not about the logger",
                    f"guard it by `{name} is not None` alone",
                )

    def _conditions_around(self, site: LogSite) -> Iterator[Condition]:
        """The tests passed on the way to a log in its own function."""
        statement = site.statement
        while True:
            place = site.function.places[statement]
            for prior in place.block[: place.index]:
                yield from passed(site.function, prior)
            if place.parent is None:
                return
            if isinstance(place.parent, ast.If):
                for leaf, wanted in implied(place.parent.test, place.role == "body"):
                    yield Condition(leaf, wanted, site.function, place.parent)
            statement = place.parent

    def _belongs(self, condition: Condition, site: LogSite, receiver: frozenset[str]) -> bool:
        """Whether a condition around the log alone may keep the line away."""
        test = condition.test
        if isinstance(test, ast.Constant):
            return bool(test.value) is condition.wanted
        if self._is_about(condition, receiver):
            return condition.wanted
        if self._about_debugger(test):
            return True
        text = dotted(subject(test))
        arguments = [*site.call.args, *(word.value for word in site.call.keywords)]
        given = {dotted(node) for argument in arguments for node in ast.walk(argument)} - {None, "self"}
        if condition.wanted and text in given:
            return True
        return self._says_completed(condition) or self._says_switched_off(condition)

    @staticmethod
    def _about_debugger(test: ast.expr) -> bool:
        """Whether a test asks about a debugger and nothing else."""
        if isinstance(test, ast.Call) and dotted(test.func) in ("hasattr", "getattr"):
            return bool(test.args) and is_debugger(test.args[0])
        if isinstance(test, ast.Constant) or any(isinstance(node, ast.Call) for node in ast.walk(test)):
            return False
        node = subject(test)
        while isinstance(node, ast.Attribute):
            if is_debugger(node):
                return True
            node = node.value
        return is_debugger(node)

    def _is_about(self, condition: Condition, receiver: frozenset[str]) -> bool:
        return bool(receiver & self._same_as(condition.function, subject(condition.test)))

    def _same_as(self, function: Function, node: ast.expr) -> frozenset[str]:
        """The names of an expression: its own, and that of the attribute which a local name stands for."""
        if isinstance(node, ast.NamedExpr):
            node = node.target
        text = dotted(node)
        names = {text} if text else set()
        if isinstance(node, ast.Name):
            values = [value for _, value in function.values_of(node.id)]
            if len(values) == 1 and (other := dotted(values[0])):
                names.add(other)
        return frozenset(names)

    def _says_completed(self, condition: Condition) -> bool:
        """Whether a condition is a local flag that the end of a `try` sets, tested in its `finally`."""
        test = condition.test
        if not condition.wanted or not isinstance(test, ast.Name):
            return False
        values = condition.function.values_of(test.id)
        given = [(statement, value.value) for statement, value in values if isinstance(value, ast.Constant)]
        if [value for _, value in given] != [False, True] or len(given) != len(values):
            return False
        place = condition.function.places[given[1][0]]
        in_try = isinstance(place.parent, ast.Try) and place.role == "body" and place.index == len(place.block) - 1
        return in_try and test.id in bound_at(self.source, condition.function, condition.statement)

    def _says_switched_off(self, condition: Condition) -> bool:
        """Whether a condition is `not self.<switch>` with a switch that is off at first and is only ever set."""
        text = dotted(condition.test)
        owner = method_owner(condition.function)
        if condition.wanted or text is None or not text.startswith("self.") or owner is None:
            return False
        values = loggers.values_of_attribute(self.source, owner, text.removeprefix("self."))
        return bool(values) and all(
            isinstance(value, ast.Constant) and value.value is (function.name != "__init__")
            for function, value in values
        )

    def _judge_arguments(self, site: LogSite) -> None:
        function = site.function
        bound = bound_at(self.source, function, site.statement)
        arguments = [*site.call.args, *(word.value for word in site.call.keywords)]
        inner = {
            name.id
            for argument in arguments
            for node in ast.walk(argument)
            if isinstance(node, ast.comprehension)
            for name in ast.walk(node.target)
            if isinstance(name, ast.Name)
        }
        for node in [node for argument in arguments for node in ast.walk(argument)]:
            if isinstance(node, ast.Name) and node.id not in inner and not self._is_bound(function, node.id, bound):
                self._report(
                    site.call,
                    f"`{node.id}` is not bound in `{function.name}` on every path to this log_step",
                    "pass what the function has, or hand it in as a parameter",
                )
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
                owner = method_owner(function)
                if owner is not None and not loggers.has_attribute(self.source, owner, node.attr, site.call):
                    self._report(
                        site.call,
                        f"nothing in class {owner.name} assigns `self.{node.attr}`, which log_step is given",
                        "pass an attribute that the class has",
                    )
        assert isinstance(site.call.func, ast.Attribute)
        definitions = loggers.log_methods(self.source, function, site.call.func.value)
        problem = loggers.wrong_arguments(next(iter(definitions)), site.call) if len(definitions) == 1 else None
        if problem:
            self._report(site.call, f"log_step is called with wrong arguments: {problem}", "call it as it is defined")

    def _is_bound(self, function: Function, name: str, bound: frozenset[str]) -> bool:
        if name in function.local_names:
            return name in bound
        outer = function.enclosing
        while outer is not None:
            if name in outer.local_names:
                return True
            outer = outer.enclosing
        return name in self.source.module_names or hasattr(builtins, name)

    def _argument_given(self, helper: Function, call: ast.Call) -> None:
        """Whether a helper's call hands in the parameters that its log needs."""
        given = helper.node.args
        names = [arg.arg for arg in (*given.posonlyargs, *given.args)][1 if helper.owner is not None else 0 :]
        passed = {*names[: len(call.args)], *(word.arg for word in call.keywords if word.arg)}
        if any(word.arg is None for word in call.keywords) or any(isinstance(arg, ast.Starred) for arg in call.args):
            return
        for statement in helper.mentioning(b"log_step"):
            for log in helper.calls[statement]:
                if is_log_call(log):
                    needed = {
                        node.id for argument in log.args for node in ast.walk(argument) if isinstance(node, ast.Name)
                    }
                    missing = sorted((needed & helper.parameters) - passed - {"self"})
                    if missing:
                        self._report(
                            call,
                            f"`{helper.name}` logs with `{missing[0]}`, which this call does not give",
                            f"pass `{missing[0]}`, or dump=False for a step that is thrown away",
                        )

    # -- after the stop

    def _recipe_log_after(self, stop: DebuggerCall) -> bool:
        place = stop.function.places[stop.statement]
        for later in place.block[place.index + 1 :]:
            calls = [call for call in stop.function.calls[later] if is_log_call(call)]
            if calls and isinstance(calls[0].func, ast.Attribute) and calls[0].func.attr == RECIPE_LOG:
                self.used.update(calls)
                return self.source.callee(stop.function, calls[0]) is not None
            if not self._is_step(stop, later) and not self._harmless(stop.function, later):
                return False
        return False

    def _is_step(self, stop: DebuggerCall, statement: ast.stmt) -> bool:
        return any(call.statement is statement and call.verb == "step" for call in self._debugger_calls[stop.function])

    @cached_property
    def _debugger_calls(self) -> dict[Function, list[DebuggerCall]]:
        return {function: list(debugger_calls(function)) for function in self.source.functions_with(*ANY_CASE)}

    def _step_after(self, stop: DebuggerCall) -> None:
        place = stop.function.places[stop.statement]
        while True:
            for later in place.block[place.index + 1 :]:
                if self._is_step(stop, later):
                    return
                if any(self._is_step(stop, inner) for inner in flat([later])) and isinstance(later, ast.With | ast.Try):
                    return
                if not self._harmless(stop.function, later):
                    break
            if place.parent is None or not self._always_enters(stop.function, place.parent, place.role):
                break
            place = stop.function.places[place.parent]
        self._report(
            stop.call,
            f"`{stop.receiver}.stop()` is not followed by `{stop.receiver}.step()`: the next dump overwrites this one",
            f"call `{stop.receiver}.step()` directly after it",
            STEP_RULE,
        )


def _says_something(call: ast.Call) -> bool:
    """Whether a call only tells a reader something."""
    name = (dotted(call.func) or "").rpartition(".")[2].lstrip("_")
    return name in _SAYS or name.startswith("warn_")


def _asks_about(call: ast.Call) -> bool:
    """Whether a call only asks about a value."""
    return dotted(call.func) in ("isinstance", "hasattr", "len", "bool", "getattr")
