"""`patchctl edit`."""

from __future__ import annotations

from pathlib import Path

import click

from patchctl.cli import print_json, say
from patchctl.commands import _trees
from patchctl.errors import UsageError
from patchctl.maintain import editing, files, worktrees
from patchctl.project import Project


@click.command()
@click.argument("upstream", type=click.Choice(_trees.UPSTREAMS))
@click.option("--pin", "revision", metavar="PIN", help="The pin to edit (default: the upstream's first).")
@click.option(
    "--into",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Where the worktree goes (default: edit/UPSTREAM-PIN in the project).",
)
@click.option(
    "--source",
    type=click.Choice(("auto", "git", "pypi", "none")),
    default="auto",
    show_default=True,
    help="Where upstream's files come from. With none, only the patches that need no file of upstream's are there.",
)
@_trees.json_option
@click.pass_obj
def command(
    project: Project, upstream: str, revision: str | None, into: Path | None, source: str, as_json: bool
) -> None:
    """Make a git worktree with the series as commits, to be changed with git as always.

    Then `patchctl refresh` writes the patches back. Remove the folder when it is not needed any more.

    \b
    patchctl edit verl
    patchctl edit vllm-ascend --pin v0.13.0 --into ~/edit/vllm-ascend
    """
    files.require_clone(project.root, "edit")
    files.recover(project.root, say)
    pins = project.pins.of(upstream)
    if not pins:
        raise UsageError(f"{upstream}: has no pin in configs/pins.toml")
    pin = project.pins.resolve(upstream, revision) if revision else pins[0]
    edited = editing.edit(project, pin, into, source, say)
    record = edited.worktree.record
    folder = worktrees.shown(edited.worktree.folder)
    if as_json:
        print_json(
            {
                "command": "edit",
                "upstream": upstream,
                "pin": pin.name,
                "root": str(edited.worktree.folder),
                "news": edited.news,
                "source": record.source if record else None,
                "base": edited.worktree.base,
                "patches": edited.patches,
                "left_out": edited.left_out,
            }
        )
        return
    left_out = f", {edited.left_out} that change upstream's files left out" if edited.left_out else ""
    click.echo(f"{pin}: {folder}: {edited.news}, {edited.patches} patches as commits{left_out}")
    if edited.news == "made":
        say(f"next: git -C {folder} log pin-{pin.name}.. ; commit, amend or rebase; then patchctl refresh")
