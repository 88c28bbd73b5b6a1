"""The requests that verl's clients send, found by what a call does and not by its method's name.

A request carries a prompt: a call with `prompt_ids` (or of a method called generate...) on a server's handle, ending in
`.remote(...)`, or the same on `super()`. Its output comes whole, or in pieces of which the last one ends the request.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from patchctl.verify.source import Function, Source, dotted, flat, own_expressions

CLIENT = "LLMServerClient"
_DEFINITION = re.compile(rb"^class .*" + CLIENT.encode() + rb"\b", re.MULTILINE)
_PROMPT = "prompt_ids"
_SENDS = "generate"
_LAST = "stop_reason"
Carried = tuple[ast.stmt, ast.expr]


@dataclass(frozen=True, eq=False)
class Request:
    """A call by which a client's method sends a request to a server, or has its parent send it.

    Attributes:
        statement: the one that makes the call.
        by_parent: the call is `super().method(...)`.
        output: the name of the output, or of each piece; None where it gets none.
        block, index: the statements behind the output: those of `block` after `index`.
        pieces: the loop over the pieces; None where the output is whole.
    """

    function: Function
    statement: ast.stmt
    call: ast.Call
    by_parent: bool
    output: str | None
    block: list[ast.stmt]
    index: int
    pieces: ast.For | ast.AsyncFor | None

    def carried(self, key: str) -> list[Carried]:
        """What the request carries under a key, and the statements that say so: the call's, or those of a mapping that
        is made before and given by `**`."""
        found: list[Carried] = []
        for word in self.call.keywords:
            if word.arg == key:
                found.append((self.statement, word.value))
            elif word.arg is None:
                found += _in_mapping(self.function, self.statement, word.value, key)
        return found

    def is_reached(self, statement: ast.stmt) -> bool:
        """Whether a statement behind the output runs for every output that ends its request.

        Pieces may be told apart, if that tells every last one: by `stop_reason is not None`, or by that or else.
        """
        places = self.function.places
        while places[statement].block is not self.block:
            place = places[statement]
            parent = place.parent
            if self.pieces is None or not isinstance(parent, ast.If):
                return False
            if not _is_last(parent.test, f"{self.output}.{_LAST}", place.role == "body"):
                return False
            statement = parent
        return places[statement].index > self.index

    def between(self, statement: ast.stmt) -> Iterator[ast.stmt]:
        """What may run behind the output and before a statement that is reached from it."""
        while True:
            place = self.function.places[statement]
            outermost = place.block is self.block
            yield from flat(place.block[self.index + 1 if outermost else 0 : place.index])
            if outermost or place.parent is None:
                return
            statement = place.parent


def may_define(data: bytes) -> bool:
    """Whether a file's text has a client's class."""
    return CLIENT.encode() in data and _DEFINITION.search(data) is not None


def requests(source: Source) -> Iterator[Request]:
    """The requests of a file's clients."""
    if not may_define(source.data):
        return
    for function in source.functions:
        if function.owner is not None and _is_client(source, function.owner):
            for statement in function.mentioning(b".remote", b"super()", _PROMPT.encode()):
                for call in function.calls[statement]:
                    by_parent = _is_parents(call)
                    if by_parent or _is_remote(call):
                        request = _request(function, statement, call, by_parent)
                        if _method(call).startswith(_SENDS) or request.carried(_PROMPT):
                            yield request


def named(statement: ast.stmt) -> str | None:
    """The single name that a statement assigns to."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        return dotted(statement.targets[0])
    return dotted(statement.target) if isinstance(statement, ast.AnnAssign) else None


def yielded(statement: ast.stmt) -> str | None:
    """The name that a statement yields."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Yield) and statement.value.value is not None:
        return dotted(statement.value.value)
    return None


def loop_around(function: Function, statement: ast.stmt | None) -> ast.While | ast.For | ast.AsyncFor | None:
    """The innermost loop that is, or holds, a statement."""
    while statement is not None and not isinstance(statement, ast.While | ast.For | ast.AsyncFor):
        statement = function.places[statement].parent
    return statement


def is_word(node: ast.AST | None, word: str | None) -> bool:
    return isinstance(node, ast.Constant) and node.value == word


def _is_client(source: Source, owner: ast.ClassDef) -> bool:
    names = [node.name for node in source.bases(owner)]
    names += [(dotted(base) or "").rpartition(".")[2] for node in source.bases(owner) for base in node.bases]
    return any(name.endswith(CLIENT) for name in names)


def _is_parents(call: ast.Call) -> bool:
    target = call.func
    return (
        isinstance(target, ast.Attribute)
        and isinstance(target.value, ast.Call)
        and dotted(target.value.func) == "super"
    )


def _is_remote(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr == "remote"


def _method(call: ast.Call) -> str:
    """`m` of `handle.m.remote(...)`, of `handle.m.options(...).remote(...)` and of `super().m(...)`."""
    node: ast.expr = call.func
    while isinstance(node, ast.Attribute | ast.Call):
        if isinstance(node, ast.Attribute) and node.attr not in ("remote", "options"):
            return node.attr
        node = node.value if isinstance(node, ast.Attribute) else node.func
    return ""


def _request(function: Function, statement: ast.stmt, call: ast.Call, by_parent: bool) -> Request:
    name, loop = _named_result(function, statement, call)
    if loop is None and name is not None and not _awaits(statement, call):
        name, statement_of_output, loop = _followed(function, name)
    else:
        statement_of_output = statement
    if loop is None:
        place = function.places[statement_of_output]
        return Request(function, statement, call, by_parent, name, place.block, place.index, None)
    reference = dotted(loop.target)
    for inner in loop.body:
        if reference is not None and _awaited(inner) == reference:
            place = function.places[inner]
            return Request(function, statement, call, by_parent, named(inner), place.block, place.index, loop)
    return Request(function, statement, call, by_parent, reference if by_parent else None, loop.body, -1, loop)


def _named_result(
    function: Function, statement: ast.stmt, call: ast.Call
) -> tuple[str | None, ast.For | ast.AsyncFor | None]:
    """The name that a call's result gets from its statement, or the loop over it."""
    if isinstance(statement, ast.For | ast.AsyncFor):
        return None, statement
    if isinstance(statement, ast.With | ast.AsyncWith):
        for item in statement.items:
            if item.optional_vars is not None and any(node is call for node in ast.walk(item.context_expr)):
                return dotted(item.optional_vars), None
        return None, None
    return named(statement), None


def _followed(function: Function, name: str) -> tuple[str | None, ast.stmt, ast.For | ast.AsyncFor | None]:
    """The output of what has been sent but not awaited: its name, the statement that gives it, the loop over pieces."""
    last: ast.stmt = function.node.body[-1]
    for statement in function.statements:
        if isinstance(statement, ast.For | ast.AsyncFor) and dotted(statement.iter) == name:
            return None, statement, statement
        if _awaited(statement) == name:
            return named(statement), statement, None
    return None, last, None


def _awaits(statement: ast.stmt, call: ast.Call) -> bool:
    return any(isinstance(node, ast.Await) and node.value is call for node in own_expressions(statement))


def _awaited(statement: ast.stmt) -> str | None:
    """`r` of `name = await r`."""
    value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
    return dotted(value.value) if isinstance(value, ast.Await) else None


def _in_mapping(function: Function, statement: ast.stmt, node: ast.expr, key: str) -> list[Carried]:
    """The values of a key of a mapping, as far as its function makes it."""
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return [(statement, value) for its, value in pairs if its is not None and is_word(its, key)]
    if isinstance(node, ast.Call) and dotted(node.func) == "dict":
        return [(statement, word.value) for word in node.keywords if word.arg == key]
    name = dotted(node)
    if not isinstance(node, ast.Name) or name is None:
        return []
    found = [pair for setter, value in function.values_of(name) for pair in _in_mapping(function, setter, value, key)]
    for setter in function.mentioning(name.encode()):
        for target in setter.targets if isinstance(setter, ast.Assign) else ():
            if isinstance(target, ast.Subscript) and dotted(target.value) == name and is_word(target.slice, key):
                assert isinstance(setter, ast.Assign)
                found.append((setter, setter.value))
    return found


def _is_last(test: ast.expr, reason: str, taken: bool) -> bool:
    """Whether a test is sure to come out as `taken` for a piece with a stop reason."""
    operator: type[ast.boolop] = ast.Or if taken else ast.And
    if isinstance(test, ast.BoolOp):
        return isinstance(test.op, operator) and any(_is_last(one, reason, taken) for one in test.values)
    comparison = ast.IsNot if taken else ast.Is
    return (
        isinstance(test, ast.Compare)
        and dotted(test.left) == reason
        and len(test.ops) == 1
        and isinstance(test.ops[0], comparison)
        and is_word(test.comparators[0], None)
    )
