"""The dispatch logger alone: what a line says, when there is one, and what happens when it cannot be written."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
from io import FileIO
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from dispatch_fakes import (
    AttentionState,
    CachedRequests,
    Debugger,
    NewRequest,
    PromptLength,
    ScheduledStep,
    load_dispatch_logger,
    read_log,
)

FIELDS = [
    "source",
    "timestamp",
    "host",
    "pid",
    "rank",
    "step",
    "phase",
    "attn_state",
    "total_num_scheduled_tokens",
    "requests",
]


class Process:
    """One inference process: a debugger, the runner's table of requests, and the attached logger."""

    def __init__(self, module: ModuleType, dump_path: Path, dumped: range | set[int] | None = None) -> None:
        self.folder = dump_path / str(os.getpid())
        self.debugger = Debugger(dump_path, dumped)
        self.table: dict[str, PromptLength] = {}
        self.dispatch_logger = module.attach_dispatch_logger(self.debugger, self.table)

    def run(self, step: ScheduledStep, attn_state: AttentionState | None = AttentionState.ChunkedPrefill) -> None:
        self.debugger.service.start()
        self.dispatch_logger.log_step(step, attn_state)
        self.debugger.service.finish()

    def run_one(
        self,
        tokens: int,
        *,
        prompt: int,
        new: int | None = None,
        cached: tuple[int, int] | None = None,
        resumed: bool = False,
        drafts: int = 0,
    ) -> dict[str, Any]:
        """Log a step with the one request "r"; `new`: computed tokens, `cached`: computed and output tokens."""
        step = ScheduledStep(num_scheduled_tokens={"r": tokens})
        if new is not None:
            step.scheduled_new_reqs.append(NewRequest("r", new))
        if cached is not None:
            step.scheduled_cached_reqs.add("r", *cached, resumed=resumed)
        if drafts:
            step.scheduled_spec_decode_tokens["r"] = [-1] * drafts
        self.table["r"] = PromptLength(prompt)
        self.run(step)
        return read_log(self.folder)[-1]


def one(**run_one_arguments: Any) -> dict[str, Any]:
    return run_one_arguments


@pytest.fixture
def process(module: ModuleType, tmp_path: Path) -> Process:
    return Process(module, tmp_path)


def two_request_step() -> ScheduledStep:
    step = ScheduledStep(
        scheduled_new_reqs=[NewRequest("prompt", 0)],
        num_scheduled_tokens={"answer": 1, "prompt": 26},
    )
    step.scheduled_cached_reqs.add("answer", 40, num_output=9)
    return step


def test_line_says_which_requests_are_in_the_step(process: Process) -> None:
    process.table.update(prompt=PromptLength(26), answer=PromptLength(32))
    process.debugger.service.current_rank = 3
    process.run(two_request_step())

    [line] = read_log(process.folder)
    assert list(line) == FIELDS
    timestamp = line.pop("timestamp")
    assert len(timestamp) == len("2026-05-13T10:00:00") and timestamp[10] == "T"
    assert line == {
        "source": "dispatch_logger",
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "rank": 3,
        "step": 0,
        "phase": "prefill",
        "attn_state": "ChunkedPrefill",
        "total_num_scheduled_tokens": 27,
        "requests": [
            {
                "request_id": "prompt",
                "type": "new",
                "tokens": 26,
                "num_computed_tokens": 0,
                "num_prompt_tokens": 26,
                "phase": "prefill",
                "prefill_complete": True,
                "resumed": False,
            },
            {
                "request_id": "answer",
                "type": "cached",
                "tokens": 1,
                "num_computed_tokens": 40,
                "num_prompt_tokens": 32,
                "phase": "decode",
                "prefill_complete": True,
                "resumed": False,
            },
        ],
    }


@pytest.mark.parametrize(
    ("request_kwargs", "phase", "complete", "line_phase"),
    [
        pytest.param(one(tokens=26, prompt=26, new=0), "prefill", True, "prefill", id="full prefill"),
        pytest.param(one(tokens=1, prompt=33, new=32), "prefill", True, "prefill", id="prefix hit, 1 token"),
        pytest.param(one(tokens=10, prompt=26, new=16), "prefill", True, "prefill", id="prefix hit, partial"),
        pytest.param(one(tokens=256, prompt=300, new=0), "prefill", False, "prefill", id="chunk 1"),
        pytest.param(one(tokens=44, prompt=300, cached=(256, 0)), "prefill", True, "prefill", id="chunk 2"),
        pytest.param(one(tokens=1, prompt=257, cached=(256, 0)), "prefill", True, "prefill", id="last chunk, 1 token"),
        pytest.param(one(tokens=1, prompt=26, cached=(26, 1)), "decode", True, "decode", id="first decode"),
        pytest.param(one(tokens=1, prompt=26, cached=(30, 5)), "decode", True, "decode", id="decode"),
        pytest.param(one(tokens=4, prompt=26, cached=(30, 5), drafts=3), "decode", True, "decode", id="drafts"),
        pytest.param(one(tokens=35, prompt=26, cached=(0, 9), resumed=True), "resumed", True, "prefill", id="resumed"),
        pytest.param(
            one(tokens=16, prompt=26, cached=(0, 9), resumed=True), "resumed", False, "prefill", id="resumed, chunk 1"
        ),
        pytest.param(
            one(tokens=12, prompt=26, cached=(16, 9)), "resumed", True, "prefill", id="resumed, chunk 2 of prompt"
        ),
        pytest.param(
            one(tokens=7, prompt=26, cached=(28, 9)), "resumed", True, "prefill", id="resumed, chunk 3 after prompt"
        ),
        pytest.param(
            one(tokens=10, prompt=26, cached=(0, 0), resumed=True), "resumed", False, "prefill", id="resumed in prompt"
        ),
    ],
)
def test_phase_of_a_request(
    process: Process, request_kwargs: dict[str, Any], phase: str, complete: bool, line_phase: str
) -> None:
    line = process.run_one(**request_kwargs)
    [request] = line["requests"]
    assert (request["phase"], request["prefill_complete"], line["phase"]) == (phase, complete, line_phase)
    assert request["resumed"] is (phase == "resumed")
    assert request["num_prompt_tokens"] == request_kwargs["prompt"]
    assert request.get("num_draft_tokens") == (request_kwargs.get("drafts") or None)


def test_decode_only_batch_is_decode_whatever_the_attention_state(process: Process) -> None:
    process.table["r"] = PromptLength(8)
    step = ScheduledStep(num_scheduled_tokens={"r": 1})
    step.scheduled_cached_reqs.add("r", 8, num_output=1)
    for attn_state in [*AttentionState, None]:
        process.run(step, attn_state)
    lines = read_log(process.folder)
    assert {line["phase"] for line in lines} == {"decode"}
    assert [line["attn_state"] for line in lines] == [*AttentionState.__members__, None]


def test_request_ids_are_written_as_they_are(process: Process) -> None:
    for req_id in ('a"b\\c', "编号-1", "0_" + "f" * 32 + "-0badcafe", "line\nbreak"):
        process.table[req_id] = PromptLength(1)
        process.run(ScheduledStep([NewRequest(req_id, 0)], num_scheduled_tokens={req_id: 1}))
        assert read_log(process.folder)[-1]["requests"][0]["request_id"] == req_id
    assert len((process.folder / "dispatch_log.jsonl").read_bytes().splitlines()) == 4


def test_line_is_the_same_without_msgspec(
    vllm_ascend_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = []
    for blocked in (False, True):
        if blocked:
            monkeypatch.setitem(sys.modules, "msgspec.json", None)
        module = load_dispatch_logger(vllm_ascend_tree)
        assert (module.encode.__module__ == module.__name__) or not blocked
        process = Process(module, tmp_path / str(blocked))
        process.table['编号"-1'] = PromptLength(1)
        process.run(ScheduledStep([NewRequest('编号"-1', 0)], num_scheduled_tokens={'编号"-1': 1}))
        line = (process.folder / "dispatch_log.jsonl").read_text(encoding="utf-8")
        lines.append(re.sub(r'"timestamp":"[^"]*"', "", line))
    assert lines[0] == lines[1]


# ---- when there is a line


def test_only_dumped_steps_have_a_line_with_their_number(module: ModuleType, tmp_path: Path) -> None:
    process = Process(module, tmp_path, dumped={2, 5})
    process.table.update(prompt=PromptLength(26), answer=PromptLength(32))
    for _ in range(8):
        process.run(two_request_step())
    assert [line["step"] for line in read_log(process.folder)] == [2, 5]


def test_rank_is_zero_without_torch_distributed(process: Process) -> None:
    assert process.run_one(1, prompt=1, new=0)["rank"] == 0


def test_log_follows_the_dumps_of_a_reloaded_configuration(process: Process, tmp_path: Path) -> None:
    pid = str(os.getpid())
    process.run_one(1, prompt=1, new=0)
    process.debugger.reload(tmp_path, dump_enable=True)
    assert vars(process.debugger.service.config) == {"dump_path": str(tmp_path / pid), "dump_enable": True}
    process.run_one(1, prompt=1, new=0)
    process.debugger.reload(tmp_path / "second")
    process.folder = tmp_path / "second" / pid
    process.run_one(1, prompt=1, new=0)
    process.debugger.reload(tmp_path)
    process.folder = tmp_path / pid
    process.run_one(1, prompt=1, new=0)

    assert [line["step"] for line in read_log(tmp_path / pid)] == [0, 1, 3]
    assert [line["step"] for line in read_log(tmp_path / "second" / pid)] == [2]


def test_debugger_keeps_its_own_dump_path(process: Process, tmp_path: Path) -> None:
    assert process.debugger.config.dump_path == str(tmp_path)
    assert process.debugger.service.config.dump_path == str(process.folder)


def test_msprobe_without_reload_is_fine(module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("dispatch_fakes.Service.apply_runtime_config")
    assert Process(module, tmp_path).run_one(1, prompt=1, new=0)["step"] == 0


def test_second_runner_of_a_process_shares_the_log(module: ModuleType, process: Process) -> None:
    process.run_one(1, prompt=1, new=0)
    second_table = {"r": PromptLength(7)}
    second = module.attach_dispatch_logger(process.debugger, second_table)
    assert second is process.dispatch_logger
    process.run(ScheduledStep([NewRequest("r", 0)], num_scheduled_tokens={"r": 7}))
    assert [line["requests"][0]["num_prompt_tokens"] for line in read_log(process.folder)] == [1, 7]


# ---- start-up refuses what would spoil the dumps


def test_a_log_of_another_process_is_refused(module: ModuleType, process: Process, tmp_path: Path) -> None:
    process.run_one(1, prompt=1, new=0)
    with pytest.raises(RuntimeError, match=r"dispatch_log.jsonl already exists: .* Set dump_path"):
        Process(module, tmp_path)
    assert len(read_log(process.folder)) == 1


def test_dump_unsafe_appends_to_it_with_a_warning(
    module: ModuleType,
    process: Process,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    process.run_one(1, prompt=1, new=0)
    monkeypatch.setenv("DUMP_UNSAFE", "1")
    Process(module, tmp_path).run_one(1, prompt=1, new=0)
    assert [line["step"] for line in read_log(process.folder)] == [0, 0]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "DUMP_UNSAFE=1 appends" in caplog.text


def test_dump_unsafe_says_nothing_in_a_new_folder(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DUMP_UNSAFE", "1")
    Process(module, tmp_path)
    assert not caplog.records


def test_a_dump_path_that_cannot_be_made_is_refused(module: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RuntimeError, match=r"cannot create .*: Not a directory\. Set dump_path"):
        Process(module, tmp_path / "file")


# ---- a failing log never harms the run


@pytest.mark.parametrize(
    ("breakage", "cause"),
    [
        (lambda process: process.table.clear(), "KeyError"),
        (lambda process: process.table.update(r=PromptLength("eight")), "TypeError"),  # type: ignore[arg-type]
        (lambda process: delattr(process.debugger.service, "primitive_switch"), "AttributeError"),
    ],
    ids=["request not in the table", "bad data", "unknown msprobe"],
)
def test_failure_warns_once_with_the_cause(
    process: Process, caplog: pytest.LogCaptureFixture, breakage: Any, cause: str
) -> None:
    process.table["r"] = PromptLength(8)
    step = ScheduledStep([NewRequest("r", 0)], num_scheduled_tokens={"r": 8})
    process.debugger.service.start()
    breakage(process)
    for _ in range(3):
        process.dispatch_logger.log_step(step, AttentionState.PrefillNoCache)
    [record] = caplog.records
    assert record.levelname == "WARNING" and cause in record.getMessage() and "step 0" in record.getMessage()
    assert read_log(process.folder) == []


def test_a_reload_into_a_folder_of_another_process_warns(
    process: Process, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    taken = tmp_path / "second" / str(os.getpid())
    taken.mkdir(parents=True)
    (taken / "dispatch_log.jsonl").touch()
    process.debugger.reload(tmp_path / "second")
    process.table["r"] = PromptLength(1)
    process.run(ScheduledStep([NewRequest("r", 0)], num_scheduled_tokens={"r": 1}))
    assert "already exists" in caplog.text
    assert read_log(taken) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_disk_full_warns_once_and_goes_on(process: Process, caplog: pytest.LogCaptureFixture) -> None:
    process.run_one(1, prompt=1, new=0)
    files = process.dispatch_logger._files
    [(folder, log)] = files.items()
    files[folder] = FileIO("/dev/full", "w")
    for _ in range(3):
        process.run(ScheduledStep())
    files[folder].close()
    files[folder] = log
    process.run_one(1, prompt=1, new=0)

    [record] = caplog.records
    assert "No space left on device" in record.getMessage()
    assert [line["step"] for line in read_log(process.folder)] == [0, 4]


@pytest.mark.parametrize("missing", [40, 1], ids=["half a line", "all but the newline"])
def test_a_line_written_in_part_leaves_the_log_whole(
    process: Process, missing: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk fills up in the middle of a line: the kernel takes the bytes that fit."""
    resource = pytest.importorskip("resource")
    log = process.folder / "dispatch_log.jsonl"
    process.run(ScheduledStep())
    size = log.stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * size - missing, hard))
        process.run(ScheduledStep())
        assert log.stat().st_size == size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        process.run(ScheduledStep())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    process.run(ScheduledStep())

    assert [line["step"] for line in read_log(process.folder)] == [0, 3]
    [record] = caplog.records
    assert "short write" in record.getMessage()


def test_each_line_is_one_write(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[bytes] = []

    class Counting(FileIO):
        def write(self, data: bytes) -> int:  # type: ignore[override]
            writes.append(data)
            return super().write(data)

    [(folder, log)] = process.dispatch_logger._files.items()
    process.dispatch_logger._files[folder] = Counting(log.name, "a")
    for _ in range(3):
        process.run_one(1, prompt=1, new=0)
    assert len(writes) == 3
    assert all(data.endswith(b"\n") and data.count(b"\n") == 1 for data in writes)


def test_the_step_is_not_changed(process: Process) -> None:
    """The runner still needs the scheduler's output after the line is written."""
    process.table.update(prompt=PromptLength(26), answer=PromptLength(32))
    step = two_request_step()
    process.run(step)
    assert step == two_request_step()
    assert step.scheduled_cached_reqs == CachedRequests(["answer"], set(), [40], [9])
