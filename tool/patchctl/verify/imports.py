"""Rule `imports`: every name that a touched file uses is bound in it, and what it imports from its own package is
there.

Why: a hook pasted without its import, or with an argument that its function doesn't have, passes every search for the
text and fails with a NameError in the middle of a run. An import whose use is gone means that a hook was lost.

How to fix: import or define the name; restore the file or the definition that is imported; restore the line that used
the import.

The scopes are Python's own (`symtable`). A file with `from x import *` can bind any name, so that only its imports are
looked at. Of the imported modules only those of the same tree are looked at, and only the touched ones for their names.
"""

from __future__ import annotations

import ast
import builtins
import symtable
import warnings
from collections.abc import Callable, Iterator, Mapping

from patchctl.verify.findings import Finding
from patchctl.verify.source import Source, absolute_module, binds, child_blocks, dotted

RULE = "imports"
IsHook = Callable[[str], bool]

_GIVEN = frozenset(
    {"__file__", "__name__", "__doc__", "__package__", "__spec__", "__loader__", "__builtins__", "__path__"}
    | {"__annotations__", "__dict__", "__module__", "__qualname__", "__class__", "__debug__"}
)
_SINCE_3_11 = frozenset({"BaseExceptionGroup", "ExceptionGroup", "PythonFinalizationError"})
BUILTINS = (frozenset(dir(builtins)) | _GIVEN | {"WindowsError"}) - _SINCE_3_11


def check(
    source: Source, touched: Mapping[str, Source], exists: Callable[[str], bool], is_hook: IsHook
) -> list[Finding]:
    """The names of a file that nothing binds.

    Args:
        touched: the files whose own definitions are known, by path.
        exists: whether the tree has a path.
        is_hook: whether a module exists for the dump alone. An import from one that nothing uses is a hook that was
            lost.
    """
    findings: list[Finding] = []
    table = _table(source)
    starred = any(
        isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*" for statement in source.tree.body
    )
    if table is not None and not starred:
        findings += _undefined(source, table)
        findings += _only_for_type_checkers(source, table)
    if table is not None:
        findings += _unused(source, table, is_hook)
    findings += _missing_modules(source, touched, exists)
    return findings


def _table(source: Source) -> symtable.SymbolTable | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return symtable.symtable(source.data, source.path, "exec")  # type: ignore[arg-type]  # bytes are read as well
        except (SyntaxError, ValueError):
            return None  # the rule `compiles` has said so


def _tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    pending = [table]
    while pending:
        one = pending.pop()
        yield one
        pending.extend(one.get_children())


def _looked_up(table: symtable.SymbolTable) -> Iterator[tuple[set[str], int]]:
    """The names that each scope looks up in the module, with the scope's line. A name that a function only sets there,
    as `global`, is among them."""
    for scope in _tables(table):
        if isinstance(scope, symtable.Function):
            yield set(scope.get_globals()), scope.get_lineno()
        else:
            names = {
                symbol.get_name() for symbol in scope.get_symbols() if symbol.is_referenced() and symbol.is_global()
            }
            yield names, scope.get_lineno()


def _undefined(source: Source, table: symtable.SymbolTable) -> list[Finding]:
    bound = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    used = [(name, line) for names, line in _looked_up(table) for name in names - bound - BUILTINS]
    if not used:
        return []
    bound |= {
        symbol.get_name()
        for scope in _tables(table)
        for symbol in scope.get_symbols()
        if symbol.is_declared_global() and symbol.is_assigned()
    }
    findings = {}
    for name, since in used:
        if name not in bound:
            line = _line_of(source, name, since)
            message, fix = f"name `{name}` is not defined", f"import or define `{name}`"
            findings[name, line] = Finding(RULE, source.path, line, message, fix)
    return list(findings.values())


def _line_of(source: Source, name: str, since: int) -> int | None:
    """The first line at or after `since` that uses a name; decorators and defaults stand before their scope's line."""
    lines = sorted(
        node.lineno
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
    )
    return next((line for line in lines if line >= since), lines[0] if lines else None)


def _only_for_type_checkers(source: Source, table: symtable.SymbolTable) -> list[Finding]:
    """Names imported under `if TYPE_CHECKING:` alone that running code uses."""
    if b"TYPE_CHECKING" not in source.data:
        return []
    checked: set[str] = set()
    otherwise: set[str] = set()
    pending: list[tuple[list[ast.stmt], set[str]]] = [(source.tree.body, otherwise)]
    while pending:
        block, names = pending.pop()
        for statement in block:
            guard = isinstance(statement, ast.If) and (dotted(statement.test) or "").endswith("TYPE_CHECKING")
            names |= binds(statement)
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            for role, inner in child_blocks(statement):
                pending.append((inner, checked if guard and role == "body" else names))
    names = checked - otherwise
    if not names or not (names & _used(table)):
        return []
    deferred = any(
        isinstance(statement, ast.ImportFrom)
        and statement.module == "__future__"
        and any(alias.name == "annotations" for alias in statement.names)
        for statement in source.tree.body
    )
    return [
        Finding(
            RULE,
            source.path,
            node.lineno,
            f"`{node.id}` is imported for type checkers only, and used when the code runs",
            f"import `{node.id}` outside `if TYPE_CHECKING:`",
        )
        for node in _running_names(source.tree, deferred)
        if node.id in names
    ]


def _running_names(tree: ast.Module, deferred: bool) -> Iterator[ast.Name]:
    """The names that are looked up when code runs: not in annotations if their evaluation is deferred, nor in those of
    local variables, nor under `if TYPE_CHECKING:`."""
    pending: list[tuple[ast.AST, bool]] = [(tree, False)]
    while pending:
        node, in_function = pending.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node
        if isinstance(node, ast.If) and (dotted(node.test) or "").endswith("TYPE_CHECKING"):
            pending.extend((child, in_function) for child in node.orelse)
            continue
        skipped: set[ast.AST] = set()
        if isinstance(node, ast.AnnAssign) and (deferred or in_function):
            skipped.add(node.annotation)
        if isinstance(node, ast.arg) and deferred and node.annotation is not None:
            skipped.add(node.annotation)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if deferred and node.returns is not None:
                skipped.add(node.returns)
            in_function = True
        elif isinstance(node, ast.ClassDef):
            in_function = False
        pending.extend((child, in_function) for child in ast.iter_child_nodes(node) if child not in skipped)


def _used(table: symtable.SymbolTable) -> set[str]:
    """The names of the module that something in it looks up."""
    names = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_referenced()}
    return names.union(*(looked_up for looked_up, _ in _looked_up(table)))


def _unused(source: Source, table: symtable.SymbolTable, is_hook: IsHook) -> list[Finding]:
    """Imports of the dump's modules that nothing in the file uses; a package's own `__init__` imports for others."""
    if source.path.endswith("/__init__.py"):
        return []
    imported = [
        (alias.asname or alias.name, statement)
        for statement, _ in source.import_statements
        if isinstance(statement, ast.ImportFrom) and is_hook(absolute_module(source.path, statement))
        for alias in statement.names
    ]
    if not imported:
        return []
    scopes = list(_tables(table))
    return [
        Finding(
            RULE,
            source.path,
            statement.lineno,
            f"`{name}` is imported and not used: the line that called it is gone",
            f"restore the call of `{name}`",
        )
        for name, statement in imported
        if not any(name in scope.get_identifiers() and scope.lookup(name).is_referenced() for scope in scopes)
    ]


def _missing_modules(source: Source, touched: Mapping[str, Source], exists: Callable[[str], bool]) -> list[Finding]:
    package = source.path.partition("/")[0]
    findings = []
    for statement, tried in source.import_statements:
        if tried:
            continue
        if isinstance(statement, ast.Import):
            wanted: list[tuple[str, str | None]] = [(alias.name, None) for alias in statement.names]
        else:
            module = absolute_module(source.path, statement)
            wanted = [(module, alias.name) for alias in statement.names]
        for module, name in wanted:
            if module.partition(".")[0] != package:
                continue
            problem = _import_problem(module, name, touched, exists)
            if problem is not None:
                findings.append(Finding(RULE, source.path, statement.lineno, *problem))
    return list(dict.fromkeys(findings))


def _import_problem(
    module: str, name: str | None, touched: Mapping[str, Source], exists: Callable[[str], bool]
) -> tuple[str, str] | None:
    """What is wrong with an import from the tree's own package: a message and what to do; None if nothing is."""
    base = module.replace(".", "/")
    path = next((path for path in (f"{base}.py", f"{base}/__init__.py") if path in touched or exists(path)), None)
    if path is None:
        if exists(base) or _is_built(module):
            return None
        return f"imports `{module}`, which the tree does not have", f"restore {base}.py"
    other = touched.get(path)
    if name is None or name == "*" or other is None or name in other.module_names:
        return None
    if "__getattr__" in other.module_names or _has_star(other):
        return None
    if path.endswith("/__init__.py") and any(exists(f"{base}/{name}{end}") for end in (".py", "/__init__.py", "")):
        return None
    return f"imports `{name}` from `{module}`, which does not define it", f"define `{name}` in {path}"


def _has_star(source: Source) -> bool:
    return any(
        isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*" for statement in source.tree.body
    )


def _is_built(module: str) -> bool:
    """Whether a module is made when the package is built, so that a checkout has none."""
    last = module.rpartition(".")[2]
    return last.startswith("_") or last.endswith(("_C", "_version", "version"))
