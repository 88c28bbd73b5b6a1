"""`runs`: what every scenario left behind, once for each verl tree."""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron_runs import Runs


@pytest.fixture(scope="session")
def runs(verl_tree: Path, pristine_verl_tree: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(verl_tree, pristine_verl_tree, model, tmp_path_factory.mktemp("megatron"))
