"""The engine's tests bring their tokenizer as the proxy's tests do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "proxy"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What the runs were made of."""
    for tree, told in getattr(sys.modules.get("test_sessions"), "SUMMARIES", {}).items():
        terminalreporter.write_line(f"chat proxy on a real engine, {tree}: {told}")
