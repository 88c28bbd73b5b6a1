"""`patchctl trajectory`."""

from __future__ import annotations

import time
from pathlib import Path

import click

from patchctl.cli import print_json, say
from patchctl.errors import PatchctlError, UsageError
from patchctl.trajectory.page import write_page
from patchctl.trajectory.summary import summary, summary_lines
from patchctl.trajectory.trial import DOCUMENT, JOURNAL, Trial, read_trial
from patchctl.trajectory.vocabulary import find_tokenizer, token_texts


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Where to write the page (default: trajectory.html beside the archive).",
)
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path),
    help="The model's tokenizer.json or its folder: the page then shows what each token says.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as one JSON document on stdout.")
def command(file: Path, out: Path | None, tokenizer: Path | None, as_json: bool) -> None:
    """Show what the chat proxy recorded of a trial, in the terminal and in one self-contained HTML file.

    FILE is the trial's proxy_trajectory.json, the journal (.jsonl) of one that was cut off, or the folder of either.
    The page shows the branches as a tree, every turn with its messages, and every token: by what it is trained on,
    its log-probability, where that comes from and which policy version it is of. It needs no network.

    \b
    patchctl trajectory trials/step_0001/SESSION
    patchctl trajectory proxy_trajectory.jsonl -o page.html --tokenizer /models/Qwen3-8B
    """
    trial = read_trial(file)
    target = out or (file if file.is_dir() else file.parent) / "trajectory.html"
    if target.name in (DOCUMENT, JOURNAL) or (target.exists() and target.samefile(file)):
        raise UsageError(f"`{target}` is an archive: the page would take its place; give another file (-o)")
    vocabulary = find_tokenizer(tokenizer, trial.tokenizer)
    texts = token_texts(vocabulary, _ids(trial)) if vocabulary is not None else {}
    try:
        write_page(trial, texts, target, time.strftime("%Y-%m-%d %H:%M", time.localtime()))
    except OSError as error:
        raise PatchctlError(f"cannot write `{target}`: {error.strerror}") from error
    if as_json:
        print_json({"command": "trajectory", "html": str(target), **summary(trial)})
    else:
        for line in summary_lines(trial):
            click.echo(_printable(line))
    say(f"wrote {target}")


def _printable(line: str) -> str:
    """An archive may hold anything, and a terminal does what it is told."""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in line)


def _ids(trial: Trial) -> set[int]:
    found: set[int] = set()
    for turn in trial.turns:
        found.update(turn.sampled)
        for span in turn.spans:
            found.update(span.ids)
    return found
