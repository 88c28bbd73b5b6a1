"""`series`, the order of the patches with their guards, and `series.lock`, what each of them does to which file.

`series` is quilt's file with Mercurial's guards: a line is a patch below `patches/`, then `#+PIN` (only for that pin)
or `#-PIN` (not for that pin), any number of them. A patch without guards serves every pin of its upstream.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

from patchctl.errors import PatchctlError
from patchctl.pins import Pin, Pins

_PATCH_NAME = re.compile(r"(?P<upstream>[^/]+)/(?P<number>\d{4})-[A-Za-z0-9._-]+\.patch")


class Entry(NamedTuple):
    """One line of the series."""

    patch: str
    line: int
    only: frozenset[str]
    without: frozenset[str]

    @property
    def upstream(self) -> str:
        return self.patch.partition("/")[0]

    @property
    def number(self) -> int:
        """The patch's number; 0 where its name has none."""
        match = _PATCH_NAME.fullmatch(self.patch)
        return int(match["number"]) if match else 0

    def serves(self, pin: Pin) -> bool:
        if self.upstream != pin.upstream.name or pin.name in self.without:
            return False
        return not self.only or pin.name in self.only


class Problem(NamedTuple):
    """A fault in the series, with the place where it stands."""

    path: str
    line: int | None
    message: str


class Series(NamedTuple):
    entries: tuple[Entry, ...]

    def for_pin(self, pin: Pin) -> tuple[str, ...]:
        """The names of the patches that serve `pin`, in the order they apply."""
        return tuple(entry.patch for entry in self.entries if entry.serves(pin))


def parse(text: str, pins: Pins) -> tuple[Series, list[Problem]]:
    """The series and everything that is wrong with it: names, guards, order, double use."""
    entries: list[Entry] = []
    problems: list[Problem] = []

    def problem(line: int | None, message: str) -> None:
        problems.append(Problem("series", line, message))

    for number, line in enumerate(text.split("\n"), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        patch, guards = words[0], words[1:]
        only: set[str] = set()
        without: set[str] = set()
        match = _PATCH_NAME.fullmatch(patch)
        if not match or match["upstream"] not in pins.upstreams:
            problem(number, f"{patch!r} is not named UPSTREAM/NNNN-words.patch with a known upstream")
            continue
        known = {pin.name for pin in pins.of(match["upstream"])}
        for guard in guards:
            sign, name = guard[:2], guard[2:]
            if sign not in ("#+", "#-"):
                problem(number, f"{guard!r} is not a guard; write #+PIN or #-PIN")
            elif name not in known:
                problem(
                    number, f"guard {guard!r} names no pin of {match['upstream']}; pins: {', '.join(sorted(known))}"
                )
            else:
                (only if sign == "#+" else without).add(name)
        if known and not (only or known) - without:
            problem(number, f"{patch} serves no pin; remove it, or correct its guards")
        entries.append(Entry(patch, number, frozenset(only), frozenset(without)))
    problems += _order_problems(entries, pins)
    return Series(tuple(entries)), problems


def _order_problems(entries: list[Entry], pins: Pins) -> Iterable[Problem]:
    seen: dict[str, int] = {}
    for entry in entries:
        if entry.patch in seen:
            yield Problem("series", entry.line, f"{entry.patch} is listed twice (first in line {seen[entry.patch]})")
        seen.setdefault(entry.patch, entry.line)
    for pin in pins.pins:
        last: Entry | None = None
        for entry in entries:
            if not entry.serves(pin):
                continue
            if last is not None and entry.patch != last.patch and entry.number <= last.number:
                yield Problem(
                    "series",
                    entry.line,
                    f"for {pin}, {entry.patch} comes after {last.patch}: number and order disagree",
                )
            last = entry


class Step(NamedTuple):
    """What one patch does to one file: its blob id before and after; None where the file does not exist."""

    patch: str
    pre: str | None
    post: str | None
    executable: bool | None = None
    """The executable bit that the patch sets; None where it sets none."""


Chain = tuple[Step, ...]


class Lock(NamedTuple):
    """series.lock: the sha256 of every patch, and for every pin the chain of blob ids of every file it touches."""

    sha256: Mapping[str, str]
    chains: Mapping[str, Mapping[str, Chain]]

    def for_pin(self, pin: Pin) -> Mapping[str, Chain]:
        try:
            return self.chains[pin.key]
        except KeyError:
            raise PatchctlError(f"series.lock has no pin {pin.key}; run `patchctl refresh`") from None

    def dump(self) -> str:
        """The text of series.lock; the same lock gives the same bytes."""
        pins: dict[str, dict[str, list[dict[str, object]]]] = {}
        for pin, files in self.chains.items():
            pins[pin] = {}
            for path, chain in files.items():
                steps: list[dict[str, object]] = []
                for step in chain:
                    fields: dict[str, object] = {"patch": step.patch, "pre": step.pre, "post": step.post}
                    if step.executable is not None:
                        fields["executable"] = step.executable
                    steps.append(fields)
                pins[pin][path] = steps
        document = {"version": 1, "patches": dict(self.sha256), "pins": pins}
        return json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def parse_lock(text: str) -> Lock:
    """Read series.lock.

    Raises:
        PatchctlError: the text is not a lock of this version.
    """
    try:
        document = json.loads(text)
        if document["version"] != 1:
            raise PatchctlError(f"series.lock: version {document['version']} is not known; update patchctl")
        chains = {
            pin: {_safe(path): _chain(path, steps) for path, steps in files.items()}
            for pin, files in document["pins"].items()
        }
        return Lock(dict(document["patches"]), chains)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise PatchctlError(f"series.lock: damaged ({error}); restore it or run `patchctl refresh`") from None


def _safe(path: str) -> str:
    if any(part in ("", ".", "..") for part in path.split("/")) or "\0" in path:
        raise ValueError(f"{path!r} is not a safe path")
    return path


def _chain(path: str, steps: list[dict[str, Any]]) -> Chain:
    chain = tuple(Step(**step) for step in steps)
    for step in chain:
        if not isinstance(step.patch, str) or not all(
            isinstance(blob, (str, NoneType)) for blob in (step.pre, step.post)
        ):
            raise TypeError(f"a step of {path} has a field of the wrong kind")
        if step.executable not in (True, False, None):
            raise TypeError(f"a step of {path} has a field of the wrong kind")
    if not chain:
        raise ValueError(f"{path} has no step")
    return chain


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def unlisted(series: Series, patches: Path) -> list[str]:
    """Files below `patches` that no line of the series names, and names that have no file, each with the cause."""
    listed = {entry.patch for entry in series.entries}
    found = {path.relative_to(patches).as_posix() for path in patches.rglob("*") if path.is_file()}
    return [f"{name}: not listed in series" for name in sorted(found - listed)] + [
        f"{name}: listed in series, but there is no such file" for name in sorted(listed - found)
    ]
