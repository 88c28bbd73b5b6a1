"""Write docs/reference.md from the code: the commands, exit codes, pins, environment variables and log fields.

    python docs/reference.py [--check]

What a patch adds to an upstream is read from the patch itself, so no upstream tree is needed. A module that reads
environment variables lists them in its docstring, in a table with the columns variable, default and meaning; a module
that writes a log lists the log's fields below a line that ends in "Fields of a line:".
"""

from __future__ import annotations

import ast
import difflib
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import click

from patchctl import environment, patchfile
from patchctl.cli import cli
from patchctl.errors import EXIT_CODES
from patchctl.project import Project

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "reference.md"
LOGS = {
    "vllm_ascend/worker/dispatch_logger.py": "dispatch_log.jsonl",
    "verl/utils/consistency_dump/training_log.py": "update_actor_log.jsonl",
}


def main(arguments: Sequence[str]) -> int:
    text = reference(Project(ROOT))
    if list(arguments) == ["--check"]:
        there = TARGET.read_text(encoding="utf-8")
        if there == text:
            return 0
        print(f"{TARGET}: not what the code says; run `make reference`", file=sys.stderr)
        print("\n".join(difflib.unified_diff(there.split("\n"), text.split("\n"), "there", "code", "", "", 0)))
        return 1
    TARGET.write_text(text, encoding="utf-8")
    return 0


def reference(project: Project) -> str:
    added = added_files(project)
    parts = ["# Reference", "Written from the code by `make reference`.", "## Commands", *_commands()]
    parts += ["## Exit codes", table(("code", "meaning"), ((f"`{code}`", text) for code, text in EXIT_CODES.items()))]
    parts += ["## Pins", _pins(project)]
    parts += ["## Environment variables", "### Of patchctl", _own_variables(project)]
    for path, text in added.items():
        if rows := variables(docstring(text)):
            parts += [f"### Of {path}", table(("variable", "default", "meaning"), rows)]
    parts += ["## Log fields"]
    for path, log in LOGS.items():
        parts += [f"### {log}", table(("field", "meaning"), log_fields(docstring(added[path])))]
    return "\n\n".join(parts) + "\n"


def added_files(project: Project) -> dict[str, str]:
    """The Python files that the series adds, by path, as its last patch leaves them for the newest pin they are in."""
    files: dict[str, str] = {}
    for pin in project.pins.pins:
        contents: dict[str, bytes | None] = {}
        for name in project.series.for_pin(pin):
            for file in patchfile.load(project.patch_bytes(name), name).files:
                if file.path.endswith(".py") and (file.pre is None or file.path in contents):
                    contents[file.path] = file.apply(contents.get(file.path), name)
        files |= {path: content.decode() for path, content in contents.items() if content is not None}
    return dict(sorted(files.items()))


def docstring(source: str) -> str:
    return ast.get_docstring(ast.parse(source)) or ""


def variables(text: str) -> list[tuple[str, str, str]]:
    """The rows of a docstring's table of environment variables: variable, default, meaning."""
    rows: list[tuple[str, str, str]] = []
    lines = text.splitlines()
    rules = [number for number, line in enumerate(lines) if re.fullmatch(r"=+( +=+){2}", line.strip())]
    if len(rules) != 3 or not lines[rules[0] + 1].startswith("variable"):
        return rows
    starts = [match.start() for match in re.finditer(r"=+", lines[rules[0]])]
    for line in lines[rules[1] + 1 : rules[2]]:
        cells = [line[start:end].strip() for start, end in zip(starts, [*starts[1:], None], strict=True)]
        name, default, meaning = (cell.replace("``", "`") for cell in cells)
        if name:
            rows.append((name, default, meaning))
        else:
            rows[-1] = (*rows[-1][:2], f"{rows[-1][2]} {meaning}")
    return rows


def log_fields(text: str) -> Iterator[tuple[str, str]]:
    """The fields that a log's docstring lists; those of the objects in a field have its name before their own."""
    _, _, listed = text.partition("Fields of a line:\n")
    parent = ""
    for line in listed.strip().splitlines():
        names, _, meaning = line.strip().partition("  ")
        if not line.startswith(" "):
            parent = names if meaning.strip().endswith(":") else ""
        prefix = f"{parent}." if line.startswith(" ") else ""
        shown = ", ".join(f"`{prefix}{name}`" for name in names.split(", "))
        yield shown, meaning.strip().rstrip(":").replace("``", "`")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)


def commands() -> Iterator[tuple[click.Command, click.Context]]:
    top = click.Context(cli, info_name="patchctl", **cli.context_settings)
    for name in cli.list_commands(top):
        command = cli.get_command(top, name)
        assert command is not None
        yield command, click.Context(command, info_name=name, parent=top)


def _commands() -> Iterator[str]:
    for command, context in commands():
        yield f"### patchctl {context.info_name}"
        for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
            if paragraph.startswith("\b"):
                yield f"```bash\n{paragraph.strip(chr(8)).strip()}\n```"
            else:
                yield " ".join(paragraph.split())
        pieces = " ".join(command.collect_usage_pieces(context))
        yield f"Usage: `{context.command_path} {pieces}`"
        yield table(("option", "meaning"), _options(command, context))


def _options(command: click.Command, context: click.Context) -> Iterator[tuple[str, str]]:
    for parameter in command.get_params(context):
        if record := parameter.get_help_record(context):
            yield f"`{record[0]}`", record[1].replace("  [default", " [default")


def _pins(project: Project) -> str:
    def rows() -> Iterator[tuple[str, ...]]:
        for pin in project.pins.pins:
            source = f"git or PyPI `{pin.wheel.requirement}`" if pin.wheel else "git"
            paired = project.pins.paired(pin).name if pin.upstream.name == "verl" else ""
            patches = len(project.series.for_pin(pin))
            yield pin.upstream.name, f"`{pin.name}`", f"`{pin.commit[:12]}`", source, paired, str(patches)

    return table(("upstream", "pin", "commit", "from", "with vllm-ascend", "patches"), rows())


def _own_variables(project: Project) -> str:
    names: Mapping[str, str] = {
        **{
            upstream.url_variable: f"where {upstream.name} is fetched from by git (default: `{upstream.url}`)"
            for upstream in project.pins.upstreams.values()
        },
        **environment.VARIABLES,
    }
    return table(("variable", "meaning"), ((f"`{name}`", meaning) for name, meaning in names.items()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
