"""What the tests of a function say about the statements after and inside them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from patchctl.verify.source import Function, dotted


@dataclass(frozen=True)
class Condition:
    """A test that was passed on the way to a statement.

    Attributes:
        wanted: what it must have been.
        function: where it stands.
        statement: the one that makes the test.
    """

    test: ast.expr
    wanted: bool
    function: Function
    statement: ast.stmt


def implied(test: ast.expr, wanted: bool) -> Iterator[tuple[ast.expr, bool]]:
    """The tests that must all have come out as given for a test to be `wanted`."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from implied(test.operand, not wanted)
    elif isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) is wanted:
        for value in test.values:
            yield from implied(value, wanted)
    else:
        compared = compared_to_none(test)
        yield test, wanted if compared is None else wanted is not compared[1]


def passed(function: Function, statement: ast.stmt) -> list[Condition]:
    """What is known after a statement: the opposite of an early exit's test, an assertion."""
    if isinstance(statement, ast.Assert):
        return [Condition(leaf, wanted, function, statement) for leaf, wanted in implied(statement.test, True)]
    if (
        isinstance(statement, ast.If)
        and not statement.orelse
        and isinstance(statement.body[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)
    ):
        return [Condition(leaf, wanted, function, statement) for leaf, wanted in implied(statement.test, False)]
    return []


def subject(test: ast.expr) -> ast.expr:
    """What a test asks about: `x` of `x` and `x is not None`; of `getattr(x, "y", None)` the attribute."""
    compared = compared_to_none(test)
    if compared is not None:
        return subject(compared[0])
    if isinstance(test, ast.Call) and dotted(test.func) in ("hasattr", "getattr") and len(test.args) >= 2:
        name = test.args[1]
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            return ast.Attribute(test.args[0], name.value, ast.Load())
    return test


def tests_presence(test: ast.expr) -> bool:
    """Whether a test, come out true, says that its subject is not None; `hasattr` says less."""
    return not (isinstance(test, ast.Call) and dotted(test.func) == "hasattr")


def compared_to_none(test: ast.expr) -> tuple[ast.expr, bool] | None:
    """For `x is None` and `x is not None`: x, and whether the test is that it is None."""
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Is | ast.IsNot):
        other = test.comparators[0]
        if isinstance(other, ast.Constant) and other.value is None:
            return test.left, isinstance(test.ops[0], ast.Is)
    return None
