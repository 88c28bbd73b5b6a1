"""`patchctl status`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from patchctl.cli import print_json
from patchctl.commands import _trees
from patchctl.errors import DONE, IN_THE_WAY, PARTLY_APPLIED
from patchctl.project import Project
from patchctl.tree import NAMED, Progress, TreeState

if TYPE_CHECKING:
    from patchctl.diagnose import Diagnosis

_EXIT = {Progress.MODIFIED: IN_THE_WAY, Progress.PARTLY: PARTLY_APPLIED}
_MARK = {True: "applied", False: "not applied", None: "can't be told"}


@click.command()
@_trees.tree_options
@_trees.revision_options
@_trees.json_option
@click.pass_context
def command(
    ctx: click.Context,
    verl: Path | None,
    vllm_ascend: Path | None,
    only: str | None,
    verl_commit: str | None,
    vllm_ascend_commit: str | None,
    as_json: bool,
) -> None:
    """Tell how far the series is applied to the trees given, or to those in ./src.

    Read from the files' own hashes. Exit code 0 if every tree is unapplied or applied, 3 if a touched file has
    contents the series does not know, 4 if a tree is partly applied.

    \b
    patchctl status
    patchctl status --verl ~/verl --json
    """
    project: Project = ctx.obj
    folders = _trees.wanted(only, verl, vllm_ascend)
    states = _trees.states(project, folders, {"verl": verl_commit, "vllm-ascend": vllm_ascend_commit})
    reasons = [_diagnosis(project, state) for state in states]
    if as_json:
        trees = [_document(project, state, why) for state, why in zip(states, reasons, strict=True)]
        print_json({"command": "status", "trees": trees})
    else:
        for state, why in zip(states, reasons, strict=True):
            _print(project, state, why)
    ctx.exit(max(_EXIT.get(state.progress, DONE) for state in states))


def _diagnosis(project: Project, state: TreeState) -> Diagnosis | None:
    if not state.modified:
        return None
    from patchctl.diagnose import diagnose  # may ask git what the tree is: only where something is wrong

    return diagnose(project, state)


def _document(project: Project, state: TreeState, why: Diagnosis | None) -> dict[str, object]:
    from patchctl import stamp

    patches = [
        {"patch": patch, "state": _MARK[state.patch_applied(patch)]} for patch in project.series.for_pin(state.pin)
    ]
    diagnosis = None if why is None else str(why)
    return {**_trees.tree_document(state), "diagnosis": diagnosis, "patches": patches, "stamp": stamp.read(state.tree)}


def _print(project: Project, state: TreeState, why: Diagnosis | None) -> None:
    patches = project.series.for_pin(state.pin)
    applied = sum(state.patch_applied(patch) is True for patch in patches)
    progress = state.progress.value
    if why is not None:
        click.echo(f"{state.tree}: {why}")
        if not state.patched and not why.foreign:
            progress += ", not applied"
    click.echo(f"{state.pin}: {progress} ({applied}/{len(patches)} patches) in {_trees.at(state.tree)}")
    for file in state.modified[:NAMED]:
        click.echo(f"  {'missing' if file.found.content is None else 'modified':<19} {file.path}")
    if len(state.modified) > NAMED:
        click.echo(f"  and {len(state.modified) - NAMED} more (--json names all)")
    if state.progress is Progress.PARTLY:
        for patch in patches:
            click.echo(f"  {_MARK[state.patch_applied(patch)]:<19} {patch}")
        for file in state.files:
            if file.position is not None and 0 < file.position < len(file.chain):
                click.echo(f"  {f'{file.position} of {len(file.chain)} patches':<19} {file.path}")
        click.echo("  next: `patchctl apply` finishes it, `patchctl revert` undoes it")
