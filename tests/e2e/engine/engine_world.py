"""A model, verl's vLLM server on it, and verl's clients of that server, on a local Ray."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROXY_TESTS = Path(__file__).resolve().parents[2] / "proxy"
sys.path.append(str(PROXY_TESTS))

import real_tokenizers  # noqa: E402

FAMILY = "qwen3"
CONTEXT = 4096
VOCABULARY = 151936


def write_model(folder: Path) -> Path:
    """A random Qwen2 with the vocabulary and the chat template of Qwen3. The same weights each time."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer, stops = real_tokenizers.load(FAMILY)
    torch.manual_seed(11)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=False,
            eos_token_id=stops[0],
            bos_token_id=None,
        )
    )
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            # Wide enough for some tokens to be far more probable than others, and for attention to count.
            torch.nn.init.normal_(weight, std=0.4 if "lm_head" in name else 0.1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class World:
    """
    Attributes:
        server: actor of a RecordingServer.
        plain, resuming, whole: verl's LLM client, the fully-async one, and that one without partial rollout.
    """

    model: Path
    server: Any
    balancer: Any
    plain: Any
    resuming: Any
    whole: Any

    async def records(self) -> list[dict[str, Any]]:
        """See RecordingServer.records."""
        found: list[dict[str, Any]] = await self.server.records.remote()
        return found

    async def until_idle(self) -> bool:
        """Whether engine and balancer were without a request within half a minute."""
        for _ in range(300):
            if await self.server.running.remote() == 0 and await self.balancer.get_inflight_count.remote("server") == 0:
                return True
            await asyncio.sleep(0.1)
        return False

    async def sync_weights(self, version: int, after_s: float | None = None) -> int:
        """A weight sync as verl's fully-async trainer does it; the number of requests that it aborted.

        Args:
            after_s: so long after the first abort comes a second one, for what has queued up meanwhile.
        """
        aborted = await self._abort_all()
        if after_s is not None:
            await asyncio.sleep(after_s)
            aborted += await self._abort_all()
        await self.server.change_weights.remote(version)
        await self.server.resume_generation.remote()
        return aborted

    async def _abort_all(self) -> int:
        aborted = await self.server.abort_all_requests.remote()
        assert "error" not in aborted, aborted
        return int(aborted["aborted_count"])


def fully_async_client() -> Any:
    """verl's class, which moved in 0.9."""
    from verl.workers.rollout import llm_server

    if hasattr(llm_server, "FullyAsyncLLMServerClient"):
        return llm_server.FullyAsyncLLMServerClient
    from verl.experimental.fully_async_policy import fully_async_rollouter

    return fully_async_rollouter.FullyAsyncLLMServerClient


def start_balancer(servers: dict[str, Any]) -> Any:
    """verl's load balancer over the servers: a plain class since verl 0.9, which makes the actor where it is used."""
    import ray
    from verl.workers.rollout.llm_server import GlobalRequestLoadBalancer

    remote = hasattr(GlobalRequestLoadBalancer, "remote")
    return (GlobalRequestLoadBalancer if remote else ray.remote(GlobalRequestLoadBalancer)).remote(servers)


@asynccontextmanager
async def start(model: Path) -> AsyncIterator[World]:
    """Launches the server; about a minute."""
    import ray
    from omegaconf import OmegaConf
    from recording_server import RecordingServer
    from verl.workers.rollout.llm_server import LLMServerClient
    from verl.workers.rollout.replica import RolloutMode

    rollout = {
        "_target_": "verl.workers.config.RolloutConfig",
        "name": "vllm",
        "mode": "async",
        "tensor_model_parallel_size": 1,
        "enable_sleep_mode": False,
        "free_cache_engine": False,
        "enforce_eager": True,
        "load_format": "auto",
        "dtype": "float32",
        "max_model_len": CONTEXT,
        "prompt_length": CONTEXT // 2,
        "response_length": CONTEXT // 2,
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 32,
        # The attention of a CPU wants a multiple of 32.
        "engine_kwargs": {"vllm": {"block_size": 32}},
    }
    hf_model = {"_target_": "verl.workers.config.HFModelConfig", "path": str(model), "trust_remote_code": False}
    ray.init(num_cpus=4, include_dashboard=False, logging_level="ERROR")
    try:
        server = (
            ray.remote(num_cpus=0)(RecordingServer)
            .options(max_concurrency=512)
            .remote(
                config=OmegaConf.create(rollout),
                model_config=OmegaConf.create(hf_model),
                rollout_mode=RolloutMode.STANDALONE,
                workers=[],
                replica_rank=0,
                node_rank=0,
                gpus_per_node=1,
                nnodes=1,
                cuda_visible_devices="",
            )
        )
        await server.launch_server.remote()
        await server.set_global_steps.remote(0)
        balancer = start_balancer({"server": server})
        client = fully_async_client()
        whole = {"actor_rollout_ref": {"rollout": rollout}}
        partial, entire = (
            OmegaConf.create({**whole, "async_training": {"partial_rollout": flag}}) for flag in (True, False)
        )
        yield World(
            model,
            server,
            balancer,
            LLMServerClient(partial, balancer),
            client(partial, balancer),
            client(entire, balancer),
        )
    finally:
        ray.shutdown()


class Reference:
    """The model in transformers, with the weights of any version."""

    def __init__(self, model: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._tokens = len(AutoTokenizer.from_pretrained(model))
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._base: dict[str, Any] = {}

    def log_probs(self, ids: list[int], positions: list[int], version: int) -> list[float]:
        """Log-probability of the ids at `positions` given all ids before them."""
        import torch
        from recording_server import change

        for name, weight in self._model.named_parameters():
            change(name, weight, version, self._base)
        with torch.no_grad():
            hidden = self._model.model(torch.tensor([ids])).last_hidden_state[0, [at - 1 for at in positions]]
            found: list[float] = []
            for part, own in zip(hidden.split(64), torch.tensor(ids)[positions].split(64), strict=True):
                logits = self._model.lm_head(part)[:, : self._tokens]  # verl bars ids that the tokenizer doesn't have
                picked = logits.gather(-1, own.unsqueeze(-1)).squeeze(-1)
                found += (picked - logits.logsumexp(-1)).tolist()
        return found
