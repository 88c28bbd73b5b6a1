"""`patchctl refresh`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from patchctl import maintain
from patchctl.cli import say
from patchctl.errors import DONE, FAILED, InTheWayError
from patchctl.maintain import files, worktrees
from patchctl.project import Project


@click.command()
@click.option(
    "--from",
    "folders",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    multiple=True,
    metavar="DIR",
    help="A git worktree whose commits on top of a pin are the series (default: those of `edit` and `port`).",
)
@click.option("--check", is_flag=True, help="Only say whether a refresh would change a file, and prove every pin.")
@click.pass_context
def command(ctx: click.Context, folders: tuple[Path, ...], check: bool) -> None:
    """Write the patches, series and series.lock anew from worktrees, proving every pin whose patches change.

    Without a worktree the patches are taken as they are, and every pin is proved.

    \b
    patchctl refresh
    patchctl refresh --check
    patchctl refresh --from ~/edit/vllm-ascend
    """
    project: Project = ctx.obj
    if check:
        if files.interrupted(project.root):
            click.echo(f"differs: {project.root}: an earlier refresh was interrupted; run `patchctl refresh`")
            ctx.exit(FAILED)
    else:
        files.require_clone(project.root, "refresh")
        files.recover(project.root, say)
    chosen = list(folders) or _changed(project)
    # Where there are worktrees, they say whether anything is new; the proof of all that is old is for --check.
    complete = check or not (folders or worktrees.made(project))
    refreshed = maintain.refresh(project, chosen, say, complete=complete)
    differing = refreshed.differing(project.root)
    if differing and not check:
        files.prove(project.root, refreshed)
        refreshed.write(project.root)
    if not check:
        for folder in chosen:
            _remember(Project(project.root), folder)
    for note in refreshed.notes:
        say(f"note: {note}")
    for name in differing:
        click.echo(f"{'differs' if check else 'written'}: {project.root / name}")
    if not differing:
        click.echo("nothing to refresh")
    ctx.exit(FAILED if differing and check else DONE)


def _changed(project: Project) -> list[Path]:
    """The worktrees of `edit` and `port` that have something new.

    Raises:
        InTheWayError: the project's patches changed too since one of them was made.
    """
    chosen = []
    for folder in worktrees.made(project):
        worktree = worktrees.open_worktree(folder, project.pins)
        shown = worktrees.shown(folder)
        if worktree.untouched:
            say(f"{shown}: nothing new")
            continue
        if worktree.record and worktree.record.series != worktrees.digest(project, worktree.pin):
            again = f"patchctl edit {worktree.pin.upstream.name} --pin {worktree.pin.name}"
            raise InTheWayError(
                f"{shown}: has new commits, but patches/ has changed too since it was made: `{again}` tells what to do"
            )
        say(f"{shown}: taking its commits")
        chosen.append(folder)
    return chosen


def _remember(project: Project, folder: Path) -> None:
    """That the worktree's commits are in the series."""
    worktree = worktrees.open_worktree(folder, project.pins)
    if worktree.record is not None:
        tip = worktree.git.line("rev-parse", "HEAD")
        series = worktrees.digest(project, worktree.pin)
        worktrees.write_record(worktree.git, replace(worktree.record, tip=tip, series=series))
