"""One rank of the training side: verl's real engine under the patched dump, one log_prob pass over the prompts.

    RANK=0 WORLD_SIZE=1 PYTHONPATH=<verl tree>:tests/e2e python training_side.py SCENARIO.json

The dump settings are the environment's, as in a real run.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # the entropy kernel would compile for minutes

import cpu_shims
import torch

RESPONSE = 2


def make_batch(scenario: dict[str, Any]) -> Any:
    """The prompts left-padded, each with a response of two tokens, as the trainer holds them after a rollout."""
    import numpy as np
    from verl.protocol import DataProto

    prompts = scenario["prompts"]
    width = max(map(len, prompts)) + 1
    input_ids = torch.zeros(len(prompts), width + RESPONSE, dtype=torch.long)
    mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, width - len(prompt) : width] = torch.tensor(prompt)
        input_ids[row, width:] = 5
        mask[row, width - len(prompt) :] = 1
    tensors = {
        "input_ids": input_ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
        "prompts": input_ids[:, :width],
        "responses": input_ids[:, width:],
        "response_mask": mask[:, width:],
    }
    return DataProto.from_single_dict({**tensors, "request_id": np.array(scenario["ids"], dtype=object)})


def engine_batch(scenario: dict[str, Any]) -> Any:
    from verl.utils import tensordict_utils as tu
    from verl.utils.consistency_dump import crop_to_prompts
    from verl.workers.utils.padding import left_right_2_no_padding

    batch = crop_to_prompts(make_batch(scenario), global_steps=scenario.get("global_steps", 1))
    data = left_right_2_no_padding(batch.to_tensordict())
    tu.assign_non_tensor(
        data,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=1,
        use_remove_padding=True,
        use_fused_kernels=False,
        calculate_entropy=False,
        temperature=1.0,
        global_batch_size=len(scenario["ids"]),
    )
    return data


def fsdp_engine(scenario: dict[str, Any]) -> Any:
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    dtype = {"bfloat16": "bf16", "float32": "fp32"}[scenario["dtype"]]
    config = FSDPEngineConfig(
        strategy=scenario["backend"],
        model_dtype="fp32",
        use_torch_compile=False,
        use_dynamic_bsz=False,
        mixed_precision={"param_dtype": dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        wrap_policy={"transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"]},
    )
    model = HFModelConfig(
        path=scenario["model"], use_remove_padding=True, override_config={"attn_implementation": "sdpa"}
    )
    optimizer = FSDPOptimizerConfig(lr=1e-2, lr_warmup_steps=0, total_training_steps=10)
    return FSDPEngineWithLMHead(model, config, optimizer, CheckpointConfig())


def megatron_engine(scenario: dict[str, Any]) -> Any:
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    # The local norm refuses sequence parallelism, and the fused kernels are CUDA's.
    override = {"masked_softmax_fusion": False, "gradient_accumulation_fusion": False, "sequence_parallel": False}
    config = McoreEngineConfig(
        tensor_model_parallel_size=scenario.get("tp", 1),
        pipeline_model_parallel_size=scenario.get("pp", 1),
        virtual_pipeline_model_parallel_size=scenario.get("vpp"),
        sequence_parallel=False,
        use_dynamic_bsz=False,
        use_distributed_optimizer=True,
        use_fused_kernels=False,
        micro_batch_size_per_gpu=1,
        infer_micro_batch_size_per_gpu=1,
        forward_only=False,
        override_transformer_config=override,
    )
    model = HFModelConfig(path=scenario["model"], override_config={"attn_implementation": "sdpa"})
    optimizer = McoreOptimizerConfig(lr=1e-2, lr_warmup_steps=0, lr_decay_steps=10, total_training_steps=10)
    return MegatronEngineWithLMHead(model, config, optimizer, CheckpointConfig())


def main() -> None:
    scenario_file = Path(sys.argv[1])
    scenario: dict[str, Any] = json.loads(scenario_file.read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    cpu_shims.stub_platform()
    cpu_shims.stub_flash_attention()
    if scenario["backend"] == "megatron":
        cpu_shims.stub_cuda_for_megatron()
        cpu_shims.stub_transformer_engine()
    else:
        cpu_shims.stub_fsdp()
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{scenario_file.parent}/rendezvous",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    engine = megatron_engine(scenario) if scenario["backend"] == "megatron" else fsdp_engine(scenario)
    engine.initialize()
    with engine.eval_mode():
        engine.infer_batch(engine_batch(scenario))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
