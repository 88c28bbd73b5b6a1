"""Import chosen modules of vLLM and vllm-ascend as they are, on a machine where neither can be installed.

Both packages need an accelerator's libraries, hundreds of modules and packages that exclude each other. The tests need
a dozen modules of them: what decides a schedule, what keeps the state of requests, and the runner that is patched.
`install` makes those importable from source and everything else in both packages, and `torch_npu`, a stand-in.

A stand-in answers any attribute: a capitalised name is a class that can be subclassed, called and used in annotations,
any other name is a `MagicMock`.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

STAND_IN_PACKAGES = ("vllm", "vllm_ascend", "torch_npu", "torchair", "zmq", "cbor2")


class _AnyAttribute(type):
    """Metaclass of stand-in classes: any class attribute exists, members of an enum included."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = MagicMock(name=f"{cls.__name__}.{name}")
        setattr(cls, name, value)
        return value

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__

    def __getitem__(cls, item: Any) -> Any:
        return cls


def stand_in_class(name: str) -> type:
    """A class named `name` that takes any arguments."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self: Any, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        value = MagicMock(name=f"{name}().{attribute}")
        self.__dict__[attribute] = value
        return value

    return _AnyAttribute(name, (), {"__init__": __init__, "__getattr__": __getattr__, "__module__": __name__})


class StandInModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = stand_in_class(name) if name[0].isupper() and not name.isupper() else MagicMock(name=name)
        setattr(self, name, value)
        return value


class _StandInLoader(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = StandInModule(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: the module makes its attributes as they are asked for."""


class SourceFinder(importlib.abc.MetaPathFinder):
    """Finds the modules named in `real` under `roots`, and stands in for the rest of `STAND_IN_PACKAGES`."""

    def __init__(self, roots: dict[str, Path], real: Sequence[str]) -> None:
        self._roots = roots
        self._real = real

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package, *rest = fullname.split(".")
        if package not in STAND_IN_PACKAGES:
            return None
        if package in self._roots and any(fullname == name or fullname.startswith(name + ".") for name in self._real):
            base = self._roots[package].joinpath(package, *rest)
            if base.with_suffix(".py").is_file():
                return importlib.util.spec_from_file_location(fullname, base.with_suffix(".py"))
            if (base / "__init__.py").is_file():
                return importlib.util.spec_from_file_location(
                    fullname, base / "__init__.py", submodule_search_locations=[str(base)]
                )
            raise ModuleNotFoundError(f"no source of {fullname} in {self._roots[package]}", name=fullname)
        return importlib.machinery.ModuleSpec(fullname, _StandInLoader(), is_package=True)


def install(vllm: Path, vllm_ascend: Path, real: Sequence[str]) -> None:
    """Make `real` (modules, or packages with all they hold) importable from the two folders."""
    sys.meta_path.insert(0, SourceFinder({"vllm": vllm, "vllm_ascend": vllm_ascend}, real))
