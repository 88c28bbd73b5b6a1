"""`runs`: the dumps of real runs, made when a test first asks for them, on one patched verl tree."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import trees

sys.path.append(str(Path(__file__).resolve().parents[2] / "dumps"))

from real_runs import Runs


@pytest.fixture(scope="session")
def patched_verl() -> Path:
    """The first patched verl tree that can be had: what the hooks write does not differ between pins."""
    if listed := os.environ.get("PATCHED_VERL_TREES"):
        return Path(listed.split(":")[0])
    for pin in trees.PROJECT.pins.of("verl"):
        try:
            return trees.applied(pin)
        except trees.Unavailable:
            continue
    pytest.skip("no patched verl tree can be had here")


@pytest.fixture(scope="session")
def runs(patched_verl: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(patched_verl, tmp_path_factory.mktemp("dumps"))
