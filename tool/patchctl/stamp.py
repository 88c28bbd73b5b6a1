"""A note that `apply` leaves for people: which series, by which version, when. No command decides anything by it."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import patchctl
from patchctl.pins import Pin
from patchctl.series import Lock, sha256
from patchctl.tree import Tree


def place(tree: Tree) -> Path:
    """Where the note lies: in a checkout's git folder, so that `git status` stays clean; else beside the package."""
    git = tree.root / ".git"
    if git.is_dir():
        return git / "patchctl.json"
    with contextlib.suppress(OSError, ValueError):  # a file that can't be read, or that names no folder
        # In a worktree or a submodule `.git` is a file that names the folder.
        named = git.read_text(encoding="utf-8", errors="surrogateescape").partition("gitdir:")[2].strip()
        folder = (tree.root / named).resolve()
        if named and folder.is_dir():
            return folder / "patchctl.json"
    return tree.root / f".patchctl-{tree.upstream.name}.json"


def write(tree: Tree, pin: Pin, lock: Lock) -> None:
    """Leave the note; that it can't be written spoils nothing."""
    note = {
        "patchctl": patchctl.__version__,
        "pin": pin.key,
        "commit": pin.commit,
        "series": sha256(lock.dump().encode()),
        "applied": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    target = place(tree)
    fresh = _fresh(target)
    with contextlib.suppress(OSError):
        fresh.write_text(json.dumps(note, indent=1) + "\n", encoding="utf-8")
        fresh.replace(target)


def _fresh(target: Path) -> Path:
    return target.with_name(target.name + ".new")


def read(tree: Tree) -> dict[str, Any] | None:
    """The note; None where there is none or it can't be read."""
    try:
        note = json.loads(place(tree).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return note if isinstance(note, dict) else None


def remove(tree: Tree) -> None:
    """Remove the note, and what a run that was killed left of one."""
    with contextlib.suppress(OSError):
        _fresh(place(tree)).unlink(missing_ok=True)
        place(tree).unlink(missing_ok=True)
