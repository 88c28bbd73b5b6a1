"""The series itself, without any tree: its order, every patch's text and message, the lock.

The parser in `patchctl.patchfile` accounts for every line. Here its reading of each patch is compared with unidiff's
and git's: three readers that agree on files and line counts leave no room for a line that one of them drops.
"""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from unidiff.errors import UnidiffParseError
from unidiff.patch import PatchSet

from patchctl import patchfile, series
from patchctl.errors import PatchctlError
from patchctl.git import GitError, start_numstat
from patchctl.patchfile import Patch
from patchctl.pins import Pin
from patchctl.project import Project
from patchctl.series import Chain, Entry, Series
from patchctl.tree import blob_id
from patchctl.verify.findings import Finding

_STATUS = re.compile(r"(Not submitted|Never) \(.+\)|Submitted \S+|Merged in \S+")
_TRAILER = re.compile(r"^[A-Z][A-Za-z-]+: .*(\n[ \t]+.*)*", re.MULTILINE)
_REFRESH = "run `patchctl refresh`"
_RESTORE = "restore the file (git checkout), or export it from its commit again"


class SeriesReport(NamedTuple):
    """Attributes:
    patches: how many patches were read.
    skipped: checks that could not be made on this machine, each with the reason.
    """

    findings: tuple[Finding, ...]
    patches: int
    skipped: tuple[str, ...]


def check_series(project: Project) -> SeriesReport:
    """Every fault of the series, its patches and its lock."""
    skipped = []
    read_by_git = None
    try:
        read_by_git = start_numstat(project.root)
    except GitError as error:
        skipped.append(f"comparison with git's reading: {error}")
    parsed, problems = project.read_series()
    findings = [Finding("series-order", p.path, p.line, p.message, "correct the line") for p in problems]
    for cause in series.unlisted(parsed, project.root / "patches"):
        name, _, message = cause.partition(": ")
        findings.append(Finding("series-files", f"patches/{name}", None, message, "list it, or remove it"))
    patches: dict[str, Patch] = {}
    texts: dict[str, bytes] = {}
    for entry in dict.fromkeys(parsed.entries):
        place = project.root / "patches" / entry.patch
        if entry.patch in texts or not place.is_file():
            continue
        try:
            data = texts[entry.patch] = place.read_bytes()
        except OSError as error:
            message = f"can't be read: {error.strerror}"
            findings.append(Finding("series-files", f"patches/{entry.patch}", None, message, _RESTORE))
            continue
        patch, faults = patchfile.parse(data, f"patches/{entry.patch}")
        findings += [Finding("patch-text", p.path, p.line, p.message, _RESTORE) for p in faults]
        if not faults:
            patches[entry.patch] = patch
        findings += _message_findings(entry, patch)
    findings += _unidiff_findings(patches, texts)
    if read_by_git and patches:
        try:
            findings += _git_findings(read_by_git([texts[name] for name in patches]), patches)
        except GitError as error:
            findings.append(Finding("git-reading", "patches", None, f"git can't read the series: {error}", _RESTORE))
    findings += _lock_findings(project, parsed, patches, texts)
    return SeriesReport(tuple(findings), len(texts), tuple(skipped))


def _message_findings(entry: Entry, patch: Patch) -> Iterator[Finding]:
    path = patch.name

    def finding(message: str, fix: str) -> Finding:
        return Finding("patch-message", path, 1, message, fix)

    if not re.fullmatch(r"[^<>]+ <[^<>\s]+@[^<>\s]+>", patch.author):
        yield finding("no author (`From: Name <address>`)", "write the From field")
    prefix = f"[{entry.upstream}] "
    area, _, what = patch.subject.removeprefix(prefix).partition(": ")
    if not (patch.subject.startswith(prefix) and area and what):
        yield finding(f"subject {patch.subject!r} is not `[{entry.upstream}] area: what it does`", "write it so")
    if len(_TRAILER.sub("", patch.body).strip()) < 20:
        yield finding("the message does not say why the patch is there", "write why, above the trailers")
    status = patch.trailer("Upstream-Status")
    if status is None or not _STATUS.match(status):
        yield finding(
            "no `Upstream-Status:` (`Not submitted (why)`, `Submitted URL`, `Merged in VERSION`, `Never (why)`)",
            "write it as a trailer",
        )
    if not patch.trailer("Drop-when"):
        yield finding("no `Drop-when:` that says what makes the patch needless", "write it as a trailer")


def _unidiff_findings(patches: Mapping[str, Patch], texts: Mapping[str, bytes]) -> Iterator[Finding]:
    for name, patch in patches.items():
        if any(" b/" in file.path for file in patch.files):
            continue  # unidiff splits the header of such a name in the wrong place
        ours = sorted(
            (file.path, *counts[:2]) for file, counts in zip(patch.files, patchfile.numstat(patch.files), strict=True)
        )
        text = texts[name].decode("utf-8", "surrogateescape").split("\n---\n", 1)[-1]
        try:
            if _read_by_unidiff(text, counting=True) == ours:
                continue
        except UnidiffParseError:
            pass  # its whole reading says better what is wrong, and takes what an old one counts wrong
        try:
            theirs = _read_by_unidiff(text, counting=False)
        except UnidiffParseError as error:
            yield Finding("unidiff-reading", patch.name, None, f"unidiff can't read it: {error}", _RESTORE)
            continue
        if ours != theirs:
            yield _disagreement("unidiff-reading", patch.name, "unidiff", ours, theirs)


def _read_by_unidiff(text: str, *, counting: bool) -> list[tuple[str, int, int]]:
    """(path, added, removed) of every file, sorted by path; `counting` keeps no line, which takes a fifth of the time.

    Raises:
        UnidiffParseError: unidiff can't read it.
    """
    # With universal newlines a lone carriage return would break the parse, and CRLF would pass unseen.
    read = PatchSet(io.StringIO(text, newline="\n"), metadata_only=counting)
    return sorted((_unquoted(file.path), file.added, file.removed) for file in read)


def _unquoted(path: str) -> str:
    if not path.startswith('"'):
        return path
    plain = patchfile.unquote(path.encode("utf-8", "surrogateescape")).decode("utf-8", "surrogateescape")
    return plain.removeprefix("b/").removeprefix("a/")


def _git_findings(read: Sequence[tuple[int, int, str]], patches: Mapping[str, Patch]) -> Iterator[Finding]:
    rows = iter(read)
    for patch in patches.values():
        ours = [(path, added, removed) for added, removed, path in patchfile.numstat(patch.files)]
        theirs = [(path, added, removed) for added, removed, path in itertools.islice(rows, len(ours))]
        if ours != theirs:
            yield _disagreement("git-reading", patch.name, "git", ours, theirs)
            return  # the rows behind it can't be told apart any more
    if more := list(rows):
        message = f"git reads {len(more)} more file sections behind the last patch's own, the first of {more[0][2]}"
        yield Finding("git-reading", list(patches.values())[-1].name, None, message, _RESTORE)


def _disagreement(rule: str, name: str, reader: str, ours: Sequence[object], theirs: Sequence[object]) -> Finding:
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=False) if a != b]
    detail = f"{pairs[0][1]} instead of {pairs[0][0]}" if pairs else f"{len(theirs)} files instead of {len(ours)}"
    return Finding(rule, name, None, f"{reader} reads (path, added, removed) {detail}", _RESTORE)


def _lock_findings(
    project: Project, parsed: Series, patches: Mapping[str, Patch], texts: Mapping[str, bytes]
) -> Iterator[Finding]:
    def finding(message: str) -> Finding:
        return Finding("lock", "series.lock", None, message, f"{_REFRESH}, or restore what was changed by hand")

    try:
        lock = project.lock
    except PatchctlError as error:
        yield finding(str(error).removeprefix("series.lock: "))
        return

    for name, data in texts.items():
        if name not in lock.sha256:
            yield finding(f"does not know patches/{name}")
        elif lock.sha256[name] != series.sha256(data):
            yield Finding("lock", f"patches/{name}", None, "is not the file that series.lock was made from", _RESTORE)
    for name in sorted(set(lock.sha256) - set(texts)):
        yield finding(f"names {name}, which the series does not list")
    known = {pin.key for pin in project.pins.pins}
    for key in sorted(known ^ set(lock.chains)):
        yield finding(f"{'lacks' if key in known else 'has an unknown'} pin {key}")
    for pin in project.pins.pins:
        if pin.key in lock.chains:
            yield from map(finding, _chain_faults(pin, parsed.for_pin(pin), lock.chains[pin.key], patches))
    for name, patch in patches.items():
        pins = [pin for pin in project.pins.pins if name in parsed.for_pin(pin) and pin.key in lock.chains]
        if pins and not any(_index_fits(patch, name, lock.chains[pin.key]) for pin in pins):
            message = "its `index` lines name other contents than series.lock does for any pin it serves"
            yield Finding("lock", patch.name, None, message, "export it from its commit: `patchctl refresh --from`")


def _index_fits(patch: Patch, name: str, chains: Mapping[str, Chain]) -> bool:
    """Whether the patch was exported from the pin that these chains are of: its blob ids are those of the lock."""
    steps = {path: step for path, chain in chains.items() for step in chain if step.patch == name}
    for file in patch.files:
        step = steps.get(file.path)
        # A patch that sets the mode alone has no `index` line.
        if step is None or (file.hunks and (file.pre, file.post) != (step.pre, step.post)):
            return False
    return True


def _chain_faults(
    pin: Pin, names: Sequence[str], chains: Mapping[str, Chain], patches: Mapping[str, Patch]
) -> Iterator[str]:
    """Where the lock of one pin does not fit the patches: files, order, an unbroken line of blob ids."""
    expected: dict[str, list[str]] = {}
    for name in names:
        if name not in patches:
            return  # said already, and nothing can be compared
        for file in patches[name].files:
            expected.setdefault(file.path, []).append(name)
    locked = {path: [step.patch for step in chain] for path, chain in chains.items()}
    for path in sorted(set(expected) | set(locked)):
        if expected.get(path) != locked.get(path):
            yield f"{pin}: {path} is touched by {expected.get(path)}, the lock says {locked.get(path)}"
            continue
        chain = chains[path]
        for before, after in itertools.pairwise(chain):
            if before.post != after.pre:
                yield f"{pin}: {path}: what {before.patch} leaves is not what {after.patch} starts from"
        for step in chain:
            file = next(file for file in patches[step.patch].files if file.path == path)
            if file.pre is None and blob_id(file.apply(None, step.patch) or b"") != step.post:
                yield f"{pin}: {path}: {step.patch} creates other contents than the lock says"
            if (file.pre is None) != (step.pre is None) or (file.post is None) != (step.post is None):
                yield f"{pin}: {path}: {step.patch} and the lock disagree on whether the file exists"
            if step.executable != (file.executable if file.executable or file.pre is not None else None):
                yield f"{pin}: {path}: {step.patch} and the lock disagree on whether it may be executed"
