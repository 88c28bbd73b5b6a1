"""Rule `start-stop`: every `debugger.start()` has its `debugger.stop()` on every path.

Why: msprobe goes on recording until it is stopped. A path that leaves without a stop (an early return, `continue`, an
exception that something catches, one thrown into a context manager at its `yield`) writes what comes next into the
wrong step, and every later step is off from there.

How to fix: put the stop on that path, or start and stop around the work in `try: ... finally:`.

A stop that no start leads to is wrong too, and so is a call of a helper that stops: the step it closes was never
recorded.

Two openings are meant. A start may be handed over to another method of its class through an attribute
(`self.execute_model_state`), which then has to stop it. An exception that leaves the function uncaught ends the process
and so is nothing to a step; only at a `yield` does the caller go on.

The rule follows every path of a function, through calls of functions in the same file, and remembers on each path what
the tests it passed said, so that the start under `if self.debugger is not None:` meets the stop under the same test.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from patchctl.verify.conditions import compared_to_none
from patchctl.verify.debugger import ANY_CASE, DebuggerCall, debugger_calls, is_debugger, throws_away
from patchctl.verify.findings import Finding
from patchctl.verify.source import Function, Source, dotted, method_owner, own_expressions

RULE = "start-stop"
_FIX = "stop the debugger there too, or start and stop it around the work in `try: ... finally:`"
# In graph mode the debugger is armed once, when the model is loaded; the first step closes it.
_ARMS = "load_model"
_DEPTH = 4
# Far more than a reviewed function needs. Beyond it the paths are no longer told apart by the tests they passed.
_MOST_STATES = 1024


@dataclass(frozen=True)
class State:
    """What is known at a point of a path.

    Attributes:
        opened: the line of the start that has not been stopped, None where there is none.
        facts: for an expression, as text, whether it is true (and so not None) on this path.
        handed: the attribute through which the open step was handed to another method.
        failed: the first line whose exception the path went on from while the debugger was running.
    """

    opened: int | None = None
    facts: frozenset[tuple[str, bool]] = frozenset()
    handed: str | None = None
    failed: int | None = None

    def truth(self, key: str) -> bool | None:
        return True if (key, True) in self.facts else False if (key, False) in self.facts else None

    def learn(self, key: str, value: bool | None) -> State:
        kept = frozenset(fact for fact in self.facts if fact[0] != key and not fact[0].startswith(key + "."))
        return replace(self, facts=kept if value is None else kept | {(key, value)})

    def fail(self, line: int) -> State:
        return self if self.opened is None or self.failed is not None else replace(self, failed=line)


States = frozenset[State]
NONE: States = frozenset()
# With the line of the `yield` at which the caller can throw it; None for an exception of the code itself.
Raised = frozenset[tuple[State, int | None]]


@dataclass(frozen=True)
class Exits:
    """The states in which code is left, by the way it is left.

    Attributes:
        returned: with the line, and the truth of what is returned where that is known.
    """

    normal: States = NONE
    broken: States = NONE
    continued: States = NONE
    returned: frozenset[tuple[State, int, bool | None]] = frozenset()
    raised: Raised = frozenset()

    def joined(self, other: Exits, *, normal: States | None = None) -> Exits:
        return Exits(
            self.normal | other.normal if normal is None else normal,
            self.broken | other.broken,
            self.continued | other.continued,
            self.returned | other.returned,
            self.raised | other.raised,
        )


def check(source: Source) -> list[Finding]:
    """The paths of a file's functions that leave with a debugger still running, or start it twice."""
    return _Follower(source).check()


class _Follower:
    """Follows the functions of a file.

    What it finds: `running`, the states with a running debugger by the line where they leave (and whether at a
    `yield`); `twice`, the lines that start a running one, with those that started it; `met`, the stops that some start
    leads to; `closing`, whether some start leads to a call of a helper that stops.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.running: dict[tuple[int, bool], set[State]] = {}
        self.twice: dict[int, set[int]] = {}
        self.met: set[ast.Call] = set()
        self.closing: dict[ast.Call, bool] = {}
        self._yields: dict[Function, frozenset[ast.stmt]] = {}
        self._targets: dict[ast.stmt, list[tuple[str, ast.expr | None]]] = {}

    def check(self) -> list[Finding]:
        through_others = {
            callee
            for function in self.eventful
            for statement in function.places
            for call in self.active.get(statement, ())
            if (callee := self.source.callee(function, call)) is not None and callee is not function
        }
        enter: int | None = None
        handed: dict[tuple[str, ast.ClassDef | None], set[State]] = {}
        for function in self.eventful:
            if function in through_others and not function.is_generator:
                continue
            entry = State(opened=enter) if function.name == "__exit__" else State()
            left_open = self._judge(function, frozenset([entry]))
            if function.name == "__enter__" and self.source.method(method_owner(function), "__exit__") in self.eventful:
                enter = next((line for state, _, _ in left_open if (line := state.opened)), None)
                continue
            for state, line, yielded in left_open:
                if state.handed is not None:
                    taken = frozenset(fact for fact in state.facts if fact[0].startswith("self."))
                    handed.setdefault((state.handed, method_owner(function)), set()).add(State(state.opened, taken))
                elif function.name != _ARMS or yielded:
                    self.running.setdefault((line, yielded), set()).add(state)
        for (attribute, owner), entries in handed.items():
            for taker in self._takers(attribute, owner):
                taken_over = frozenset(state.learn(f"self.{attribute}", True) for state in entries)
                for state, line, yielded in self._judge(taker, taken_over):
                    self.running.setdefault((line, yielded), set()).add(state)
        return [*self._running_findings(), *self._twice_findings(), *self._idle_findings()]

    def _judge(self, function: Function, entry: States) -> list[tuple[State, int, bool]]:
        """The ways out of a function that leave the debugger running: state, line, whether at a `yield`."""
        exits = self._block(function, function.node.body, entry, (function,), False)
        last = function.node.body[-1]
        end = last.end_lineno or last.lineno
        ways = [(state, end, False) for state in exits.normal]
        ways += [(state, line, False) for state, line, _ in exits.returned]
        ways += [(state, line, True) for state, line in exits.raised if line is not None]
        return sorted((way for way in ways if way[0].opened is not None), key=lambda way: (way[1], way[0].opened or 0))

    def _running_findings(self) -> Iterator[Finding]:
        for (line, yielded), states in self.running.items():
            started = _lines_of(state.opened for state in states)
            how = "an exception at this `yield` leaves" if yielded else "this path leaves"
            failed = {state.failed for state in states}
            cause = "" if None in failed else f" when {_lines_of(failed)} raises"
            message = f"{how} the debugger running that {started} starts{cause}"
            yield Finding(RULE, self.source.path, line, message, _FIX)

    def _twice_findings(self) -> Iterator[Finding]:
        for line, earlier in self.twice.items():
            message = f"starts the debugger that {_lines_of(earlier)} has started and nothing has stopped"
            yield Finding(RULE, self.source.path, line, message, _FIX)

    def _idle_findings(self) -> Iterator[Finding]:
        for call in self.debugger_calls.values():
            if call.verb == "stop" and call.call not in self.met:
                message = "stops a debugger that nothing has started on any path to here"
                fix = f"start it before the work: `{call.receiver}.start(...)`"
                yield Finding(RULE, self.source.path, call.call.lineno, message, fix)
        for node, started in self.closing.items():
            if not started:
                message = "closes a step, but nothing has started the debugger on any path to here"
                yield Finding(
                    RULE, self.source.path, node.lineno, message, "start it before the work, as the others do"
                )

    # -- which functions and statements matter

    def _yielding(self, function: Function) -> frozenset[ast.stmt]:
        """The statements of a function that may yield."""
        if function not in self._yields:
            self._yields[function] = frozenset(function.mentioning(b"yield"))
        return self._yields[function]

    @cached_property
    def debugger_calls(self) -> dict[ast.Call, DebuggerCall]:
        return {
            call.call: call
            for function in self.source.functions_with(*ANY_CASE)
            for call in debugger_calls(function)
            if call.verb != "step"
        }

    @cached_property
    def _stopping(self) -> frozenset[Function]:
        """The helpers that stop a debugger themselves."""
        return frozenset(call.function for call in self.debugger_calls.values() if call.verb == "stop")

    @cached_property
    def eventful(self) -> dict[Function, None]:
        """The functions that start or stop a debugger, themselves or through others, in the order of the file."""
        having = {call.function for call in self.debugger_calls.values()}
        for _ in range(_DEPTH):
            names = [f"{function.name}(".encode() for function in having]
            wider = having | {
                function
                for function in (self.source.functions_with(*names) if names else ())
                for statement in function.mentioning(*names)
                for call in function.calls[statement]
                if self.source.callee(function, call) in having
            }
            if wider == having:
                break
            having = wider
        return dict.fromkeys(sorted(having, key=lambda function: function.node.lineno))

    @cached_property
    def active(self) -> dict[ast.stmt, list[ast.Call]]:
        """The statements that start or stop a debugger, with the calls that do."""
        found: dict[ast.stmt, list[ast.Call]] = {}
        names = [f"{function.name}(".encode() for function in self.eventful]
        for function in self.eventful:
            for statement in function.mentioning(b"start", b"stop", *names):
                calls = [
                    call
                    for call in function.calls[statement]
                    if call in self.debugger_calls or self._enters(function, call, ()) is not None
                ]
                if calls:
                    found[statement] = calls
        return found

    def _enters(self, function: Function, call: ast.Call, stack: tuple[Function, ...]) -> Function | None:
        """The function of the file that a call runs, where that one matters."""
        callee = self.source.callee(function, call)
        if callee in self.eventful and callee is not None and not callee.is_generator and callee not in stack:
            return callee if len(stack) < _DEPTH else None
        return None

    @cached_property
    def _telling(self) -> frozenset[str]:
        """The expressions whose truth tells the paths with a running debugger from the others: those tested around a
        start or a stop, and flags."""
        keys: set[str] = set()
        for function in self.eventful:
            for statement in function.places:
                if isinstance(statement, ast.Assign) and _is_flag(statement.value):
                    keys.update(self._key(function, target) or "" for target in statement.targets)
                inner: ast.stmt | None = statement if statement in self.active else None
                while inner is not None:
                    parent = function.places[inner].parent
                    test = getattr(inner, "test", None)
                    if test is not None:
                        keys.update(self._key(function, node) or "" for node in _leaves(test))
                    inner = parent
        return frozenset(keys - {""})

    @cached_property
    def _hand_overs(self) -> frozenset[str]:
        """The attributes through which a method can take over a running debugger."""
        return frozenset(f"self.{attribute}" for other in self.eventful for attribute in _refused_when_none(other))

    def _takers(self, attribute: str, owner: ast.ClassDef | None) -> list[Function]:
        return [
            function
            for function in self.eventful
            if method_owner(function) is owner and attribute in _refused_when_none(function)
        ]

    def _key(self, function: Function, node: ast.AST) -> str | None:
        """The name under which a path remembers an expression's truth; local names are kept apart by function."""
        text = dotted(node)
        if text is None:
            return None
        root = text.partition(".")[0]
        if root in ("self", "cls"):
            return text
        if root not in function.local_names:
            return text
        return f"{function.name}:{function.node.lineno}:{text}"

    # -- following

    def _block(
        self, function: Function, block: list[ast.stmt], states: States, stack: tuple[Function, ...], caught: bool
    ) -> Exits:
        exits = Exits(normal=states)
        for statement in block:
            if not exits.normal:
                break
            entering = exits.normal
            if len(entering) > _MOST_STATES:
                entering = frozenset(replace(state, facts=frozenset()) for state in entering)
            after = self._statement(function, statement, entering, stack, caught)
            exits = exits.joined(after, normal=after.normal)
        return exits

    def _statement(
        self, function: Function, statement: ast.stmt, states: States, stack: tuple[Function, ...], caught: bool
    ) -> Exits:
        """Follows one statement. `caught` says that exceptions matter here: something around it catches them."""

        def block(inner: list[ast.stmt], start: States, inside: bool = caught) -> Exits:
            return self._block(function, inner, start, stack, inside)

        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return Exits(normal=states)
        if isinstance(statement, ast.If):
            true, false, raised = self._test(function, statement, statement.test, states, stack, caught)
            both = block(statement.body, true).joined(block(statement.orelse, false))
            return both.joined(Exits(raised=raised))
        if isinstance(statement, ast.While | ast.For | ast.AsyncFor):
            return self._loop(function, statement, states, stack, caught)
        if isinstance(statement, ast.Try):
            return self._try(function, statement, states, stack, caught)
        if isinstance(statement, ast.With | ast.AsyncWith):
            entered, raised, _ = self._effects(function, statement, states, stack, caught)
            swallows = self.source.swallows(function, statement)
            exits = block(statement.body, entered, caught or swallows)
            if swallows:
                going_on = frozenset(state for state, _ in exits.raised)
                thrown = frozenset((state, line) for state, line in exits.raised if line is not None)
                exits = replace(exits, normal=exits.normal | going_on, raised=thrown)
            return exits.joined(Exits(raised=raised))
        if isinstance(statement, ast.Match):
            entered, raised, _ = self._effects(function, statement, states, stack, caught)
            exits = Exits(normal=entered, raised=raised)
            for case in statement.cases:
                exits = exits.joined(block(case.body, entered))
            return exits
        return self._simple(function, statement, states, stack, caught)

    def _simple(
        self, function: Function, statement: ast.stmt, states: States, stack: tuple[Function, ...], caught: bool
    ) -> Exits:
        if isinstance(statement, ast.Break):
            return Exits(broken=states)
        if isinstance(statement, ast.Continue):
            return Exits(continued=states)
        if isinstance(statement, ast.Assert):
            true, _, raised = self._test(function, statement, statement.test, states, stack, caught)
            return Exits(normal=true, raised=raised)
        after, raised, truth = self._effects(function, statement, states, stack, caught)
        if isinstance(statement, ast.Raise):
            return Exits(raised=raised | {(state, None) for state in after})
        if isinstance(statement, ast.Return):
            known = statement.value
            returned = frozenset(
                (state, statement.lineno, truth.get(state, self._known(function, known, state))) for state in after
            )
            return Exits(returned=returned, raised=raised)
        if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
            after = frozenset(self._assigned(function, statement, state, truth.get(state)) for state in after)
        return Exits(normal=after, raised=raised)

    def _effects(
        self,
        function: Function,
        statement: ast.stmt,
        states: States,
        stack: tuple[Function, ...],
        caught: bool,
        within: ast.expr | None = None,
    ) -> tuple[States, Raised, dict[State, bool | None]]:
        """What a statement's own calls do to the states.

        Returns: the states after them, the exceptions on the way, and for a state what the last call followed returned.
        """
        raised: set[tuple[State, int | None]] = set()
        truth: dict[State, bool | None] = {}
        if not caught and statement not in self.active and statement not in self._yielding(function):
            return states, frozenset(), truth
        events = _events(own_expressions(statement) if within is None else ast.walk(within))
        for node in events:
            if isinstance(node, ast.Yield | ast.YieldFrom):
                raised |= {(state, node.lineno) for state in states}
                continue
            if not isinstance(node, ast.Call):
                raised |= _failing(states, node.lineno)
                continue
            driven = self.debugger_calls.get(node)
            if driven is not None:
                states, more = self._driven(function, driven, states)
                raised |= more
                continue
            callee = self._enters(function, node, stack)
            if callee is None:
                raised |= _failing(states, node.lineno)
                continue
            if callee in self._stopping and not throws_away(node):
                self.closing[node] = self.closing.get(node, False) or any(state.opened is not None for state in states)
            entered = frozenset(self._bind(function, callee, node, state) for state in states)
            exits = self._block(callee, callee.node.body, entered, (*stack, callee), caught)
            raised |= exits.raised
            truth = {}
            for state, _, value in [*exits.returned, *((state, 0, False) for state in exits.normal)]:
                truth[state] = value if state not in truth or truth[state] is value else None
            states = frozenset(truth)
        if not events and caught and isinstance(statement, ast.Import | ast.ImportFrom):
            raised |= _failing(states, statement.lineno)
        return states, frozenset(raised), truth

    def _driven(
        self, function: Function, call: DebuggerCall, states: States
    ) -> tuple[States, set[tuple[State, int | None]]]:
        if call.verb == "stop":
            if any(state.opened is not None for state in states):
                self.met.add(call.call)
            # A stop that fails was still called: nothing better can be done about that step.
            states = frozenset(replace(state, opened=None, handed=None, failed=None) for state in states)
            return states, _failing(states, call.call.lineno)
        running = {state.opened for state in states if state.opened is not None}
        if running:
            self.twice.setdefault(call.call.lineno, set()).update(running)
        assert isinstance(call.call.func, ast.Attribute)
        key = self._key(function, call.call.func.value)
        started = [replace(state, opened=call.call.lineno, handed=None, failed=None) for state in states]
        after = frozenset(state if key is None else state.learn(key, True) for state in started)
        return after, _failing(states, call.call.lineno)

    def _bind(self, caller: Function, callee: Function, call: ast.Call, state: State) -> State:
        """The state at the start of a called function, with the truth of the arguments that are known."""
        given = callee.node.args
        names = [arg.arg for arg in (*given.posonlyargs, *given.args)]
        if callee.owner is not None:
            names = names[1:]
        values: dict[str, ast.expr] = dict(zip(reversed(names), reversed(given.defaults), strict=False))
        keyword_only = zip(given.kwonlyargs, given.kw_defaults, strict=True)
        values |= {arg.arg: value for arg, value in keyword_only if value is not None}
        values |= dict(zip(names, call.args, strict=False)) | {
            word.arg: word.value for word in call.keywords if word.arg
        }
        truths = {name: self._known(caller, value, state) for name, value in values.items()}
        for name, value in truths.items():
            state = state.learn(f"{callee.name}:{callee.node.lineno}:{name}", value)
        return state

    def _known(self, function: Function, value: ast.expr | None, state: State) -> bool | None:
        """The truth of an expression, where the path tells it."""
        constant = False if value is None else _constant(value)
        if constant is not None or value is None:
            return constant
        key = self._key(function, value)
        if key is not None:
            return state.truth(key)
        return True if isinstance(value, ast.Call) and _is_class(value.func) else None

    def _assigned(
        self,
        function: Function,
        statement: ast.Assign | ast.AnnAssign | ast.AugAssign,
        state: State,
        truth: bool | None,
    ) -> State:
        """The state after an assignment; `truth` is that of the value, where a followed call gave it."""
        for key, value in self._telling_targets(function, statement):
            known = truth if truth is not None or value is None else self._known(function, value, state)
            state = state.learn(key, known)
            if state.opened is not None and known is not False and key in self._hand_overs:
                state = replace(state, handed=key.removeprefix("self."))
        return state

    def _telling_targets(
        self, function: Function, statement: ast.Assign | ast.AnnAssign | ast.AugAssign
    ) -> list[tuple[str, ast.expr | None]]:
        """What an assignment sets, as far as it can tell paths apart, with the value where it has one of its own."""
        known = self._targets.get(statement)
        if known is None:
            pairs: list[tuple[ast.expr, ast.expr | None]] = []
            value = None if isinstance(statement, ast.AugAssign) else statement.value
            for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
                if not isinstance(target, ast.Tuple | ast.List):
                    pairs.append((target, value))
                elif isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts):
                    pairs.extend(zip(target.elts, value.elts, strict=True))
                else:
                    pairs.extend((element, None) for element in target.elts)
            keyed = [(key, its) for one, its in pairs if (key := self._key(function, one)) is not None]
            known = [
                (key, its)
                for key, its in keyed
                if key in self._hand_overs or any(one == key or one.startswith(key + ".") for one in self._telling)
            ]
            if isinstance(statement, ast.AnnAssign) and statement.value is None:
                known = []
            self._targets[statement] = known
        return known

    def _test(
        self,
        function: Function,
        statement: ast.stmt,
        test: ast.expr,
        states: States,
        stack: tuple[Function, ...],
        caught: bool,
    ) -> tuple[States, States, Raised]:
        """The states in which a test is true, those in which it is false, and the exceptions on the way."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            true, false, raised = self._test(function, statement, test.operand, states, stack, caught)
            return false, true, raised
        if isinstance(test, ast.BoolOp):
            stops_when = isinstance(test.op, ast.Or)
            decided, going_on, raised = NONE, states, frozenset[tuple[State, int | None]]()
            for value in test.values:
                true, false, more = self._test(function, statement, value, going_on, stack, caught)
                decided |= true if stops_when else false
                going_on = false if stops_when else true
                raised |= more
            return (decided, going_on, raised) if stops_when else (going_on, decided, raised)
        compared = compared_to_none(test)
        if compared is not None:
            true, false, raised = self._test(function, statement, compared[0], states, stack, caught)
            return (false, true, raised) if compared[1] else (true, false, raised)
        constant = _constant(test)
        if (
            constant is None
            and isinstance(test, ast.Call)
            and dotted(test.func) == "hasattr"
            and is_debugger(test.args[0])
        ):
            constant = True  # one without a `stop` has nothing to stop
        if constant is not None:
            return (states, NONE, frozenset()) if constant else (NONE, states, frozenset())
        key = self._key(function, test)
        if key is not None:
            telling = key in self._telling
            true = frozenset(
                state.learn(key, True) if telling else state for state in states if state.truth(key) is not False
            )
            false = frozenset(
                state.learn(key, False) if telling else state for state in states if state.truth(key) is not True
            )
            return true, false, frozenset()
        after, raised, truth = self._effects(function, statement, states, stack, caught, within=test)
        followed = isinstance(test, ast.Call) and bool(truth)
        true = frozenset(state for state in after if not followed or truth.get(state) is not False)
        false = frozenset(state for state in after if not followed or truth.get(state) is not True)
        return true, false, raised

    def _loop(
        self,
        function: Function,
        statement: ast.While | ast.For | ast.AsyncFor,
        states: States,
        stack: tuple[Function, ...],
        caught: bool,
    ) -> Exits:
        outside = Exits()
        if not isinstance(statement, ast.While):
            states, raised, _ = self._effects(function, statement, states, stack, caught)
            outside = Exits(raised=raised)
        entering, ended = states, states
        while True:
            if isinstance(statement, ast.While):
                true, ended, raised = self._test(function, statement, statement.test, entering, stack, caught)
                outside = outside.joined(Exits(raised=raised))
            else:
                true = ended = entering
            exits = self._block(function, statement.body, true, stack, caught)
            again = entering | exits.normal | exits.continued
            if again == entering:
                break
            entering = again
        without_break = self._block(function, statement.orelse, ended, stack, caught)
        kept = replace(exits, normal=exits.broken, broken=NONE, continued=NONE)
        return kept.joined(without_break).joined(outside)

    def _try(
        self, function: Function, statement: ast.Try, states: States, stack: tuple[Function, ...], caught: bool
    ) -> Exits:
        inside = caught or bool(statement.handlers) or bool(statement.finalbody)
        body = self._block(function, statement.body, states, stack, inside)
        exits = replace(body, normal=NONE, raised=frozenset())
        exits = exits.joined(self._block(function, statement.orelse, body.normal, stack, inside))
        uncaught = body.raised
        arriving = frozenset(state for state, _ in body.raised)
        for handler in statement.handlers:
            exits = exits.joined(self._block(function, handler.body, arriving, stack, inside))
            uncaught = frozenset((state, line) for state, line in uncaught if not _catches(handler, line))
        exits = replace(exits, raised=exits.raised | uncaught)
        return self._finally(function, statement.finalbody, exits, stack, caught) if statement.finalbody else exits

    def _finally(
        self, function: Function, block: list[ast.stmt], exits: Exits, stack: tuple[Function, ...], caught: bool
    ) -> Exits:
        """What `finally` makes of each way out."""
        done = Exits()

        def through(states: Iterable[State]) -> States:
            nonlocal done
            after = self._block(function, block, frozenset(states), stack, caught)
            done = done.joined(after, normal=NONE)
            return after.normal

        normal, broken, continued = through(exits.normal), through(exits.broken), through(exits.continued)
        returned = {(after, line, value) for state, line, value in exits.returned for after in through([state])}
        raised = {(after, line) for state, line in exits.raised for after in through([state])}
        return done.joined(Exits(normal, broken, continued, frozenset(returned), frozenset(raised)))


def _lines_of(lines: Iterable[int | None]) -> str:
    """`line 3`, `line 3 or 7`."""
    numbers = [str(line) for line in sorted({line for line in lines if line is not None})]
    return "line " + (", ".join(numbers[:-1]) + " or " if len(numbers) > 1 else "") + numbers[-1]


def _events(nodes: Iterable[ast.AST]) -> list[ast.expr]:
    """The expressions among some nodes that can raise, be thrown into or drive a debugger, in the order they run."""
    happening = ast.Call | ast.Yield | ast.YieldFrom | ast.Await | ast.Subscript
    found = [node for node in nodes if isinstance(node, happening)]
    return sorted(found, key=lambda node: (node.end_lineno or 0, node.end_col_offset or 0))


def _failing(states: States, line: int) -> set[tuple[State, int | None]]:
    """The states in which an exception of a line leaves it."""
    return {(state.fail(line), None) for state in states}


def _constant(node: ast.expr) -> bool | None:
    """The truth of a constant, None for anything else."""
    if isinstance(node, ast.Constant):
        return bool(node.value)
    if isinstance(node, ast.Dict | ast.List | ast.Tuple) and not ast.dump(node).count("("):
        return False
    return None


def _is_flag(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, bool)


def _leaves(test: ast.expr) -> Iterator[ast.expr]:
    """The expressions that a test combines."""
    if isinstance(test, ast.BoolOp):
        for value in test.values:
            yield from _leaves(value)
    elif isinstance(test, ast.UnaryOp):
        yield from _leaves(test.operand)
    else:
        compared = compared_to_none(test)
        yield compared[0] if compared is not None else test


def _is_class(node: ast.expr) -> bool:
    name = (dotted(node) or "").rpartition(".")[2].lstrip("_")
    return name[:1].isupper() and not name.isupper()


def _catches(handler: ast.ExceptHandler, yielded: int | None) -> bool:
    """Whether a handler surely catches: at a `yield`, a generator can also be closed, which `Exception` doesn't see."""
    if handler.type is None:
        return True
    names = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    wanted = {"BaseException"} if yielded is not None else {"Exception", "BaseException"}
    return any(dotted(name) in wanted for name in names)


def _refused_when_none(function: Function) -> frozenset[str]:
    """The attributes of `self` without which a method returns at once: `if self.x is None: ... return`."""
    found = set()
    for statement in function.node.body:
        if isinstance(statement, ast.If) and isinstance(statement.body[-1], ast.Return):
            compared = compared_to_none(statement.test)
            text = dotted(compared[0]) if compared is not None and compared[1] else None
            if text is not None and text.startswith("self."):
                found.add(text.removeprefix("self."))
    return frozenset(found)
