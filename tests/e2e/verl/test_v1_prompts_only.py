"""A dump run on prompts only through verl's V1 trainer, which keeps its batches in TransferQueue."""

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
    """One step.

    Attributes:
        samples: how many samples there are; the trainer fills them up to four.
    """

    name: str
    overrides: tuple[str, ...]
    samples: int = 4


CASES = (
    Case("grpo", ("algorithm.adv_estimator=grpo",)),
    Case("gae", ("algorithm.adv_estimator=gae",)),
    Case("bypass", ("algorithm.adv_estimator=grpo", f"{ROLLOUT_CORRECTION}.bypass_mode=True")),
    Case("filled-up", ("algorithm.adv_estimator=grpo",), samples=3),
)


@pytest.fixture(scope="module")
def run(verl_tree: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    if not (verl_tree / "verl/trainer/ppo/v1/trainer_base.py").exists():
        pytest.skip("this verl has no V1 trainer")
    fits = [{"trainer": "v1", "overrides": case.overrides, "samples": case.samples} for case in CASES]
    return run_trainers(
        verl_tree,
        tmp_path_factory.mktemp("v1"),
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
    metrics = fit_of(run, case)["metrics"]
    assert [name for name, value in metrics.items() if not math.isfinite(value)] == []
    assert metrics["response_length/max"] == 4
    assert metrics["critic/score/max"] == (2.0 if case.samples == 4 else 1.0)
    assert not any(name in metrics for name in ("actor/grad_norm", "actor/pg_loss", "critic/grad_norm"))


def test_each_prompt_is_dumped_once_and_alone(run: Run) -> None:
    expected = [
        f"s{number}-{row}" if row < case.samples else None for number, case in enumerate(CASES, 1) for row in range(4)
    ]
    lines = run.lines()
    assert sorted(run.steps()) == [line["step"] for line in lines]
    assert sorted(map(str, (line["request_ids"][0] for line in lines))) == sorted(map(str, expected))
    for line in lines:
        [request_id] = line["request_ids"]
        length = 1 if request_id is None else PROMPT_LENS[int(request_id.split("-")[1])]
        assert line["seq_lens"] == line["prompt_lens"] == [length]
        assert run.dumped_tokens(line["step"]) == length
        assert line["global_steps"] == 1


def test_weights_still_go_to_the_rollout(run: Run) -> None:
    assert run.result()["weight_syncs"] == [1] * len(CASES)


def test_says_what_was_cropped(run: Run) -> None:
    warnings = run.warnings("prompts are dumped without their responses")
    assert len(warnings) == len(CASES)
    assert "(18 of 30 tokens)" in warnings[0]
