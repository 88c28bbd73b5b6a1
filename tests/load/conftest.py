"""The load runs share the proxy tests' helpers, their fixture of the tree, and their environment."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

PROXY_TESTS = Path(__file__).resolve().parents[1] / "proxy"
sys.path.append(str(PROXY_TESTS))

# A conftest can't be imported by its name, which all folders' have.
_spec = importlib.util.spec_from_file_location("conftest_of_the_proxy_tests", PROXY_TESTS / "conftest.py")
assert _spec is not None and _spec.loader is not None
_shared = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_shared)
proxy_tree = _shared.proxy_tree
