"""Rule `prompts-only`: both trainers crop to the prompts when they are told to.

Why: what can be compared with the rollout's prefill is the forward of the prompt alone. A trainer that doesn't crop
dumps whole sequences, which pair with nothing; one that crops in every run trains on nothing.

How to fix: under the test of PROMPTS_ONLY, after the rewards and before the log-probabilities are computed, either

    if prompts_only():
        self._compute_old_log_prob(crop_to_prompts(batch, self.global_steps))

with `_update_actor` and `_update_critic` returning at once under the same test, or put the cropped batch in the
batch's place as the published recipe does, with input_ids, attention_mask, position_ids and responses all cropped.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from patchctl.verify.findings import Finding
from patchctl.verify.source import Function, Source, dotted, flat

RULE = "prompts-only"
CROP = "crop_to_prompts"
_FIX = "crop under the test of PROMPTS_ONLY, after the rewards and before the log-probabilities"
_CROPPED = ("input_ids", "attention_mask", "position_ids", "responses")
_UPDATES = ("_update_actor", "_update_critic")


@dataclass(frozen=True)
class Trainer:
    """Where a trainer crops.

    Attributes:
        after: what must have been called before the crop.
        before: what must not have been called before it.
    """

    owner: str
    method: str
    after: str
    before: tuple[str, ...]


TRAINERS = {
    "verl/trainer/ppo/ray_trainer.py": Trainer(
        "RayPPOTrainer", "fit", "extract_reward", ("apply_bypass_mode", "_compute_old_log_prob")
    ),
    "verl/experimental/fully_async_policy/fully_async_trainer.py": Trainer(
        "FullyAsyncTrainer", "_fit_generate", "_get_samples_from_queue", ()
    ),
}


@dataclass(frozen=True, eq=False)
class Crop:
    """A statement that crops.

    Attributes:
        call: the call of the cropping function; None where the batch's fields are sliced in place.
        replaces: whether the batch itself becomes the cropped one.
    """

    statement: ast.stmt
    call: ast.Call | None
    replaces: bool


def check(source: Source) -> list[Finding]:
    """What is wrong with the crop of a trainer's file."""
    trainer = TRAINERS[source.path]
    owner = source.classes.get(trainer.owner)
    method = source.method(owner, trainer.method)
    if method is None or owner is None:
        where = f"{trainer.owner}.{trainer.method}"
        return [Finding(RULE, source.path, None, f"{where} is gone", "port the hook to where the batch is now")]
    crops = list(_crops(source, method))
    if not crops:
        line = method.node.lineno
        return [
            Finding(RULE, source.path, line, f"`{trainer.owner}.{trainer.method}` does not crop to the prompts", _FIX)
        ]
    findings = [finding for crop in crops for finding in _check_crop(source, method, trainer, crop)]
    if not all(crop.replaces for crop in crops):
        findings += _check_updates(source, owner)
    return findings


def _crops(source: Source, method: Function) -> Iterator[Crop]:
    local = {
        function.name
        for function in source.functions
        if function.enclosing is method and _sliced(list(function.statements))
    }
    for statement in method.mentioning(CROP.encode(), *(name.encode() for name in local)):
        for call in method.calls[statement]:
            name = (dotted(call.func) or "").rpartition(".")[2]
            if name == CROP or name in local:
                yield Crop(statement, call, isinstance(statement, ast.Assign))
    inline = [statement for statement in method.mentioning(b"input_ids") if _slices(statement) == "input_ids"]
    yield from (Crop(statement, None, True) for statement in inline)


def _sliced(statements: list[ast.stmt]) -> dict[str, ast.stmt]:
    """The fields of a batch that statements crop, with one that does."""
    return {field: statement for statement in statements if (field := _slices(statement)) is not None}


def _slices(statement: ast.stmt) -> str | None:
    """The field of a batch that a statement replaces by its first columns."""
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Subscript):
        return None
    target = statement.targets[0]
    cut = statement.value.slice
    if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant) and isinstance(cut, ast.Tuple):
        last = cut.elts[-1]
        if isinstance(last, ast.Slice) and last.upper is not None and isinstance(target.slice.value, str):
            return target.slice.value
    return None


def _check_crop(source: Source, method: Function, trainer: Trainer, crop: Crop) -> Iterator[Finding]:
    def finding(node: ast.stmt | ast.expr, message: str) -> Finding:
        return Finding(RULE, source.path, node.lineno, message, _FIX)

    if crop.call is not None and not _is_used(method, crop.statement, crop.call):
        yield finding(crop.call, "the cropped batch is dropped: nothing is computed with it")
    if crop.call is not None and not crop.call.args and not crop.call.keywords:
        yield finding(crop.call, "the crop is given no batch")
    guards = list(_guards(method, crop.statement))
    if not any(_asks_for_it(source, method, guard) for guard in guards):
        yield finding(crop.statement, "crops in every run: it is under no test of PROMPTS_ONLY")
    for guard in guards:
        if isinstance(guard, ast.Constant) and not guard.value:
            yield finding(guard, "the crop is never reached")
    yield from _check_order(source, method, trainer, crop)
    cropping = _cropping_statements(source, method, crop)
    if cropping:
        missing = [field for field in _CROPPED if field not in cropping]
        if missing:
            yield finding(crop.statement, f"`{missing[0]}` is not cropped with the others")


def _cropping_statements(source: Source, method: Function, crop: Crop) -> dict[str, ast.stmt]:
    """The fields cropped where the crop is written out; empty where it is a call of an imported function."""
    if crop.call is None:
        return _sliced(list(method.statements))
    name = dotted(crop.call.func)
    for function in source.functions:
        if function.enclosing is method and function.name == name:
            return _sliced(list(function.statements))
    return {}


def _is_used(method: Function, statement: ast.stmt, call: ast.Call) -> bool:
    """Whether a cropped batch goes anywhere: into a name or into another call."""
    if isinstance(statement, ast.Assign | ast.AnnAssign | ast.Return | ast.With):
        return True
    return any(call in [*outer.args, *(word.value for word in outer.keywords)] for outer in method.calls[statement])


def _guards(method: Function, statement: ast.stmt) -> Iterator[ast.expr]:
    inner: ast.stmt | None = statement
    while inner is not None:
        place = method.places[inner]
        if isinstance(place.parent, ast.If) and place.role == "body":
            yield place.parent.test
        inner = place.parent


def _asks_for_it(source: Source, method: Function, test: ast.expr) -> bool:
    """Whether a test asks for PROMPTS_ONLY, by a call, the environment or a local name that was set from it."""
    for node in ast.walk(test):
        text = dotted(node) or (node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "")
        if "prompts_only" in text.lower():
            return not _negated(test)
    return False


def _belongs(source: Source, method: Function, test: ast.expr) -> bool:
    """Whether a test around the crop asks for PROMPTS_ONLY, or for a field that is to be cropped."""
    asks_for_field = any(isinstance(node, ast.Constant) and node.value in _CROPPED for node in ast.walk(test))
    return asks_for_field or _asks_for_it(source, method, test)


def _negated(test: ast.expr) -> bool:
    return isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)


def _check_order(source: Source, method: Function, trainer: Trainer, crop: Crop) -> Iterator[Finding]:
    line = crop.statement.lineno
    before = [
        call
        for statement in method.mentioning(trainer.after.encode())
        if statement is not crop.statement
        for call in method.calls[statement]
        if (dotted(call.func) or "").rpartition(".")[2] == trainer.after
    ]
    if not any(call.lineno < line for call in before):
        yield Finding(
            RULE, source.path, line, f"the crop comes before {trainer.after}, which needs the responses", _FIX
        )
    for statement in method.mentioning(*(name.encode() for name in trainer.before)) if trainer.before else ():
        if statement is crop.statement or statement.lineno >= line:
            continue
        for call in method.calls[statement]:
            name = (dotted(call.func) or "").rpartition(".")[2]
            if name in trainer.before:
                yield Finding(RULE, source.path, line, f"the crop comes after {name} in line {call.lineno}", _FIX)
    inner: ast.stmt = crop.statement
    while (parent := method.places[inner].parent) is not None:
        if isinstance(parent, ast.If) and trainer.method != "fit" and not _belongs(source, method, parent.test):
            message = "the crop also hangs on another test than PROMPTS_ONLY"
            yield Finding(RULE, source.path, parent.lineno, message, _FIX)
        inner = parent
    place = method.places[inner]
    for earlier in flat(place.block[: place.index]):
        if isinstance(earlier, ast.Return) and any(call.lineno < earlier.lineno for call in before):
            yield Finding(RULE, source.path, earlier.lineno, "this path returns before the crop", _FIX)


def _check_updates(source: Source, owner: ast.ClassDef) -> Iterator[Finding]:
    """Whether a trainer whose batch stays whole leaves its weights alone."""
    for name in _UPDATES:
        method = source.method(owner, name)
        if method is None:
            continue
        first = next(
            (statement for statement in method.node.body if not _is_docstring(statement)),
            method.node.body[0],
        )
        returns = (
            isinstance(first, ast.If)
            and isinstance(first.body[-1], ast.Return)
            and _asks_for_it(source, method, first.test)
        )
        if not returns:
            yield Finding(
                RULE,
                source.path,
                method.node.lineno,
                f"`{name}` trains in a run that is for prompts only",
                "return from it at once under the test of PROMPTS_ONLY",
            )


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
