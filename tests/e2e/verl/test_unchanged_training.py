"""With the instrumentation off nothing changes, and with it on a run learns the same: to the bit as upstream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from verl_runs import run_engine, run_trainers

ACTIONS: list[dict[str, Any]] = [
    {"do": "infer", "role": "actor", "prefix": "a"},
    {"do": "train", "role": "actor", "prefix": "b"},
    {"do": "train", "role": "critic", "prefix": "c"},
    {"do": "infer", "role": "actor", "prefix": "d"},
    {"do": "train", "role": "actor", "prefix": "e"},
]
FITS: list[dict[str, Any]] = [
    {"trainer": "ppo", "overrides": ["algorithm.adv_estimator=grpo"]},
    {"trainer": "ppo", "overrides": ["algorithm.adv_estimator=gae"]},
    {"trainer": "fully_async", "overrides": ["algorithm.adv_estimator=grpo"], "log_probs": True},
]


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_engines(verl_tree: Path, pristine_verl_tree: Path, model: Path, tmp_path: Path, strategy: str) -> None:
    """Losses, outputs, weights and random state of upstream, of the dump off, and of the log_prob phase dumped."""
    runs = {}
    for name, tree, env in (
        ("upstream", pristine_verl_tree, {}),
        ("off", verl_tree, {}),
        ("on", verl_tree, {"DUMP_ON": "1"}),
    ):
        (tmp_path / name).mkdir()
        runs[name] = run_engine(tree, tmp_path / name, model, ACTIONS, env=env, strategy=strategy)
    upstream = runs["upstream"].result()["outcomes"]
    assert upstream[1]["weights"] != upstream[1]["weights_before"], "the training step trains"
    assert runs["off"].result()["outcomes"] == upstream
    assert runs["on"].result()["outcomes"] == upstream
    assert runs["off"].result()["msprobe"] is False
    assert not (runs["off"].folder / "dump").exists()
    assert len(runs["on"].lines()) == 8


def test_trainers(verl_tree: Path, pristine_verl_tree: Path, model: Path, tmp_path: Path) -> None:
    """The trainers' steps, with the dump off and on, end in upstream's weights and log upstream's metrics."""
    runs = {}
    for name, tree, env in (
        ("upstream", pristine_verl_tree, {}),
        ("off", verl_tree, {}),
        ("on", verl_tree, {"DUMP_ON": "1"}),
    ):
        (tmp_path / name).mkdir()
        runs[name] = run_trainers(tree, tmp_path / name, model, {"critic": True, "fits": FITS}, env=env)
    upstream = runs["upstream"].result()
    assert all(fit["before"]["actor"] != fit["after"]["actor"] for fit in upstream["fits"])
    for name in ("off", "on"):
        fits = runs[name].result()["fits"]
        assert [fit["after"] for fit in fits] == [fit["after"] for fit in upstream["fits"]]
        for mine, theirs in zip(fits, upstream["fits"], strict=True):
            assert measured(mine["metrics"]) == measured(theirs["metrics"])
    assert not (runs["off"].folder / "dump").exists()
    # Fully Async bypasses the log_prob phase by default.
    assert [line["request_ids"][0] for line in runs["on"].lines()] == [
        f"s{n}-{row}" for n in (1, 2) for row in range(4)
    ]


def measured(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics that are not times, rates or this machine's memory."""
    volatile = (
        *("timing", "perf/", "mfu", "fully_async/total_wait_time", "idle_ratio", "memory", "global_token_num"),
        *("_time_s", "resource_utilization"),  # of verl 0.9's dynamic resources
    )
    return {name: value for name, value in metrics.items() if not any(part in name for part in volatile)}
