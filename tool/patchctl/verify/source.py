"""A parsed file, and the small questions that every rule asks of its tree.

Rules work on statements: they walk the few functions that can matter and leave the rest of a file of thousands of lines
alone, since walking every expression of every touched file would cost as much as parsing it.
"""

from __future__ import annotations

import ast
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_WITH_BLOCKS = (
    *(ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match),
    *_SCOPES,
)
_COMPOUND = frozenset(_WITH_BLOCKS)  # the types themselves: nearly every statement is of none, and asking is cheaper


class Lines:
    """Where words stand in a file: the cheap question that spares most of the expensive ones."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._known: dict[tuple[bytes, ...], Sequence[int]] = {}

    def having(self, *words: bytes) -> Sequence[int]:
        """The numbers of the lines that contain any of the words, in order."""
        if words not in self._known:
            found: set[int] = set()
            for word in words:
                line, counted = 1, 0
                at = self._data.find(word)
                while at != -1:
                    line += self._data.count(b"\n", counted, at)
                    counted = at
                    found.add(line)
                    at = self._data.find(word, at + 1)
            self._known[words] = sorted(found)
        return self._known[words]


@dataclass(frozen=True, eq=False)
class Function:
    """A function, and where it is defined.

    Attributes:
        owner: the class whose method it is; for a function inside a method, None.
        enclosing: the function around it, if any.
        lines: those of its file.
    """

    node: FunctionNode
    owner: ast.ClassDef | None
    enclosing: Function | None
    lines: Lines

    @property
    def name(self) -> str:
        return self.node.name

    @cached_property
    def parameters(self) -> frozenset[str]:
        given = self.node.args
        names = [arg.arg for arg in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
        return frozenset([*names, *(arg.arg for arg in (given.vararg, given.kwarg) if arg is not None)])

    @cached_property
    def places(self) -> dict[ast.stmt, Place]:
        """Where each statement of the function stands; nested functions and classes are single statements."""
        found: dict[ast.stmt, Place] = {}
        pending: list[tuple[list[ast.stmt], ast.stmt | None, str]] = [(self.node.body, None, "body")]
        while pending:
            block, parent, role = pending.pop()
            for index, statement in enumerate(block):
                found[statement] = Place(block, index, parent, role)
                if not isinstance(statement, _SCOPES):
                    pending.extend((inner, statement, name) for name, inner in child_blocks(statement))
        return found

    @property
    def statements(self) -> Iterator[ast.stmt]:
        return iter(self.places)

    def mentioning(self, *words: bytes) -> list[ast.stmt]:
        """The statements whose own lines contain any of the words: what is to be looked at more closely."""
        lines = self.lines.having(*words)
        return [statement for statement in self.places if _has_line(lines, *_own_lines(statement))]

    @cached_property
    def calls(self) -> Mapping[ast.stmt, list[ast.Call]]:
        """The calls that each statement itself makes, in the order of the text."""
        return _Calls()

    @cached_property
    def local_names(self) -> frozenset[str]:
        """The names that the function binds anywhere, so that they are local to it, unless it says `global`."""
        names = set(self.parameters)
        outer: set[str] = set()
        for statement in self.places:
            names |= self.bound_by(statement)
            if isinstance(statement, ast.Global | ast.Nonlocal):
                outer.update(statement.names)
        return frozenset(names - outer)

    def bound_by(self, statement: ast.stmt) -> frozenset[str]:
        """The names that a statement of the function binds, apart from those of the statements inside it."""
        if _has_line(self.lines.having(b":="), *_own_lines(statement)):
            return binds(statement) | walruses(statement)
        return binds(statement)

    def values_of(self, name: str) -> list[tuple[ast.stmt, ast.expr]]:
        """What the function assigns to a local name, and where; for one element of an unpacked call, the call."""
        found: list[tuple[ast.stmt, ast.expr]] = []
        for statement in self.mentioning(name.encode()):
            if isinstance(statement, ast.Assign):
                for target in statement.targets:
                    pairs = assigned_pairs(target, statement.value)
                    found += [(statement, value) for one, value in pairs if dotted(one) == name]
            elif isinstance(statement, ast.AnnAssign) and statement.value and dotted(statement.target) == name:
                found.append((statement, statement.value))
            for node in ast.walk(statement.test) if isinstance(statement, ast.If | ast.While) else ():
                if isinstance(node, ast.NamedExpr) and node.target.id == name:
                    found.append((statement, node.value))
        return found

    @cached_property
    def is_generator(self) -> bool:
        return any(
            isinstance(node, ast.Yield | ast.YieldFrom)
            for statement in self.mentioning(b"yield")
            for node in own_expressions(statement)
        )


class _Calls(dict[ast.stmt, list[ast.Call]]):
    """The calls of statements, looked for when they are asked for."""

    def __missing__(self, statement: ast.stmt) -> list[ast.Call]:
        found = [node for node in own_expressions(statement) if isinstance(node, ast.Call)]
        found.sort(key=lambda call: (call.end_lineno or call.lineno, call.end_col_offset or 0))
        self[statement] = found
        return found


@dataclass(frozen=True, eq=False)
class Place:
    """A statement's position.

    Attributes:
        block: the statement list it is in.
        parent: the compound statement that the list belongs to; None at the function's top level.
        role: which list of the parent: `body`, `orelse`, `finalbody`, `handler` or `case`.
    """

    block: list[ast.stmt]
    index: int
    parent: ast.stmt | None
    role: str


@dataclass(frozen=True, eq=False)
class Source:
    """A file of a tree, read and parsed once.

    Attributes:
        path: relative to the tree's root, with `/`.
        parsed: its tree, where it has been parsed; else that is done when a rule first asks.
        load: gives another file of the same tree, by its module; None where there is none that parses.
    """

    path: str
    data: bytes
    parsed: ast.Module | None = None
    load: Callable[[str], Source | None] = field(repr=False, default=lambda _module: None)

    @cached_property
    def lines(self) -> Lines:
        return Lines(self.data)

    @cached_property
    def tree(self) -> ast.Module:
        return self.parsed or ast.parse(self.data, self.path)

    @cached_property
    def functions(self) -> tuple[Function, ...]:
        """Every function of the file, outer ones first."""
        found: list[Function] = []
        lines = self.lines.having(b"def ")
        pending: list[tuple[list[ast.stmt], ast.ClassDef | None, Function | None]] = [(self.tree.body, None, None)]
        while pending:
            block, owner, enclosing = pending.pop()
            for statement in block:
                if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                    function = Function(statement, owner, enclosing, self.lines)
                    found.append(function)
                    if _has_line(lines, statement.body[0].lineno, statement.end_lineno):
                        pending.append((statement.body, None, function))
                elif isinstance(statement, ast.ClassDef):
                    pending.append((statement.body, statement, enclosing))
                elif type(statement) in _COMPOUND and _has_line(lines, statement.lineno, statement.end_lineno):
                    pending.extend((inner, owner, enclosing) for _, inner in child_blocks(statement))
        found.sort(key=lambda function: function.node.lineno)
        return tuple(found)

    @cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        """The classes at the file's top level."""
        return {node.name: node for node in self.tree.body if isinstance(node, ast.ClassDef)}

    @cached_property
    def import_statements(self) -> tuple[tuple[ast.Import | ast.ImportFrom, bool], ...]:
        """The imports anywhere in the file, with whether each is in a `try` that catches its failure.

        They are found by their lines: a walk over every statement would cost more than all that is done with them.
        """
        lines = self.lines.having(b"import ")
        found: list[tuple[ast.Import | ast.ImportFrom, bool]] = []
        pending: list[tuple[list[ast.stmt], bool]] = [(self.tree.body, False)]
        while pending:
            block, tried = pending.pop()
            for statement in block:
                if isinstance(statement, ast.Import | ast.ImportFrom):
                    found.append((statement, tried))
                elif type(statement) in _COMPOUND and _has_line(lines, statement.lineno, statement.end_lineno):
                    catches = isinstance(statement, ast.Try) and bool(statement.handlers)
                    pending += [
                        (inner, tried or (catches and role == "body")) for role, inner in child_blocks(statement)
                    ]
        return tuple(found)

    @cached_property
    def imports(self) -> dict[str, tuple[str, str | None]]:
        """What `import` binds anywhere in the file: name -> (module, name in it or None for the module itself)."""
        bound: dict[str, tuple[str, str | None]] = {}
        for statement, _ in self.import_statements:
            for alias in statement.names:
                top = alias.name.partition(".")[0]
                if isinstance(statement, ast.ImportFrom):
                    bound[alias.asname or alias.name] = (absolute_module(self.path, statement), alias.name)
                else:
                    bound[alias.asname or top] = (alias.name if alias.asname else top, None)
        return bound

    @cached_property
    def module_names(self) -> frozenset[str]:
        """The names bound at the top level of the file, and by functions that declare them `global`."""
        names: set[str] = set()
        for statement in flat(self.tree.body):
            names |= binds(statement)
            if b":=" in self.data:
                names |= walruses(statement)
        for function in self.functions_with(b"global "):
            for statement in function.mentioning(b"global "):
                if isinstance(statement, ast.Global):
                    names.update(statement.names)
        return frozenset(names)

    def bases(self, owner: ast.ClassDef) -> list[ast.ClassDef]:
        """The class and those of its bases that this file defines, nearest first."""
        chain: list[ast.ClassDef] = []
        pending = [owner]
        while pending:
            node = pending.pop(0)
            if node not in chain:
                chain.append(node)
                pending.extend(self.classes[name] for base in node.bases if (name := dotted(base)) in self.classes)
        return chain

    @cached_property
    def _index(self) -> dict[tuple[ast.ClassDef | Function | None, str], Function]:
        """The functions by where they are looked up, a class, a function or the file, and their name."""
        return {(one.owner or one.enclosing, one.name): one for one in reversed(self.functions)}

    def method(self, owner: ast.ClassDef | None, name: str) -> Function | None:
        """The method that `self.name` means in a class, as far as this file tells."""
        if owner is None:
            return None
        return next((found for node in self.bases(owner) if (found := self._index.get((node, name)))), None)

    def callee(self, caller: Function, call: ast.Call) -> Function | None:
        """The function of this file that a call reaches.

        It is called by its name, as `self.name(...)`, or as a method of a local object of a class of this file.
        """
        target = call.func
        if isinstance(target, ast.Attribute):
            return self.method(self._class_of(caller, target.value), target.attr)
        if not isinstance(target, ast.Name):
            return None
        scope: Function | None = caller
        while scope is not None:
            if (scope, target.id) in self._index:
                return self._index[scope, target.id]
            scope = scope.enclosing
        return self._index.get((None, target.id))

    def _class_of(self, caller: Function, node: ast.expr) -> ast.ClassDef | None:
        """The class of this file of which an expression is an object, by what its function assigns to it."""
        if not isinstance(node, ast.Name):
            return None
        if node.id in ("self", "cls"):
            return method_owner(caller)
        if not self.classes or node.id not in caller.local_names:
            return None
        made = {
            dotted(value.func) if isinstance(value, ast.Call) else None
            for _, value in caller.values_of(node.id)
            if not (isinstance(value, ast.Constant) and value.value is None)
        }
        return self.classes.get(made.pop() or "") if len(made) == 1 else None

    def swallows(self, function: Function, statement: ast.With | ast.AsyncWith) -> bool:
        """Whether a `with` goes on after an exception inside it: `suppress`, or a context manager of this file that
        catches what its `yield` raises."""
        for item in statement.items:
            call = item.context_expr
            if not isinstance(call, ast.Call):
                continue
            if (dotted(call.func) or "").rpartition(".")[2] == "suppress":
                return True
            callee = self.callee(function, call)
            if callee is not None and callee.is_generator and _catches_at_yield(callee):
                return True
        return False

    def functions_with(self, *words: bytes) -> list[Function]:
        """The functions whose text contains any of the words; of nested ones, the inner and the outer."""
        lines = self.lines.having(*words)
        if not lines:
            return []
        return [
            function for function in self.functions if _has_line(lines, function.node.lineno, function.node.end_lineno)
        ]


def _has_line(lines: Sequence[int], first: int, last: int | None) -> bool:
    """Whether one of some lines, in order, is in a range."""
    at = bisect_left(lines, first)
    return at < len(lines) and lines[at] <= (last or first)


def _own_lines(statement: ast.stmt) -> tuple[int, int]:
    """The first and last line of a statement without those inside it."""
    if type(statement) in _COMPOUND:
        inner = next((block[0].lineno for _, block in child_blocks(statement)), statement.lineno)
        return statement.lineno, max(statement.lineno, inner - 1)
    return statement.lineno, statement.end_lineno or statement.lineno


def _catches_at_yield(function: Function) -> bool:
    for statement in function.statements:
        if isinstance(statement, ast.Try) and statement.handlers:
            yields = any(
                isinstance(node, ast.Yield) for inner in flat(statement.body) for node in own_expressions(inner)
            )
            returns = any(not isinstance(handler.body[-1], ast.Raise) for handler in statement.handlers)
            if yields and returns:
                return True
    return False


def method_owner(function: Function | None) -> ast.ClassDef | None:
    """The class that `self` belongs to in a function: its own, or that of the method around it."""
    while function is not None:
        if function.owner is not None:
            return function.owner
        function = function.enclosing
    return None


def child_blocks(statement: ast.stmt) -> Iterator[tuple[str, list[ast.stmt]]]:
    """The statement lists directly inside a statement, with the role of each."""
    if type(statement) not in _COMPOUND:
        return
    assert isinstance(statement, _WITH_BLOCKS)
    if isinstance(statement, ast.Match):
        for case in statement.cases:
            yield "case", case.body
        return
    yield "body", statement.body
    if isinstance(statement, ast.If | ast.For | ast.AsyncFor | ast.While | ast.Try):
        if statement.orelse:
            yield "orelse", statement.orelse
        if isinstance(statement, ast.Try):
            for handler in statement.handlers:
                yield "handler", handler.body
            if statement.finalbody:
                yield "finalbody", statement.finalbody


def flat(block: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Every statement of a list and of the lists inside it, except inside functions and classes."""
    pending = list(reversed(block))
    while pending:
        statement = pending.pop()
        yield statement
        if not isinstance(statement, _SCOPES):
            for _, inner in child_blocks(statement):
                pending.extend(reversed(inner))


def own_expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """The expressions that a statement itself evaluates.

    Not those of the statements inside it, nor the bodies of lambdas and nested functions.
    """
    if isinstance(statement, _SCOPES):
        return
    pending: list[ast.AST] = [statement]
    while pending:
        for child in pending.pop().__dict__.values():
            for node in child if type(child) is list else (child,):
                if isinstance(node, ast.expr):
                    yield node
                    if not isinstance(node, ast.Lambda):
                        pending.append(node)
                elif isinstance(node, ast.keyword | ast.comprehension | ast.withitem | ast.Slice):
                    pending.append(node)


def dotted(node: ast.AST) -> str | None:
    """`a.b.c` of a chain of attributes on a name; None for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    parts.append(node.id)
    return ".".join(reversed(parts))


def absolute_module(path: str, statement: ast.ImportFrom) -> str:
    """The module that a `from` import names, a relative one made absolute."""
    if not statement.level:
        return statement.module or ""
    parts = path.removesuffix(".py").split("/")
    package = parts[: len(parts) - statement.level]
    return ".".join([*package, *(statement.module.split(".") if statement.module else ())])


def assigned_pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    """What an assignment gives to each single target."""
    if isinstance(target, ast.Tuple | ast.List):
        if isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts):
            return [pair for one, its in zip(target.elts, value.elts, strict=True) for pair in assigned_pairs(one, its)]
        return [(one, value) for one in target.elts]
    return [(target, value)]


def bound_names(target: ast.AST) -> Iterator[str]:
    """The names that an assignment target binds."""
    if isinstance(target, ast.Name):
        yield target.id
    elif isinstance(target, ast.Tuple | ast.List):
        for element in target.elts:
            yield from bound_names(element)
    elif isinstance(target, ast.Starred):
        yield from bound_names(target.value)


def binds(statement: ast.stmt) -> frozenset[str]:
    """The names that a statement binds otherwise than by `:=`, apart from those of the statements inside it."""
    names: set[str] = set()
    if isinstance(statement, ast.Assign):
        for target in statement.targets:
            names.update(bound_names(target))
    elif isinstance(statement, ast.AnnAssign):
        if statement.value is not None:
            names.update(bound_names(statement.target))
    elif isinstance(statement, ast.Import | ast.ImportFrom):
        names.update(alias.asname or alias.name.partition(".")[0] for alias in statement.names)
    elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        names.add(statement.name)
    elif isinstance(statement, ast.For | ast.AsyncFor):
        names.update(bound_names(statement.target))
    elif isinstance(statement, ast.With | ast.AsyncWith):
        names |= with_names(statement)
    elif isinstance(statement, ast.Match):
        for case in statement.cases:
            names |= captures(case.pattern)
    names.update(handler.name for handler in getattr(statement, "handlers", ()) if handler.name)
    return frozenset(names)


def walruses(statement: ast.stmt) -> frozenset[str]:
    """The names that a statement binds by `:=`."""
    return frozenset(node.target.id for node in own_expressions(statement) if isinstance(node, ast.NamedExpr))


def with_names(statement: ast.With | ast.AsyncWith) -> frozenset[str]:
    return frozenset(name for item in statement.items if item.optional_vars for name in bound_names(item.optional_vars))


def captures(pattern: ast.pattern) -> frozenset[str]:
    return frozenset(
        name
        for node in ast.walk(pattern)
        for name in (getattr(node, "name", None), getattr(node, "rest", None))
        if isinstance(name, str)
    )
