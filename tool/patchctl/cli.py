"""The command line: which commands there are, and what becomes of an error. Each command is in a module of its own."""

from __future__ import annotations

import gc
import importlib
import io
import os
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

import click

import patchctl
from patchctl import environment
from patchctl.errors import DONE, EXIT_CODES, FAILED, INTERRUPTED, USAGE, PatchctlError
from patchctl.project import Project, default_root

COMMANDS = {
    "apply": "Apply the series to pinned upstream trees.",
    "verify": "Prove the series, and the trees it is applied to.",
    "revert": "Take the series back out of a tree, to the byte.",
    "status": "Tell how far the series is applied.",
    "list": "List the patches: what each is for and which pins it serves.",
    "fetch": "Obtain the upstream trees, and only that.",
    "edit": "Make a git worktree with the series as commits.",
    "refresh": "Write the patches and series.lock anew.",
    "port": "Carry the series to another commit of upstream.",
    "drift": "Tell whether the series still applies somewhere.",
    "pair": "Tell which requests of two dump trees can be compared.",
    "compare": "Compare paired dumps and find the first module that differs.",
    "report": "Turn a comparison into a summary and an HTML report.",
    "trajectory": "Show what the chat proxy recorded of a trial.",
    "config": "Write the msprobe and launch configuration of a dump run.",
    "doctor": "Check that this machine is ready for a dump run.",
}

LONG_RUNNING = ("pair", "compare", "report")
"""Commands that make much garbage; the others end before a collection pays."""


class _Commands(click.Group):
    """Imports a command's module only when the command is called: a start costs what the command needs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"patchctl.commands.{name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code), meaning) for code, meaning in EXIT_CODES.items()])
        with formatter.section("Environment"):
            urls = "a mirror or a local clone of an upstream: PATCHCTL_VERL_URL and the like (configs/pins.toml)"
            formatter.write_dl([*environment.VARIABLES.items(), ("PATCHCTL_..._URL", urls)])


def _print_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    """The version of the program, and which series it is: the beginning of the hash of series.lock."""
    if not wanted:
        return
    project = _project(ctx.params.get("root"))
    lines = [f"patchctl {patchctl.__version__}"]
    lines += [f"series {project.lock_id[:12]} ({len(project.series.entries)} patches) in {project.root}"]
    lines += [f"{name}: {', '.join(pin.name for pin in project.pins.of(name))}" for name in project.pins.upstreams]
    click.echo("\n".join(lines))
    ctx.exit()


def _project(root: Path | None) -> Project:
    return Project(root.resolve() if root else default_root())


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--root",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="The project that holds series, patches and pins (default: the one this program belongs to).",
)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version, the series and the pins it carries, and exit.",
)
@click.pass_context
def cli(ctx: click.Context, root: Path | None) -> None:
    """A numbered patch series for verl and vllm-ascend.

    \b
    patchctl apply --verl-commit b7dabd83
    patchctl verify
    patchctl revert
    """
    ctx.obj = _project(root)
    if ctx.invoked_subcommand in LONG_RUNNING:
        gc.freeze()
        gc.enable()


def say(message: str) -> None:
    """A message for people; documents for programs go to stdout."""
    click.echo(message, err=True)


def print_json(document: Any) -> None:
    import json

    text = json.dumps(document, indent=1, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding)
    except UnicodeEncodeError:  # a terminal of another encoding, or a name that is no Unicode
        text = json.dumps(document, indent=1)
    click.echo(text)


def main() -> NoReturn:
    """Run the command line; every error becomes one line on stderr and an exit code."""
    signal.signal(signal.SIGTERM, _interrupt)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # what a terminal can't show is no reason to fail
    try:
        code = cli.main(prog_name="patchctl", standalone_mode=False)
    except click.UsageError as error:
        error.show()
        code = USAGE
    except click.ClickException as error:
        say(f"patchctl: {error.format_message()}")
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        say("patchctl: interrupted")
        code = INTERRUPTED
    except PatchctlError as error:
        say(f"patchctl: {error}")
        code = error.exit_code
    except SystemExit:  # click's answer to a broken pipe, as of `patchctl list | head`: the reader has what it wanted
        code = DONE
    except OSError as error:
        say(f"patchctl: {f'{error.filename}: ' if error.filename else ''}{error.strerror}")
        code = FAILED
    except Exception as error:
        if os.environ.get("PATCHCTL_DEBUG"):
            raise
        say(f"patchctl: a defect of patchctl: {type(error).__name__}: {error}; PATCHCTL_DEBUG=1 shows where; report it")
        code = FAILED
    sys.exit(code if isinstance(code, int) else DONE)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
