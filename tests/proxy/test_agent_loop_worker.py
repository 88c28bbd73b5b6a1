"""`proxy_agent` trials through verl's own AgentLoopWorker: what comes out is what the engine sampled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SCRIPT = Path(__file__).with_name("agent_loop_worker.py")


def run(tree: Path, folder: Path, *options: str) -> dict[str, Any]:
    if subprocess.run([sys.executable, "-c", "import ray, torch, tensordict, hydra"], capture_output=True).returncode:
        pytest.skip("verl's agent loop needs ray, torch, tensordict and hydra")
    environment = {**os.environ, "PYTHONPATH": str(tree), "HF_HUB_OFFLINE": "1", "WANDB_API_KEY": "secret"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), *options],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    return dict(json.loads(line.removeprefix("RESULT ")))


@pytest.fixture(scope="module")
def found(verl_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(verl_tree, tmp_path_factory.mktemp("worker"))


def calls_of(found: dict[str, Any], row: dict[str, Any]) -> list[Any]:
    """The engine's calls for the session whose trial folder the row names."""
    short = Path(row["trial_dir"]).name.rpartition("-")[2]
    return next((calls for session, calls in found["asked"].items() if session.startswith(short)), [])


def test_every_row_is_what_the_engine_sampled(found: dict[str, Any]) -> None:
    for row in found["dense"]["rows"][:4] + found["dense"]["rows"][5:7] + found["moe"]["rows"][1:]:
        kind = "moe" if row["routes"] else "dense"
        calls = calls_of(found[kind], row)
        sampled = [token for _, ids, _ in calls for token in ids]
        assert row["trained_ids"] == sampled
        assert row["log_probs"] == pytest.approx([-token / 512 for token in sampled])
        last_prompt, last_ids, _ = calls[-1]
        assert row["prompt"] + row["response"] == last_prompt + last_ids
        assert row["prompt"] == calls[0][0]
        assert row["masked_behind"] == 0
        assert {params["temperature"] for _, _, params in calls} == {1.0}


@pytest.mark.parametrize(
    ("number", "trained", "termination", "reward", "num_turns"),
    [
        (0, "one<|im_end|>two<|im_end|>three<|im_end|>", "completed", 3.0, 6),
        (1, "one<|im_end|>two<|im_end|>", "completed", 2.0, 4),
        (2, "one<|im_end|>", "agent_error", 1.0, 2),
        (3, "one<|im_end|>two<|im_end|>", "timeout", 2.0, 4),
        (4, "", "env_setup_failed", 0.0, 0),
        (5, "one<|im_end|>", "overlong", 3.0, 2),
        (6, "one<|im_end|>", "completed", 1.0, 2),
        (7, "", "internal_error", 0.0, 0),
    ],
)
def test_rows(
    found: dict[str, Any], number: int, trained: str, termination: str, reward: float, num_turns: int
) -> None:
    row = found["dense"]["rows"][number]
    assert (row["trained"], row["termination_reason"], row["num_turns"]) == (trained, termination, num_turns)
    assert row["reward"] == row["reward_at_end"] == reward


def test_fields_of_a_row(found: dict[str, Any]) -> None:
    row = found["dense"]["rows"][0]
    assert (row["min_global_steps"], row["max_global_steps"], row["request_id"]) == (5, 7, "engine-1")
    archive = json.loads((Path(row["trial_dir"]) / "proxy_trajectory.json").read_text())
    assert archive["branches"][0]["traj_acc_ids"] == row["prompt"] + row["response"]
    summary = json.loads((Path(row["trial_dir"]) / "trial.json").read_text())
    assert (summary["termination"], summary["reward"], summary["turns"]) == ("completed", 3.0, 3)
    assert summary["outputs"][0]["trained"] == len(row["trained_ids"])
    metrics = found["dense"]["metrics"][0]
    assert metrics["generate_sequences"] > 0 and metrics["tool_calls"] > 0 and metrics["compute_score"] > 0


def test_routed_experts(found: dict[str, Any]) -> None:
    absent, trial = found["moe"]["rows"]
    routes = np.asarray(trial["routes"])
    total = len(trial["prompt"]) + len(trial["response"])
    expected = (np.arange((total - 1) * 4) % 64).reshape(total - 1, 2, 2)
    assert (routes[: total - 1] == expected).all() and not routes[total - 1].any()
    # A batch has them for all rows; in the trial without an answer no token is trained on.
    assert np.asarray(absent["routes"]).shape == (2, 2, 2)


def test_nothing_is_left(found: dict[str, Any]) -> None:
    # All agents of one client share a proxy, in which no session is left.
    assert (found["sessions"], found["servers"]) == (0, 2)


def test_a_repeated_trial(found: dict[str, Any]) -> None:
    row = found["dense"]["rows"][6]
    assert json.loads((Path(row["trial_dir"]) / "trial.json").read_text())["attempt"] == 2
    assert len(list(Path(row["trial_dir"]).parent.glob("6-*"))) == 2


def test_a_wrong_template_ends_the_run(found: dict[str, Any]) -> None:
    assert found["template"] == "proxy_agent: {sample.no}: the sample has no such field"


def test_several_outputs_need_a_trainer_that_takes_them(found: dict[str, Any]) -> None:
    assert "verl.trainer.main_ppo_sync" in found["several"]


def test_registered_without_a_configuration_file(found: dict[str, Any]) -> None:
    target, server_imported = found["registered"]
    assert target == "verl.experimental.agent_loop.proxy_agent_loop.ProxyAgentLoop"
    assert server_imported == "False"  # runs without agents don't pay for it


def test_through_ray(verl_tree: Path, tmp_path: Path) -> None:
    found = run(verl_tree, tmp_path, "--ray")
    assert [row["trained"] for row in found["rows"]] == ["one<|im_end|>two<|im_end|>three<|im_end|>"] * 2
    assert found["running_before"] > 0
    assert found["running_after"] == 0
