"""`patchctl apply`."""

from __future__ import annotations

from pathlib import Path

import click

from patchctl import engine
from patchctl.cli import print_json, say
from patchctl.commands import _trees
from patchctl.errors import UsageError
from patchctl.pins import Pin
from patchctl.project import Project
from patchctl.tree import Progress, open_tree


@click.command()
@_trees.revision_options
@_trees.tree_options
@_trees.source_option
@click.option("--dry-run", is_flag=True, help="Say what would be done; change nothing.")
@_trees.json_option
@click.pass_obj
def command(
    project: Project,
    verl_commit: str | None,
    vllm_ascend_commit: str | None,
    verl: Path | None,
    vllm_ascend: Path | None,
    only: str | None,
    source: str,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Apply the series to verl and vllm-ascend.

    A tree that is not given is obtained into ./src. Both trees are patched, or neither; a second run changes nothing.

    \b
    patchctl apply --verl-commit b7dabd83
    patchctl apply --verl-commit b7dabd83 --verl ~/verl --vllm-ascend ~/vllm-ascend
    patchctl apply --verl ~/venv/lib/python3.11/site-packages --only verl
    """
    folders = _trees.wanted(only, verl, vllm_ascend)
    revisions = {"verl": verl_commit, "vllm-ascend": vllm_ascend_commit}
    pins = _pins(project, folders, revisions)
    targets = []
    for name, pin in pins.items():
        folder = folders[name] or _trees.SRC / name
        if folders[name] is None and not folder.exists():
            if dry_run:
                raise UsageError(
                    f"--dry-run obtains no tree, and {folder} is not there; run `patchctl fetch` or give --{name}"
                )
            from patchctl import sources

            say(f"{pin}: from {sources.obtain(pin, folder, source, say)}")
        targets.append(engine.Target(open_tree(folder, project.pins.upstreams[name]), pin))
    outcomes = engine.apply(project, targets, dry_run=dry_run)
    if as_json:
        print_json({"command": "apply", "dry_run": dry_run, "trees": [_trees.outcome_document(o) for o in outcomes]})
        return
    for outcome in outcomes:
        for note in outcome.notes:
            say(f"note: {outcome.target.pin}: {note}")
        click.echo(_sentence(outcome, dry_run))


def _pins(project: Project, folders: dict[str, Path | None], revisions: dict[str, str | None]) -> dict[str, Pin]:
    """The pin of each upstream: the one asked for, else the paired one, else the one whose files the tree has."""
    pins: dict[str, Pin] = {}
    for name, folder in folders.items():
        revision = revisions[name]
        if revision is not None:
            pins[name] = project.pins.resolve(name, revision)
        elif name == "vllm-ascend" and "verl" in pins and folder is None:
            pins[name] = project.pins.paired(pins["verl"])
        elif folder is not None:
            state = project.detect(open_tree(folder, project.pins.upstreams[name]))
            if state.modified and name == "vllm-ascend" and "verl" in pins:
                pins[name] = project.pins.paired(pins["verl"])
            else:
                pins[name] = state.pin
        elif name == "vllm-ascend" and "verl" not in folders:
            raise UsageError("which vllm-ascend? give --vllm-ascend-commit REV or --vllm-ascend DIR")
        else:
            known = ", ".join(pin.name for pin in project.pins.of(name))
            raise UsageError(f"which {name}? give --{name}-commit REV (pins: {known}) or --{name} DIR")
    return pins


def _sentence(outcome: engine.Outcome, dry_run: bool) -> str:
    pin, tree = outcome.target.pin, _trees.at(outcome.target.tree)
    patches = len(outcome.patches)
    if outcome.before is Progress.APPLIED:
        return f"{pin}: already applied ({patches}/{patches} patches) in {tree}"
    verb = "would apply" if dry_run else "applied"
    return f"{pin}: {verb} {patches} patches to {len(outcome.written)} files in {tree}"
