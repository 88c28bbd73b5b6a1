"""Write the series: patches from the commits of a worktree, series.lock from patches and pristine upstream files."""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from patchctl import patchfile, series, sources
from patchctl.errors import PatchctlError, UsageError
from patchctl.git import Git, GitError
from patchctl.patchfile import HunkError, Patch
from patchctl.pins import Pin, Pins
from patchctl.project import Project
from patchctl.series import Chain, Lock, Step
from patchctl.sources import Say
from patchctl.tree import blob_id
from patchctl.verify.rules import check_tree

# Each flag keeps out one way in which the same commit could give other bytes.
_EXPORT_FLAGS = (
    "--full-index",  # blob ids whole, however many objects the repository has
    "--zero-commit",  # no commit id, which every rebase changes
    "--no-signature",  # no version of git
    "--no-stat",  # no diffstat, whose width depends on the terminal
    "--keep-subject",  # no [PATCH n/m]
    "--no-numbered",
    "--unified=3",
    "--inter-hunk-context=0",
    "--diff-algorithm=myers",
    "--no-renames",  # a rename as deletion and addition, which every tool applies
    "--no-ext-diff",
    "--no-textconv",
    "--no-color",
    "--no-attach",
    "--no-thread",
    "--no-base",
    "--no-from",
    "--no-to",
    "--no-cc",
    "--no-add-header",
    "--no-notes",
    "--no-signoff",
    "--no-cover-letter",
    "--no-encode-email-headers",
    "--src-prefix=a/",
    "--dst-prefix=b/",
    "-O/dev/null",  # files in the order of their names
)
_EXPORT_SETTINGS = ("diff.indentHeuristic=true", "diff.suppressBlankEmpty=false", "diff.context=3")


@dataclass(frozen=True)
class Worktree:
    """A git worktree whose commits on top of a pin are the series for that pin."""

    folder: Path
    pin: Pin

    def export(self) -> list[Patch]:
        """Its commits as patches, named by their subject only."""
        git = Git(self.folder)
        merges = git.line("rev-list", "--merges", f"{self.pin.commit}..HEAD")
        if merges:
            raise PatchctlError(
                f"{self.folder}: {merges.split()[0][:12]} is a merge; the series is a line of commits: rebase"
            )
        commits = git.line("rev-list", "--reverse", f"{self.pin.commit}..HEAD").split()
        patches = [patchfile.load(_export(git, commit), f"commit {commit[:12]}") for commit in commits]
        subjects = [patch.subject for patch in patches]
        doubled = [subject for subject in subjects if subjects.count(subject) > 1]
        if doubled:
            raise PatchctlError(f"{self.folder}: two commits are called {doubled[0]!r}; a subject names its patch")
        return patches


def _export(git: Git, commit: str) -> bytes:
    settings = [word for setting in _EXPORT_SETTINGS for word in ("-c", setting)]
    data = git.run(*settings, "format-patch", *_EXPORT_FLAGS, "--stdout", "-1", commit)
    return data.rstrip(b"\n") + b"\n"


def open_worktree(folder: Path, pins: Pins) -> Worktree:
    """The worktree, with the pin that its commits stand on: the nearest of those that are ancestors of its HEAD."""
    git = Git(folder.resolve())
    distances: list[tuple[int, Pin]] = []
    for pin in pins.pins:
        with contextlib.suppress(GitError):  # another upstream's commit, or not an ancestor
            git.run("merge-base", "--is-ancestor", pin.commit, "HEAD")
            distances.append((int(git.line("rev-list", "--count", f"{pin.commit}..HEAD")), pin))
    if not distances:
        raise UsageError(f"{folder}: no git worktree on top of a pin; see `patchctl list` for the pins")
    return Worktree(folder.resolve(), min(distances, key=lambda found: found[0])[1])


@dataclass(frozen=True)
class Refreshed:
    """The series as it should be on disk: contents by path below the project's root."""

    files: Mapping[str, bytes]

    def differing(self, root: Path) -> list[str]:
        """The paths whose file is missing, superfluous or other than it should be."""
        there = {path.relative_to(root).as_posix() for path in (root / "patches").rglob("*.patch")}
        changed = [
            name
            for name, data in self.files.items()
            if not (root / name).is_file() or (root / name).read_bytes() != data
        ]
        return sorted({*changed, *(there - set(self.files))})

    def write(self, root: Path) -> None:
        """Put the new files in place and remove the ones that are no longer listed; the lock comes last."""
        differing = self.differing(root)
        superfluous = [name for name in differing if name not in self.files]
        changed = [name for name in self.files if name in differing]
        fresh = root / ".refresh"
        shutil.rmtree(fresh, ignore_errors=True)
        try:
            for name in changed:
                (fresh / name).parent.mkdir(parents=True, exist_ok=True)
                (fresh / name).write_bytes(self.files[name])
            for name in changed:  # patches, series, series.lock: in this order
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (fresh / name).replace(root / name)
            for name in superfluous:
                (root / name).unlink()
        finally:
            shutil.rmtree(fresh, ignore_errors=True)


def refresh(project: Project, folders: Sequence[Path], say: Say) -> Refreshed:
    """The series with the commits of the worktrees taken in, and the lock of all pins proved anew.

    An upstream of which a worktree is given gets its patches from the worktrees alone, so one is needed for every pin
    of it. The others keep their patches.

    Raises:
        PatchctlError: a patch does not apply to a pin it serves, or the worktrees disagree.
    """
    worktrees = [open_worktree(folder, project.pins) for folder in folders]
    texts: dict[str, bytes] = {}
    guards: dict[str, list[str]] = {}
    for upstream in project.pins.upstreams:
        own = [worktree for worktree in worktrees if worktree.pin.upstream.name == upstream]
        if own:
            _export_upstream(project, upstream, own, texts, guards, say)
        else:
            for entry in project.series.entries:
                if entry.upstream == upstream:
                    texts[entry.patch] = project.patch_bytes(entry.patch)
                    guards[entry.patch] = [f"#+{name}" for name in sorted(entry.only)]
                    guards[entry.patch] += [f"#-{name}" for name in sorted(entry.without)]
    listing = _series_text(project, guards)
    parsed, problems = series.parse(listing, project.pins)
    if problems:
        raise PatchctlError(f"series: {problems[0].message}")
    patches = {name: patchfile.load(data, name) for name, data in texts.items()}
    chains = {}
    for pin in project.pins.pins:
        with sources.pristine(pin, say) as archive:
            chains[pin.key], post_images = _chains(pin, [patches[name] for name in parsed.for_pin(pin)], archive)
            if pin.debugger_stops is not None:
                _prove(pin, post_images, archive)
    lock = Lock({name: series.sha256(data) for name, data in sorted(texts.items())}, chains)
    files = {f"patches/{name}": data for name, data in texts.items()}
    return Refreshed({**files, "series": listing.encode(), "series.lock": lock.dump().encode()})


def _prove(pin: Pin, post_images: Mapping[str, bytes | None], archive: zipfile.ZipFile) -> None:
    """Hold the patched tree to every rule; `verify` asks fewer of a tree that has the lock's hashes.

    Raises:
        PatchctlError: a rule is broken; names the first place, and how many there are.
    """
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        archive.extractall(root, [name for name in archive.namelist() if name.endswith(".py")])
        for path, content in post_images.items():
            (root / path).unlink(missing_ok=True)
            if content is not None:
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                (root / path).write_bytes(content)
        findings = check_tree(root, pin.upstream.name, pin.debugger_stops, list(post_images))
    if findings:
        more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
        raise PatchctlError(f"{pin}: the patched tree breaks a rule: {findings[0]}{more}")


def _chains(
    pin: Pin, patches: Sequence[Patch], archive: zipfile.ZipFile
) -> tuple[dict[str, Chain], dict[str, bytes | None]]:
    """What the pin's patches make of each file, from the pristine contents; and the contents it ends with."""
    touched = sorted({file.path for patch in patches for file in patch.files})
    contents = sources.contents(archive, touched)
    chains: dict[str, list[Step]] = {path: [] for path in touched}
    for patch in patches:
        for file in patch.files:
            before = contents[file.path]
            try:
                after = file.apply(before, f"patches/{patch.name}")
            except HunkError as error:
                raise PatchctlError(f"{pin}: {error}") from None
            contents[file.path] = after
            chains[file.path].append(
                Step(
                    patch=patch.name,
                    pre=None if before is None else blob_id(before),
                    post=None if after is None else blob_id(after),
                    executable=file.executable if file.executable or file.pre is not None else None,
                )
            )
    return {path: tuple(chain) for path, chain in chains.items()}, contents


def _export_upstream(
    project: Project,
    upstream: str,
    worktrees: Sequence[Worktree],
    texts: dict[str, bytes],
    guards: dict[str, list[str]],
    say: Say,
) -> None:
    pins = project.pins.of(upstream)
    by_pin = {worktree.pin.name: worktree for worktree in worktrees}
    missing = [pin.name for pin in pins if pin.name not in by_pin]
    if missing:
        raise UsageError(f"{upstream}: a worktree is needed for every pin; none is given for {', '.join(missing)}")
    exported = {pin.name: by_pin[pin.name].export() for pin in pins}
    subjects = _merged_order([[patch.subject for patch in exported[pin.name]] for pin in pins])
    names = _names(project, upstream, subjects)
    contents = {}
    for pin in pins:
        with sources.pristine(pin, say) as archive:
            contents[pin.name] = sources.contents(archive, {f.path for p in exported[pin.name] for f in p.files})
    for subject in subjects:
        serving = [pin for pin in pins if any(patch.subject == subject for patch in exported[pin.name])]
        variants: list[tuple[Patch, list[Pin]]] = []
        for pin in serving:
            own = next(patch for patch in exported[pin.name] if patch.subject == subject)
            goal = {file.path: file.apply(contents[pin.name].get(file.path), own.name) for file in own.files}
            for patch, sharing in variants:
                if _makes(patch, contents[pin.name], goal):
                    sharing.append(pin)
                    break
            else:
                variants.append((own, [pin]))
            contents[pin.name].update(goal)
        for number, (patch, sharing) in enumerate(variants):
            name = names[subject] if number == 0 else f"{names[subject][: -len('.patch')]}.{sharing[0].name}.patch"
            texts[name] = _export(Git(by_pin[sharing[0].name].folder), patch.name.removeprefix("commit "))
            guards[name] = [] if len(sharing) == len(pins) else [f"#+{pin.name}" for pin in sharing]


def _makes(patch: Patch, contents: Mapping[str, bytes | None], goal: Mapping[str, bytes | None]) -> bool:
    """Whether a patch made for another pin gives this pin exactly what its own commit gives."""
    if {file.path for file in patch.files} != set(goal):
        return False
    try:
        return all(file.apply(contents.get(file.path), patch.name) == goal[file.path] for file in patch.files)
    except HunkError:
        return False


def _merged_order(orders: Sequence[Sequence[str]]) -> list[str]:
    """One order that holds every list's order; a subject that only some lists have stands behind its predecessor."""
    merged: list[str] = []
    for order in orders:
        at = 0
        for subject in order:
            if subject in merged:
                found = merged.index(subject)
                if found < at - 1:
                    raise PatchctlError(f"{subject!r} stands in another order in another worktree; rebase one of them")
                at = found + 1
            else:
                merged.insert(at, subject)
                at += 1
    return merged


def _names(project: Project, upstream: str, subjects: Sequence[str]) -> dict[str, str]:
    """Each subject's file name: the one it has, or else a new one; numbers follow the order."""
    pins = "|".join(re.escape(pin.name) for pin in project.pins.of(upstream))
    variant = re.compile(rf"\.(?:{pins})\.patch$")
    known: dict[str, str] = {}
    for entry in project.series.entries:
        if entry.upstream == upstream:
            # A patch that is damaged still names its subject, and a refresh is what repairs it.
            subject = patchfile.parse(project.patch_bytes(entry.patch), entry.patch)[0].subject
            known.setdefault(subject, variant.sub(".patch", entry.patch))
    names: dict[str, str] = {}
    last = 0
    for subject in subjects:
        existing = known.get(subject)
        number = int(existing.partition("/")[2][:4]) if existing else 0
        if existing and number > last:
            names[subject], last = existing, number
            continue
        last += 1
        words = re.sub(r"^\[[^]]*\] *", "", subject).lower()
        slug = re.sub(r"[^a-z0-9]+", "-", words).strip("-")[:60].rstrip("-")
        names[subject] = f"{upstream}/{last:04d}-{slug}.patch"
    return names


def _series_text(project: Project, guards: Mapping[str, list[str]]) -> str:
    """The series file: its leading comment as it is, then one line a patch."""
    lines = []
    for line in (project.root / "series").read_text(encoding="utf-8").split("\n"):
        if line and not line.startswith("#"):
            break
        lines.append(line)
    head = "\n".join(lines).rstrip("\n")
    body = []
    for upstream in project.pins.upstreams:
        own = sorted(name for name in guards if name.startswith(f"{upstream}/"))
        width = max((len(name) for name in own), default=0)
        body.append("\n".join(f"{name:<{width}}  {' '.join(guards[name])}".rstrip() for name in own))
    return head + "\n\n" + "\n\n".join(block for block in body if block) + "\n"
