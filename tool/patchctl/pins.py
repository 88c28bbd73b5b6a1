"""configs/pins.toml: the upstreams, and the commits of them that the series is proved on."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from patchctl.errors import InTheWayError, PatchctlError, UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_HEX_PREFIX = re.compile(r"[0-9a-f]{7,40}")


class Upstream(NamedTuple):
    """A project the series patches.

    Attributes:
        name: as in `patches/<name>/`.
        package: the Python package at the top of its trees.
        url: where git fetches it from unless the environment variable `url_variable` names another place.
    """

    name: str
    package: str
    url: str
    url_variable: str

    def fetch_url(self) -> str:
        """The mirror or clone that the variable names (`~` is the home folder), else the upstream's own address."""
        url = os.path.expanduser(os.environ.get(self.url_variable) or self.url)  # noqa: PTH111 - a URL is no path
        # A folder is meant from where the user stands, and git runs elsewhere.
        return str(Path(url).absolute()) if Path(url).is_dir() else url


class Wheel(NamedTuple):
    """A release on PyPI that has the pin's package files, byte for byte."""

    requirement: str
    sha256: str
    platform: str | None = None
    python: str | None = None


class Pin(NamedTuple):
    """A commit of an upstream that the series is proved on.

    Attributes:
        pairs_with: for a verl pin, the name of the vllm-ascend pin that goes with it.
        debugger_stops: how many `debugger.stop()` calls the patched tree has; None where the rules about dumps do not
            apply to it.
    """

    upstream: Upstream
    name: str
    commit: str
    debugger_stops: int | None = None
    pairs_with: str | None = None
    wheel: Wheel | None = None

    @property
    def key(self) -> str:
        """The pin's name in series.lock: `verl/b7dabd83`."""
        return f"{self.upstream.name}/{self.name}"

    def __str__(self) -> str:
        return f"{self.upstream.name} {self.name}"


class Pins(NamedTuple):
    upstreams: Mapping[str, Upstream]
    pins: tuple[Pin, ...]

    def of(self, upstream: str) -> tuple[Pin, ...]:
        return tuple(pin for pin in self.pins if pin.upstream.name == upstream)

    def resolve(self, upstream: str, revision: str) -> Pin:
        """The pin that `revision` (a pin's name, its tag, or 7 hex digits or more of its commit) stands for.

        Raises:
            UsageError: `revision` can't name a commit.
            InTheWayError: it names a commit that the series has no pin for, or fits several pins.
        """
        candidates = self.of(upstream)
        for pin in candidates:
            if revision == pin.name:
                return pin
        known = ", ".join(f"{pin.name} ({pin.commit[:12]})" for pin in candidates)
        prefix = revision.lower()
        if not _HEX_PREFIX.fullmatch(prefix):
            if re.fullmatch(r"v?\d+(\.\w+)+", revision):
                raise InTheWayError(f"{upstream} has no pin {revision!r}; the series serves {known}")
            raise UsageError(
                f"{revision!r} names no {upstream} commit: give a pin's name or at least 7 hex digits; "
                f"the series serves {known}"
            )
        fitting = [pin for pin in candidates if pin.commit.startswith(prefix)]
        if len(fitting) == 1:
            return fitting[0]
        if fitting:
            raise InTheWayError(f"{revision!r} fits several {upstream} pins; give more digits: {known}")
        raise InTheWayError(f"{upstream} commit {revision} is not a pin of the series; it serves {known}")

    def paired(self, verl_pin: Pin) -> Pin:
        """The vllm-ascend pin that goes with a verl pin."""
        if verl_pin.pairs_with is None:
            raise PatchctlError(f"pin {verl_pin} names no vllm-ascend pin; give --vllm-ascend-commit")
        return self.resolve("vllm-ascend", verl_pin.pairs_with)


NAME = re.compile(r"(?!.*\.lock$)[A-Za-z0-9][A-Za-z0-9_-]*(?:\.[A-Za-z0-9_-]+)*")
"""A pin's name: it is part of a folder's name, of a git branch's, and of the marks in `series`."""


def load(path: Path) -> Pins:
    """Read pins.toml.

    Raises:
        PatchctlError: the file is missing, not TOML, or lacks a field.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
        upstreams = {name: Upstream(name=name, **fields) for name, fields in document["upstreams"].items()}
        pins = tuple(_pin(entry, upstreams) for entry in document["pins"])
    except FileNotFoundError:
        raise PatchctlError(f"{path}: no such file; is this a patchctl project?") from None
    except OSError as error:
        raise PatchctlError(f"{path}: can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PatchctlError(f"{path}: not readable as TOML: {error}") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise PatchctlError(f"{path}: a field is missing or unknown: {error}") from None
    for pin in pins:
        if not isinstance(pin.name, str) or not NAME.fullmatch(pin.name):
            raise PatchctlError(f"{path}: {pin.name!r} can't be a pin's name: letters, digits, `.`, `_` and `-`")
        if not isinstance(pin.commit, str) or not re.fullmatch(r"[0-9a-f]{40}", pin.commit):
            raise PatchctlError(f"{path}: pin {pin}: its commit is not 40 hex digits")
        if pin.pairs_with is not None and pin.pairs_with not in [p.name for p in pins if p.upstream != pin.upstream]:
            raise PatchctlError(f"{path}: pin {pin} goes with {pin.pairs_with!r}, which is no pin of another upstream")
    keys = [pin.key for pin in pins]
    doubled = sorted({key for key in keys if keys.count(key) > 1})
    if doubled:
        raise PatchctlError(f"{path}: pin {doubled[0]} is defined twice")
    return Pins(upstreams, pins)


def _pin(entry: Mapping[str, Any], upstreams: Mapping[str, Upstream]) -> Pin:
    wheel = entry.get("wheel")
    return Pin(
        upstream=upstreams[entry["upstream"]],
        name=entry["name"],
        commit=entry["commit"],
        debugger_stops=entry.get("debugger_stops"),
        pairs_with=entry.get("vllm-ascend"),
        wheel=Wheel(**wheel) if wheel else None,
    )
