"""One rank of a run of verl's real Megatron engines on gloo. Started by the tests, once per rank.

    RANK=0 WORLD_SIZE=1 PYTHONPATH=<verl tree>:tests/e2e:tests/e2e/verl python run_engine.py SCENARIO.json

The scenario names the engines to build and, in order, what to do with them. What came out of each action is written
to `result_rank{N}.json` beside the scenario. The dump settings are the environment's, as in a real run.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # jit fusers and the entropy kernel would compile for minutes

import batches
import cpu_shims
import torch
from weights import weights_digest


def build_engine(scenario: dict[str, Any], role: str) -> Any:
    """The engine for `role`, not yet initialised: actor, critic (value head) or ref (forward only)."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
    from verl.workers.engine.megatron import transformer_impl as megatron
    from verl.workers.engine.mindspeed import transformer_impl as mindspeed

    classes = {
        "megatron": (megatron.MegatronEngineWithLMHead, megatron.MegatronEngineWithValueHead),
        "mindspeed": (mindspeed.MindspeedEngineWithLMHead, mindspeed.MindspeedEngineWithValueHead),
    }
    model_config = HFModelConfig(
        path=scenario["model"],
        model_type="value_model" if role == "critic" else "language_model",
        override_config={"attn_implementation": "sdpa"},
    )
    engine_config = McoreEngineConfig(
        tensor_model_parallel_size=scenario.get("tp", 1),
        pipeline_model_parallel_size=scenario.get("pp", 1),
        virtual_pipeline_model_parallel_size=scenario.get("vpp"),
        use_dynamic_bsz=False,
        use_fused_kernels=scenario.get("fused_kernels", False),
        vanilla_mbridge=True,
        micro_batch_size_per_gpu=1,
        infer_micro_batch_size_per_gpu=1,
        forward_only=role == "ref",
        override_transformer_config={
            "masked_softmax_fusion": False,
            "gradient_accumulation_fusion": False,
            "sequence_parallel": False,  # the local norm refuses it
        },
    )
    language_model, value_model = classes[scenario.get("backend", "megatron")]
    return (value_model if role == "critic" else language_model)(
        model_config,
        engine_config,
        McoreOptimizerConfig(lr=1e-2, lr_warmup_steps=0, lr_decay_steps=10, total_training_steps=10),
        CheckpointConfig(),
    )


def loss_function() -> Any:
    """verl's own loss of the actor."""
    from verl.workers.config import ActorConfig
    from verl.workers.utils.losses import ppo_loss

    return partial(
        ppo_loss, ActorConfig(strategy="megatron", rollout_n=1, ppo_micro_batch_size_per_gpu=1, entropy_coeff=0.01)
    )


def fail_once(engine: Any, at_call: int) -> None:
    """Let the last layer raise on its `at_call`-th forward from now on, once."""
    from verl.utils.megatron_utils import unwrap_model

    calls = 0

    def fail(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == at_call:
            handle.remove()
            raise RuntimeError("planted failure")

    handle = unwrap_model(engine.module[-1]).decoder.layers[-1].register_forward_pre_hook(fail)


def act(scenario: dict[str, Any], engine: Any, action: dict[str, Any]) -> dict[str, Any]:
    """Run one action and describe its outcome in plain JSON types."""
    batch = batches.make_batch(action["prefix"])
    batches.add_training_fields(batch)
    if action.get("crop"):
        from verl.utils.consistency_dump import crop_to_prompts

        batch = crop_to_prompts(batch)
    data = batches.engine_batch(batch, use_fused_kernels=scenario.get("fused_kernels", False))
    if "fail_at_call" in action:
        fail_once(engine, action["fail_at_call"])
    outcome: dict[str, Any] = {}
    try:
        if action["do"] == "infer":
            with engine.eval_mode():
                output = engine.infer_batch(data)
        else:
            with engine.train_mode():
                output = engine.train_batch(data, loss_function=loss_function())
        for name, value in output.get("model_output", {}).items():
            outcome[name] = [row.float().flatten().tolist() for row in value.unbind()]
        outcome["loss"] = [float(loss) for loss in output.get("loss", [])]
        grad_norm = output.get("metrics", {}).get("grad_norm")
        outcome["grad_norm"] = None if grad_norm is None else float(grad_norm)
    except RuntimeError as error:
        outcome["error"] = str(error)
    outcome["weights"] = weights_digest(torch.nn.ModuleList(engine.module))
    return outcome


def refusal(scenario: dict[str, Any]) -> str | None:
    """What one more actor engine says at construction, None where it is built."""
    try:
        build_engine(scenario, "actor")
    except RuntimeError as error:
        return str(error)
    return None


def passed_on(engine: Any) -> bool:
    """Whether the schedule is given upstream's own functions."""
    from verl.utils.consistency_dump.megatron import dump_schedule

    functions = (lambda: None, lambda: None)
    return dump_schedule(engine, [], *functions, True) == functions


def fields_of_other_models() -> list[dict[str, Any]]:
    """What the log says of a vision-language model's stage, under context parallelism, and of an empty fp8 stage."""
    from megatron.core import parallel_state
    from verl.utils.consistency_dump.megatron import stage_fields

    layers = [SimpleNamespace(layer_number=number) for number in (7, 8)]
    config = SimpleNamespace(sequence_parallel=True, fp8=None)
    vision = SimpleNamespace(language_model=SimpleNamespace(decoder=SimpleNamespace(layers=layers)), config=config)
    empty = SimpleNamespace(
        decoder=SimpleNamespace(layers=[]), config=SimpleNamespace(sequence_parallel=False, fp8="e4m3")
    )
    with (
        patch.object(parallel_state, "get_context_parallel_world_size", return_value=2),
        patch.object(parallel_state, "get_context_parallel_rank", return_value=1),
        patch.object(parallel_state, "get_tensor_model_parallel_world_size", return_value=4),
    ):
        return [stage_fields([vision])["megatron"], stage_fields([empty])["megatron"]]


def is_dumping() -> bool | None:
    """Whether msprobe still collects; None where it was never imported."""
    runtime = sys.modules.get("msprobe.core.common.runtime")
    return None if runtime is None else bool(runtime.Runtime.is_running)


def main() -> None:
    scenario_file = Path(sys.argv[1]).resolve()
    scenario: dict[str, Any] = json.loads(scenario_file.read_text(encoding="utf-8"))
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    cpu_shims.stub_platform()
    cpu_shims.stub_flash_attention()
    cpu_shims.stub_cuda_for_megatron()
    cpu_shims.stub_transformer_engine()
    cpu_shims.stub_fused_kernels()
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{scenario_file.parent}/rendezvous",
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=120),
    )
    engines = {role: build_engine(scenario, role) for role in dict.fromkeys(a["role"] for a in scenario["actions"])}
    for engine in engines.values():
        engine.initialize()
    outcomes = [act(scenario, engines[action["role"]], action) for action in scenario["actions"]]
    result: dict[str, Any] = {
        "pid": os.getpid(),
        "outcomes": outcomes,
        "dumping": is_dumping(),
        "msprobe": getattr(sys.modules.get("msprobe"), "__file__", None),
        "refusal": refusal(scenario),
    }
    if importlib.util.find_spec("verl.utils.consistency_dump"):
        result["passed_on"] = [role for role, engine in engines.items() if passed_on(engine)]
        result["other_models"] = fields_of_other_models()
    (scenario_file.parent / f"result_rank{rank}.json").write_text(json.dumps(result), encoding="utf-8")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
