"""What the training hooks cost a micro batch while no dump is wanted.

    PYTHONPATH=build/trees/verl-v0.8.0-... build/e2e/venv/bin/python tests/bench/bench_bracket.py [--rounds 30]

The hook is `with ctx, micro_batch_dump(...)` in place of `with ctx` around an engine's micro batch. Both are timed in
turns in one process; printed is the median difference. On Megatron the hook is one call of `dump_schedule` for all
micro batches of a batch, after which the schedule is given upstream's own functions: printed beside it.

Exit code 1: the hook costs 1 microsecond a micro batch or more.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import timeit
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

LIMIT_NS = 1000.0
LOOPS = 20_000


def nanoseconds(call: Callable[[], Any]) -> float:
    """Of one call, from a loop of LOOPS."""
    return timeit.timeit(call, number=LOOPS) / LOOPS * 1e9


def main() -> int:
    parser = argparse.ArgumentParser(description="What the training hooks cost while no dump is wanted.")
    parser.add_argument("--rounds", type=int, default=30)
    rounds: int = parser.parse_args().rounds
    os.environ.pop("DUMP_ON", None)

    import torch
    from tensordict import TensorDict
    from verl.utils.consistency_dump import micro_batch_dump, prepare_dump
    from verl.utils.consistency_dump.megatron import dump_schedule

    engine = SimpleNamespace(engine_config=SimpleNamespace(forward_only=False), module=None)
    prepare_dump(engine)
    micro_batch = TensorDict({"input_ids": torch.zeros(1, 8)}, batch_size=1)
    ctx = nullcontext()

    def upstream() -> None:
        with ctx:
            pass

    def patched() -> None:
        with ctx, micro_batch_dump(engine, micro_batch, forward_only=True):
            pass

    def megatron() -> None:
        dump_schedule(engine, [micro_batch], upstream, upstream, True)

    samples = [(nanoseconds(upstream), nanoseconds(patched), nanoseconds(megatron)) for _ in range(rounds)]
    hook = statistics.median(after - before for before, after, _ in samples)
    schedule = statistics.median(cost for _, _, cost in samples)
    print(f"command: python {' '.join(sys.argv)}")
    print(f"DUMP_ON unset, median of {rounds} rounds of {LOOPS} calls")
    print(f"micro_batch_dump: {hook:.0f} ns a micro batch (limit {LIMIT_NS:.0f})")
    print(f"dump_schedule:    {schedule:.0f} ns a batch (Megatron)")
    return 0 if hook < LIMIT_NS and schedule < LIMIT_NS else 1


if __name__ == "__main__":
    raise SystemExit(main())
