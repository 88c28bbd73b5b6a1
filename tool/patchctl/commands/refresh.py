"""`patchctl refresh`."""

from __future__ import annotations

from pathlib import Path

import click

from patchctl import maintain
from patchctl.cli import say
from patchctl.errors import DONE, FAILED, UsageError
from patchctl.project import PACKAGED, Project


@click.command()
@click.option(
    "--from",
    "folders",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    multiple=True,
    metavar="DIR",
    help="A git worktree whose commits on top of a pin are the series; one for every pin of its upstream.",
)
@click.option("--check", is_flag=True, help="Only say whether a refresh would change a file.")
@click.pass_context
def command(ctx: click.Context, folders: tuple[Path, ...], check: bool) -> None:
    """Write series.lock anew, proving the series on every pin; with --from the patches as well.

    \b
    patchctl refresh --check
    patchctl refresh --from ~/edit/verl-b7dabd83 --from ~/edit/verl-v0.8.0
    """
    project: Project = ctx.obj
    if not check and project.root == PACKAGED:
        raise UsageError(
            f"{project.root} is the series that this patchctl was installed with; run the patchctl of the clone "
            "(`.venv/bin/patchctl`), or name the clone: patchctl --root DIR refresh"
        )
    refreshed = maintain.refresh(project, folders, say)
    differing = refreshed.differing(project.root)
    if not check:
        refreshed.write(project.root)
    for name in differing:
        click.echo(f"{'differs' if check else 'written'}: {project.root / name}")
    if not differing:
        click.echo("nothing to refresh")
    ctx.exit(FAILED if differing and check else DONE)
