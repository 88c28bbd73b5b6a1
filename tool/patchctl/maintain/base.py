"""A pin's own files, as far as maintainers' commands ask for them."""

from __future__ import annotations

import io
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path

from patchctl import sources
from patchctl.errors import PatchctlError
from patchctl.git import Git
from patchctl.maintain.commits import ABSENT, FileState, States
from patchctl.pins import Pin
from patchctl.sources import Say
from patchctl.verify.dump_calls import stops
from patchctl.verify.rules import check_tree
from patchctl.verify.source import Source


class Base:
    """The files of a pin without the series, obtained when the first of them is asked for.

    Attributes:
        clone: a repository that has the pin's commit; the files come from there instead of the pin's source.
    """

    def __init__(self, pin: Pin, say: Say, clone: Git | None = None) -> None:
        self.pin = pin
        self._say = say
        self._clone = clone

    @cached_property
    def _archive(self) -> zipfile.ZipFile:
        if self._clone is None:
            return sources.pristine(self.pin, self._say)
        with tempfile.TemporaryDirectory() as scratch:
            git = sources.borrow(self._clone, Path(scratch))
            return zipfile.ZipFile(io.BytesIO(sources.archive(git, self.pin.commit, self.pin.upstream)))

    @cached_property
    def _names(self) -> Mapping[str, zipfile.ZipInfo]:
        return {entry.filename: entry for entry in self._archive.infolist() if not entry.is_dir()}

    def state(self, path: str) -> FileState:
        entry = self._names.get(path)
        if entry is None:
            return ABSENT
        return FileState(self._archive.read(entry), executable=bool(entry.external_attr >> 16 & 0o100))

    def states(self, paths: Iterable[str]) -> dict[str, FileState]:
        return {path: self.state(path) for path in paths}

    def all_states(self) -> dict[str, FileState]:
        """Every file of the package."""
        package = f"{self.pin.upstream.package}/"
        return self.states(path for path in self._names if path.startswith(package))

    def prove(self, after: States) -> None:
        """Hold the tree with these files in it to every rule; `verify` asks fewer of a tree that has the lock's hashes.

        Raises:
            PatchctlError: a rule is broken; names the first place, and how many there are.
        """
        with tempfile.TemporaryDirectory() as scratch:
            root = Path(scratch)
            self._extract(root, after)
            findings = check_tree(root, self.pin.upstream.name, self.pin.debugger_stops, list(after))
        if findings:
            more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
            raise PatchctlError(f"{self.pin}: the patched tree breaks a rule: {findings[0]}{more}")

    def _extract(self, root: Path, after: States) -> None:
        self._archive.extractall(root, [name for name in self._names if name.endswith(".py")])
        for path, state in after.items():
            place = root / path
            place.unlink(missing_ok=True)
            if state.content is not None:
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(state.content)

    def differing(self, other: Mapping[str, bytes]) -> str | None:
        """The first Python file of the package that `other`, a release's files by path, has not to the byte."""
        for path in self._names:
            if path.endswith(".py") and self._archive.read(path) != other.get(path):
                return path
        return None


def count_stops(after: States) -> int:
    """How many `debugger.stop()` the files have together.

    Raises:
        SyntaxError: a file can't be parsed.
    """
    count = 0
    for path, state in after.items():
        if state.content is not None and path.endswith(".py") and b"stop" in state.content:
            count += len(stops(Source(path, state.content)))
    return count
