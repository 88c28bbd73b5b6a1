"""The proxy's package from a patched tree, without the agent loop's own imports (ray, torch), which take half a minute.

The proxy's files are the same on every pin of verl, so one tree is enough: the first that there is.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import real_tokenizers
from bare_import import import_from

import trees


def _tree() -> Path:
    if listed := os.environ.get("PATCHED_VERL_TREES"):
        return Path(listed.split(":")[0])
    reasons = []
    for pin in trees.PROJECT.pins.of("verl"):
        try:
            return Path(trees.applied(pin))
        except trees.Unavailable as reason:
            reasons.append(str(reason))
    pytest.skip("; ".join(reasons), allow_module_level=True)


@pytest.fixture(scope="session", autouse=True)
def proxy_tree() -> Path:
    """The tree that the proxy is imported from. Autouse: test modules import the proxy inside their functions."""
    tree = _tree()
    if "verl" not in sys.modules:
        import_from(tree)
    return tree


RENDERERS: dict[str, object] = {}


def load_renderer(name: str) -> object:
    """The renderer of a family of `real_tokenizers.FAMILIES`, made once a run; skips where it cannot be fetched."""
    if name not in RENDERERS:
        from verl.experimental.agent_loop.chat_proxy.rendering import Renderer

        try:
            tokenizer, stops = real_tokenizers.load(name)
        except real_tokenizers.Unavailable as reason:
            pytest.skip(str(reason))
        RENDERERS[name] = Renderer(tokenizer, stop_ids=stops)
    return RENDERERS[name]


@pytest.fixture
def renderer(request: pytest.FixtureRequest, proxy_tree: Path) -> object:
    """A real tokenizer and chat template; parametrize it indirectly with names of families."""
    return load_renderer(request.param)


FIGURES: Counter[str] = Counter()
"""What the random trials of all processes were made of."""


def pytest_configure(config: pytest.Config) -> None:
    """Fetches the templates before processes that run tests in parallel all want to; they say why they can't be had."""
    if not hasattr(config, "workerinput"):
        with contextlib.suppress(real_tokenizers.Unavailable):
            real_tokenizers.trl_templates()
            if os.environ.get("PROXY_TESTS") == "all":
                real_tokenizers.llama_cpp_templates()


def pytest_sessionfinish(session: pytest.Session) -> None:
    FIGURES.update(getattr(sys.modules.get("test_property"), "FIGURES", {}))
    if hasattr(session.config, "workerinput"):
        session.config.workeroutput["figures"] = dict(FIGURES)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """pytest-xdist: a process that ran tests has ended."""
    FIGURES.update(getattr(node, "workeroutput", {}).get("figures", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What the random trials were made of."""
    if FIGURES:
        told = ", ".join(f"{count} {name}" for name, count in FIGURES.items())
        terminalreporter.write_line(f"chat proxy, random trials: {told}")
