"""The documents are true: both READMEs say the same, the reference is what the code says, every command shown works."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import documents
import trees
from documents import ROOT, Command
from patchctl import cli, environment
from patchctl.errors import EXIT_CODES

sys.path.append(str(ROOT / "docs"))

import reference

ENGLISH = (ROOT / "README.md").read_text(encoding="utf-8")
CHINESE = (ROOT / "README.zh-CN.md").read_text(encoding="utf-8")

RUN_ELSEWHERE = {
    r"patchctl (port|drift) ": "tests/test_port.py",
    r"patchctl refresh --check": "tests/test_maintain.py",
    r"patchctl trajectory ": "tests/test_trajectory.py",
    r"make demo$|.* build/demo/": "tests/e2e/test_demo.py",
    r"bash (dump-config/hybrid|fully-async-config/fully_async)\.sh ": "tests/e2e/test_launch_settings.py",
    r"pip install \.$|pipx run ": "tests/test_wheel.py",
    r"pip install mindstudio-probe$": "tests/e2e/setup_env.py",
}
"""Commands that the sandbox below can't run, and the file that runs them."""

ALSO_FINE = {"doctor": {1}, "compare": {1}, "report": {1}}
"""Exit codes beside 0: what they find here, in the machine of a test and in dumps that differ."""


# -- README.md and README.zh-CN.md


def test_both_readmes_have_the_same_headings_blocks_tables_and_links() -> None:
    assert documents.headings(ENGLISH) == documents.headings(CHINESE)

    def block_texts(text: str) -> list[tuple[str, list[str]]]:
        return [
            (language, [re.sub(r"\s+#.*", "", line) for line in block.splitlines()])
            for language, _, block in documents.blocks(text)
        ]

    assert block_texts(ENGLISH) == block_texts(CHINESE)
    english, chinese = documents.tables(ENGLISH), documents.tables(CHINESE)
    assert [[documents.code(row[0]) for row in table] for table in english] == [
        [documents.code(row[0]) for row in table] for table in chinese
    ]
    assert [[len(row) for row in table] for table in english] == [[len(row) for row in table] for table in chinese]
    own = {"README.md", "README.zh-CN.md"}
    assert [link for link in documents.links(ENGLISH) if link not in own] == [
        link for link in documents.links(CHINESE) if link not in own
    ]


@pytest.mark.parametrize("text", [ENGLISH, CHINESE], ids=["en", "zh"])
def test_the_readme_lists_every_command_pin_exit_code_and_variable(text: str) -> None:
    listed, pins, variables = documents.tables(text)[:3]
    names = [name.removeprefix("patchctl ") for cell in documents.column(listed, 0) for name in documents.code(cell)]
    assert sorted(names) == sorted(cli.COMMANDS)
    assert [(row[0], row[1].strip("`"), row[2][:12]) for row in pins[1:]] == [
        (pin.upstream.name, pin.name, pin.commit[:12]) for pin in trees.PROJECT.pins.pins
    ]
    added = reference.added_files(trees.PROJECT)
    known = reference.variables(reference.docstring(added["verl/utils/consistency_dump/settings.py"]))
    assert [(row[0], row[1]) for row in variables[1:]] == [(name, default) for name, default, _ in known]
    numbers = re.findall(r"(?:^|[,，] ?)(\d+) ", exit_codes(text).strip())
    assert [int(number) for number in numbers] == list(EXIT_CODES)


def exit_codes(text: str) -> str:
    """The sentence that lists the exit codes."""
    found = re.search(r"(?:Exit codes:|退出码：)((?:.|\n)*?[.。]\n)", text)
    assert found
    return found[1].replace("\n", " ")


# -- the reference


def test_the_reference_is_what_the_code_says() -> None:
    assert reference.main(["--check"]) == 0


def test_every_variable_that_patchctl_reads_is_listed() -> None:
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tool").rglob("*.py"))
    read = set(re.findall(r"environ(?:\.get\(|\[)[\"'](PATCHCTL_\w+)", sources))
    assert read == set(environment.VARIABLES)


def test_every_variable_that_the_series_reads_is_listed() -> None:
    added = reference.added_files(trees.PROJECT)
    listed = {
        name.strip("`") for text in added.values() for name, _, _ in reference.variables(reference.docstring(text))
    }
    read = {
        node.value
        for text in added.values()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"(HARBOR|DUMP)_\w*[A-Z]|PROMPTS_ONLY", node.value)
    }
    assert read
    assert read <= listed


@pytest.mark.parametrize(
    ("log", "sources"),
    [
        ("vllm_ascend/worker/dispatch_logger.py", ["vllm_ascend/worker/dispatch_logger.py"]),
        (
            "verl/utils/consistency_dump/training_log.py",
            [f"verl/utils/consistency_dump/{name}.py" for name in ("training_log", "bracket", "megatron")],
        ),
    ],
)
def test_every_log_field_that_is_written_is_listed(log: str, sources: list[str]) -> None:
    added = reference.added_files(trees.PROJECT)
    rows = [cell for cell, _ in reference.log_fields(reference.docstring(added[log]))]
    names = [name for cell in rows for name in documents.code(cell)]
    written = {key for source in sources for key in written_keys(ast.parse(added[source]))}
    # The chains come as text from the client that kept them.
    assert written == {name.rpartition(".")[2] for name in names if not name.startswith("request_chains.")}


def written_keys(tree: ast.AST) -> Iterator[str]:
    """The string keys of every dict literal, and of every item assigned by a literal key."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            yield from (key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str))
        elif (
            isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and isinstance(node.slice, ast.Constant)
        ):
            yield str(node.slice.value)


# -- links and commands


@pytest.mark.parametrize("path", documents.documents(), ids=lambda path: path.name)
def test_every_link_leads_somewhere(path: Path) -> None:
    for link in documents.links(path.read_text(encoding="utf-8")):
        target = link.partition("#")[0]
        if target and not re.match(r"https?:", target):
            assert (path.parent / target).exists(), f"{path.name}: {link}"


def shown() -> list[Command]:
    return [command for path in documents.documents() for command in documents.commands(path)]


def test_every_command_shown_is_one_that_a_test_runs() -> None:
    for command in shown():
        if elsewhere := ran_elsewhere(command):
            assert (ROOT / elsewhere).is_file(), f"{command}: {elsewhere} is gone"
        elif command.text.startswith("make "):
            targets = [word for word in shlex.split(command.text)[1:] if "=" not in word]
            subprocess.run(["make", "-n", *targets], cwd=ROOT, check=True, capture_output=True)
        else:
            assert re.match(r"([A-Z_]+=\S+ )?patchctl |export [A-Z_]+=|git ", command.text), command


def ran_elsewhere(command: Command) -> str | None:
    return next((path for pattern, path in RUN_ELSEWHERE.items() if re.match(pattern, command.text)), None)


class Sandbox:
    """A home folder with what the documents name: trees in ~/verl and ~/vllm-ascend, dumps, a model, the project."""

    def __init__(self, folder: Path) -> None:
        self.home = folder
        self.exports: list[str] = []
        self.project = folder / "patchctl"
        self.places = {
            "b7dabd83": "v0.8.0",  # a release, so that no git source is needed
            "patchctl edit verl": "patchctl edit verl --pin v0.8.0",
            "/dump_data": str(folder / "dump_data"),
            "~/venv/bin/python": sys.executable,
        }
        for name in subprocess.check_output(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, text=True
        ).split("\0"):
            if name and (ROOT / name).is_file():
                (self.project / name).parent.mkdir(parents=True, exist_ok=True)
                os.link(ROOT / name, self.project / name)
        verl, ascend = (pin for pin in trees.PROJECT.pins.pins if pin.name in ("v0.8.0", "v0.18.0"))
        for pin in (verl, ascend):
            trees.copy(trees.pristine(pin), folder / pin.upstream.name)
        trees.copy(folder / "verl", folder / "venv" / "lib" / "python3.11" / "site-packages")
        trees.copy(trees.applied(ascend), folder / "my-vllm-ascend")
        subprocess.run(
            [sys.executable, ROOT / "tests" / "dumps" / "make_dump_tree.py", folder / "dump_data"],
            check=True,
            capture_output=True,
        )
        (folder / "Qwen3-4B").mkdir()
        (folder / "Qwen3-4B" / "config.json").write_text(
            '{"model_type": "qwen3", "hidden_size": 2560, "num_hidden_layers": 36, "vocab_size": 151936, '
            '"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 9728}'
        )
        for at in (folder / "bin", self.project / ".venv" / "bin"):
            at.mkdir(parents=True)
            (at / "patchctl").write_text(
                f"#!/bin/sh\nPYTHONPATH={shlex.quote(str(self.project / 'tool'))} "
                f'exec {shlex.quote(sys.executable)} -m patchctl "$@"\n'
            )
            (at / "patchctl").chmod(0o755)

    def run(self, command: Command) -> None:
        """Run it, and hold its exit code and output to what the document says."""
        if command.text.startswith("export "):
            self.exports.append(command.text)
            return
        text = command.text
        for said, here in self.places.items():
            text = text.replace(said, here)
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PATCHCTL_")},
            "HOME": str(self.home),
            "GIT_SEQUENCE_EDITOR": ":",
            "PATH": f"{self.home / 'bin'}:{os.environ['PATH']}",
        }
        script = "\n".join(["set -euo pipefail", *self.exports, text])
        done = subprocess.run(
            ["bash", "-c", script], cwd=self.project, env=environment, capture_output=True, text=True, check=False
        )
        fine = {0, *next((codes for word, codes in ALSO_FINE.items() if f"patchctl {word} " in text), ())}
        assert done.returncode in fine, f"{command}\n{done.stdout}{done.stderr}"
        if command.output is not None:
            printed = done.stdout + done.stderr
            assert documents.shows(command.output, printed), f"{command}\n{printed}"


@pytest.mark.parametrize("path", documents.documents(), ids=lambda path: path.name)
def test_the_commands_of_a_document_work_one_after_the_other(path: Path, tmp_path: Path) -> None:
    commands = [
        command
        for command in documents.commands(path)
        if not command.text.startswith("make ") and not ran_elsewhere(command)
    ]
    if not commands:
        pytest.skip(f"{path.name} shows no command for the sandbox")
    sandbox = Sandbox(tmp_path)
    for command in commands:
        sandbox.run(command)
