"""`patchctl revert`."""

from __future__ import annotations

from pathlib import Path

import click

from patchctl import engine
from patchctl.cli import print_json, say
from patchctl.commands import _trees
from patchctl.project import Project
from patchctl.tree import Progress


@click.command()
@_trees.tree_options
@_trees.revision_options
@click.option("--force", is_flag=True, help="Revert around local edits; edited files that go are saved as NAME.edited.")
@click.option("--dry-run", is_flag=True, help="Say what would be done; change nothing.")
@_trees.json_option
@click.pass_obj
def command(
    project: Project,
    verl: Path | None,
    vllm_ascend: Path | None,
    only: str | None,
    verl_commit: str | None,
    vllm_ascend_commit: str | None,
    force: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Take the series back out of the trees given, or of those in ./src.

    Every file is as before, to the byte, and the files that the series made are gone.

    \b
    patchctl revert
    patchctl revert --verl ~/verl
    """
    folders = _trees.wanted(only, verl, vllm_ascend)
    states = _trees.states(project, folders, {"verl": verl_commit, "vllm-ascend": vllm_ascend_commit})
    targets = [engine.Target(state.tree, state.pin) for state in states]
    outcomes = engine.revert(project, targets, force=force, dry_run=dry_run)
    if as_json:
        print_json({"command": "revert", "dry_run": dry_run, "trees": [_trees.outcome_document(o) for o in outcomes]})
        return
    for outcome in outcomes:
        for copy in outcome.kept:
            say(f"note: your edited file is kept as {copy}")
        tree, pin = _trees.at(outcome.target.tree), outcome.target.pin
        if outcome.before is Progress.UNAPPLIED:
            click.echo(f"{pin}: nothing to revert in {tree}")
        else:
            click.echo(f"{pin}: {'would revert' if dry_run else 'reverted'} {len(outcome.written)} files in {tree}")
