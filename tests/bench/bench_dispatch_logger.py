"""What one line of the dispatch log costs.

    python tests/bench/bench_dispatch_logger.py [--tree TREE] [--requests 256] [--steps 100000]

Prints the median time of `log_step` against its peer, the shorter line of the dump workflow's first version (kept
below as it was published), measured in turns in one process. Then logs `--steps` steps in a row while requests come
and go, and prints the median at the beginning and at the end, and what the process's memory grew by.

Exit code 1: more than 1.5 times the peer, or the last steps cost over 1.5 times the first, or memory grew by over 4 MB.
Exit code 2: without msgspec, which every vLLM installation has, the figures would be those of the fallback.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "patched" / "vllm_ascend"), str(TESTS), str(TESTS.parent / "tool")]

from dispatch_fakes import (  # noqa: E402
    AttentionState,
    Debugger,
    NewRequest,
    PromptLength,
    ScheduledStep,
    load_dispatch_logger,
)

PROMPT_TOKENS = 512
MAX_RATIO = 1.5
MAX_GROWTH_MB = 4.0


class PeerLogger:
    """The dispatch logger as first published with the dump workflow."""

    def __init__(self, dump_path: str, pid: int, rank: int = 0):
        log_dir = Path(dump_path) / str(pid)
        log_dir.mkdir(parents=True, exist_ok=True)
        self._fp = open(log_dir / "dispatch_log.jsonl", "w")  # noqa: PTH123, SIM115
        self._step_counter = 0
        self._pid = pid
        self._rank = rank

    def log_step(self, scheduler_output: Any, attn_state: Enum) -> None:
        from vllm_ascend.attention.attention_v1 import AscendAttentionState

        is_prefill = attn_state != AscendAttentionState.DecodeOnly

        requests = []
        for req in scheduler_output.scheduled_new_reqs:
            requests.append(
                {
                    "request_id": req.req_id,
                    "type": "new",
                    "tokens": scheduler_output.num_scheduled_tokens.get(req.req_id, 0),
                }
            )
        for req_id in scheduler_output.scheduled_cached_reqs.req_ids:
            requests.append(
                {
                    "request_id": req_id,
                    "type": "cached",
                    "tokens": scheduler_output.num_scheduled_tokens.get(req_id, 0),
                }
            )

        record = {
            "source": "dispatch_logger",
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime()),
            "pid": self._pid,
            "rank": self._rank,
            "step": self._step_counter,
            "phase": "prefill" if is_prefill else "decode",
            "total_num_scheduled_tokens": scheduler_output.total_num_scheduled_tokens,
            "requests": requests,
        }
        self._fp.write(json.dumps(record, ensure_ascii=False) + "\n")
        self._fp.flush()
        self._step_counter += 1


class Load:
    """Running requests of which the oldest finishes in every step and a new one takes its place."""

    def __init__(self, num_requests: int) -> None:
        self.table: dict[str, PromptLength] = {}
        self._computed: dict[str, int] = {}
        self._num_requests = num_requests
        self._started = 0

    def next_step(self) -> ScheduledStep:
        step = ScheduledStep()
        if len(self._computed) == self._num_requests:
            finished = next(iter(self._computed))
            del self._computed[finished], self.table[finished]
        for req_id, computed in self._computed.items():
            step.scheduled_cached_reqs.add(req_id, computed, num_output=computed - PROMPT_TOKENS + 1)
            step.num_scheduled_tokens[req_id] = 1
            self._computed[req_id] = computed + 1
        while len(self._computed) < self._num_requests:
            req_id = f"{self._started:032x}-{self._started % 2**32:08x}"
            self._started += 1
            step.scheduled_new_reqs.append(NewRequest(req_id, 0))
            step.num_scheduled_tokens[req_id] = self._computed[req_id] = PROMPT_TOKENS
            self.table[req_id] = PromptLength(PROMPT_TOKENS)
        return step


def timed(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def against_peer(module: ModuleType, folder: Path, num_requests: int, steps: int) -> tuple[float, float]:
    """Median seconds of one line: ours, the peer's."""
    load = Load(num_requests)
    debugger = Debugger(folder / "ours")
    ours = module.attach_dispatch_logger(debugger, load.table)
    peer = PeerLogger(str(folder / "peer"), os.getpid())
    our_times, peer_times = [], []
    for _ in range(steps):
        step = load.next_step()
        debugger.service.start()
        our_times.append(timed(lambda step=step: ours.log_step(step, AttentionState.ChunkedPrefill)))  # type: ignore[misc]
        debugger.service.finish()
        peer_times.append(timed(lambda step=step: peer.log_step(step, AttentionState.ChunkedPrefill)))  # type: ignore[misc]
    return statistics.median(our_times), statistics.median(peer_times)


def endurance(module: ModuleType, folder: Path, num_requests: int, steps: int) -> tuple[float, float, float]:
    """Median seconds of the first and of the last tenth of `steps` steps, and the growth in memory in MB."""
    load = Load(num_requests)
    debugger = Debugger(folder)
    ours = module.attach_dispatch_logger(debugger, load.table)
    log = folder / str(os.getpid()) / "dispatch_log.jsonl"
    medians: list[float] = []
    settled = 0.0
    tenth = max(steps // 10, 1)
    for part in range(10):
        times = []
        for index in range(tenth):
            step = load.next_step()
            debugger.service.start()
            times.append(timed(lambda step=step: ours.log_step(step, AttentionState.ChunkedPrefill)))  # type: ignore[misc]
            debugger.service.finish()
            if index % 1000 == 999:
                os.truncate(log, 0)  # 100,000 lines of 256 requests are 5 GB
        medians.append(statistics.median(times))
        gc.collect()
        if part == 0:
            settled = resident_mb()
    return medians[0], medians[-1], resident_mb() - settled


def default_tree() -> Path:
    import trees

    return trees.applied(trees.PROJECT.pins.of("vllm-ascend")[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--tree", type=Path, help="a vllm-ascend tree with the series applied (default: the first pin's)"
    )
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--steps", type=int, default=100_000)
    args = parser.parse_args()

    attention = ModuleType("vllm_ascend.attention.attention_v1")
    attention.AscendAttentionState = AttentionState  # type: ignore[attr-defined]
    sys.modules["vllm_ascend"] = ModuleType("vllm_ascend")
    sys.modules["vllm_ascend.attention"] = ModuleType("vllm_ascend.attention")
    sys.modules["vllm_ascend.attention.attention_v1"] = attention
    module = load_dispatch_logger(args.tree or default_tree())

    if module.encode.__module__ == module.__name__:
        print("bench_dispatch_logger: msgspec is missing: pip install msgspec", file=sys.stderr)
        return 2

    print(f"command: python {' '.join(sys.argv)}")
    with tempfile.TemporaryDirectory() as folder:
        ours, peer = against_peer(module, Path(folder) / "peer", args.requests, 2_000)
        ratio = ours / peer
        print(f"log_step, {args.requests} requests: {ours * 1e6:.0f} us, peer {peer * 1e6:.0f} us, ratio {ratio:.2f}")
        first, last, growth = endurance(module, Path(folder) / "endurance", args.requests, args.steps)
        print(
            f"{args.steps} steps: {first * 1e6:.0f} us a line in the first tenth, {last * 1e6:.0f} us in the last, "
            f"memory {growth:+.1f} MB"
        )
    return int(ratio > MAX_RATIO or last > MAX_RATIO * first or growth > MAX_GROWTH_MB)


if __name__ == "__main__":
    sys.exit(main())
