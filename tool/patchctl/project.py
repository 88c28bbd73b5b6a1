"""The project that holds a series: its top folder, and the pins, series, lock and patches read from there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from patchctl import series
from patchctl.errors import PatchctlError
from patchctl.pins import Pin, Pins, load
from patchctl.series import Chain, Lock, Series
from patchctl.tree import Tree, TreeState, closest, read_state

if TYPE_CHECKING:
    from patchctl.patchfile import Patch

_REFRESH = "restore it (git checkout), or run `patchctl refresh` if the change is meant"
_PACKAGE = Path(__file__).resolve().parent
PACKAGED = _PACKAGE / "data"
"""The copy of the series that an installed package carries."""


def default_root() -> Path:
    """The checkout that this code runs from, or the copy of the series that the installed package carries.

    `PATCHCTL_ROOT` names another project.
    """
    if named := os.environ.get("PATCHCTL_ROOT"):
        return Path(named)
    checkout = _PACKAGE.parents[1]
    return checkout if (checkout / "series").is_file() else PACKAGED


class Project:
    """Attributes:
    root: the folder that has `series`, `series.lock`, `patches/` and `configs/pins.toml`.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    @cached_property
    def pins(self) -> Pins:
        return load(self.root / "configs" / "pins.toml")

    def read_series(self) -> tuple[Series, list[series.Problem]]:
        """The series with its problems, for those who report them all."""
        return series.parse(self._text("series"), self.pins)

    @cached_property
    def series(self) -> Series:
        found, problems = self.read_series()
        if problems:
            first = problems[0]
            raise PatchctlError(f"{first.path}:{first.line}: {first.message}")
        return found

    @cached_property
    def lock(self) -> Lock:
        return series.parse_lock(self._text("series.lock"))

    @property
    def lock_id(self) -> str:
        """The sha256 of series.lock, which names every byte of the series."""
        return series.sha256(self._text("series.lock").encode())

    def _text(self, name: str) -> str:
        path = self.root / name
        try:
            return path.read_bytes().decode("utf-8")
        except FileNotFoundError:
            raise PatchctlError(f"{path}: no such file; is {self.root} a patchctl project?") from None
        except OSError as error:
            raise PatchctlError(f"{path}: can't be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise PatchctlError(f"{path}: not UTF-8 at byte {error.start}") from None

    def patch_bytes(self, name: str) -> bytes:
        path = self.root / "patches" / name
        try:
            return path.read_bytes()
        except OSError as error:
            raise PatchctlError(f"{path}: can't be read: {error.strerror}; restore it") from None

    def patches(self, pin: Pin) -> tuple[Patch, ...]:
        """The pin's patches, proved to be the ones that series.lock was made from.

        Raises:
            PatchctlError: a patch is missing, differs from the lock, or has a problem in its text.
        """
        from patchctl import patchfile

        loaded = []
        for name in self.series.for_pin(pin):
            data = self.patch_bytes(name)
            if self.lock.sha256.get(name) != series.sha256(data):
                raise PatchctlError(f"patches/{name}: not the file that series.lock was made from; {_REFRESH}")
            loaded.append(patchfile.load(data, name))
        touched: dict[str, list[str]] = {}
        for patch in loaded:
            for file in patch.files:
                touched.setdefault(file.path, []).append(patch.name)
        if touched != {path: [step.patch for step in chain] for path, chain in self.chains(pin).items()}:
            raise PatchctlError(f"series.lock: its files for {pin} are not those of the patches; {_REFRESH}")
        return tuple(loaded)

    def chains(self, pin: Pin) -> Mapping[str, Chain]:
        """What the pin's patches make of each file.

        Raises:
            PatchctlError: the lock was made from other patches than the series lists for the pin.
        """
        chains = self.lock.for_pin(pin)
        locked = {step.patch for chain in chains.values() for step in chain}
        listed = set(self.series.for_pin(pin))
        if locked != listed:
            name = min(locked ^ listed)
            where = "lists it, series.lock does not" if name in listed else "does not list it, series.lock does"
            raise PatchctlError(f"{name}: for {pin}, the series {where}; {_REFRESH}")
        return chains

    def detect(self, tree: Tree, revision: str | None = None) -> TreeState:
        """The tree's state under the pin that `revision` names, or else under the pin whose files it has."""
        name = tree.upstream.name
        pins = (self.pins.resolve(name, revision),) if revision else self.pins.of(name)
        return closest(read_state(tree, pin, self.chains(pin)) for pin in pins)
