"""`patchctl drift`."""

from __future__ import annotations

from typing import Any

import click

from patchctl.cli import print_json, say
from patchctl.commands import _trees
from patchctl.errors import DONE, FAILED, IN_THE_WAY, PatchctlError, UsageError
from patchctl.maintain.drift import Drifted, drift, newest
from patchctl.project import Project


@click.command()
@click.argument("upstream", type=click.Choice(_trees.UPSTREAMS), required=False)
@click.option("--against", "revision", required=True, metavar="REV", help="A commit, tag or branch of upstream.")
@click.option("--pin", "name", metavar="PIN", help="The pin whose series is tried (default: the newest).")
@_trees.json_option
@click.pass_context
def command(ctx: click.Context, upstream: str | None, revision: str, name: str | None, as_json: bool) -> None:
    """Tell whether the series still applies at a commit of upstream, patch by patch, without changing anything.

    Exit code 0: it applies, maybe after a 3-way merge. 1: a patch is in conflict. 3: that can't be told here.

    \b
    patchctl drift verl --against main
    patchctl drift --against main --json
    """
    project: Project = ctx.obj
    if name is not None and upstream is None:
        raise UsageError("--pin PIN needs an upstream: patchctl drift verl --pin PIN --against REV")
    found = []
    for wanted in [upstream] if upstream else _trees.UPSTREAMS:
        pin = project.pins.resolve(wanted, name) if name else newest(project, wanted)
        say(f"{pin}: trying {len(project.series.for_pin(pin))} patches on {revision}")
        try:
            found.append(drift(project, pin, revision, say))
        except PatchctlError as error:
            # 1 is the answer that it does not apply; there is none yet.
            error.exit_code = IN_THE_WAY if error.exit_code == FAILED else error.exit_code
            raise
    if as_json:
        print_json({"command": "drift", "ok": all(each.applies for each in found), "upstreams": list(map(_row, found))})
    else:
        for each in found:
            _print(each)
    ctx.exit(DONE if all(each.applies for each in found) else FAILED)


def _print(drifted: Drifted) -> None:
    width = max((len(name) for name, _ in drifted.carried), default=0)
    for name, carried in drifted.carried:
        shift = f" ({carried.shift:+d} lines)" if carried.shift else ""
        click.echo(f"{name:<{width}}  {carried.word.value}{shift}")
        for clash in carried.clashes:
            click.echo(f"    {clash}")
    for line in drifted.newcomers:
        click.echo(line)
    verb = "applies" if drifted.applies else "does not apply"
    click.echo(f"{drifted.pin} {verb} at {drifted.revision} ({drifted.commit[:12]})")


def _row(drifted: Drifted) -> dict[str, Any]:
    return {
        "upstream": drifted.pin.upstream.name,
        "pin": drifted.pin.name,
        "against": drifted.revision,
        "commit": drifted.commit,
        "applies": drifted.applies,
        "newcomers": list(drifted.newcomers),
        "patches": [
            {
                "patch": name,
                "result": carried.word.value,
                "shift": carried.shift,
                "clashes": [
                    {
                        "path": clash.path,
                        "hunk": clash.hunk or None,
                        "line": clash.line or None,
                        "reason": clash.reason,
                        "touched_by": list(clash.touched_by),
                    }
                    for clash in carried.clashes
                ],
            }
            for name, carried in drifted.carried
        ],
    }
