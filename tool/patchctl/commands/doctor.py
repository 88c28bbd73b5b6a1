"""`patchctl doctor`."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path

import click

from patchctl import doctor
from patchctl.cli import print_json
from patchctl.config_files import TASKS, RunPlan, read_shape
from patchctl.errors import DONE, FAILED, PatchctlError
from patchctl.project import Project
from patchctl.tree import open_tree

_MARK = {"ok": "ok     ", "warning": "warning", "error": "error  "}
_file = click.Path(path_type=Path, dir_okay=False)
_folder = click.Path(path_type=Path, exists=True, file_okay=False)


@click.command()
@click.option("--python", metavar="PYTHON", help="Interpreter of the environment to check (default: this one).")
@click.option("--verl", type=_folder, help="verl tree (default: the one that PYTHON imports).")
@click.option("--vllm-ascend", type=_folder, help="vllm-ascend tree, likewise.")
@click.option("--generate-config", type=_file, help="msprobe's file of the inference side.")
@click.option("--actor-config", type=_file, help="msprobe's file of the training side.")
@click.option("--launch", type=_file, help="Launch script whose overrides and variables to check.")
@click.option(
    "--model", type=click.Path(path_type=Path, exists=True), help="Model folder, for the estimate of the disk."
)
@click.option("--requests", type=click.IntRange(1), default=16, show_default=True, help="Prompts to dump.")
@click.option("--prompt", type=click.IntRange(1), default=1024, show_default=True, help="Tokens of the longest prompt.")
@click.option("--task", type=click.Choice(TASKS), default=TASKS[0], show_default=True, help="What is dumped.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document: findings and the environment.")
@click.pass_context
def command(
    ctx: click.Context,
    python: str | None,
    verl: Path | None,
    vllm_ascend: Path | None,
    generate_config: Path | None,
    actor_config: Path | None,
    launch: Path | None,
    model: Path | None,
    requests: int,
    prompt: int,
    task: str,
    as_json: bool,
) -> None:
    """Check this machine before a dump run: packages, patches, msprobe's files, dump paths, variables, overrides.

    Run it as the user, in the container and with the variables of the run. Every finding says what to change. Exit
    code 1 when one of them would make the dump worthless.

    \b
    patchctl doctor --generate-config dump-config/config_generate.json --actor-config dump-config/config_actor.json
    patchctl doctor --python ~/venv/bin/python --json > train-env.json
    """
    found = doctor.probe(python)
    variables = doctor.exported(launch, os.environ) if launch else dict(os.environ)
    places = {
        "verl": verl or _place(found["places"]["verl"]),
        "vllm-ascend": vllm_ascend or _place(found["places"]["vllm_ascend"]),
    }
    findings = [
        *doctor.check_packages(found["packages"]),
        *doctor.check_trees(_states(ctx.obj, places), python or sys.executable),
        *doctor.check_configs(generate_config, actor_config),
        *doctor.check_disk(
            generate_config, read_shape(model) if model else None, RunPlan(task=task, requests=requests, prompt=prompt)
        ),
        *doctor.check_variables(variables, doctor.forwards_variables(places["verl"]), actor_config),
        *(doctor.check_launch(launch) if launch else ()),
    ]
    if as_json:
        print_json(
            {
                "command": "doctor",
                "findings": [asdict(finding) for finding in findings],
                "environment": doctor.environment_of(found, variables),
            }
        )
    else:
        for finding in sorted(findings, key=lambda finding: list(_MARK).index(finding.level), reverse=True):
            click.echo(f"{_MARK[finding.level]} {finding.area}: {finding.what}")
            if finding.change:
                click.echo(f"        -> {finding.change}")
    ctx.exit(FAILED if doctor.failed(findings) else DONE)


def _place(path: str | None) -> Path | None:
    return Path(path) if path else None


def _states(project: Project, places: dict[str, Path | None]) -> dict[str, tuple[str, str] | None]:
    """How far the series is applied to each tree; None where there is none to look at."""
    states: dict[str, tuple[str, str] | None] = {}
    for name, place in places.items():
        if place is None:
            states[name] = None
            continue
        try:
            state = project.detect(open_tree(place, project.pins.upstreams[name]))
            states[name] = (state.progress.value, str(place))
        except PatchctlError as error:
            states[name] = (f"not a tree that the series knows ({error})", str(place))
    return states
