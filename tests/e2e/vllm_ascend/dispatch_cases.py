"""What the engine is made to do, and the dispatch log that has to come of it.

A case runs in a process of its own, with msprobe dumping under `Job.dump_path`. `Case.lines` is the whole log, a string
for each line:

    step line-phase: request type phase tokens@computed/prompt[ +drafts][ incomplete]; next request ...
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from ascend_engine import VOCABULARY, Engine, Options, make_runner, start_worker

PROMPT = list(range(26))


@dataclass
class Job:
    """One process's dump: where it goes, and how msprobe is configured."""

    folder: Path

    @property
    def dump_path(self) -> Path:
        return self.folder / "dump"

    @property
    def config_file(self) -> Path:
        return self.folder / "config.json"

    def configure(self, dump_path: Path | None = None, **changes: Any) -> None:
        """Write msprobe's configuration: layer statistics of every step, with `changes`."""
        config = {
            "task": "statistics",
            "dump_path": str(dump_path or self.dump_path),
            "rank": [],
            "step": [],
            "level": "L0",
            "async_dump": False,
            "statistics": {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"},
        }
        self.config_file.write_text(json.dumps(config | changes))

    def engine(self, options: Options | None = None) -> Engine:
        return Engine(replace(options or Options(), dump_config=self.config_file))


@dataclass(frozen=True)
class Case:
    name: str
    run: Callable[[Job], list[str] | None]
    """Drives an engine; may return the lines that have to come of it."""
    lines: tuple[str, ...] = ()
    moved_lines: tuple[str, ...] = ()
    """Of the log under `dump2/`, where a case moves the dump."""
    shared_steps: tuple[int, ...] = ()
    """Numbers that msprobe gave to a step that failed and to the one after it."""
    warnings: tuple[str, ...] = ()
    """A part of each warning, in order."""


CASES: list[Case] = []


def case(
    *lines: str, moved: tuple[str, ...] = (), shared: tuple[int, ...] = (), warnings: tuple[str, ...] = ()
) -> Callable[..., Any]:
    def register(run: Callable[[Job], None]) -> Callable[[Job], None]:
        CASES.append(Case(run.__name__, run, lines, moved, shared, warnings))
        return run

    return register


# ---- what a request computes


@case(
    "0 prefill: a new prefill 26@0/26",
    "1 decode: a cached decode 1@26/26",
    "2 decode: a cached decode 1@27/26",
)
def prefill_then_decode(job: Job) -> None:
    job.configure()
    engine = job.engine()
    engine.add("a", PROMPT, answer=3)
    engine.run_dry()


@case(
    "0 prefill: a new prefill 26@0/26",
    "1 prefill: b new prefill 40@0/40; a cached decode 1@26/26",
    "2 decode: a cached decode 1@27/26; b cached decode 1@40/40",
)
def decode_with_new_prefill(job: Job) -> None:
    job.configure()
    engine = job.engine(Options(prefix_caching=False))
    engine.add("a", PROMPT, answer=3)
    engine.step()
    engine.add("b", list(range(40)), answer=2)
    engine.run_dry()


@case("0 prefill: a new prefill 33@0/33", "1 prefill: b new prefill 1@32/33")
def prefix_hit_leaves_one_token(job: Job) -> None:
    job.configure()
    engine = job.engine()
    for request_id in "ab":
        engine.add(request_id, list(range(33)), answer=1)
        engine.step()


@case("0 prefill: a new prefill 26@0/26", "1 prefill: b new prefill 10@16/26")
def prefix_hit_in_part(job: Job) -> None:
    job.configure()
    engine = job.engine()
    for request_id in "ab":
        engine.add(request_id, PROMPT, answer=1)
        engine.step()


@case("0 prefill: a new prefill 256@0/300 incomplete", "1 prefill: a cached prefill 44@256/300")
def chunked_prefill(job: Job) -> None:
    job.configure()
    engine = job.engine()
    engine.add("a", [token % 60 for token in range(300)], answer=1)
    engine.run_dry()


@case("0 prefill: a new prefill 256@0/257 incomplete", "1 prefill: a cached prefill 1@256/257")
def last_chunk_of_one_token(job: Job) -> None:
    job.configure()
    engine = job.engine()
    engine.add("a", [token % 60 for token in range(257)], answer=1)
    engine.run_dry()


@case(
    "0 prefill: a new prefill 26@0/26",
    "1 decode: a cached decode 4@26/26 +3",
    "2 decode: a cached decode 4@28/26 +3",
    "3 decode: a cached decode 4@30/26 +3",
)
def speculative_decoding(job: Job) -> None:
    job.configure()
    engine = job.engine(Options(draft_tokens=3))
    engine.add("a", PROMPT, answer=7)
    engine.run_dry()


@case(
    "0 prefill: a new prefill 30@0/30; b new prefill 2@0/30 incomplete",
    "1 prefill: a cached decode 1@30/30; b cached prefill 28@2/30",
    "2 decode: a cached decode 1@31/30; b cached decode 1@30/30",
    "3 decode: a cached decode 1@32/30; b cached decode 1@31/30",
    "4 decode: a cached decode 1@33/30",
    "5 prefill: a cached decode 1@34/30; b cached resumed 31@0/30",
    "6 prefill: b cached resumed 2@31/30",
    "7 decode: b cached decode 1@33/30",
)
def preempted_and_resumed_in_chunks(job: Job) -> None:
    """Four blocks hold 32 tokens of both requests; the second one is thrown out when they grow."""
    job.configure()
    engine = job.engine(Options(num_blocks=6, prefix_caching=False, token_budget=32))
    engine.add("a", list(range(30)), answer=6)
    engine.add("b", list(range(30)), answer=5)
    engine.run_dry()


@case(
    "0 prefill: a new prefill 26@0/26",
    "1 prefill: a new prefill 20@0/20",
)
def aborted_and_sent_again_under_the_same_id(job: Job) -> None:
    job.configure()
    engine = job.engine(Options(prefix_caching=False))
    engine.add("a", PROMPT, answer=9)
    engine.step()
    engine.abort("a")
    engine.add("a", list(range(20)), answer=1)
    engine.step()


# ---- how a step ends


@case("0 prefill: a new prefill 26@0/26", "1 prefill: b new prefill 5@0/5; c new prefill 6@0/6")
def pooling(job: Job) -> None:
    job.configure()
    engine = job.engine(Options(pooling=True))
    engine.add("a", PROMPT, answer=1)
    engine.step()
    engine.add("b", list(range(5)), answer=1)
    engine.add("c", list(range(6)), answer=1)
    engine.run_dry()


@case("0 prefill: a new prefill 26@0/26", "1 prefill: b new prefill 8@0/8")
def pipeline_stage_that_is_not_the_last(job: Job) -> None:
    """It has no tokens to give back: only what is scheduled for the first time is run."""
    job.configure()
    engine = job.engine(Options(last_stage=False, prefix_caching=False))
    for request_id, length in (("a", 26), ("b", 8)):
        engine.add(request_id, list(range(length)), answer=1)
        engine.execute(engine.scheduler.schedule())


@case(
    "0 prefill: a new prefill 26@0/26",
    "1 prefill: b new prefill 9@0/9; a cached decode 1@26/26",
    "2 decode: a cached decode 1@27/26; b cached decode 1@9/9",
)
def asynchronous_scheduling(job: Job) -> None:
    job.configure()
    engine = job.engine(Options(async_scheduling=True, prefix_caching=False))
    engine.add("a", PROMPT, answer=3)
    engine.step()
    engine.add("b", list(range(9)), answer=2)
    engine.run_dry()


@case(
    "0 prefill: a new prefill 26@0/26",
    "1 decode: a cached decode 4@26/26 +3",
    "2 decode: a cached decode 4@30/26 +3",
)
def asynchronous_scheduling_with_drafts(job: Job) -> None:
    """The scheduler counts drafts as computed until it hears that they were rejected."""
    job.configure()
    engine = job.engine(Options(async_scheduling=True, draft_tokens=3))
    engine.add("a", PROMPT, answer=40)
    for _ in range(3):
        engine.step()


# ---- steps without a dump


@case("0 prefill: a new prefill 26@0/26", "1 prefill: b new prefill 7@0/7")
def steps_without_tokens(job: Job) -> None:
    job.configure()
    engine = job.engine()
    engine.step()
    for request_id, length in (("a", 26), ("b", 7)):
        engine.add(request_id, list(range(length)), answer=1)
        engine.run_dry()
        engine.step()


@case("0 prefill: a new prefill 26@0/26")
def steps_that_only_move_kv_cache(job: Job) -> None:
    job.configure()
    engine = job.engine(Options(kv_transfer=True))
    engine.step_without_output()
    engine.add("a", PROMPT, answer=1)
    engine.step()
    engine.step_without_output()


@case()
def steps_that_only_encode(job: Job) -> list[str]:
    """Newer runners dump what the encoder computes, older ones nothing."""
    job.configure()
    engine = job.engine(Options(encoder_only=True))
    engine.add("a", PROMPT, answer=1)
    engine.step_without_output()
    return ["0 prefill: a new prefill 26@0/26"] if "_finalize_dump_data" in vars(type(engine.runner)) else []


@case("0 prefill: a new prefill 26@0/26", "1 decode: a cached decode 1@26/26")
def dummy_runs(job: Job) -> None:
    job.configure()
    engine = job.engine()
    engine.runner._dummy_run(1)
    engine.add("a", PROMPT, answer=2)
    engine.step()
    engine.runner._dummy_run(1)
    engine.step()
    engine.runner._dummy_run(1)


@case("0 prefill: a new prefill 26@0/26")
def dummy_run_of_an_idle_external_launcher(job: Job) -> None:
    job.configure()
    engine = job.engine(Options(external_launcher=True))
    engine.step()
    engine.add("a", PROMPT, answer=1)
    engine.step()
    engine.step()


@case("0 prefill: b new prefill 20@0/20", "1 prefill: c new prefill 5@0/5", shared=(0,))
def exception_in_the_model(job: Job) -> None:
    """The engine dies of it in reality. Were it to go on, the next step takes over the number, and the line is its."""
    job.configure()
    engine = job.engine(Options(prefix_caching=False))
    forward = engine.runner.model.layers[1].forward
    engine.add("a", PROMPT, answer=1)
    engine.runner.model.layers[1].forward = lambda hidden: hidden[10_000]
    try:
        engine.step()
    except IndexError:
        pass
    else:
        raise AssertionError("the model was meant to fail")
    engine.runner.model.layers[1].forward = forward
    engine.abort("a")
    for request_id, length in (("b", 20), ("c", 5)):
        engine.add(request_id, list(range(length)), answer=1)
        engine.step()


@case("1 decode: a cached decode 1@26/26", "3 decode: a cached decode 1@28/26")
def chosen_steps(job: Job) -> None:
    """After the last of them msprobe's own number stays where it is."""
    job.configure(step=[1, 3])
    engine = job.engine()
    engine.add("a", PROMPT, answer=8)
    engine.run_dry()


@case()
def another_rank(job: Job) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{job.folder}/store", rank=0, world_size=1)
    job.configure(rank=[1])
    engine = job.engine()
    engine.add("a", PROMPT, answer=2)
    engine.run_dry()


@case("0 prefill: a new prefill 26@0/26")
def this_rank(job: Job) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{job.folder}/store", rank=0, world_size=1)
    job.configure(rank=[0])
    engine = job.engine()
    engine.add("a", PROMPT, answer=1)
    engine.run_dry()


@case("0 prefill: a new prefill 26@0/26")
def operators_instead_of_layers(job: Job) -> None:
    job.configure(level="L1")
    engine = job.engine()
    engine.add("a", PROMPT, answer=1)
    engine.run_dry()


def _reload(job: Job, engine: Engine, **changes: Any) -> None:
    """Change the configuration file while the engine runs; msprobe looks at it in each start, stop and step."""
    debugger = engine.runner.debugger
    type(debugger)._CONFIG_CHECK_INTERVAL_ENABLED_S = type(debugger)._CONFIG_CHECK_INTERVAL_DISABLED_S = 0
    job.configure(**changes)


@case(
    "0 prefill: a new prefill 26@0/26",
    "3 decode: a cached decode 1@28/26",
)
def dump_switched_off_and_on(job: Job) -> None:
    job.configure(dump_enable=True)
    engine = job.engine()
    engine.add("a", PROMPT, answer=4)
    engine.step()
    _reload(job, engine, dump_enable=False)
    engine.step()
    engine.step()
    _reload(job, engine, dump_enable=True)
    engine.step()


@case("1 decode: a cached decode 1@26/26")
def dump_switched_on_late(job: Job) -> None:
    """The request's prompt length is known although its first step was not dumped."""
    job.configure(dump_enable=False)
    engine = job.engine()
    engine.add("a", PROMPT, answer=2)
    engine.step()
    _reload(job, engine, dump_enable=True)
    engine.step()


@case(
    "0 prefill: a new prefill 26@0/26",
    "2 decode: a cached decode 1@27/26",
    moved=("1 decode: a cached decode 1@26/26",),
)
def dump_moved_and_moved_back(job: Job) -> None:
    job.configure(dump_enable=True)
    engine = job.engine()
    engine.add("a", PROMPT, answer=3)
    engine.step()
    _reload(job, engine, dump_enable=True, dump_path=job.folder / "dump2")
    engine.step()
    _reload(job, engine, dump_enable=True)
    engine.step()


# ---- more than one engine, and none


@case("0 prefill: a new prefill 26@0/26", "1 prefill: a new prefill 9@0/9")
def second_engine_in_the_process(job: Job) -> None:
    job.configure()
    for length in (26, 9):
        engine = job.engine()
        engine.add("a", list(range(length)), answer=1)
        engine.run_dry()


@case()
def dump_not_asked_for(job: Job) -> None:
    engine = Engine(Options())
    engine.add("a", PROMPT, answer=2)
    engine.run_dry()
    assert engine.runner.debugger is None
    assert engine.runner._dispatch_logger is None


@case(
    warnings=(
        "npu model runner v2 is in developing",
        "dump_config_path is ignored: unset VLLM_USE_V2_MODEL_RUNNER",
        "npu model runner v2 is in developing",
    )
)
def v2_model_runner(job: Job) -> None:
    """It has no debugger: said once, and only if a dump is configured."""
    job.configure()
    start_worker(Options(dump_config=job.config_file), use_v2_model_runner=True)
    start_worker(Options(), use_v2_model_runner=True)
    start_worker(Options(dump_config=job.config_file), use_v2_model_runner=False)


@case()
def dump_of_captured_graphs(job: Job) -> None:
    """Newer runners take another dumper there, which leaves no moment for a line, and say so. Older ones refuse."""
    import msprobe.pytorch
    from vllm_ascend.worker.dispatch_logger import logger

    job.configure()
    msprobe.pytorch.AclGraphDumper = MagicMock()
    try:
        runner = make_runner(Options(dump_config=job.config_file, graph_mode=True))
    except RuntimeError as error:
        assert "only works in eager mode" in str(error)
        return
    assert runner._dispatch_logger is None
    [said] = [call.args[0] for call in logger.warning.call_args_list]
    assert "not written in graph mode; set enforce_eager=True" in said
    logger.warning.reset_mock()


# ---- random schedules


def random_schedule(options: Options, seed: int, job: Job) -> list[str]:
    """Requests of random lengths through a cache that is too small for them; the lines follow from their histories."""
    job.configure()
    engine = job.engine(replace(options, num_blocks=12, token_budget=48))
    choose = random.Random(seed)
    lines: list[str] = []
    seen: set[str] = set()
    preempted: set[str] = set()
    lost: dict[str, int] = {}  # tokens in the cache when it was last preempted; 0 if it had generated none by then

    for number in range(60):
        if number % 4 == 0 and number < 40:
            prompt = [token % VOCABULARY for token in range(choose.randrange(1, 90))]
            engine.add(f"r{number}", prompt, answer=choose.randrange(1, 60))
        requests = dict(engine.scheduler.requests)
        before = {req_id: (request.num_preemptions, known_tokens(request) - 1) for req_id, request in requests.items()}
        scheduled = engine.step()
        for req_id, request in requests.items():
            preemptions, newest = before[req_id]
            if request.num_preemptions > preemptions:
                preempted.add(req_id)
                lost[req_id] = newest if newest >= request.num_prompt_tokens else 0

        texts = []
        again = scheduled.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        computed |= dict(zip(again.req_ids, again.num_computed_tokens, strict=True))
        for req_id, start in computed.items():
            prompt_tokens = requests[req_id].num_prompt_tokens
            tokens = scheduled.num_scheduled_tokens[req_id]
            drafts = len(scheduled.scheduled_spec_decode_tokens.get(req_id, ()))
            if req_id in preempted or start < lost.get(req_id, 0):
                phase = "resumed"
            else:
                phase = "prefill" if start < prompt_tokens else "decode"
            texts.append(
                f"{req_id} {'cached' if req_id in seen else 'new'} {phase} {tokens}@{start}/{prompt_tokens}"
                + (f" +{drafts}" if drafts else "")
                + ("" if start + tokens >= prompt_tokens else " incomplete")
            )
            seen.add(req_id)
            preempted.discard(req_id)
        if texts:
            line_phase = "prefill" if any(" prefill " in text or " resumed " in text for text in texts) else "decode"
            lines.append(f"{len(lines)} {line_phase}: {'; '.join(texts)}")
    assert lost, "the cache was meant to be too small"
    return lines


def known_tokens(request: Any) -> int:
    """Prompt and generated tokens, with those that a running step is about to generate."""
    return request.num_tokens + request.num_output_placeholders


for _name, _options in {
    "plain": Options(prefix_caching=False),
    "prefix_caching": Options(),
    "drafts": Options(draft_tokens=3),
    "asynchronous": Options(async_scheduling=True),
}.items():
    for _seed in (1, 2):
        CASES.append(Case(f"random_schedule_{_name}_{_seed}", partial(random_schedule, _options, _seed)))
