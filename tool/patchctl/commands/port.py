"""`patchctl port`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from patchctl.cli import print_json, say
from patchctl.commands import _trees
from patchctl.errors import DONE, FAILED, PatchctlError, UsageError
from patchctl.maintain import files, newpin, port, worktrees
from patchctl.maintain.drift import newest
from patchctl.maintain.newpin import Ported
from patchctl.maintain.port import Port
from patchctl.project import Project


@click.command()
@click.argument("upstream", type=click.Choice(_trees.UPSTREAMS))
@click.option("--to", "revision", metavar="REV", help="The commit, tag or branch of upstream to carry the series to.")
@click.option("--from", "old", metavar="PIN", help="The pin whose series is carried (default: the newest).")
@click.option("--name", help="The new pin's name (default: the tag, or 8 digits of the commit).")
@click.option(
    "--pairs-with", metavar="PIN", help="For verl: the vllm-ascend pin that goes with it (default: the old one's)."
)
@click.option(
    "--into",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Where the worktree goes (default: edit/UPSTREAM-NAME in the project).",
)
@click.option("--continue", "go_on", is_flag=True, help="Go on after a conflict was resolved, or to write the pin.")
@click.option("--skip", is_flag=True, help="Leave out the patch that is in conflict, and go on.")
@click.option("--abort", is_flag=True, help="Remove the worktree of the port, and all that was done in it.")
@click.option("--yes", is_flag=True, help="Write the new pin without asking.")
@_trees.json_option
@click.pass_context
def command(
    ctx: click.Context,
    upstream: str,
    revision: str | None,
    old: str | None,
    name: str | None,
    pairs_with: str | None,
    into: Path | None,
    go_on: bool,
    skip: bool,
    abort: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Carry the series to another commit of upstream, which becomes a new pin.

    Each patch is applied exactly where it fits, else merged 3-way. A conflict stops in the worktree: resolve it there,
    `git add`, then --continue. Nothing is written to the project before the new pin is proved and confirmed.

    \b
    patchctl port verl --to v0.9.0
    patchctl port verl --continue
    """
    project: Project = ctx.obj
    files.require_clone(project.root, "port")
    if sum((revision is not None, go_on, skip, abort)) != 1:
        raise UsageError("give one of --to REV, --continue, --skip, --abort")
    files.recover(project.root, say)
    if revision is not None:
        pin = project.pins.resolve(upstream, old) if old else newest(project, upstream)
        current = port.start(project, upstream, revision, pin, name, pairs_with, into, say)
    else:
        current = port.under_way(project, upstream, name)
        if abort:
            port.abort(project, current)
            click.echo(f"{upstream} {current.name}: {worktrees.shown(current.folder)} removed")
            return
        if pairs_with is not None:
            current = port.pair(project, current, pairs_with)
        current = port.skip(current) if skip else port.resume(current, say)
    current = port.advance(project, current, say)
    folder, again = worktrees.shown(current.folder), f"patchctl port {upstream} --continue"
    if current.stopped:
        if as_json:
            print_json(_document(current, None, "conflict"))
        else:
            _print(current, None)
        say(f"next: in {folder}: resolve the conflict, git add, then `{again}` (or --skip, --abort)")
        ctx.exit(FAILED)
    try:
        ported = newpin.finish(project, current, say)
    except PatchctlError as error:
        raise PatchctlError(
            f"{error}; correct it in {folder} (git commit --amend, git rebase -i), then `{again}`",
            exit_code=error.exit_code,
        ) from None
    if as_json:
        written = yes
    else:
        _print(current, ported)
        written = yes or (sys.stdin.isatty() and click.confirm(f"write the pin {ported.pin}?", err=True))
    if written:
        newpin.write(project, current, ported)
    if as_json:
        print_json(_document(current, ported, "written" if written else "ported"))
    elif written:
        click.echo(f"{ported.pin}: written")
    if written:
        say(f"next: patchctl verify; the worktree {folder} is kept for `patchctl refresh`")
    else:
        say(f"next: nothing is written yet; look it over in {folder}, then `{again} --yes`")
    ctx.exit(DONE)


def _print(current: Port, ported: Ported | None) -> None:
    width = max((len(step.patch) for step in current.steps), default=0)
    for step in current.steps:
        click.echo(f"{step.patch:<{width}}  {step}")
        for line in () if step.resolved else step.detail:
            click.echo(f"    {line}")
    if ported is None:
        return
    pin = ported.pin
    stops = "" if pin.debugger_stops is None else f", {pin.debugger_stops} debugger.stop() counted"
    click.echo(f"new pin {pin}: commit {pin.commit[:12]}{stops}")
    click.echo(f"    {ported.origin}")
    if pin.pairs_with:
        click.echo(f"    goes with vllm-ascend {pin.pairs_with} (--pairs-with names another)")
    for note in (*ported.refreshed.notes, *ported.newcomers):
        click.echo(f"    {note}")


def _document(current: Port, ported: Ported | None, state: str) -> dict[str, Any]:
    pin = ported.pin if ported else None
    return {
        "command": "port",
        "state": state,
        "upstream": current.upstream,
        "from": current.old,
        "to": current.revision,
        "commit": current.commit,
        "name": current.name,
        "root": str(current.folder),
        "steps": [step.document() for step in current.steps],
        "pin": None
        if pin is None or ported is None
        else {
            "name": pin.name,
            "debugger_stops": pin.debugger_stops,
            "pairs_with": pin.pairs_with,
            "wheel": pin.wheel.requirement if pin.wheel else None,
            "origin": ported.origin,
            "notes": list(ported.refreshed.notes),
            "newcomers": list(ported.newcomers),
        },
    }
