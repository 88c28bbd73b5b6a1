"""`patchctl fetch`."""

from __future__ import annotations

from pathlib import Path

import click

from patchctl import sources
from patchctl.cli import print_json, say
from patchctl.commands import _trees
from patchctl.errors import InTheWayError, UsageError
from patchctl.project import Project
from patchctl.tree import open_tree


@click.command()
@_trees.revision_options
@click.option("--only", type=click.Choice(_trees.UPSTREAMS), help="Obtain this upstream only.")
@click.option(
    "--into",
    type=click.Path(path_type=Path),
    default=_trees.SRC,
    show_default=True,
    help="The folder that gets the trees.",
)
@_trees.source_option
@_trees.json_option
@click.pass_obj
def command(
    project: Project,
    verl_commit: str | None,
    vllm_ascend_commit: str | None,
    only: str | None,
    into: Path,
    source: str,
    as_json: bool,
) -> None:
    """Obtain the upstream trees at their pins, and only that.

    \b
    patchctl fetch --verl-commit b7dabd83
    PATCHCTL_VERL_URL=/srv/mirrors/verl.git patchctl fetch --verl-commit b7dabd83 --only verl
    """
    pins = {}
    if only != "vllm-ascend":
        if verl_commit is None:
            known = ", ".join(pin.name for pin in project.pins.of("verl"))
            raise UsageError(f"which verl? give --verl-commit REV (pins: {known})")
        pins["verl"] = project.pins.resolve("verl", verl_commit)
    if only != "verl":
        if vllm_ascend_commit is not None:
            pins["vllm-ascend"] = project.pins.resolve("vllm-ascend", vllm_ascend_commit)
        elif "verl" in pins:
            pins["vllm-ascend"] = project.pins.paired(pins["verl"])
        else:
            raise UsageError("which vllm-ascend? give --vllm-ascend-commit REV")
    rows = []
    for name, pin in pins.items():
        folder = into / name
        origin = "already there"
        if folder.exists():
            state = project.detect(open_tree(folder, pin.upstream))
            if state.pin != pin or state.modified:
                raise InTheWayError(f"{folder}: is there already and is not {pin}; move it away, or give --into DIR")
        else:
            origin = sources.obtain(pin, folder, source, say)
        rows.append({"upstream": name, "pin": pin.name, "commit": pin.commit, "root": str(folder), "from": origin})
    if as_json:
        print_json({"command": "fetch", "trees": rows})
        return
    for row in rows:
        click.echo(f"{row['upstream']} {row['pin']}: {row['root']} ({row['from']})")
