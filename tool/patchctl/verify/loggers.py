"""Is an expression a logger, by what is assigned to it in its class or function?"""

from __future__ import annotations

import ast

from patchctl.verify.debugger import is_log_call
from patchctl.verify.source import (
    Function,
    FunctionNode,
    Source,
    assigned_pairs,
    dotted,
    method_owner,
    own_expressions,
)

_DEPTH = 6


def values_of_attribute(source: Source, owner: ast.ClassDef, attribute: str) -> list[tuple[Function, ast.expr]]:
    """What a class, or a base of it in the same file, assigns to `self.<attribute>`, and in which method."""
    classes = source.bases(owner)
    text = f"self.{attribute}"
    found: list[tuple[Function, ast.expr]] = []
    for function in source.functions_with(attribute.encode()):
        if method_owner(function) in classes:
            for statement in function.mentioning(attribute.encode()):
                if isinstance(statement, ast.Assign):
                    for target in statement.targets:
                        pairs = assigned_pairs(target, statement.value)
                        found += [(function, value) for one, value in pairs if dotted(one) == text]
                elif isinstance(statement, ast.AnnAssign) and dotted(statement.target) == text and statement.value:
                    found.append((function, statement.value))
    return found


def has_attribute(source: Source, owner: ast.ClassDef, attribute: str, apart_from: ast.Call) -> bool:
    """Whether objects of a class have an attribute, as far as its file tells.

    Where a base is defined elsewhere, it is enough that the class reads the attribute in another place than the call.
    """
    if values_of_attribute(source, owner, attribute):
        return True
    classes = source.bases(owner)
    for node in classes:
        for statement in node.body:
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef) and statement.name == attribute:
                return True
            if isinstance(statement, ast.Assign | ast.AnnAssign):
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                if any(dotted(target) == attribute for target in targets):
                    return True
    if all(dotted(base) in source.classes for node in classes for base in node.bases):
        return False
    logged = {node for call in _log_calls(source) for node in ast.walk(call)}
    return any(
        isinstance(node, ast.Attribute) and dotted(node) == f"self.{attribute}" and node not in logged
        for function in source.functions_with(f"self.{attribute}".encode())
        if method_owner(function) in classes
        for statement in function.mentioning(f"self.{attribute}".encode())
        for node in own_expressions(statement)
    )


Methods = frozenset[FunctionNode]
NONE: Methods = frozenset()


def log_methods(source: Source, function: Function, node: ast.expr, depth: int = 0) -> Methods:
    """The `log_step` methods that an expression can have where a function uses it.

    Empty unless it is a logger: unless all that is assigned to it, in its class or its function, is one, or None.
    """
    if depth > _DEPTH:
        return NONE
    if isinstance(node, ast.IfExp):
        return _of_all(source, [(function, node.body), (function, node.orelse)], depth)
    if isinstance(node, ast.BoolOp):
        return log_methods(source, function, node.values[-1], depth + 1)
    if isinstance(node, ast.Call):
        return _of_call(source, function, node, depth)
    text = dotted(node) or ""
    root, _, rest = text.partition(".")
    if isinstance(node, ast.Attribute) and root in ("self", "cls") and rest == node.attr:
        owner = method_owner(function)
        return _of_all(source, values_of_attribute(source, owner, rest), depth) if owner is not None else NONE
    if not isinstance(node, ast.Name):
        return NONE
    if text in function.local_names:
        values = [(function, value) for _, value in function.values_of(text)]
        given = function.node.args
        for arg in (*given.posonlyargs, *given.args, *given.kwonlyargs):
            if arg.arg == text:
                return NONE if values else _of_annotation(source, arg.annotation)
        return _of_all(source, values, depth)
    if function.enclosing is not None and text in function.enclosing.local_names:
        return log_methods(source, function.enclosing, node, depth + 1)
    at_top = [statement for statement in source.tree.body if isinstance(statement, ast.Assign)]
    named = [one for one in at_top if any(dotted(target) == text for target in one.targets)]
    return _of_all(source, [(function, one.value) for one in named], depth)


def _of_all(source: Source, values: list[tuple[Function, ast.expr]], depth: int) -> Methods:
    """The methods of several values of which one is the logger; None among them is no logger and does no harm."""
    given = [pair for pair in values if not (isinstance(pair[1], ast.Constant) and pair[1].value is None)]
    found = [log_methods(source, function, value, depth + 1) for function, value in given]
    return frozenset().union(*found) if all(found) else NONE


def _of_call(source: Source, function: Function, call: ast.Call, depth: int) -> Methods:
    """The methods of what a call makes: an object of its class, or what the function says it returns."""
    if dotted(call.func) == "getattr" and len(call.args) >= 2 and isinstance(call.args[1], ast.Constant):
        attribute = ast.Attribute(call.args[0], str(call.args[1].value), ast.Load())
        return log_methods(source, function, attribute, depth + 1)
    callee = source.callee(function, call)
    if callee is not None:
        return _of_annotation(source, callee.node.returns)
    return frozenset(log_definitions(source, dotted(call.func) or ""))


def _of_annotation(source: Source, annotation: ast.expr | None) -> Methods:
    """The methods of the loggers that an annotation names, alone or among others."""
    found: set[FunctionNode] = set()
    for node in ast.walk(annotation) if annotation is not None else ():
        text = dotted(node)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value.partition(" ")[0].removeprefix("Optional[").removesuffix("]")
        if text:
            found.update(log_definitions(source, text))
    return frozenset(found)


def log_definitions(source: Source, name: str, depth: int = 0) -> list[FunctionNode]:
    """The `log_step` methods of what a name in a file stands for: a class, or a function that makes one.

    Empty where the name is of another project or stands for something without a log_step.
    """
    root, _, rest = name.partition(".")
    if root in source.classes:
        return [
            function.node
            for function in source.functions
            if function.owner in source.bases(source.classes[root]) and function.name == "log_step"
        ]
    for function in source.functions:
        if function.name == root and function.owner is None and function.enclosing is None:
            annotated = [dotted(node) for node in ast.walk(function.node.returns)] if function.node.returns else []
            return [
                found
                for text in annotated
                if text and text != root
                for found in log_definitions(source, text, depth + 1)
            ]
    if root in source.imports and depth < _DEPTH:
        module, imported = source.imports[root]
        other = source.load(module) if imported is not None else None
        if other is not None and imported is not None:
            return log_definitions(other, imported, depth + 1)
        target = rest.partition(".")[0]
        if imported is not None and target:
            inner = source.load(f"{module}.{imported}")
            return log_definitions(inner, target, depth + 1) if inner is not None else []
    return []


def wrong_arguments(definition: FunctionNode, call: ast.Call) -> str | None:
    """What a log call gets wrong about the parameters of the log_step it reaches, None where it is right or unknown."""
    given = definition.args
    if given.vararg or given.kwarg or any(word.arg is None for word in call.keywords):
        return None
    if any(isinstance(argument, ast.Starred) for argument in call.args):
        return None
    names = [arg.arg for arg in (*given.posonlyargs, *given.args)][1:]
    keyword_only = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    required = names[: len(names) - len(given.defaults)]
    required += [arg.arg for arg, default in keyword_only if default is None]
    keywords = [word.arg for word in call.keywords if word.arg]
    positional = names[: len(call.args)]
    if len(call.args) > len(names):
        return f"it takes {', '.join(names)}, and gets {len(call.args)}"
    for keyword in keywords:
        if keyword in positional:
            return f"`{keyword}` is given twice"
        if keyword not in names and keyword not in {arg.arg for arg in given.kwonlyargs}:
            return f"it has no parameter `{keyword}`"
    for name in required:
        if name not in positional and name not in keywords:
            return f"`{name}` is missing"
    pairs = [*zip(positional, call.args, strict=True), *((word.arg or "", word.value) for word in call.keywords)]
    for name, argument in pairs:
        text = (dotted(argument) or "").rpartition(".")[2].lstrip("_")
        if text in names and text != name:
            return f"`{text}` is given as `{name}`"
    return None


def _log_calls(source: Source) -> list[ast.Call]:
    return [
        call
        for function in source.functions_with(b"log_step")
        for statement in function.mentioning(b"log_step")
        for call in function.calls[statement]
        if is_log_call(call)
    ]
