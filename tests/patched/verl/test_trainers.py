"""PROMPTS_ONLY in the trainers: a log_prob pass over the cropped batch before the step, and no update in it."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from verl_parts import PACKAGE, load

PPO = "verl/trainer/ppo/ray_trainer.py"
FULLY_ASYNC = "verl/experimental/fully_async_policy/fully_async_trainer.py"


def trainer(tree: Path, file: str, prompts_only: bool) -> Any:
    """An instance of the trainer class in `file` without its `__init__`."""
    name = "RayPPOTrainer" if file == PPO else "FullyAsyncTrainer"
    modules = {
        PACKAGE: {
            "prompts_only": lambda: prompts_only,
            "crop_to_prompts": lambda batch, step: ("cropped", batch, step),
        },
        "verl": {"DataProto": SimpleNamespace},
        "ray": {"remote": lambda **_: lambda cls: cls},
        "verl.utils.import_utils": {"deprecated": lambda _: lambda cls: cls, "load_class_from_fqn": None},
        "verl.utils.debug": {"marked_timer": lambda *_, **__: nullcontext()},
        "verl.experimental.separation.ray_trainer": {"SeparateRayPPOTrainer": object},
    }
    return object.__new__(load(tree / file, name, modules))


@pytest.mark.parametrize("method", ["_update_actor", "_update_critic"])
def test_nothing_is_updated(verl_tree: Path, method: str) -> None:
    """No worker is called, and no metric of an update is reported."""
    output = getattr(trainer(verl_tree, PPO, prompts_only=True), method)(SimpleNamespace())
    assert output.meta_info == {"metrics": {}}


@pytest.mark.parametrize("method", ["_update_actor", "_update_critic"])
def test_updates_are_made_otherwise(verl_tree: Path, method: str) -> None:
    instance = trainer(verl_tree, PPO, prompts_only=False)
    with pytest.raises(AttributeError, match=r"config|to_tensordict"):  # goes on to what this instance does not have
        getattr(instance, method)(SimpleNamespace())


@pytest.mark.parametrize("prompts_only", [True, False])
def test_fully_async_samples_are_dumped_when_they_come(verl_tree: Path, prompts_only: bool) -> None:
    instance = trainer(verl_tree, FULLY_ASYNC, prompts_only)
    passes: list[Any] = []
    batch = SimpleNamespace(meta_info={})

    async def samples() -> tuple[int, Any]:
        return 0, batch

    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(temperature=0.5)))
    instance.__dict__.update(
        metrics={}, timing_raw={}, global_steps=7, config=config, _get_samples_from_queue=samples,
        _collect_metrics_from_samples=lambda *_: None, _compute_old_log_prob=passes.append,
    )  # fmt: skip
    assert asyncio.run(instance._fit_generate()) is batch
    assert batch.meta_info == {"temperature": 0.5}
    assert passes == ([("cropped", batch, 7)] if prompts_only else [])
