"""The tests in pieces/, on every tree: they import verl, and a process can import only one."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

from verl_runs import HERE


def test_pieces(verl_tree: Path, tmp_path: Path) -> None:
    report, pieces = tmp_path / "report.xml", HERE / "pieces"
    alone = ("-c", os.devnull, "--rootdir", pieces, "--confcutdir", pieces, "-p", "no:cacheprovider")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "pytest", "-q", *alone, f"--junitxml={report}", pieces],
        env={**os.environ, "PYTHONPATH": str(verl_tree), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    suite = ET.parse(report).getroot()[0]
    assert int(suite.attrib["tests"]) > 15 and int(suite.attrib["skipped"]) == 0
