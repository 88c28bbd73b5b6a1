"""`patchctl config`."""

from __future__ import annotations

from pathlib import Path

import click

from patchctl.cli import print_json
from patchctl.config_files import MODES, TASKS, RunPlan, estimate_disk, human, read_shape, write_configs


@click.command()
@click.argument("out", type=click.Path(path_type=Path, file_okay=False))
@click.option("--mode", type=click.Choice(MODES), default=MODES[0], show_default=True, help="How verl is run.")
@click.option(
    "--task",
    type=click.Choice(TASKS),
    default=TASKS[0],
    show_default=True,
    help="What is dumped: statistics; statistics and the tensors of some modules; all tensors.",
)
@click.option("--dump-root", default="/dump_data", show_default=True, help="Folder that both sides dump into.")
@click.option("--config-dir", help="Where the files will lie on the machines (default: OUT, made absolute).")
@click.option("--requests", type=click.IntRange(1), default=16, show_default=True, help="Prompts to dump.")
@click.option("--prompt", type=click.IntRange(1), default=1024, show_default=True, help="Tokens of the longest prompt.")
@click.option("--response", type=click.IntRange(1), default=2, show_default=True, help="Tokens to generate for each.")
@click.option("--ranks", type=click.IntRange(1), default=1, show_default=True, help="Ranks of a side that dump.")
@click.option(
    "--virtual-stages",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Megatron's virtual pipeline size: each chunk of a micro batch is a step.",
)
@click.option(
    "--model", type=click.Path(path_type=Path, exists=True), help="Model folder, for the estimate of the disk."
)
@click.option("--overwrite", is_flag=True, help="Replace files that exist.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
def command(
    out: Path,
    mode: str,
    task: str,
    dump_root: str,
    config_dir: str | None,
    requests: int,
    prompt: int,
    response: int,
    ranks: int,
    virtual_stages: int,
    model: Path | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write msprobe's two files and the launch script of a dump run into OUT, and estimate the disk it takes.

    The run is bounded, every prefill has a step of its own, prefix caching and chunked prefill are off. Tensors (the
    choices tensor_list and tensor) are needed where statistics are not sharp enough, and by msprobe's own verdicts.

    \b
    patchctl config dump-config
    patchctl config fully-async-config --mode fully-async --task tensor_list --model ~/Qwen3-4B --dump-root /data/dump
    """
    plan = RunPlan(
        mode, task, dump_root, config_dir or str(out.resolve()), requests, prompt, response, ranks, virtual_stages
    )
    files = write_configs(plan, out, overwrite)
    sizes = estimate_disk(plan, read_shape(model)) if model else None
    if as_json:
        print_json(
            {
                "command": "config",
                "files": [str(file) for file in files],
                "disk": sizes,
                "steps": {"infer": plan.infer_steps, "train": plan.train_steps},
            }
        )
        return
    for file in files:
        click.echo(f"wrote {file}")
    click.echo(f"steps: {plan.infer_steps} of each rollout server, {plan.train_steps} of the trainer")
    if sizes:
        click.echo(f"disk: about {human(sizes['infer'])} inference, {human(sizes['train'])} training for all requests")
    else:
        click.echo("disk: give --model DIR for an estimate")
    click.echo(f"next: patchctl doctor --generate-config {files[0]} --actor-config {files[1]} --launch {files[2]}")
