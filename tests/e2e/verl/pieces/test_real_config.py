"""The checks before a run, on verl's own composed configurations."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import world
from verl.utils.consistency_dump.preflight import run_refusals, run_warnings
from verl.utils.consistency_dump.settings import DumpSettings
from verl.workers.utils import padding

ROLLOUT = "actor_rollout_ref.rollout"
SETTINGS = DumpSettings(on=True, prompts_only=True)
CONFIGS = {
    "ppo": ("ppo_trainer", "trainer/config", ()),
    "fully_async": (
        "fully_async_ppo_trainer",
        "experimental/fully_async_policy/config",
        ("hydra.searchpath=[pkg://verl.trainer.config]",),
    ),
}


@pytest.fixture(autouse=True)
def _model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINY_MODEL", "/nowhere")


def found(trainer: str, overrides: Sequence[str] = (), settings: DumpSettings = SETTINGS) -> list[str]:
    name, folder, base = CONFIGS[trainer]
    return [str(finding) for finding in run_refusals(world.compose(name, folder, [*base, *overrides]), settings)]


@pytest.mark.parametrize("trainer", CONFIGS)
def test_a_run_that_is_set_up_for_it(trainer: str) -> None:
    assert found(trainer) == []


@pytest.mark.parametrize(
    ("override", "change"),
    [
        ("actor_rollout_ref.actor.use_dynamic_bsz=True", "set actor_rollout_ref.actor.use_dynamic_bsz=False"),
        (f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=null", f"set {ROLLOUT}.log_prob_micro_batch_size_per_gpu=1"),
        ("global_profiler.tool=precision_debugger", "set global_profiler.tool=null"),
    ],
)
def test_refused(override: str, change: str) -> None:
    refusals = found("ppo", [override, "global_profiler.steps=[1]"])
    assert refusals and any(change in refusal for refusal in refusals)


def test_queue_of_main_ppo_sync() -> None:
    """It trains on whole sequences; the V1 trainers, which have the queue too, crop."""
    refused = any("main_ppo_sync" in refusal for refusal in found("ppo", ["++transfer_queue.enable=True"]))
    composed = world.compose(*CONFIGS["ppo"][:2])
    assert refused is not bool(composed.trainer.get("use_v1"))


def test_repeated_request_ids() -> None:
    config = world.compose(*CONFIGS["ppo"][:2], [f"++{ROLLOUT}.full_determinism=True"])
    assert any("repeats the request ids" in str(warning) for warning in run_warnings(config, SETTINGS))


def test_remove_padding() -> None:
    fixed = hasattr(padding, "build_attention_mask_from_nested")
    assert bool(found("ppo", ["actor_rollout_ref.model.use_remove_padding=False"])) is not fixed


def test_bypass_is_fully_async_default() -> None:
    """It leaves no log_prob phase but the pass over the prompts."""
    whole = DumpSettings(on=True)
    assert any("bypass_mode" in refusal for refusal in found("fully_async", settings=whole))
    assert found("fully_async", ["algorithm.rollout_correction=null"], whole) == []


def test_warnings() -> None:
    name, folder, _ = CONFIGS["ppo"]
    defaults = [str(finding) for finding in run_warnings(world.compose(name, folder), SETTINGS)]
    assert len(defaults) == 3  # prefix caching, chunked prefill, two samples for each prompt
    off = [f"+{ROLLOUT}.engine_kwargs.vllm.no_enable_{name}=True" for name in ("prefix_caching", "chunked_prefill")]
    assert run_warnings(world.compose(*CONFIGS["ppo"][:2], [f"{ROLLOUT}.n=1", *off]), SETTINGS) == []
