"""`patchctl list`."""

from __future__ import annotations

from typing import Any

import click

from patchctl import patchfile
from patchctl.cli import print_json
from patchctl.commands._trees import json_option
from patchctl.errors import UsageError
from patchctl.pins import Pin
from patchctl.project import Project


@click.command()
@click.option(
    "--pin", "key", metavar="UPSTREAM/PIN", help="Only the patches that serve this pin, in the order they apply."
)
@click.option("--paths", is_flag=True, help="Print the files of the patches, one a line, and nothing else.")
@json_option
@click.pass_obj
def command(project: Project, key: str | None, paths: bool, as_json: bool) -> None:
    """List the patches: what each is for, which pins it serves, when it can go.

    \b
    patchctl list
    patchctl list --json
    patchctl list --pin verl/b7dabd83 --paths
    """
    wanted = None if key is None else _pin(project, key)
    rows: list[dict[str, Any]] = []
    for entry in project.series.entries:
        if wanted is not None and not entry.serves(wanted):
            continue
        patch = patchfile.load(project.patch_bytes(entry.patch), entry.patch)
        rows.append(
            {
                "patch": entry.patch,
                "pins": [pin.name for pin in project.pins.of(entry.upstream) if entry.serves(pin)],
                "subject": patch.subject,
                "upstream_status": patch.trailer("Upstream-Status"),
                "drop_when": patch.trailer("Drop-when"),
                "files": [file.path for file in patch.files],
                "body": patch.body,
            }
        )
    if paths:
        for row in rows:
            click.echo(project.root / "patches" / row["patch"])
        return
    if as_json:
        print_json({"command": "list", "patches": rows})
        return
    for row in rows:
        click.echo(f"{row['patch']}  [{', '.join(row['pins'])}]")
        click.echo(f"    {row['subject']}")
        click.echo(f"    status: {row['upstream_status']}")
        click.echo(f"    drop when: {row['drop_when']}")


def _pin(project: Project, key: str) -> Pin:
    for pin in project.pins.pins:
        if pin.key == key:
            return pin
    raise UsageError(f"{key}: no such pin; pins: {', '.join(pin.key for pin in project.pins.pins)}")
