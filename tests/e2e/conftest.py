"""Fixtures of all end-to-end tests, which run in the environment that setup_env.py makes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import tiny_model

import trees

# The Megatron runs use the batches and the readers of the FSDP runs.
sys.path.append(str(Path(__file__).resolve().parent / "verl"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with its tokenizer."""
    return tiny_model.write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def newest_verl_tree() -> Path:
    """The patched tree of verl's last pin that can be had: for what the series' own files do, the same on every pin."""
    if listed := os.environ.get("PATCHED_VERL_TREES"):
        return Path(listed.split(":")[-1])
    for pin in reversed(trees.PROJECT.pins.of("verl")):
        if trees.available(pin) is None:
            return trees.applied(pin)
    pytest.skip("no patched verl tree can be had here")


@pytest.fixture(scope="session")
def pristine_verl_tree(verl_tree: Path) -> Path:
    """What `verl_tree` was before the series was applied."""
    if listed := os.environ.get("PRISTINE_VERL_TREES"):
        names = {Path(folder).name: Path(folder) for folder in listed.split(":")}
        return names[verl_tree.name]
    # The pin without a source here has no patched tree either.
    here = [pin for pin in trees.PROJECT.pins.of("verl") if trees.available(pin) is None]
    return trees.pristine(next(pin for pin in here if trees.applied(pin) == verl_tree))
