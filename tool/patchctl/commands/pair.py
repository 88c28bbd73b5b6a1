"""`patchctl pair`."""

from __future__ import annotations

import csv
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from patchctl.cli import say
from patchctl.dumps.join import PairRun, open_trees, pair_trees
from patchctl.dumps.pairing import Status
from patchctl.errors import DONE, FAILED

COLUMNS = (
    "request_id",
    "status",
    "infer_pid",
    "infer_rank",
    "infer_step",
    "train_rank",
    "train_step",
    "infer_tokens",
    "train_tokens",
    "why",
)
SHOWN = 20


@click.command()
@click.argument("generate_dir", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("actor_dir", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--json", "form", flag_value="json", help="One JSON document on stdout: the input of `patchctl compare`.")
@click.option("--csv", "form", flag_value="csv", help="One line a request on stdout.")
@click.option("--logs-only", is_flag=True, help="Join the logs without looking for a dump.json.")
@click.option("--jobs", type=click.IntRange(1), help="Processes that read the logs (default: one a core, 8 at most).")
@click.pass_context
def command(
    ctx: click.Context, generate_dir: Path, actor_dir: Path, form: str | None, logs_only: bool, jobs: int | None
) -> None:
    """Tell which requests of an inference and a training dump tree can be compared, and why the others cannot.

    GENERATE_DIR is the dump_path of config_generate.json (it holds {pid}/dispatch_log.jsonl), ACTOR_DIR that of
    config_actor.json (it holds {pid}/update_actor_log.jsonl). Exit code 1 when no request can be compared.

    \b
    patchctl pair /dump_data/generate_sequence /dump_data/update_actor
    patchctl pair /dump_data/generate_sequence /dump_data/update_actor --json > pairs.json
    """
    trees = open_trees(generate_dir, actor_dir, look_at_dumps=not logs_only)
    shown = sys.stderr.isatty()
    with click.progressbar(length=trees.size, label="reading logs", file=sys.stderr) if shown else nullcontext() as bar:
        done = [0]

        def progress(now: int, total: int) -> None:
            if bar is not None:
                bar.update(now - done[0])
                done[0] = now

        with pair_trees(trees, jobs, progress) as run:
            if bar is not None:
                bar.render_finish()
            {"json": _print_json, "csv": _print_csv, None: _print_text}[form](run)
    if form is not None:
        for warning in run.warnings:
            say(f"warning: {warning}")
    ctx.exit(DONE if run.counts[Status.PAIR.value] else FAILED)


def _print_json(run: PairRun) -> None:
    """Stream the document: it may be larger than memory."""
    write = sys.stdout.write
    head = {
        "command": "pair",
        "generate_dir": str(run.trees.generate.resolve()),
        "actor_dir": str(run.trees.actor.resolve()),
    }
    write(json.dumps(head, ensure_ascii=False)[:-1] + ',\n"requests": {')
    separator = "\n"
    for request_id, _, text in run.results:
        write(f"{separator}{json.dumps(request_id, ensure_ascii=False)}: {text}")
        separator = ",\n"
    tail = {"counts": dict(run.counts), "warnings": run.warnings, "lines": run.lines}
    write("\n}, " + json.dumps(tail, ensure_ascii=False)[1:] + "\n")


def _print_csv(run: PairRun) -> None:
    writer = csv.writer(sys.stdout)
    writer.writerow(COLUMNS)
    for request_id, _, text in run.results:
        writer.writerow(_row(request_id, json.loads(text)))


def _print_text(run: PairRun) -> None:
    click.echo("request  status  inference  training  tokens")
    rest = 0
    for number, (request_id, status, text) in enumerate(run.results):
        if number >= SHOWN:
            rest += 1
            continue
        entry = json.loads(text)
        infer, train, tokens = entry["infer"], entry["train"], entry["tokens"]
        left = f"pid {infer['pid']} rank {infer['rank']} step {_steps(infer)}" if infer else "-"
        right = f"rank {train['rank']} step {train['step']}" if train else "-"
        click.echo(f"{request_id}  {status}  {left}  {right}  {_or_dash(tokens['infer'])}/{_or_dash(tokens['train'])}")
        if entry["why"]:
            click.echo(f"    {entry['why']}")
    if rest:
        click.echo(f"... and {rest} more; --json or --csv shows all")
    total = sum(run.counts.values())
    click.echo("")
    click.echo(f"{run.counts[Status.PAIR.value]} of {total} requests can be compared")
    for name, number in sorted(run.counts.items(), key=lambda item: -item[1]):
        click.echo(f"  {name:<14}{number}")
    for warning in run.warnings:
        click.echo(f"warning: {warning}")


def _row(request_id: str, entry: dict[str, Any]) -> list[Any]:
    infer, train, tokens = entry["infer"] or {}, entry["train"] or {}, entry["tokens"]
    return [
        request_id,
        entry["status"],
        infer.get("pid"),
        infer.get("rank"),
        _steps(infer) if infer else None,
        train.get("rank"),
        train.get("step"),
        tokens["infer"],
        tokens["train"],
        entry["why"],
    ]


def _steps(place: dict[str, Any]) -> str:
    return "+".join(str(step) for step in place.get("steps", [place.get("step")]))


def _or_dash(value: object) -> object:
    return "-" if value is None else value
