"""`patchctl list`."""

from __future__ import annotations

from typing import Any

import click

from patchctl import patchfile
from patchctl.cli import print_json
from patchctl.commands._trees import json_option
from patchctl.project import Project


@click.command()
@json_option
@click.pass_obj
def command(project: Project, as_json: bool) -> None:
    """List the patches: what each is for, which pins it serves, when it can go.

    \b
    patchctl list
    patchctl list --json
    """
    rows: list[dict[str, Any]] = []
    for entry in project.series.entries:
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
    if as_json:
        print_json({"command": "list", "patches": rows})
        return
    for row in rows:
        click.echo(f"{row['patch']}  [{', '.join(row['pins'])}]")
        click.echo(f"    {row['subject']}")
        click.echo(f"    status: {row['upstream_status']}")
        click.echo(f"    drop when: {row['drop_when']}")
