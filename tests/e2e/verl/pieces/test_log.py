"""The log's file, and the switch of a dump run on prompts."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from verl.utils.consistency_dump import prompts_only
from verl.utils.consistency_dump.training_log import TrainingLog


def never(error: Exception) -> None:
    raise AssertionError(error)


def test_one_line_for_each_step(tmp_path: Path) -> None:
    log = TrainingLog(str(tmp_path), 3, never)
    file = tmp_path / str(os.getpid()) / "update_actor_log.jsonl"
    assert not file.exists(), "nothing is written before the first step"
    log.log_step(4, {"request_ids": ["a"], "num_requests": 1})
    TrainingLog(str(tmp_path), 3, never).log_step(5, {"request_ids": ["编号"], "num_requests": 1})
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    times = [line.pop("timestamp") for line in lines]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", time) for time in times)
    common = {"source": "update_actor", "pid": os.getpid(), "rank": 3, "num_requests": 1}
    assert lines == [{**common, "step": 4, "request_ids": ["a"]}, {**common, "step": 5, "request_ids": ["编号"]}]
    assert "编号" in file.read_text(encoding="utf-8")


def test_a_line_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / str(os.getpid())).touch()  # a file where the log's folder would be
    errors: list[Exception] = []
    TrainingLog(str(tmp_path), 0, errors.append).log_step(0, {})
    assert [type(error) for error in errors] == [FileExistsError]


@pytest.mark.parametrize(("value", "meant"), [("1", True), ("0", False), (None, False)])
def test_prompts_only(monkeypatch: pytest.MonkeyPatch, value: str | None, meant: bool) -> None:
    monkeypatch.delenv("PROMPTS_ONLY", raising=False)
    if value is not None:
        monkeypatch.setenv("PROMPTS_ONLY", value)
    assert prompts_only() is meant
