"""One rank of a run of verl's real FSDP engines on gloo. Started by the tests, once per rank.

    RANK=0 WORLD_SIZE=1 PYTHONPATH=<verl tree>:tests/e2e python run_engine.py SCENARIO.json

The scenario names the engines to build and, in order, what to do with them. What came out of each action is written
to `result_rank{N}.json` beside the scenario. The dump settings are the environment's, as in a real run.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # the entropy kernel would compile for minutes

import batches
import cpu_shims
import torch
from cpu_memory import stub_memory_statistics
from weights import weights_digest


def build_engine(scenario: dict[str, Any], role: str) -> Any:
    """The engine that verl registers for `role`, initialised: actor, lora, critic (value head) or ref."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp import transformer_impl as fsdp

    model_config = HFModelConfig(
        path=scenario["model"],
        use_remove_padding=scenario.get("remove_padding", True),
        lora_rank=4 if role == "lora" else 0,
        target_modules="all-linear",
        override_config={"attn_implementation": "sdpa"},
    )
    model_config.model_type = "value_model" if role == "critic" else "language_model"
    strategy = scenario.get("strategy", "fsdp")
    engine_config = FSDPEngineConfig(
        strategy=strategy,
        forward_only=role == "ref",
        model_dtype="fp32",
        mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        use_torch_compile=False,
        use_dynamic_bsz=False,
        wrap_policy={"transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"]},
    )
    engine_class = fsdp.FSDPEngineWithValueHead if role == "critic" else fsdp.FSDPEngineWithLMHead
    engine = engine_class(
        model_config,
        engine_config,
        FSDPOptimizerConfig(lr=1e-2, lr_warmup_steps=0, total_training_steps=10),
        CheckpointConfig(),
    )
    engine.initialize()
    return engine


def loss_function(role: str) -> Any:
    """verl's own loss for the role."""
    from verl.workers.config import ActorConfig
    from verl.workers.utils.losses import ppo_loss, value_loss

    if role == "critic":
        return partial(value_loss, _critic_config())
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, entropy_coeff=0.01)
    return partial(ppo_loss, config)


def _critic_config() -> Any:
    from verl.workers.config import CriticConfig

    return CriticConfig(strategy="fsdp", ppo_micro_batch_size_per_gpu=1)


def fail_once(engine: Any, where: str, at_call: int) -> None:
    """Let the engine raise on the `at_call`-th micro batch from now on, once: inside a "layer" or after the forward."""
    calls = 0

    def fail(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == at_call:
            undo()
            raise RuntimeError("planted failure")

    if where == "layer":
        names = {name.replace("_fsdp_wrapped_module.", ""): module for name, module in engine.module.named_modules()}
        layer = names["model.layers.2.mlp"]
        undo = layer.register_forward_pre_hook(fail).remove
    else:
        real = engine.prepare_model_outputs

        def prepare_model_outputs(*args: Any, **kwargs: Any) -> Any:
            fail()
            return real(*args, **kwargs)

        engine.prepare_model_outputs = prepare_model_outputs

        def undo() -> None:
            del engine.prepare_model_outputs


def break_dump(kind: str, dump_path: Path) -> None:
    """From here on msprobe cannot write: "full" disk, or "blocked" where the directory of step 6 would be."""
    if kind == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    else:
        (dump_path / "step6").touch()


def mend_disk() -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


def make_data(action: dict[str, Any]) -> Any:
    """The batch of an action: whole or cropped, this rank's share."""
    from verl.utils import tensordict_utils as tu

    batch = batches.make_batch(action["prefix"], **action.get("non_tensors", {}))
    batches.add_training_fields(batch)
    if action.get("crop"):
        from verl.utils.consistency_dump import crop_to_prompts

        cropped = crop_to_prompts(batch, global_steps=7)
        batch = cropped if action["crop"] == "prompts" else batch
    data = batches.engine_batch(batch, **action.get("settings", {}))
    world_size = int(os.environ["WORLD_SIZE"])
    return tu.chunk_tensordict(data, world_size)[int(os.environ["RANK"])] if world_size > 1 else data


def act(engine: Any, action: dict[str, Any]) -> dict[str, Any]:
    """Run one action and describe its outcome in plain JSON types."""
    data = make_data(action)
    if "fail" in action:
        fail_once(engine, action["fail"], 2)
    if "break" in action:
        break_dump(action["break"], Path(json.loads(Path(os.environ["DUMP_CONFIG_PATH"]).read_text())["dump_path"]))
    outcome: dict[str, Any] = {"weights_before": weights_digest(engine.module)}
    adapter = engine.disable_adapter() if action.get("adapter_off") else nullcontext()
    try:
        if action["do"] == "infer":
            with engine.eval_mode(), adapter:
                output = engine.infer_batch(data)
        else:
            with engine.train_mode():
                output = engine.train_batch(data, loss_function=loss_function(action["role"]))
        for name, value in output.get("model_output", {}).items():
            outcome[name] = [row.float().flatten().tolist() for row in value.unbind()]
        outcome["loss"] = [float(loss) for loss in output.get("loss", [])]
        grad_norm = output.get("metrics", {}).get("grad_norm")
        outcome["grad_norm"] = None if grad_norm is None else float(grad_norm)
    except RuntimeError as error:
        outcome["error"] = str(error)
    outcome["weights"] = weights_digest(engine.module)
    outcome["rng"] = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()
    outcome["deterministic"] = torch.are_deterministic_algorithms_enabled()
    return outcome


def is_dumping() -> bool | None:
    """Whether msprobe still collects; None where it was never imported."""
    runtime = sys.modules.get("msprobe.core.common.runtime")
    return None if runtime is None else bool(runtime.Runtime.is_running)


def main() -> None:
    scenario_file = Path(sys.argv[1])
    scenario: dict[str, Any] = json.loads(scenario_file.read_text(encoding="utf-8"))
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    torch.manual_seed(5)
    cpu_shims.stub_platform()
    cpu_shims.stub_flash_attention()
    cpu_shims.stub_fsdp()
    stub_memory_statistics()
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{scenario_file.parent}/rendezvous",
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    engines = {role: build_engine(scenario, role) for role in dict.fromkeys(a["role"] for a in scenario["actions"])}
    outcomes = [act(engines[action["role"]], action) for action in scenario["actions"]]
    mend_disk()
    result = {"pid": os.getpid(), "outcomes": outcomes, "dumping": is_dumping(), "msprobe": "msprobe" in sys.modules}
    (scenario_file.parent / f"result_rank{rank}.json").write_text(json.dumps(result), encoding="utf-8")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
