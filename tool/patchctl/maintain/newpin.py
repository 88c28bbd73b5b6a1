"""The end of a port: the new pin, counted, compared with PyPI, proved, and written with its patches."""

from __future__ import annotations

import datetime
import re
import tempfile
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

from patchctl import pins as pins_file
from patchctl import sources
from patchctl.errors import PatchctlError
from patchctl.maintain import commits, files, rewrite, worktrees
from patchctl.maintain.base import Base, count_stops
from patchctl.maintain.carry import states_at
from patchctl.maintain.commits import FileState, States
from patchctl.maintain.files import Refreshed
from patchctl.maintain.newcomers import hooked, newcomers
from patchctl.maintain.port import RELEASE, Port
from patchctl.maintain.worktrees import Record, Worktree
from patchctl.pins import Pin, Pins, Wheel
from patchctl.project import Project
from patchctl.sources import Say


@dataclass(frozen=True)
class Ported:
    """A new pin, proved and ready to be written.

    Attributes:
        origin: where its files can be had from, and why from nowhere else.
        newcomers: upstream's new files that the series may have to see to, a line each.
    """

    pin: Pin
    refreshed: Refreshed
    origin: str
    newcomers: tuple[str, ...]


def finish(project: Project, port: Port, say: Say) -> Ported:
    """The project's files with the new pin, all of it proved.

    Raises:
        InTheWayError: something in the worktree is not committed.
        PatchctlError: a rule is broken on the new pin.
    """
    old = project.pins.resolve(port.upstream, port.old)
    pin = Pin(old.upstream, port.name, port.commit, pairs_with=port.pairs_with)
    worktree = Worktree(port.folder, pin, port.commit, worktrees.read_record(port.folder))
    worktree.check_clean()
    after: dict[str, FileState] = {}
    for change in commits.read_commits(port.git, port.commit):
        after.update(change.files)
    if old.debugger_stops is not None:
        try:
            pin = pin._replace(debugger_stops=count_stops(after))
        except SyntaxError as error:
            place = f"{worktrees.shown(port.folder)}/{error.filename}:{error.lineno}"
            raise PatchctlError(f"{place}: {error.msg}; correct it in the commit that it is from") from None
    pins, _ = _with_pin(project, pin, _date(port))
    (added,) = (found for found in pins.of(port.upstream) if found.name == port.name)
    refreshed = rewrite.refresh(project, (), say, pins=pins, added=replace(worktree, pin=added))
    wheel, origin = _release(pin, old, Base(pin, say, port.git), say)  # of a pin that is proved
    pin = pin._replace(wheel=wheel)
    _, text = _with_pin(project, pin, _date(port))
    contents = dict(refreshed.files)
    lock = contents.pop("series.lock")  # which comes last
    refreshed = replace(refreshed, files={**contents, "configs/pins.toml": text.encode(), "series.lock": lock})
    files.prove(project.root, refreshed)
    return Ported(pin, refreshed, origin, _newcomers(project, port, old, after))


def _newcomers(project: Project, port: Port, old: Pin, after: States) -> tuple[str, ...]:
    changes = commits.read_commits(port.git, old.commit, f"refs/patchctl/series-{old.name}")
    paths = list(dict.fromkeys(path for change in changes for path in change.files))
    hooks = hooked(project.patches(old), changes, states_at(port.git, old.commit, paths))
    return tuple(newcomers(port.git, old.commit, port.commit, old.upstream.package, hooks, after))


def write(project: Project, port: Port, ported: Ported) -> None:
    """Write the new pin, and end the port; its worktree stays for `refresh`."""
    ported.refreshed.write(project.root)
    tip = port.git.line("rev-parse", "HEAD")
    digest = worktrees.digest(Project(project.root), ported.pin)
    worktrees.write_record(port.git, Record(port.upstream, port.name, port.commit, "git", tip, digest))
    worktrees.port_path(port.folder).unlink()


def _release(pin: Pin, old: Pin, base: Base, say: Say) -> tuple[Wheel | None, str]:
    """The PyPI release whose Python files are the commit's, and a word about it."""
    version = RELEASE.fullmatch(pin.name)
    if version is None:
        return None, "from git only: its name is no release's"
    try:
        wheel, path = sources.released(f"{pin.upstream.name}=={version[1]}", old.wheel, say)
    except PatchctlError as error:
        return None, f"from git only: {error}"
    with zipfile.ZipFile(path) as archive:
        released = {name: archive.read(name) for name in archive.namelist() if name.endswith(".py")}
    if (other := base.differing(released)) is not None:
        return None, f"from git only: {wheel.requirement} has not the commit's {other}"
    return wheel, f"{wheel.requirement} on PyPI has its Python files, byte for byte"


def _date(port: Port) -> datetime.date:
    seconds = int(port.git.line("show", "--no-patch", "--no-show-signature", "--format=%ct", port.commit))
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).date()


def _with_pin(project: Project, pin: Pin, date: datetime.date) -> tuple[Pins, str]:
    """The pins with one more, and pins.toml with it behind the last of its upstream; everything else as it is."""
    text = (project.root / "configs" / "pins.toml").read_text(encoding="utf-8")
    lines = ["[[pins]]", f'upstream = "{pin.upstream.name}"', f'name = "{pin.name}"', f'commit = "{pin.commit}"']
    lines.append(f"date = {date.isoformat()}")
    if pin.pairs_with is not None:
        lines.append(f'vllm-ascend = "{pin.pairs_with}"')
    if pin.debugger_stops is not None:
        lines.append(f"debugger_stops = {pin.debugger_stops}")
    if pin.wheel is not None:
        lines += ["[pins.wheel]", f'requirement = "{pin.wheel.requirement}"', f'sha256 = "{pin.wheel.sha256}"']
        if pin.wheel.platform and pin.wheel.python:
            lines += [f'platform = "{pin.wheel.platform}"', f'python = "{pin.wheel.python}"']
    head, *blocks = re.split(r"(?m)^(?=\[\[pins\]\])", text)
    own = re.compile(rf'(?m)^upstream\s*=\s*"{re.escape(pin.upstream.name)}"')
    last = max((number for number, block in enumerate(blocks) if own.search(block)), default=len(blocks) - 1)
    blocks.insert(last + 1, "\n".join(lines) + "\n")
    text = head + "\n".join(block.rstrip("\n") + "\n" for block in blocks)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "pins.toml")
        path.write_text(text, encoding="utf-8")
        return pins_file.load(path), text
