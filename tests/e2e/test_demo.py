"""The tutorial's first part: the demonstration, and the commands on its dumps print what the tutorial shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import documents
from documents import ROOT

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder whose build/demo has the dumps."""
    folder = tmp_path_factory.mktemp("demo")
    paths = [ROOT / "tool", ROOT / "tests", HERE, HERE / "dumps"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, str(HERE / "demo.py"), "--into", "build/demo"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (shown,) = [command for command in tutorial() if command.text == "make demo"]
    assert shown.output
    assert documents.shows(shown.output, done.stdout)
    return folder


def tutorial() -> list[documents.Command]:
    return list(documents.commands(ROOT / "docs" / "tutorial.md"))


def test_the_tutorial_s_commands_show_what_it_says(folder: Path) -> None:
    commands = [command for command in tutorial() if " build/demo/" in command.text]
    assert len(commands) == 6
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tool")}
    for command in commands:
        text = command.text.replace(".venv/bin/patchctl", f"{sys.executable} -m patchctl")
        done = subprocess.run(
            ["bash", "-c", text],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        differs = re.search(r" (compare|report) ", text) and "verdict: diverges" in done.stdout
        assert done.returncode == (1 if differs else 0), f"{command}\n{done.stdout}"
        if command.output:
            assert documents.shows(command.output, done.stdout), f"{command}\n{done.stdout}"
