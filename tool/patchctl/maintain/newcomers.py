"""Upstream's new files that define what the series hooks elsewhere: nothing conflicts there, and nothing is patched."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence

from patchctl import patchfile
from patchctl.git import Git, GitError
from patchctl.maintain.commits import ABSENT, Change, States
from patchctl.patchfile import Hunk, Patch

_FUNCTION = re.compile(rb"\s*(?:async )?def ([A-Za-z_][A-Za-z0-9_]*)\(")
_COMMON = 8
"""A name that so many files define already says nothing."""


def newcomers(
    git: Git, old: str, new: str, package: str, hooked: Mapping[str, str], patched: Container[str] = ()
) -> list[str]:
    """A line for each new file of the package that defines a hooked function.

    Args:
        old, new: upstream's commits that the series is from and goes to; without the old one nothing can be told.
        hooked: the functions, each with the patch that changes one of that name.
        patched: files that have been seen to.
    """
    if not hooked or not git.succeeds("rev-parse", "--quiet", "--verify", f"{old}^{{commit}}"):
        return []
    known = set(git.run("ls-tree", "-r", "-z", "--name-only", old, "--", package).decode().split("\0"))
    before, after = (_definitions(git, commit, package, hooked) for commit in (old, new))
    found: dict[str, list[str]] = {}
    for name, paths in after.items():
        if len(before.get(name, ())) < _COMMON:
            for path in paths - known:
                found.setdefault(path, []).append(name)
    return [
        f"upstream's new {path} defines {', '.join(sorted(names))}, as what patches/{hooked[min(names)]} changes does: "
        "look whether it needs the same"
        for path, names in sorted(found.items())
        if path not in patched
    ]


def hooked(patches: Sequence[Patch], changes: Sequence[Change], base: States) -> dict[str, str]:
    """The functions of upstream's own files that the patches change, each with the last patch that does."""
    states = dict(base)
    found: dict[str, str] = {}
    for patch, change in zip(patches, changes, strict=True):
        for file in patch.files:
            if base.get(file.path, ABSENT).content is not None:
                lines = patchfile.split_lines(states[file.path].content or b"")
                for hunk in file.hunks:
                    if (name := _function(lines, hunk)) is not None:
                        found[name] = patch.name
        states.update(change.files)
    return found


def _function(lines: Sequence[bytes], hunk: Hunk) -> str | None:
    """The function that a hunk changes; None where it changes none, or a special one."""
    for line in reversed(lines[: max(hunk.old_start - 1, 0) + hunk.leading]):
        if match := _FUNCTION.match(line):
            name = match[1].decode()
            return None if name.startswith("__") else name
        if line[:1].strip() and not line.startswith((b"@", b"#", b")")):
            return None
    return None


def _definitions(git: Git, commit: str, package: str, names: Mapping[str, str]) -> dict[str, set[str]]:
    """The files that define a function of these names."""
    try:
        pattern = rf"^\s*(async )?def ({'|'.join(sorted(names))})\("
        out = git.run("grep", "-E", "-I", "--full-name", "-z", pattern, commit, "--", f"{package}/*.py")
    except GitError:  # none
        return {}
    found: dict[str, set[str]] = {}
    for row in out.split(b"\n"):
        place, _, line = row.partition(b"\0")
        if match := _FUNCTION.match(line):
            path = place.partition(b":")[2].decode("utf-8", "surrogateescape")
            found.setdefault(match[1].decode(), set()).add(path)
    return found
