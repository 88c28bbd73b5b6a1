"""verl's V1 trainer around the workers of `world`, with its real TransferQueue on a local Ray."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import batches
import ray
import torch
import transfer_queue
import world
from omegaconf import DictConfig, OmegaConf

PADDING_TOKEN = 3


def start_queue() -> None:
    """A local Ray with one storage unit of the queue."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    backend = {"SimpleStorage": {"num_data_storage_units": 1}}
    transfer_queue.init(OmegaConf.create({"backend": backend}))


class Critic:
    """The critic's worker group: hands out results that are not there yet."""

    def __init__(self, critic: Any):
        self._critic = critic

    def infer_batch(self, batch: Any) -> Any:
        self._critic.infer_batch(batch)
        return SimpleNamespace(futures=[])

    def train_mini_batch(self, batch: Any) -> Any:
        return world.Later(self._critic.train_mini_batch(batch))


def put_rollout(batch: Any) -> Any:
    """Let the real agent loop worker put samples into the queue; returns their keys and tags."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

    async def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    worker = object.__new__(AgentLoopWorkerTQ.__ray_metadata__.modified_class)
    worker.processor = None
    worker._compute_score = worker._compute_teacher_logprobs = nothing
    worker._compute_multi_modal_inputs = lambda output, input_ids: {}
    keys = []
    for row, (prompt, response) in enumerate(zip(batches.PROMPT_LENS, batches.RESPONSE_LENS, strict=True)):
        prompts, responses = batch.batch["prompts"][row], batch.batch["responses"][row]
        columns = {name: values[row] for name, values in batch.non_tensor_batch.items()}
        log_probs = batch.batch["rollout_log_probs"][row, :response].tolist()
        output = AgentLoopOutput(
            prompt_ids=prompts[-prompt:].tolist(),
            response_ids=responses[:response].tolist(),
            response_mask=[1] * response,
            response_logprobs=log_probs,
            reward_score=float(batch.batch["rm_scores"][row].sum()),
            num_turns=2,
            metrics=AgentLoopMetrics(),
            extra_fields={name: columns[name] for name in ("request_id", "min_global_steps", "max_global_steps")},
        )
        uid = f"{columns['request_id']}:{row // world.SAMPLES_PER_PROMPT}"
        asyncio.run(worker._agent_loop_postprocess(output, False, uid=uid, session_id=0, global_steps=1))
        keys.append(f"{uid}_0_0")
    listed = transfer_queue.kv_list("train")["train"]
    return transfer_queue.KVBatchMeta(partition_id="train", keys=keys, tags=[listed[key] for key in keys])


def fit(actors: world.World, config: DictConfig, samples: int | None) -> dict[str, Any]:
    """One step of verl's `PPOTrainerSync`; returns the metrics it logs.

    Args:
        samples: how many of the four samples the replay buffer gives; the trainer fills up the rest.
    """
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    trainer = PPOTrainerSync(config)
    trainer.tokenizer = SimpleNamespace(eos_token_id=PADDING_TOKEN)
    trainer.global_steps = 1
    trainer.ref_in_actor = False
    trainer.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[])
    trainer.actor_rollout_wg = SimpleNamespace(
        compute_log_prob=actors.actor.compute_log_prob,
        update_actor=actors.actor.update_actor,
        _dispatch_info={"actor": [0]},
    )
    trainer.ref_policy_wg = actors.ref
    trainer.critic_wg = Critic(actors.critic)
    trainer.resource_pool_manager = SimpleNamespace(get_n_gpus=lambda: 1)
    trainer.checkpoint_manager = SimpleNamespace(update_weights=actors.weight_syncs.append, sleep_replicas=lambda: None)

    def sample(**_: Any) -> tuple[Any, dict[str, Any]]:
        batch = put_rollout(actors.rollout(with_log_probs=True))
        if samples is not None:
            batch = transfer_queue.KVBatchMeta(
                partition_id="train", keys=batch.keys[:samples], tags=batch.tags[:samples]
            )
        return batch, {}

    trainer.replay_buffer = SimpleNamespace(sample=sample)
    trainer._add_batch_to_generate = lambda: None
    trainer.timing_raw = {"step": 1.0}
    metrics: dict[str, Any] = {}
    batch = trainer.step(metrics, trainer.timing_raw)
    trainer.on_step_end()
    trainer._compute_metrics(batch, metrics, trainer.timing_raw, global_steps=1, epoch=0)
    transfer_queue.kv_clear(keys=batch.keys, partition_id=batch.partition_id)
    return {
        name: value.item() if isinstance(value, torch.Tensor) or hasattr(value, "item") else value
        for name, value in metrics.items()
    }
