"""Rule `micro-batch`: a training engine dumps every micro batch by itself.

Why: one msprobe step is one micro batch, and its log line names that one's requests. A bracket around the loop makes
one step of all of them; one that leaves out the forward, or in the FSDP engine the backward, dumps nothing of it.

How to fix, in an engine with a loop over its micro batches:

    for micro_batch in micro_batches:
        with ctx, micro_batch_dump(self, micro_batch, forward_only=forward_only):
            loss, meta_info = self.forward_step(...)

and in one that hands its loop to a pipeline schedule, either let the dump wrap the step and the schedule before they
are used, or enter it around the model's call in `forward_step` or around the schedule. A `debugger.start()` before and
a `debugger.stop()` after, in the same block, do as well.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from patchctl.verify.debugger import debugger_calls
from patchctl.verify.findings import Finding
from patchctl.verify.imports import IsHook
from patchctl.verify.source import Function, Source, binds, bound_names, dotted, flat

RULE = "micro-batch"
_FIX = "enter the dump for each micro batch around its forward and backward"
_LOOP, _SCHEDULE, _STEP = "forward_backward_batch", "forward_backward_func", "forward_step"
# Only this engine's backward is promised. In others it runs in a context of its own, and nothing is compared with it.
_FSDP = "verl/workers/engine/fsdp/transformer_impl.py"
# The dump is of the actor; a value model's engine computes nothing that the rollout computes.
_VALUE = "ValueHead"


def check(source: Source, is_hook: IsHook) -> list[Finding]:
    """What is wrong with the dump of an engine's micro batches.

    Args:
        is_hook: whether a module exists for the dump alone.
    """
    batches = [function for function in source.functions if function.owner is not None and function.name == _LOOP]
    findings: list[Finding] = []
    for function in batches:
        schedule = [
            statement
            for statement in function.mentioning(_SCHEDULE.encode())
            for call in function.calls[statement]
            if dotted(call.func) == _SCHEDULE
        ]
        loops = [
            statement
            for statement in function.statements
            if isinstance(statement, ast.For) and any(_calls_step(function, inner) for inner in flat(statement.body))
        ]
        if schedule:
            findings += _check_schedule(source, function, schedule, is_hook)
        for loop in loops:
            findings += _check_loop(source, function, loop, is_hook)
    if not findings and not batches:
        return [Finding(RULE, source.path, None, f"no engine with a {_LOOP} is here", "port the hook to where it went")]
    return findings


def _calls_step(function: Function, statement: ast.stmt) -> bool:
    return any(dotted(call.func) == f"self.{_STEP}" for call in function.calls[statement])


def _is_backward(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr == "backward"


def _check_loop(source: Source, function: Function, loop: ast.For, is_hook: IsHook) -> Iterator[Finding]:
    variable = dotted(loop.target) if not isinstance(loop.target, ast.Tuple) else dotted(loop.target.elts[-1])
    work = [
        statement
        for statement in flat(loop.body)
        if _calls_step(function, statement)
        or (source.path == _FSDP and any(_is_backward(call) for call in function.calls[statement]))
    ]
    for statement in work:
        entered = _entered(source, function, statement, loop, is_hook)
        if entered is None and not _between_start_and_stop(function, statement, loop):
            what = "forward" if _calls_step(function, statement) else "backward"
            yield Finding(RULE, source.path, statement.lineno, f"this {what} is in no dump of its micro batch", _FIX)
        if entered is not None and _calls_step(function, statement):
            yield from _check_arguments(source, function, entered, variable)


def _check_arguments(source: Source, function: Function, call: ast.Call, variable: str | None) -> Iterator[Finding]:
    given = [*call.args, *(word.value for word in call.keywords)]
    if variable not in {dotted(argument) for argument in given}:
        yield Finding(
            RULE,
            source.path,
            call.lineno,
            f"the dump is not given `{variable}`, the micro batch of this turn",
            f"pass `{variable}`",
        )
    names = {node.id for argument in given for node in ast.walk(argument) if isinstance(node, ast.Name)}
    if "forward_only" in function.parameters and "forward_only" not in names:
        yield Finding(
            RULE,
            source.path,
            call.lineno,
            "the dump is not given `forward_only`, so that it does not know its phase",
            "pass forward_only=forward_only",
        )


def _check_schedule(source: Source, function: Function, schedule: list[ast.stmt], is_hook: IsHook) -> Iterator[Finding]:
    if all(_entered(source, function, statement, None, is_hook) is not None for statement in schedule):
        return
    wrappings = list(_wrappings(source, function, schedule[0], is_hook))
    if wrappings:
        for wrapping, call in wrappings:
            yield from _check_wrapping(source, function, wrapping, call)
        return
    steps = [
        step
        for step in source.functions
        if step.name == _STEP
        and step.owner is not None
        and not step.owner.name.endswith(_VALUE)
        and _models_calls(step)
    ]
    if not steps:
        line = schedule[0].lineno
        yield Finding(RULE, source.path, line, "the schedule runs in no dump and no forward_step calls the model", _FIX)
    for step in steps:
        for statement in _models_calls(step):
            if _entered(source, step, statement, None, is_hook) is None and not _between_start_and_stop(
                step, statement, None
            ):
                yield Finding(
                    RULE, source.path, statement.lineno, "this forward is in no dump of its micro batch", _FIX
                )


def _wrappings(
    source: Source, function: Function, schedule: ast.stmt, is_hook: IsHook
) -> Iterator[tuple[ast.Assign, ast.Call]]:
    """Where, before a schedule runs, the dump gives a schedule of its own in its place."""
    place = function.places[schedule]
    for statement in place.block[: place.index]:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call):
            root = (dotted(statement.value.func) or "").partition(".")[0]
            if _SCHEDULE in set(bound_names(statement.targets[0])) and is_hook(source.imports.get(root, ("", None))[0]):
                yield statement, statement.value


def _check_wrapping(source: Source, function: Function, statement: ast.Assign, call: ast.Call) -> Iterator[Finding]:
    """Whether the dump is given the step and the schedule, and gives them back under the same names."""
    given = [dotted(argument) for argument in (*call.args, *(word.value for word in call.keywords))]
    fix = f"write `{_STEP}, {_SCHEDULE} = dump_schedule(self, micro_batches, {_STEP}, {_SCHEDULE}, forward_only)`"
    taken = list(bound_names(statement.targets[0]))
    for name in (_STEP, _SCHEDULE, *({"forward_only"} & function.parameters)):
        if name not in given:
            yield Finding(RULE, source.path, call.lineno, f"the dump is not given `{name}`", fix)
    if taken != [_STEP, _SCHEDULE]:
        message = (
            f"the dump gives back `{_STEP}` and `{_SCHEDULE}`, taken as {', '.join(f'`{name}`' for name in taken)}"
        )
        yield Finding(RULE, source.path, statement.lineno, message, fix)
    place = function.places[statement]
    for later in place.block[place.index + 1 :]:
        for name in {_STEP, _SCHEDULE} & binds(later):
            yield Finding(RULE, source.path, later.lineno, f"`{name}` is replaced after the dump has wrapped it", fix)


def _models_calls(function: Function) -> list[ast.stmt]:
    """The statements of a forward_step that call the model: those that hand `model` to something with its inputs."""
    return [
        statement
        for statement in function.statements
        for call in function.calls[statement]
        if len(call.args) > 1 and dotted(call.args[0]) == "model"
    ]


def _entered(
    source: Source, function: Function, statement: ast.stmt, within: ast.stmt | None, is_hook: IsHook
) -> ast.Call | None:
    """The dump that is entered around a statement, inside `within` where that is given."""
    inner = statement
    while True:
        parent = function.places[inner].parent
        if parent is None or parent is within:
            return None
        if isinstance(parent, ast.With):
            for item in parent.items:
                if isinstance(item.context_expr, ast.Call) and _is_dump(source, item.context_expr, is_hook):
                    return item.context_expr
        inner = parent


def _is_dump(source: Source, call: ast.Call, is_hook: IsHook) -> bool:
    """Whether a context manager is the dump: a function of its modules, or the `micro_batch` method of an attribute."""
    text = dotted(call.func) or ""
    root, _, rest = text.partition(".")
    if root in source.imports and is_hook(source.imports[root][0]):
        return True
    return root == "self" and rest.endswith(".micro_batch")


def _between_start_and_stop(function: Function, statement: ast.stmt, within: ast.stmt | None) -> bool:
    """Whether a block around a statement starts a debugger before it and stops it after it."""
    verbs = {call.statement: call.verb for call in debugger_calls(function) if call.verb != "step"}

    def has(verb: str, block: list[ast.stmt]) -> bool:
        return any(verbs.get(inner) == verb for inner in flat(block))

    inner: ast.stmt | None = statement
    while inner is not None and inner is not within:
        place = function.places[inner]
        if has("start", place.block[: place.index]) and has("stop", place.block[place.index + 1 :]):
            return True
        inner = place.parent
    return False
