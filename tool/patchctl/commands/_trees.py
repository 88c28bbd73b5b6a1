"""What the commands that work on trees share: their options, and the trees they mean."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from patchctl.errors import UsageError
from patchctl.project import Project
from patchctl.tree import Tree, TreeState, open_tree

if TYPE_CHECKING:
    from patchctl import engine

SRC = Path("src")
UPSTREAMS = ("verl", "vllm-ascend")

_Function = TypeVar("_Function", bound=Callable[..., Any])


def tree_options(function: _Function) -> _Function:
    """--verl, --vllm-ascend and --only."""
    folder = click.Path(path_type=Path)
    options = (
        click.option("--verl", type=folder, metavar="DIR", help="A verl tree: checkout, copy, or site-packages."),
        click.option("--vllm-ascend", type=folder, metavar="DIR", help="A vllm-ascend tree, likewise."),
        click.option("--only", type=click.Choice(UPSTREAMS), help="Leave the other upstream alone."),
    )
    return functools.reduce(lambda wrapped, option: option(wrapped), reversed(options), function)


def revision_options(function: _Function) -> _Function:
    """--verl-commit and --vllm-ascend-commit."""
    options = (
        click.option(
            "--verl-commit", metavar="REV", help="The verl pin: its name, or 7 hex digits or more of its commit."
        ),
        click.option(
            "--vllm-ascend-commit",
            metavar="REV",
            help="The vllm-ascend pin (default: the one paired with the verl pin).",
        ),
    )
    return functools.reduce(lambda wrapped, option: option(wrapped), reversed(options), function)


source_option = click.option(
    "--source",
    type=click.Choice(("auto", "git", "pypi")),
    default="auto",
    show_default=True,
    help="Where trees come from: git, or the PyPI release that equals the pin; auto tries git first.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")


def wanted(only: str | None, verl: Path | None, vllm_ascend: Path | None) -> dict[str, Path | None]:
    """The folder given for each upstream that the command is about; None where it was left out.

    Raises:
        UsageError: `only` leaves out an upstream whose folder is given.
    """
    given = {"verl": verl, "vllm-ascend": vllm_ascend}
    if only is None:
        return given
    for name, folder in given.items():
        if folder is not None and name != only:
            raise UsageError(f"--only {only} leaves {name} out, but --{name} {folder} is given; drop one of them")
    return {only: given[only]}


def states(project: Project, folders: dict[str, Path | None], revisions: dict[str, str | None]) -> list[TreeState]:
    """The state of every tree that is given, or else of every tree in ./src.

    Raises:
        UsageError: there is none.
    """
    given = {name: folder for name, folder in folders.items() if folder is not None}
    if not given:
        given = {name: SRC / name for name in folders if (SRC / name).is_dir()}
    if not given:
        options = " or ".join(f"--{name} DIR" for name in folders)
        raise UsageError(f"no tree: give {options}, or run in the folder that has ./{SRC} (see `patchctl fetch`)")
    trees = [open_tree(folder, project.pins.upstreams[name]) for name, folder in given.items()]
    found = [project.detect(tree, revisions.get(tree.upstream.name)) for tree in trees]
    for state in found:
        if state.modified and revisions.get(state.tree.upstream.name):
            from patchctl.diagnose import other_pin

            if error := other_pin(project, state):
                raise error
    return found


def tree_document(state: TreeState) -> dict[str, Any]:
    """A tree's state for --json."""
    return {
        "upstream": state.tree.upstream.name,
        "pin": state.pin.name,
        "commit": state.pin.commit,
        "root": str(state.tree.root),
        "state": state.progress.value,
        "files": [
            {"path": file.path, "applied": file.position, "of": len(file.chain), "crlf": file.found.crlf}
            for file in state.files
        ],
    }


def outcome_document(outcome: engine.Outcome) -> dict[str, Any]:
    """What apply or revert did to a tree, for --json."""
    return {
        "upstream": outcome.target.pin.upstream.name,
        "pin": outcome.target.pin.name,
        "commit": outcome.target.pin.commit,
        "root": str(outcome.target.tree.root),
        "before": outcome.before.value,
        "patches": list(outcome.patches),
        "written": list(outcome.written),
        "kept": [str(path) for path in outcome.kept],
        "notes": list(outcome.notes),
    }


def at(tree: Tree) -> str:
    """The tree's place as a user would type it."""
    try:
        return str(tree.root.relative_to(Path.cwd()))
    except ValueError:
        return str(tree.root)
