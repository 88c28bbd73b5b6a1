"""Random schedules: whatever the scheduler does with its requests, the log tells what each of them computed."""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from dispatch_fakes import AttentionState, Debugger, NewRequest, PromptLength, ScheduledStep, read_log
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


@dataclass
class Request:
    """One request in the model scheduler below; token counts."""

    prompt: int
    outputs: int = 0
    computed: int = 0
    scheduled_before: bool = False
    preempted: bool = False

    @property
    def to_compute(self) -> int:
        return self.prompt + self.outputs - self.computed


@dataclass
class Expected:
    phase: str
    tokens: int
    computed: int
    prompt: int
    drafts: int
    complete: bool
    kind: str


class Scheduler:
    """Schedules like vLLM's: chunks, prefix hits, drafts, preemption; what it draws decides."""

    def __init__(self) -> None:
        self.live: dict[str, Request] = {}
        self.table: dict[str, PromptLength] = {}
        self._count = 0

    def step(self, draw: st.DataObject) -> tuple[ScheduledStep, dict[str, Expected]]:
        for req_id in [r for r, request in self.live.items() if request.outputs and draw.draw(st.integers(0, 7)) == 0]:
            del self.live[req_id], self.table[req_id]
        for _ in range(draw.draw(st.integers(0, 2))):
            self.live[f"request-{self._count}"] = Request(prompt=draw.draw(st.integers(1, 40)))
            self._count += 1

        step = ScheduledStep()
        expected: dict[str, Expected] = {}
        for req_id, request in self.live.items():
            action = draw.draw(st.sampled_from(["run", "run", "run", "wait", "preempt"]))
            if action == "preempt" and request.computed:
                request.computed, request.preempted = 0, True
            elif action == "run":
                expected[req_id] = self._schedule(req_id, request, step, draw)
        return step, expected

    def _schedule(self, req_id: str, request: Request, step: ScheduledStep, draw: st.DataObject) -> Expected:
        if request.computed == 0:
            request.computed = draw.draw(st.integers(0, request.to_compute - 1))  # prefix hit
        computed = request.computed
        chunk = draw.draw(st.integers(1, request.to_compute))
        decode = request.to_compute == 1 and computed >= request.prompt
        drafts = draw.draw(st.integers(0, 3)) if decode else 0

        if request.preempted or (request.outputs and not decode):
            phase = "resumed"
        elif computed < request.prompt:
            phase = "prefill"
        else:
            phase = "decode"
        answer = Expected(
            phase,
            chunk + drafts,
            computed,
            request.prompt,
            drafts,
            computed + chunk >= request.prompt,
            "cached" if request.scheduled_before else "new",
        )

        if request.scheduled_before:
            step.scheduled_cached_reqs.add(req_id, computed, request.outputs, request.preempted)
        else:
            step.scheduled_new_reqs.append(NewRequest(req_id, computed))
            self.table[req_id] = PromptLength(request.prompt)
        if drafts:
            step.scheduled_spec_decode_tokens[req_id] = [-1] * drafts
        step.num_scheduled_tokens[req_id] = answer.tokens

        request.scheduled_before, request.preempted = True, False
        request.computed += chunk
        if request.to_compute == 0:
            accepted = draw.draw(st.integers(0, drafts))
            request.outputs += 1 + accepted
            request.computed += accepted
        return answer


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(draw=st.data(), dumped=st.sets(st.integers(0, 11)))
def test_random_schedule(module: ModuleType, draw: st.DataObject, dumped: set[int]) -> None:
    scheduler = Scheduler()
    with tempfile.TemporaryDirectory() as folder:
        debugger = Debugger(Path(folder), dumped)
        dispatch_logger = module.attach_dispatch_logger(debugger, scheduler.table)
        expected = {}
        for number in range(12):
            step, expected[number] = scheduler.step(draw)
            debugger.service.start()
            dispatch_logger.log_step(step, draw.draw(st.sampled_from(list(AttentionState))))
            debugger.service.finish()
        lines = read_log(Path(folder) / str(os.getpid()))

    assert [line["step"] for line in lines] == sorted(dumped)
    for line in lines:
        requests = {request["request_id"]: request for request in line["requests"]}
        answers = expected[line["step"]]
        assert requests.keys() == answers.keys()
        for req_id, request in requests.items():
            assert answers[req_id] == Expected(
                request["phase"],
                request["tokens"],
                request["num_computed_tokens"],
                request["num_prompt_tokens"],
                request.get("num_draft_tokens", 0),
                request["prefill_complete"],
                request["type"],
            )
            assert request["resumed"] == (request["phase"] == "resumed")
        assert line["phase"] == ("decode" if all(a.phase == "decode" for a in answers.values()) else "prefill")
        assert line["total_num_scheduled_tokens"] == sum(a.tokens for a in answers.values())


def reachable_size(root: object) -> int:
    """Bytes of the objects that the logger alone keeps: its attributes and what they hold."""
    return sum(sys.getsizeof(value) for value in vars(root).values())


def test_logger_keeps_nothing_of_the_requests(module: ModuleType, tmp_path: Path) -> None:
    table: dict[str, PromptLength] = {}
    debugger = Debugger(tmp_path)
    dispatch_logger = module.attach_dispatch_logger(debugger, table)
    sizes = set()
    for number in range(2_000):
        req_id = f"request-{number}"
        table[req_id] = PromptLength(8)
        debugger.service.start()
        dispatch_logger.log_step(
            ScheduledStep([NewRequest(req_id, 0)], num_scheduled_tokens={req_id: 8}), AttentionState.PrefillNoCache
        )
        debugger.service.finish()
        del table[req_id]
        sizes.add(reachable_size(dispatch_logger))
    assert len(sizes) == 1
    assert table == {}
