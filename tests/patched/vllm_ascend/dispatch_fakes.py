"""The shapes that `vllm_ascend/worker/dispatch_logger.py` reads, without vLLM, torch or msprobe.

`tests/e2e/vllm_ascend` runs the same logger with the real ones; here they are small enough for property tests and for
the benchmark.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

LOGGER_FILE = Path("vllm_ascend/worker/dispatch_logger.py")
VLLM_LOGGER = "vllm"


class AttentionState(Enum):
    """Members of `AscendAttentionState`."""

    PrefillNoCache = 0
    PrefillCacheHit = 1
    DecodeOnly = 2
    ChunkedPrefill = 3
    SpecDecoding = 4


@dataclass
class NewRequest:
    """What is read of `NewRequestData`."""

    req_id: str
    num_computed_tokens: int


@dataclass
class CachedRequests:
    """What is read of `CachedRequestData`: parallel lists, one item a request."""

    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    num_computed_tokens: list[int] = field(default_factory=list)
    num_output_tokens: list[int] = field(default_factory=list)

    def add(self, req_id: str, num_computed: int, num_output: int, resumed: bool = False) -> None:
        self.req_ids.append(req_id)
        self.num_computed_tokens.append(num_computed)
        self.num_output_tokens.append(num_output)
        if resumed:
            self.resumed_req_ids.add(req_id)


@dataclass
class ScheduledStep:
    """What is read of `SchedulerOutput`."""

    scheduled_new_reqs: list[NewRequest] = field(default_factory=list)
    scheduled_cached_reqs: CachedRequests = field(default_factory=CachedRequests)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


@dataclass
class PromptLength:
    """What is read of the runner's `CachedRequestState`."""

    num_prompt_tokens: int


class Service:
    """`PrecisionDebugger.service` as far as the logger knows it; `dumped` says which steps are dumped."""

    def __init__(self, dump_path: Path, dumped: range | set[int] | None = None) -> None:
        self.config = SimpleNamespace(dump_path=str(dump_path))
        self.primitive_switch = False
        self.current_iter = 0
        self.current_rank: int | None = None
        self.dumped = dumped
        self._loop = 0

    def apply_runtime_config(self, config: Any) -> None:
        self.config = SimpleNamespace(**vars(config))

    def start(self) -> None:
        self.current_iter = self._loop
        if self.dumped is None or self.current_iter in self.dumped:
            self.primitive_switch = True

    def finish(self) -> None:
        """stop() and step()"""
        self.primitive_switch = False
        self._loop += 1


class Debugger:
    """`PrecisionDebugger`: its own configuration, and a service with a copy of it."""

    def __init__(self, dump_path: Path, dumped: range | set[int] | None = None) -> None:
        self.config = SimpleNamespace(dump_path=str(dump_path))
        self.service = Service(dump_path, dumped)

    def reload(self, dump_path: Path, **changes: Any) -> None:
        """The configuration file changed while the run goes on."""
        self.config = SimpleNamespace(dump_path=str(dump_path), **changes)
        self.service.apply_runtime_config(self.config)


def load_dispatch_logger(tree: Path) -> ModuleType:
    """Execute the logger's file in `tree` as a module, with Python's logging in place of vLLM's."""
    spec = importlib.util.spec_from_file_location("dispatch_logger", tree / LOGGER_FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    vllm_logger = ModuleType("vllm.logger")
    vllm_logger.logger = logging.getLogger(VLLM_LOGGER)  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, {"vllm": ModuleType("vllm"), "vllm.logger": vllm_logger}):
        spec.loader.exec_module(module)
    return module


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Every line of the folder's log; a line that is not one JSON object fails the test that reads it."""
    text = (folder / "dispatch_log.jsonl").read_text(encoding="utf-8")
    assert text == "" or text.endswith("\n"), "the last line is not whole"
    return [json.loads(line) for line in text.splitlines()]
