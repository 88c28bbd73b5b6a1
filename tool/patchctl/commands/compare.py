"""`patchctl compare`."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

import click

from patchctl.cli import print_json, say
from patchctl.doctor import read_environments
from patchctl.dumps.compare_run import CompareOptions, read_baseline, read_pairs, run_compare, succeeded
from patchctl.dumps.judge import BUILT_IN
from patchctl.dumps.msprobe_compare import find_msprobe
from patchctl.dumps.report_text import summary_lines
from patchctl.dumps.workers import Progress
from patchctl.errors import DONE, FAILED


@click.command()
@click.argument("pairs", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option(
    "-o", "--out", required=True, type=click.Path(path_type=Path, file_okay=False), help="Folder for results."
)
@click.option(
    "--baseline",
    type=click.Path(path_type=Path, exists=True),
    help="OUT of a run that is known to be good: its noise becomes the noise band.",
)
@click.option("--msprobe", metavar="COMMAND", help="msprobe to run (default: the one on PATH, if any).")
@click.option("--no-msprobe", is_flag=True, help="Only our own judgement.")
@click.option("--statistics-only", is_flag=True, help="Leave real tensors unread.")
@click.option(
    "--infer-env",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Output of `patchctl doctor --json` on the inference machine, for the report.",
)
@click.option(
    "--train-env",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="The same of the training machine.",
)
@click.option("--jobs", type=click.IntRange(1), help="Worker processes (default: one a core, 8 at most).")
@click.option("--json", "as_json", is_flag=True, help="Print OUT/compare.json on stdout.")
@click.pass_context
def command(
    ctx: click.Context,
    pairs: tuple[Path, ...],
    out: Path,
    baseline: Path | None,
    msprobe: str | None,
    no_msprobe: bool,
    statistics_only: bool,
    infer_env: Path | None,
    train_env: Path | None,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Compare the dumps of every clean pair and name the first module whose output differs.

    PAIRS are documents of `patchctl pair --json`. Every pair gets a folder under OUT/pairs with all rows (rows.csv)
    and msprobe's own table; OUT/compare.json is what `patchctl report` reads. Exit code 1 when something differs,
    nothing could be compared, or msprobe matched no row of a pair.

    \b
    patchctl pair /dump_data/generate_sequence /dump_data/update_actor --json > pairs.json
    patchctl compare pairs.json -o out
    """
    requests, warnings = read_pairs(pairs)
    found = None if no_msprobe else find_msprobe(msprobe)
    if found is None and not no_msprobe:
        say("note: msprobe is not installed here: only our own judgement (pip install mindstudio-probe)")
    options = CompareOptions(
        msprobe=found,
        jobs=jobs,
        bands=read_baseline(baseline) if baseline else BUILT_IN,
        statistics_only=statistics_only,
        environment=read_environments(infer_env, train_env),
    )
    with ExitStack() as stack:

        def progress(label: str) -> Progress:
            bar = stack.enter_context(click.progressbar(length=1, label=label, file=sys.stderr))

            def tick(done: int, total: int) -> None:
                bar.length = total
                bar.update(done - bar.pos)

            return tick

        document = run_compare(requests, warnings, out, options, progress if sys.stderr.isatty() else None)
    if as_json:
        print_json(document)
    else:
        for line in summary_lines(document):
            click.echo(line)
        click.echo(f"next: patchctl report {out}")
    ctx.exit(DONE if succeeded(document) else FAILED)
