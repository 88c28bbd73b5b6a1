"""`module`: the dispatch logger of each applied vllm-ascend tree."""

from pathlib import Path
from types import ModuleType

import pytest
from dispatch_fakes import load_dispatch_logger


@pytest.fixture
def module(vllm_ascend_tree: Path) -> ModuleType:
    return load_dispatch_logger(vllm_ascend_tree)
