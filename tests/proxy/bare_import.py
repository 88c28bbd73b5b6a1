"""Imports the proxy's package from a patched tree without the agent loop's own imports (ray, torch)."""

from __future__ import annotations

import sys
import types
from pathlib import Path

PACKAGE = "verl.experimental.agent_loop"


def import_from(tree: Path) -> None:
    """Makes ``verl.experimental.agent_loop`` importable from ``tree`` as bare packages: no ``__init__`` is run."""
    folder = tree
    for name in ("verl", "verl.experimental", PACKAGE):
        folder = folder / name.rpartition(".")[2]
        package = types.ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
