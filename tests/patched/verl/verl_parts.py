"""Parts of a patched verl tree, run with the standard library alone.

`load` executes one class or function of a file as it stands there, with the file's own imports: what the test gives
stands for the modules it names, the standard library is real, and every other import answers with something that does
nothing.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

PACKAGE = "verl.utils.consistency_dump"


class Anything:
    """A name of an import that the code under test does not use in the test."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return Anything()

    def __enter__(self) -> Any:
        return Anything()

    def __exit__(self, *raised: object) -> None:
        return None

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()


class _Given(Anything):
    """A module of the test's; what it has not been given does nothing."""

    def __init__(self, names: Mapping[str, Any]) -> None:
        self.__dict__.update(names)


def load(
    file: Path, name: str, modules: dict[str, dict[str, Any]], known: Mapping[str, Any] = MappingProxyType({})
) -> Any:
    """The class or function `name` of `file`.

    Args:
        modules: dotted name of a module -> the names it has in the test.
        known: other names of the file that have been loaded before.
    """
    tree = ast.parse(file.read_text(encoding="utf-8"), str(file))
    namespace: dict[str, Any] = {
        "__name__": file.stem,
        "__file__": str(file),
        **known,
        "__builtins__": {**vars(builtins), "__import__": _importer(modules)},
    }
    for node in tree.body:
        wanted = isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name
        if isinstance(node, ast.Import | ast.ImportFrom) or wanted or _is_logger(node):
            future = ast.parse("from __future__ import annotations").body
            exec(compile(ast.Module([*future, node], []), str(file), "exec"), namespace)
    return namespace[name]


def _is_logger(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "logger"


def _importer(modules: dict[str, dict[str, Any]]) -> Callable[..., Any]:
    def import_module(name: str, *args: Any) -> Any:
        from_list, level = (args[2], args[3]) if len(args) > 3 else (None, 0)
        bound = name if from_list else name.split(".")[0]  # `import a.b` binds `a`
        if level == 0 and bound in modules:
            return _Given(modules[bound])
        if level == 0 and name.split(".")[0] in sys.stdlib_module_names:
            return builtins.__import__(name, *args)
        return Anything()

    return import_module


@contextmanager
def package(tree: Path) -> Iterator[SimpleNamespace]:
    """The modules `settings` and `preflight` of the tree's package, without the rest of verl."""
    before = dict(sys.modules)
    try:
        for name in ("verl", "verl.utils", PACKAGE):
            module = ModuleType(name)
            module.__path__ = [str(tree / name.replace(".", "/"))]
            sys.modules[name] = module
        yield SimpleNamespace(
            settings=importlib.import_module(f"{PACKAGE}.settings"),
            preflight=importlib.import_module(f"{PACKAGE}.preflight"),
        )
    finally:
        for name in set(sys.modules) - set(before):
            if name.split(".")[0] == "verl":
                del sys.modules[name]
