"""verl's real trainers and workers in one process on a CPU. Only the rollout and the weight transfer are scripted.

The workers are verl's own (`ActorRolloutRefWorker`, `TrainingWorker`) around real FSDP engines of a tiny random model;
what stands for a worker group calls them directly, where Ray would.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import batches
import cpu_shims
import torch
from cpu_memory import stub_memory_statistics
from omegaconf import DictConfig

SAMPLES_PER_PROMPT = 2
COMMON = (
    "trainer.device=cpu",
    "trainer.logger=[]",
    "trainer.n_gpus_per_node=1",
    "trainer.nnodes=1",
    "trainer.total_epochs=1",
    "trainer.total_training_steps=1",
    "trainer.resume_mode=disable",
    "trainer.val_before_train=False",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
    "trainer.balance_batch=False",
    "data.train_batch_size=2",
    "data.dataloader_num_workers=0",
    "actor_rollout_ref.model.use_remove_padding=True",
    "++actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.actor.optim.lr=1e-2",
    "++actor_rollout_ref.actor.optim.total_training_steps=10",
    "actor_rollout_ref.rollout.name=vllm",
    f"actor_rollout_ref.rollout.n={SAMPLES_PER_PROMPT}",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1",
    "critic.ppo_micro_batch_size_per_gpu=1",
    "critic.model.use_remove_padding=True",
    "++critic.model.override_config.attn_implementation=sdpa",
    "critic.optim.lr=1e-2",
    "++critic.optim.total_training_steps=10",
)
ENGINES = ("actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.ref.fsdp_config", "critic.fsdp")
FSDP = (
    "model_dtype=fp32",
    "use_torch_compile=False",
    "mixed_precision={param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}",
)


def compose(name: str, folder: str, overrides: Sequence[str] = ()) -> DictConfig:
    """The configuration `name` in `folder` of the verl under test, for the tiny model."""
    import verl
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    model = os.environ["TINY_MODEL"]
    fsdp = [f"++{engine}.{setting}" for engine in ENGINES for setting in FSDP]
    paths = [f"actor_rollout_ref.model.path={model}", f"critic.model.path={model}"]
    with initialize_config_dir(str(Path(verl.__file__).parent / folder), version_base=None):
        return hydra_compose(name, overrides=[*COMMON, *fsdp, *paths, *overrides])


def start_process_group() -> None:
    """One rank on gloo, and what verl takes for granted of an accelerator."""
    cpu_shims.stub_platform()
    from verl.workers.engine import EngineRegistry

    sys.modules.setdefault("aiohttp", ModuleType("aiohttp"))  # only reward servers talk to it
    cpu_shims.stub_flash_attention()
    cpu_shims.stub_fsdp()
    stub_memory_statistics()
    torch.set_num_threads(1)
    torch.manual_seed(5)  # the value head starts random
    for by_backend in EngineRegistry._engines.values():
        for by_device in by_backend.values():
            by_device.setdefault("cpu", next(iter(by_device.values())))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)


def build_actor(config: DictConfig, role: str = "actor") -> Any:
    """verl's worker for "actor" or "ref" (in Fully Async training: the subclass of it), with its model loaded."""
    from verl.experimental.separation.engine_workers import DetachActorWorker

    worker = DetachActorWorker(config.actor_rollout_ref, role)
    worker.init_model()
    return worker


def build_critic(config: DictConfig) -> Any:
    """verl's worker for the critic, set up as the trainer's `init_workers` does it."""
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.config import TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils.losses import value_loss

    critic = omega_conf_to_dataclass(config.critic)
    engine_config = critic.engine
    engine_config.infer_max_token_len_per_gpu = critic.ppo_max_token_len_per_gpu
    engine_config.max_token_len_per_gpu = critic.ppo_max_token_len_per_gpu
    engine_config.use_dynamic_bsz = critic.use_dynamic_bsz
    engine_config.micro_batch_size_per_gpu = critic.ppo_micro_batch_size_per_gpu
    engine_config.infer_micro_batch_size_per_gpu = critic.ppo_micro_batch_size_per_gpu
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="value_model",
            model_config=critic.model,
            engine_config=engine_config,
            optimizer_config=critic.optim,
            checkpoint_config=critic.checkpoint,
        )
    )
    worker.reset()
    worker.set_loss_fn(partial(value_loss, config=critic))
    return worker


class Later:
    """A result as the critic's worker group hands it out."""

    def __init__(self, value: Any):
        self.value = value

    def get(self) -> Any:
        return self.value


@dataclass
class World:
    """Workers that outlive a trainer, and what the trainers did to the scripted rest.

    Attributes:
        rollouts: number of batches generated so far; the ids of batch N are `sN-0` to `sN-3`.
        weight_syncs: the global step of each transfer of weights to the rollout.
    """

    actor: Any
    critic: Any = None
    ref: Any = None
    rollouts: int = 0
    weight_syncs: list[int] = field(default_factory=list)

    def rollout(self, with_log_probs: bool) -> Any:
        """What the agent loop returns: two samples for each of two prompts."""
        self.rollouts += 1
        batch = batches.make_batch(f"s{self.rollouts}-", __num_turns__=[2] * 4, multi_modal_inputs=[{}] * 4)
        rewards = torch.zeros(batch.batch["responses"].shape)
        for row, (reward, length) in enumerate(zip((1.0, 0.0, 0.5, 2.0), batches.RESPONSE_LENS, strict=True)):
            rewards[row, length - 1] = reward
        batch.batch["rm_scores"] = rewards
        if with_log_probs:
            noise = torch.rand(rewards.shape, generator=torch.Generator().manual_seed(13))
            batch.batch["rollout_log_probs"] = (-4.0 - noise) * batch.batch["response_mask"]
        for name in ("min_global_steps", "max_global_steps"):
            batch.non_tensor_batch[name] = batches.object_array([self.rollouts - 1] * 4)
        return batch

    def fit_ppo(self, config: DictConfig, with_log_probs: bool) -> dict[str, Any]:
        """One step of verl's `RayPPOTrainer.fit`; returns the metrics it logs."""
        from verl.trainer.ppo.ray_trainer import RayPPOTrainer, ResourcePoolManager, Role

        row = {"data_source": "test", "reward_model": {"ground_truth": ""}, "extra_info": {}, "index": 0}
        rows = [{**row, "raw_prompt": [], "dummy_tensor": torch.zeros(1)} for _ in range(2)]
        trainer = RayPPOTrainer(
            config=config,
            tokenizer=None,
            role_worker_mapping={Role.ActorRollout: None},
            resource_pool_manager=ResourcePoolManager({"pool": [1]}, {}),
            train_dataset=rows,
            val_dataset=rows,
            train_sampler=torch.utils.data.SequentialSampler(rows),
            device_name="cpu",
        )
        self._connect(trainer)
        trainer.checkpoint_manager = SimpleNamespace(
            update_weights=self.weight_syncs.append, sleep_replicas=lambda: None
        )

        def generate_sequences(_: Any) -> Any:
            batch = self.rollout(with_log_probs)
            batch.meta_info["timing"] = {}
            return batch

        trainer.async_rollout_manager = SimpleNamespace(generate_sequences=generate_sequences)
        logged = record_metrics()
        trainer.fit()
        return logged

    def fit_fully_async(self, config: DictConfig, with_log_probs: bool) -> dict[str, Any]:
        """Two steps of verl's `FullyAsyncTrainer.fit_step`, with a transfer of weights after the second."""
        import ray
        from verl.experimental.fully_async_policy.fully_async_trainer import FullyAsyncTrainer
        from verl.trainer.ppo.ray_trainer import ResourcePoolManager

        trainer = FullyAsyncTrainer.__ray_metadata__.modified_class(
            config=config,
            tokenizer=None,
            role_worker_mapping={},
            resource_pool_manager=ResourcePoolManager({"pool": [1]}, {}),
            device_name="cpu",
        )
        self._connect(trainer)
        trainer.total_training_steps = 2
        trainer.global_steps = 1
        trainer.progress_bar = SimpleNamespace(update=lambda count: None)
        trainer.message_queue_client = SimpleNamespace(
            get_sample=partial(self._queued_sample, with_log_probs), get_queue_size_sync=lambda: 0
        )

        async def update_weights(global_steps: int) -> None:
            self.weight_syncs.append(global_steps)

        trainer.checkpoint_manager = SimpleNamespace(update_weights=update_weights)
        trainer.rollouter = SimpleNamespace(
            reset_staleness=SimpleNamespace(remote=lambda: _Done({})),
            get_total_produced_samples=SimpleNamespace(remote=lambda: _Done(0)),
            get_completed_steps=SimpleNamespace(remote=lambda: _Done(0)),
        )
        logged = record_metrics()

        async def two_steps() -> None:
            await trainer.fit_step()
            logged.update(trainer.metrics)
            await trainer.fit_step()
            logged.update(trainer.metrics)

        with patch.object(ray, "get", lambda references: [reference.value for reference in references]):
            asyncio.run(two_steps())
        return logged

    async def _queued_sample(self, with_log_probs: bool) -> tuple[bytes, int]:
        """Half a batch, pickled as the rollouter puts it into the queue."""
        import ray
        from verl.experimental.fully_async_policy.detach_utils import RolloutSample

        batch = self.rollout(with_log_probs)[:SAMPLES_PER_PROMPT]
        batch.meta_info["metrics"] = [{"generate_sequences": 0.1, "tool_calls": 0.0}] * len(batch)
        batch.non_tensor_batch["uid"] = batches.object_array([f"u{self.rollouts}"] * len(batch))
        sample = RolloutSample(full_batch=batch, sample_id=f"{self.rollouts}", epoch=0, rollout_status={})
        return ray.cloudpickle.dumps(sample), 0

    def _connect(self, trainer: Any) -> None:
        trainer.actor_rollout_wg = self.actor
        trainer.ref_policy_wg = self.ref
        trainer.critic_wg = SimpleNamespace(
            infer_batch=lambda data: Later(self.critic.infer_batch(data)),
            train_mini_batch=lambda data: Later(self.critic.train_mini_batch(data)),
        )


class _Done:
    """A Ray object reference whose value is there."""

    def __init__(self, value: Any):
        self.value = value

    def future(self) -> Any:
        future: Future[Any] = Future()
        future.set_result(self.value)
        return future


def record_metrics() -> dict[str, Any]:
    """Let verl's `Tracking` write what it is given into the returned dictionary."""
    from verl.utils import tracking

    logged: dict[str, Any] = {}
    tracking.Tracking.log = lambda self, data, step, backend=None: logged.update(data)  # type: ignore[method-assign]
    return logged
