"""A dump run on prompts only, through verl's real trainers, for every kind of advantage and correction."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from verl_runs import Run, run_trainers

PROMPT_LENS = [3, 6, 4, 5]
ROLLOUT_CORRECTION = "algorithm.rollout_correction"


@dataclass(frozen=True)
class Case:
    """One fit; a Fully Async fit takes two steps, of two half batches each."""

    name: str
    overrides: tuple[str, ...]
    trainer: str = "ppo"
    log_probs: bool = False

    @property
    def rollouts(self) -> int:
        return 1 if self.trainer == "ppo" else 4


CASES = (
    Case("grpo", ("algorithm.adv_estimator=grpo",)),
    Case("grpo-correction", ("algorithm.adv_estimator=grpo",), log_probs=True),
    Case("grpo-kl", ("algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=True"), log_probs=True),
    Case("rloo-no-correction", ("algorithm.adv_estimator=rloo", f"{ROLLOUT_CORRECTION}=null"), log_probs=True),
    Case("gae", ("algorithm.adv_estimator=gae",), log_probs=True),
    Case("reinforce-plus-plus", ("algorithm.adv_estimator=reinforce_plus_plus",)),
    Case("bypass", ("algorithm.adv_estimator=grpo", f"{ROLLOUT_CORRECTION}.bypass_mode=True"), log_probs=True),
    Case("fully-async", ("algorithm.adv_estimator=grpo",), "fully_async", log_probs=True),
    Case(
        "fully-async-gae", ("algorithm.adv_estimator=gae", f"{ROLLOUT_CORRECTION}=null"), "fully_async", log_probs=True
    ),
)


@pytest.fixture(scope="module")
def run(verl_tree: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """All cases one after the other around the same workers: actor, critic and reference in one process."""
    fits = [{"trainer": case.trainer, "overrides": case.overrides, "log_probs": case.log_probs} for case in CASES]
    return run_trainers(
        verl_tree,
        tmp_path_factory.mktemp("prompts_only"),
        model,
        {"critic": True, "ref": True, "fits": fits},
        env={"DUMP_ON": "1", "PROMPTS_ONLY": "1"},
    )


def fit_of(run: Run, case: Case) -> dict[str, Any]:
    found: dict[str, Any] = run.result()["fits"][CASES.index(case)]
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_weight_changes(run: Run, case: Case) -> None:
    fit = fit_of(run, case)
    assert fit["before"] == fit["after"]
    assert set(fit["after"]) == {"actor", "critic"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_metric_is_a_measurement(run: Run, case: Case) -> None:
    """None is NaN, lengths and rewards are the whole batch's, and an update that was not made has none."""
    metrics = fit_of(run, case)["metrics"]
    assert [name for name, value in metrics.items() if not math.isfinite(value)] == []
    assert metrics["response_length/max"] == (4 if case.trainer == "ppo" else 3)
    assert metrics["critic/score/max"] == (2.0 if case.trainer == "ppo" else 1.0)
    if case.log_probs and "bypass" not in case.name and case.name != "fully-async":
        assert metrics["training/rollout_probs_diff_valid"] == 1
    updates = ("actor/grad_norm", "actor/pg_loss", "actor/lr", "critic/grad_norm", "critic/vf_loss", "critic/lr")
    assert not any(name in metrics for name in updates)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_prompt_is_dumped_once_and_alone(run: Run, case: Case) -> None:
    first = fit_of(run, case)["rollouts_before"] + 1
    rollouts = range(first, first + case.rollouts)
    rows = range(4 if case.trainer == "ppo" else 2)
    mine = [line for line in run.lines() if line["request_ids"][0].split("-")[0] in {f"s{n}" for n in rollouts}]
    assert [line["request_ids"] for line in mine] == [[f"s{n}-{row}"] for n in rollouts for row in rows]
    for line in mine:
        row = int(line["request_ids"][0].split("-")[1])
        assert line["seq_lens"] == line["prompt_lens"] == [PROMPT_LENS[row]]
        assert run.dumped_tokens(line["step"]) == PROMPT_LENS[row]
        assert line["min_global_steps"] == line["max_global_steps"]
    steps = [line["global_steps"] for line in mine]
    assert steps == ([1] * 4 if case.trainer == "ppo" else [1] * 4 + [2] * 4)


def test_steps_and_lines_are_the_same(run: Run) -> None:
    assert [line["step"] for line in run.lines()] == sorted(run.steps())


def test_weights_still_go_to_the_rollout(run: Run) -> None:
    """The replicas sleep until weights arrive: a step without an update still sends them."""
    syncs = run.result()["weight_syncs"]
    assert len(syncs) == sum(2 if case.trainer == "ppo" else 1 for case in CASES)


def test_says_what_was_cropped(run: Run) -> None:
    lines = run.warnings("prompts are dumped without their responses")
    assert len(lines) == sum(1 if case.trainer == "ppo" else 2 for case in CASES)
    for line in lines:
        assert "input_ids (4, 12) -> (4, 7)" in line and "responses (4, 5) -> (4, 0)" in line
