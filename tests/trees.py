"""Upstream trees for the tests: pristine ones, and ones that have the series applied.

They are made under build/ once, from PyPI's wheels or, for pins that have none, from git where PATCHCTL_VERL_URL or
PATCHCTL_VLLM_ASCEND_URL names a source. `python tests/trees.py` makes all of them; with pins
(`verl/v0.8.0`) it makes those and prints only where they are.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from patchctl import engine, sources
from patchctl.errors import PatchctlError
from patchctl.pins import Pin
from patchctl.project import Project
from patchctl.series import sha256
from patchctl.tree import open_tree

ROOT = Path(__file__).resolve().parents[1]
PROJECT = Project(ROOT)


class Unavailable(Exception):
    """The pin's tree can't be had here; says why."""


def available(pin: Pin) -> str | None:
    """Why the pin can't be tested here; None where it can."""
    if pin.wheel is not None or os.environ.get(pin.upstream.url_variable):
        return None
    return f"{pin} comes from git only: set {pin.upstream.url_variable} to a mirror or a local clone to test it"


def pristine(pin: Pin) -> Path:
    """The pin's tree as upstream has it. Not to be written to.

    Raises:
        Unavailable: there is no source for it here.
    """
    if reason := available(pin):
        raise Unavailable(reason)
    folder = ROOT / "build" / "pristine" / f"{pin.upstream.name}-{pin.commit[:12]}"
    if not folder.exists():
        try:
            sources.obtain(pin, folder, "pypi" if pin.wheel else "git", lambda message: print(message, file=sys.stderr))
        except PatchctlError:
            if not folder.exists():  # else another process was faster
                raise
    return folder


def copy(source: Path, target: Path) -> Path:
    """A copy that shares its files with `source` by hard links; patchctl replaces files and never writes into them."""
    return Path(shutil.copytree(source, target, copy_function=os.link, symlinks=True))


def applied(pin: Pin) -> Path:
    """The pin's tree with the series of this checkout applied. Not to be written to.

    Raises:
        Unavailable: there is no source for it here.
    """
    series = sha256((ROOT / "series.lock").read_bytes())[:12]
    folder = ROOT / "build" / "trees" / f"{pin.upstream.name}-{pin.name}-{series}"
    if folder.exists():
        return folder
    fresh = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.parent.mkdir(parents=True, exist_ok=True)
    copy(pristine(pin), fresh)
    engine.apply(PROJECT, [engine.Target(open_tree(fresh, pin.upstream), pin)])
    try:
        fresh.rename(folder)
    except OSError:  # another process was faster, with the same result
        shutil.rmtree(fresh)
    for old in folder.parent.glob(f"{pin.upstream.name}-{pin.name}-*"):
        if old != folder:
            shutil.rmtree(old, ignore_errors=True)
    return folder


if __name__ == "__main__":
    wanted = sys.argv[1:]
    for each in PROJECT.pins.pins:
        if wanted and each.key not in wanted:
            continue
        try:
            print(applied(each) if wanted else f"{each}: {applied(each)}")
        except Unavailable as reason:
            print(f"{each}: skipped: {reason}", file=sys.stderr)
