"""The dispatch log of the patched runner: its lines are the scheduler's truth, and each has its dump."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from dispatch_cases import CASES, Case


def short(line: dict[str, Any]) -> str:
    """A log line in the notation of `dispatch_cases`."""
    requests = []
    for request in line["requests"]:
        text = (
            f"{request['request_id']} {request['type']} {request['phase']} "
            f"{request['tokens']}@{request['num_computed_tokens']}/{request['num_prompt_tokens']}"
        )
        if "num_draft_tokens" in request:
            text += f" +{request['num_draft_tokens']}"
        if not request["prefill_complete"]:
            text += " incomplete"
        requests.append(text)
    return f"{line['step']} {line['phase']}: {'; '.join(requests)}"


def log_lines(folder: Path) -> list[dict[str, Any]]:
    log = folder / "dispatch_log.jsonl"
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []


def dumped_tokens(dump: Path) -> int | None:
    """Tokens that the model's embedding saw in this step; None when the dump has no layers."""
    data = json.loads(dump.read_text(encoding="utf-8"))["data"]
    embeddings = [
        value for name, value in data.items() if re.fullmatch(r"Module\.embed_tokens\..*\.forward\.\d+", name)
    ]
    return embeddings[0]["input_args"][0]["shape"][0] if embeddings else None


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: Case, written: Path) -> None:
    folder = written / case.name
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    assert result["error"] is None, result["error"]
    assert len(result["warnings"]) == len(case.warnings), result["warnings"]
    for warning, part in zip(result["warnings"], case.warnings, strict=True):
        assert part in warning

    for name, expected in (("dump", result["lines"] or case.lines), ("dump2", case.moved_lines)):
        dump = folder / name
        assert [path.name for path in dump.glob("*")] in ([], [str(result["pid"])]), "every dump is under the process"
        own = dump / str(result["pid"])
        lines = log_lines(own)
        assert [short(line) for line in lines] == list(expected)

        dumps = {int(path.parts[-3].removeprefix("step")): path for path in own.glob("step*/*/dump.json")}
        assert sorted(dumps) == [line["step"] for line in lines], "one line for each dump and one dump for each line"
        for line in lines:
            assert line["total_num_scheduled_tokens"] == sum(request["tokens"] for request in line["requests"])
            assert line["pid"] == result["pid"]
            assert dumps[line["step"]].parent.name in (f"rank{line['rank']}", f"proc{line['pid']}")
            if line["step"] not in case.shared_steps:
                assert dumped_tokens(dumps[line["step"]]) in (line["total_num_scheduled_tokens"], None)


def test_dumps_are_of_layers(written: Path) -> None:
    """What `test_case` compares token counts with is there."""
    [dump] = (written / "prefill_then_decode" / "dump").glob("*/step0/*/dump.json")
    assert dumped_tokens(dump) == 26


def test_ranks_are_told_apart(written: Path) -> None:
    [dump] = (written / "this_rank" / "dump").glob("*/step0/*/dump.json")
    assert dump.parent.name == "rank0"
