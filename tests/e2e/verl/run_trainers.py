"""verl's real trainers around real engines, one after the other in one process. Started by the tests.

    TINY_MODEL=<folder> PYTHONPATH=<verl tree>:tests/e2e python run_trainers.py SCENARIO.json

The scenario is a list of fits: the trainer, and overrides of verl's configuration. For each, the metrics that the
trainer logged and the weights before and after it go to `result.json` beside the scenario.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # the entropy kernel would compile for minutes

import world
from weights import weights_digest

CONFIGS = {
    "ppo": ("ppo_trainer", "trainer/config"),
    "v1": ("ppo_trainer", "trainer/config"),
    "fully_async": ("fully_async_ppo_trainer", "experimental/fully_async_policy/config"),
}
FULLY_ASYNC = (
    "hydra.searchpath=[pkg://verl.trainer.config]",
    "actor_rollout_ref.hybrid_engine=False",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=naive",
    "async_training.trigger_parameter_sync_step=2",
    "data.train_batch_size=0",
)


def numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """The metrics that are numbers, as JSON can hold them."""
    return {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}


def main() -> None:
    scenario_file = Path(sys.argv[1])
    scenario: dict[str, Any] = json.loads(scenario_file.read_text(encoding="utf-8"))
    world.start_process_group()
    strategy = [f"actor_rollout_ref.actor.strategy={scenario.get('strategy', 'fsdp2')}"]
    base = world.compose(*CONFIGS["ppo"], strategy)
    actors = world.World(world.build_actor(base))
    if scenario.get("critic"):
        actors.critic = world.build_critic(base)
    if scenario.get("ref"):
        actors.ref = world.build_actor(base, "ref")
    if any(fit["trainer"] == "v1" for fit in scenario["fits"]):
        import v1_world

        v1_world.start_queue()
    results = []
    for fit in scenario["fits"]:
        trainer = fit["trainer"]
        extra = FULLY_ASYNC if trainer == "fully_async" else ()
        config = world.compose(*CONFIGS[trainer], [*strategy, *extra, *fit["overrides"]])
        result: dict[str, Any] = {"before": digests(actors), "rollouts_before": actors.rollouts}
        if trainer == "v1":
            result["metrics"] = numbers(v1_world.fit(actors, config, fit.get("samples")))
        else:
            run = actors.fit_fully_async if trainer == "fully_async" else actors.fit_ppo
            result["metrics"] = numbers(run(config, fit.get("log_probs", False)))
        result["after"] = digests(actors)
        results.append(result)
    (scenario_file.parent / "result.json").write_text(
        json.dumps({"fits": results, "pid": os.getpid(), "weight_syncs": actors.weight_syncs}), encoding="utf-8"
    )


def digests(actors: world.World) -> dict[str, str]:
    """The weights of the actor and, where there is one, of the critic."""
    found = {"actor": weights_digest(actors.actor.actor.engine.module)}
    if actors.critic is not None:
        found["critic"] = weights_digest(actors.critic.engine.module)
    return found


if __name__ == "__main__":
    main()
