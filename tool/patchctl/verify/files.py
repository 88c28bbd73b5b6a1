"""The files that the rules look at, each read and parsed once.

Rule `present`: every file that the series touches is there and can be read.
"""

from __future__ import annotations

import os
from collections.abc import Container
from pathlib import Path

from patchctl.verify import compiles
from patchctl.verify.findings import Finding
from patchctl.verify.source import Source

RULE = "present"


class Files:
    """The files of a tree, each read and parsed once.

    Args:
        root: the folder that holds the upstream's package.
        unchanged: the files that are known to compile, which are parsed only when a rule asks for their tree.
    """

    def __init__(self, root: Path, unchanged: Container[str] = ()) -> None:
        self._root = str(root)
        self._unchanged = unchanged
        self._sources: dict[str, Source | None] = {}
        self._problems: dict[str, list[Finding]] = {}

    def exists(self, path: str) -> bool:
        return os.path.exists(f"{self._root}/{path}")  # noqa: PTH110  # asked a hundred times, where Path is slow

    def source(self, path: str) -> Source | None:
        """The file, None where there is none that parses."""
        if path not in self._sources:
            self._sources[path], self._problems[path] = self._read(path)
        return self._sources[path]

    def module(self, module: str) -> Source | None:
        """The file of a module."""
        base = module.replace(".", "/")
        return next((self.source(path) for path in (f"{base}.py", f"{base}/__init__.py") if self.exists(path)), None)

    def check(self, path: str, required: bool) -> list[Finding]:
        """Why a file can't be looked at. One that is not required may be missing."""
        self.source(path)
        return self._problems[path] if required or self.exists(path) else []

    def forget(self) -> None:
        """Lets go of the files, each of which can load the others."""
        self._sources.clear()

    def _read(self, path: str) -> tuple[Source | None, list[Finding]]:
        try:
            data = Path(self._root, path).read_bytes()
        except FileNotFoundError:
            return None, [Finding(RULE, path, None, "the file is missing", "apply the series, or restore the file")]
        except OSError as error:
            return None, [Finding(RULE, path, None, f"can't be read: {error.strerror}", "make it readable")]
        if not path.endswith(".py"):
            return None, []
        if path in self._unchanged:
            return Source(path, data, None, self.module), []
        tree, problems = compiles.parse(path, data)
        return (None if tree is None else Source(path, data, tree, self.module)), problems
