"""A small project for the engine's tests: synthetic upstreams in git, a series over them, pins, and a lock.

The lock is worked out here from the contents that the test gave, not by patchctl: what the engine makes of a tree is
so compared with something it had no hand in.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from patchctl.engine import Target
from patchctl.pins import Pin
from patchctl.project import Project
from patchctl.tree import Tree, open_tree

PACKAGES = {"verl": "verl", "vllm-ascend": "vllm_ascend"}
URL_VARIABLES = {"verl": "PATCHCTL_VERL_URL", "vllm-ascend": "PATCHCTL_VLLM_ASCEND_URL"}
QUIET = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_AUTHOR_NAME": "patchctl maintainers",
    "GIT_AUTHOR_EMAIL": "maintainers@patchctl.invalid",
    "GIT_COMMITTER_NAME": "patchctl maintainers",
    "GIT_COMMITTER_EMAIL": "maintainers@patchctl.invalid",
}


@dataclass(frozen=True)
class Exe:
    """The contents of a file that may be executed."""

    content: bytes


File = bytes | Exe | None
Files = Mapping[str, File]


@dataclass(frozen=True)
class PinSpec:
    """A pin: its files, and what each patch makes of which of them (None deletes)."""

    name: str
    base: Files
    steps: Sequence[Files]
    pairs_with: str | None = None


@dataclass(frozen=True)
class Mini:
    root: Path
    specs: Mapping[str, Sequence[PinSpec]]
    repositories: Mapping[str, Path] = field(default_factory=dict)

    @property
    def project(self) -> Project:
        """Read anew each time, so that a test may change files."""
        return Project(self.root)

    def pin(self, upstream: str = "verl", number: int = 0) -> Pin:
        return self.project.pins.of(upstream)[number]

    def spec(self, pin: Pin) -> PinSpec:
        return next(spec for spec in self.specs[pin.upstream.name] if spec.name == pin.name)

    def pristine(self, folder: Path, pin: Pin) -> Tree:
        """The pin's files at `folder`, without git."""
        write_files(folder, self.spec(pin).base)
        return open_tree(folder, pin.upstream)

    def checkout(self, folder: Path, pin: Pin) -> Tree:
        """A clone at the pin's commit, detached."""
        git(folder.parent, "clone", "--quiet", "--no-checkout", str(self.repositories[pin.upstream.name]), str(folder))
        git(folder, "checkout", "--quiet", "--detach", pin.commit)
        return open_tree(folder, pin.upstream)

    def expected(self, pin: Pin, through: int | None = None) -> dict[str, File]:
        """Every file after the first `through` patches (default: after all)."""
        spec = self.spec(pin)
        files = dict(spec.base)
        for step in spec.steps[:through]:
            files.update(step)
        return {path: file for path, file in files.items() if file is not None}


def git(folder: Path, *arguments: str, stdin: bytes | None = None, env: Mapping[str, str] | None = None) -> bytes:
    """git for a test's own purposes, free of the machine's configuration."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    done = subprocess.run(
        ["git", "-c", "protocol.file.allow=always", *arguments],
        cwd=folder,
        input=stdin,
        capture_output=True,
        env={**kept, **QUIET, **(env or {})},
        check=False,
    )
    assert done.returncode == 0, f"git {arguments}: {done.stderr.decode()}"
    return done.stdout


def content(file: File) -> bytes | None:
    return file.content if isinstance(file, Exe) else file


def blob(data: bytes | None) -> str | None:
    return None if data is None else hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def write_files(folder: Path, files: Files) -> None:
    for path, file in files.items():
        data = content(file)
        if data is None:
            continue
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
        place.chmod(0o755 if isinstance(file, Exe) else 0o644)


def snapshot(folder: Path, *, mtimes: bool = False) -> dict[str, tuple[object, ...]]:
    """Every file and folder below `folder` but git's own: kind, mode, contents and, if asked for, time and inode."""
    found: dict[str, tuple[object, ...]] = {}
    for place in sorted(folder.rglob("*")):
        name = place.relative_to(folder).as_posix()
        if name == ".git" or name.startswith(".git/"):
            continue
        status = place.lstat()
        data: object = None
        if place.is_symlink():
            data = place.readlink()
        elif place.is_file():
            data = place.read_bytes()
        stamp = (status.st_mtime_ns, status.st_ino) if mtimes else ()
        found[name] = (oct(status.st_mode), data, *stamp)
    return found


def tree_files(folder: Path) -> dict[str, File]:
    """The regular files below `folder`, without git's own and without the note that apply leaves beside a package."""
    found: dict[str, File] = {}
    for place in sorted(folder.rglob("*")):
        name = place.relative_to(folder).as_posix()
        if name == ".git" or name.startswith((".git/", ".patchctl-")) or place.is_dir():
            continue
        data = place.read_bytes()
        found[name] = Exe(data) if place.stat().st_mode & 0o100 else data
    return found


def build(root: Path, specs: Mapping[str, Sequence[PinSpec]]) -> Mini:
    """Write the project at `root`, and its upstreams beside it."""
    sections = []
    listing = ["# a series for tests", ""]
    sha256: dict[str, str] = {}
    chains: dict[str, dict[str, list[dict[str, object]]]] = {}
    repositories: dict[str, Path] = {}
    for upstream, pins in specs.items():
        repository = repositories[upstream] = root.parent / f"{root.name}-upstream-{upstream}"
        commits = _import(repository, pins)
        sections.append(_upstream_section(upstream, repository))
        texts: dict[str, bytes] = {}
        guards: dict[str, list[str]] = {}
        for pin in pins:
            exported = _export(repository, pin)
            key = f"{upstream}/{pin.name}"
            chains[key] = {}
            state: dict[str, File] = dict(pin.base)
            for number, (text, step) in enumerate(zip(exported, pin.steps, strict=True), start=1):
                name = f"{upstream}/{number:04d}-step.patch"
                if texts.get(name, text) != text:
                    name = f"{upstream}/{number:04d}-step.{pin.name}.patch"
                texts[name] = text
                guards.setdefault(name, []).append(pin.name)
                for path, file in step.items():
                    chains[key].setdefault(path, []).append(_step(name, state.get(path), file))
                state.update(step)
            sections.append(_pin_section(upstream, pin, commits[pin.name]))
        width = max((len(name) for name in texts), default=0)
        for name in sorted(texts):
            place = root / "patches" / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(texts[name])
            sha256[name] = hashlib.sha256(texts[name]).hexdigest()
            serving = guards[name]
            guard = " ".join(f"#+{pin}" for pin in serving) if len(serving) < len(pins) else ""
            listing.append(f"{name:<{width}}  {guard}".rstrip())
        listing.append("")
    (root / "configs").mkdir(parents=True, exist_ok=True)
    (root / "configs" / "pins.toml").write_text("\n".join(sections), encoding="utf-8")
    (root / "series").write_text("\n".join(listing), encoding="utf-8")
    document = {"version": 1, "patches": sha256, "pins": chains}
    (root / "series.lock").write_text(
        json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    return Mini(root, specs, repositories)


def target(tree: Tree, pin: Pin) -> Target:
    return Target(tree, pin)


def _step(patch: str, before: File, after: File) -> dict[str, object]:
    step: dict[str, object] = {"patch": patch, "pre": blob(content(before)), "post": blob(content(after))}
    if after is not None and (isinstance(before, Exe) if before is not None else False) != isinstance(after, Exe):
        step["executable"] = isinstance(after, Exe)
    return step


def _upstream_section(upstream: str, repository: Path) -> str:
    return "\n".join(
        (
            f"[upstreams.{upstream}]",
            f'package = "{PACKAGES[upstream]}"',
            f"url = {json.dumps(str(repository))}",
            f'url_variable = "{URL_VARIABLES[upstream]}"',
            "",
        )
    )


def _pin_section(upstream: str, pin: PinSpec, commit: str) -> str:
    lines = ["[[pins]]", f'upstream = "{upstream}"', f'name = "{pin.name}"', f'commit = "{commit}"']
    if pin.pairs_with:
        lines.append(f'vllm-ascend = "{pin.pairs_with}"')
    return "\n".join([*lines, ""])


def _import(repository: Path, pins: Sequence[PinSpec]) -> dict[str, str]:
    """The upstream's repository: for each pin a root commit `pin-NAME`, and its series on branch `series-NAME`."""
    repository.mkdir(parents=True)
    git(repository, "init", "--quiet", "--bare", "--initial-branch=main")
    git(repository, "config", "uploadpack.allowAnySHA1InWant", "true")
    stream = bytearray()
    for pin in pins:
        _commit(stream, f"refs/heads/series-{pin.name}", f"base of {pin.name}\n", dict(pin.base))
        stream += f"reset refs/heads/pin-{pin.name}\nfrom refs/heads/series-{pin.name}\n\n".encode()
        for number, step in enumerate(pin.steps, start=1):
            _commit(stream, f"refs/heads/series-{pin.name}", _message(pin, number), step)
    stream += f"reset refs/heads/main\nfrom refs/heads/pin-{pins[0].name}\n\n".encode()
    git(repository, "fast-import", "--quiet", stdin=bytes(stream))
    return {pin.name: git(repository, "rev-parse", f"pin-{pin.name}").decode().strip() for pin in pins}


def _message(pin: PinSpec, number: int) -> str:
    upstream = "vllm-ascend" if any(path.startswith("vllm_ascend/") for path in pin.base) else "verl"
    return (
        f"[{upstream}] area: step {number}\n\n"
        f"This is why the patch is there: the tests want step {number}.\n\n"
        "Upstream-Status: Not submitted (a test)\nDrop-when: the tests end\n"
    )


def _commit(stream: bytearray, branch: str, message: str, files: Files) -> None:
    text = message.encode()
    when = b"patchctl maintainers <maintainers@patchctl.invalid> 1700000000 +0000"
    stream += b"commit %s\nauthor %s\ncommitter %s\ndata %d\n%s\n" % (branch.encode(), when, when, len(text), text)
    for path, file in files.items():
        raw = path.encode("utf-8", "surrogateescape")
        name = b'"' + b"".join(b"\\%03o" % byte for byte in raw) + b'"'
        data = content(file)
        if data is None:
            stream += b"D %s\n" % name
        else:
            stream += b"M %s inline %s\n" % (b"100755" if isinstance(file, Exe) else b"100644", name)
            stream += b"data %d\n%s\n" % (len(data), data)
    stream += b"\n"


def _export(repository: Path, pin: PinSpec) -> list[bytes]:
    if not pin.steps:
        return []
    flags = ["--full-index", "--zero-commit", "--no-signature", "--no-stat", "--keep-subject", "--no-renames"]
    out = git(repository, "format-patch", *flags, "--text", "--stdout", f"pin-{pin.name}..series-{pin.name}")
    marker = b"From 0000000000000000000000000000000000000000 "
    return [(marker + part).rstrip(b"\n") + b"\n" for part in out.split(marker)[1:]]


PY = b"".join(b"line %d\n" % number for number in range(1, 41))
"""A file of 40 distinct lines."""


def edit(data: bytes, at: int, *lines: bytes) -> bytes:
    """`data` with lines put in before its line number `at` (1-based)."""
    rows = data.splitlines(keepends=True)
    return b"".join([*rows[: at - 1], *lines, *rows[at - 1 :]])


def standard() -> dict[str, list[PinSpec]]:
    """Two pins of each upstream; patches that touch one file several times, and make, remove and mark files."""
    base = {
        "verl/__init__.py": b"",
        "verl/a.py": PY,
        "verl/b.py": PY.replace(b"line", b"row"),
        "verl/tool.sh": b"#!/bin/sh\necho hello\n",
        "verl/old.py": b"gone\nsoon\n",
        "verl/untouched.py": b"x = 1\n",
        "README.md": b"verl\n",
    }
    a1, b1 = edit(PY, 5, b"one\n"), edit(base["verl/b.py"], 20, b"two\n")
    steps: list[Files] = [
        {"verl/a.py": a1, "verl/b.py": b1},
        {"verl/new/__init__.py": b"", "verl/new/mod.py": b"def f():\n    return 1\n"},
        {"verl/a.py": edit(a1, 7, b"three\n"), "verl/new/mod.py": b"def f():\n    return 2\n"},
        {"verl/tool.sh": Exe(base["verl/tool.sh"]), "verl/run.sh": Exe(b"#!/bin/sh\n"), "verl/old.py": None},
    ]
    late = {**base, "verl/a.py": edit(PY, 30, b"later\n"), "verl/b.py": edit(base["verl/b.py"], 21, b"near\n")}
    late_a = edit(late["verl/a.py"], 5, b"one\n")
    late_steps: list[Files] = [
        {"verl/a.py": late_a, "verl/b.py": edit(late["verl/b.py"], 20, b"two\n")},
        steps[1],
        {"verl/a.py": edit(late_a, 7, b"three\n"), "verl/new/mod.py": b"def f():\n    return 2\n"},
        steps[3],
    ]
    ascend = {"vllm_ascend/__init__.py": b"", "vllm_ascend/runner.py": PY, "vllm_ascend/envs.py": b"A = 1\n"}
    ascend_steps: list[Files] = [
        {"vllm_ascend/logger.py": b"LOG = 1\n"},
        {"vllm_ascend/runner.py": edit(PY, 12, b"log_step()\n")},
    ]
    old_ascend = {**ascend, "vllm_ascend/runner.py": PY.replace(b"line 30", b"line thirty")}
    old_steps: list[Files] = [
        ascend_steps[0],
        {"vllm_ascend/runner.py": edit(old_ascend["vllm_ascend/runner.py"], 12, b"log_step()\n")},
    ]
    return {
        "verl": [
            PinSpec("p1", base, steps, pairs_with="a1"),
            PinSpec("p2", late, late_steps, pairs_with="a1"),
        ],
        "vllm-ascend": [PinSpec("a1", ascend, ascend_steps), PinSpec("a2", old_ascend, old_steps)],
    }
