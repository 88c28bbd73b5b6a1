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

_DEPTH = 3


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
                        found += [
                            (function, value)
                            for one, value in assigned_pairs(target, statement.value)
                            if dotted(one) == text
                        ]
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


def is_logger(source: Source, function: Function, node: ast.expr) -> bool:
    """Whether an expression is a logger where a function uses it: all that is assigned to it is one, or None."""
    owner = method_owner(function)
    text = dotted(node)
    if text is None:
        return False
    if text.startswith(("self.", "cls.")) and text.count(".") == 1:
        if owner is None:
            return False
        values = values_of_attribute(source, owner, node.attr if isinstance(node, ast.Attribute) else "")
        return _are_loggers(source, values)
    if "." in text:
        return False
    if text in function.local_names:
        arguments = function.node.args
        for arg in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            if arg.arg == text:
                return not function.values_of(text) and _names_logger(source, function, arg.annotation)
        return _are_loggers(source, [(function, value) for _, value in function.values_of(text)])
    if function.enclosing is not None and text in function.enclosing.local_names:
        return is_logger(source, function.enclosing, node)
    values = [
        (function, statement.value)
        for statement in source.tree.body
        if isinstance(statement, ast.Assign) and any(dotted(target) == text for target in statement.targets)
    ]
    return _are_loggers(source, values)


def _are_loggers(source: Source, values: list[tuple[Function, ast.expr]]) -> bool:
    given = [(function, value) for function, value in values if not _is_none(value)]
    return bool(given) and all(_makes_logger(source, function, value, 0) for function, value in given)


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _makes_logger(source: Source, function: Function, value: ast.expr, depth: int) -> bool:
    """Whether an assigned value is a logger, or can be one beside None."""
    if depth > _DEPTH:
        return False
    if isinstance(value, ast.IfExp):
        branches = [branch for branch in (value.body, value.orelse) if not _is_none(branch)]
        return bool(branches) and all(_makes_logger(source, function, branch, depth + 1) for branch in branches)
    if isinstance(value, ast.BoolOp):
        return _makes_logger(source, function, value.values[-1], depth + 1)
    if isinstance(value, ast.Call):
        if dotted(value.func) == "getattr" and len(value.args) >= 2 and isinstance(value.args[1], ast.Constant):
            attribute = ast.Attribute(value.args[0], str(value.args[1].value), ast.Load())
            return is_logger(source, function, attribute)
        callee = source.callee(function, value)
        if callee is not None:
            return _gives_logger(source, callee)
        return bool(log_definitions(source, dotted(value.func) or ""))
    if dotted(value) is not None:
        return is_logger(source, function, value)
    return False


def _gives_logger(source: Source, function: Function) -> bool:
    """Whether a function returns a logger, alone or among others, by its annotation."""
    return _names_logger(source, function, function.node.returns)


def _names_logger(source: Source, function: Function, annotation: ast.expr | None) -> bool:
    if annotation is None:
        return False
    for node in ast.walk(annotation):
        text = dotted(node)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value.partition(" ")[0].removeprefix("Optional[").removesuffix("]")
        if text and log_definitions(source, text):
            return True
    return False


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


def wrong_arguments(source: Source, function: Function, call: ast.Call) -> str | None:
    """What a log call gets wrong about the parameters of the log_step it reaches, None where it is right or unknown."""
    assert isinstance(call.func, ast.Attribute)
    definition = _definition_of(source, function, call.func.value)
    if definition is None or any(isinstance(arg, ast.Starred) for arg in call.args):
        return None
    given = definition.args
    if given.vararg or given.kwarg or any(word.arg is None for word in call.keywords):
        return None
    names = [arg.arg for arg in (*given.posonlyargs, *given.args)][1:]
    required = names[: len(names) - len(given.defaults)]
    required += [arg.arg for arg, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default is None]
    keywords = [word.arg for word in call.keywords]
    if len(call.args) > len(names):
        return f"it takes {', '.join(names)}, and gets {len(call.args)}"
    unknown = [word for word in keywords if word not in names and word not in {arg.arg for arg in given.kwonlyargs}]
    if unknown:
        return f"it has no parameter `{unknown[0]}`"
    missing = [name for name in required if name not in names[: len(call.args)] and name not in keywords]
    if missing:
        return f"`{missing[0]}` is missing"
    for position, argument in enumerate(call.args):
        text = (dotted(argument) or "").rpartition(".")[2]
        if text in names and text != names[position]:
            return f"`{text}` is given as `{names[position]}`"
    return None


def _definition_of(source: Source, function: Function, receiver: ast.expr) -> FunctionNode | None:
    """The log_step that a receiver has, where exactly one class can be behind it."""
    owner = method_owner(function)
    values: list[ast.expr] = []
    if isinstance(receiver, ast.Attribute) and dotted(receiver) == f"self.{receiver.attr}" and owner is not None:
        values = [value for _, value in values_of_attribute(source, owner, receiver.attr)]
    elif isinstance(receiver, ast.Name):
        values = [value for _, value in function.values_of(receiver.id)]
    names: list[str] = []
    for value in values:
        if isinstance(value, ast.Call):
            callee = source.callee(function, value)
            annotation = callee.node.returns if callee is not None else None
            names += [dotted(node) or "" for node in ast.walk(annotation)] if annotation is not None else []
            names.append(dotted(value.func) or "")
    definitions = {definition for name in names for definition in log_definitions(source, name)}
    return definitions.pop() if len(definitions) == 1 else None


def _log_calls(source: Source) -> list[ast.Call]:
    return [
        call
        for function in source.functions_with(b"log_step")
        for statement in function.mentioning(b"log_step")
        for call in function.calls[statement]
        if is_log_call(call)
    ]
