"""`patchctl report`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click

from patchctl.cli import print_json, say
from patchctl.dumps.compare_run import FORMAT, succeeded
from patchctl.dumps.report_html import write_report
from patchctl.dumps.report_text import summary_lines
from patchctl.errors import DONE, FAILED, PatchctlError


@click.command()
@click.argument("out", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option(
    "--html", type=click.Path(path_type=Path, dir_okay=False), help="Where to write (default: OUT/report.html)."
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as one JSON document on stdout.")
@click.pass_context
def command(ctx: click.Context, out: Path, html: Path | None, as_json: bool) -> None:
    """Summarize a comparison in the terminal and in one self-contained HTML file, in English and Chinese.

    OUT is the folder that `patchctl compare` wrote. The file needs no network. Exit code 1 when something differs or
    nothing was compared, for CI.

    \b
    patchctl report out
    patchctl report out --json --html consistency.html
    """
    document = _read(out)
    target = html or out / "report.html"
    try:
        write_report(document, target, time.strftime("%Y-%m-%d %H:%M", time.localtime()))
    except OSError as error:
        raise PatchctlError(f"cannot write `{target}`: {error.strerror}") from error
    if as_json:
        keys = ("verdict", "verdicts", "pairs_by_status", "first", "warnings", "msprobe")
        print_json({"command": "report", "html": str(target), **{key: document[key] for key in keys}})
    else:
        for line in summary_lines(document):
            click.echo(line)
    say(f"wrote {target}")
    ctx.exit(DONE if succeeded(document) else FAILED)


def _read(out: Path) -> dict[str, Any]:
    path = out / "compare.json"
    try:
        document: dict[str, Any] = json.loads(path.read_bytes())
        if document["command"] != "compare" or document["format"] != FORMAT:
            raise KeyError("format")
    except FileNotFoundError as error:
        raise PatchctlError(f"no compare.json in `{out}`; run `patchctl compare PAIRS -o {out}` first") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PatchctlError(f"`{path}` is no result of this version's `patchctl compare`; run it again") from error
    return document
