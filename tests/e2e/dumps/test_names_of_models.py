"""The mapping tables against the models themselves: transformers' modules, and vLLM's source."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from real_runs import E2E_FOLDER

from patchctl.dumps.names import Family, families, known_paths, parse_name

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
CONFIGS: dict[str, Any] = {
    "qwen2": lambda: transformers.Qwen2Config(**SMALL),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL, head_dim=8),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(**SMALL, **MOE, head_dim=8, num_experts=4, mlp_only_layers=[0]),
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "deepseek-v3": lambda: transformers.DeepseekV3Config(
        **SMALL, **MOE, **MLA, n_routed_experts=4, first_k_dense_replace=1, n_group=2, topk_group=1
    ),
}
ABSENT = {
    "qwen2": {"self_attn.q_norm", "self_attn.k_norm"},
    "llama": {"self_attn.q_norm", "self_attn.k_norm"},
    "qwen3-moe": {"mlp.shared_experts.gate_up_proj", "mlp.shared_experts.down_proj"},
}
SOURCES = {
    "qwen2": ("qwen2.py",),
    "qwen3": ("qwen3.py", "qwen2.py"),
    "qwen3-moe": ("qwen3_moe.py",),
    "llama": ("llama.py",),
    "deepseek-v3": ("deepseek_v2.py",),
}


def family(name: str) -> Family:
    return next(found for found, _ in families() if found.name == name)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_module_of_transformers_is_compared_or_left_out_by_name(name: str) -> None:
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]())
    used, reasons = known_paths(family(name), "fsdp")
    paths = set()
    for path, module in model.named_modules():
        if path and not isinstance(module, torch.nn.ModuleList):
            parsed = parse_name(f"Module.{path}.{type(module).__name__}.forward.0")
            assert parsed is not None
            paths.add(parsed.path)
    assert paths <= used | set(reasons)
    unfilled = {
        point.module
        for point in family(name).layer
        if point.fsdp and not any(all(term.path in paths for term in formula.terms) for formula in point.fsdp)
    }
    assert unfilled == ABSENT.get(name, set())


@pytest.mark.parametrize("name", SOURCES)
def test_every_point_has_a_name_that_vllm_uses(name: str) -> None:
    models = E2E_FOLDER / "vllm-0.18.1" / "vllm" / "model_executor" / "models"
    if not models.is_dir():
        pytest.skip("vLLM's source is not in this environment")
    sources = [(models / file).read_text(encoding="utf-8") for file in SOURCES[name]]
    attributes = set(re.findall(r"self\.(\w+) = ", "\n".join(sources)))
    layer_class = families()[[found.name for found, _ in families()].index(name)][1]
    assert any(f"class {cls}(" in source for cls in layer_class for source in sources)
    for point in family(name).layer:
        if point.module in ABSENT.get(name, set()):
            continue
        leaves = [[term.path.rpartition(".")[2] for term in formula.terms] for formula in point.infer]
        assert any(all(leaf in attributes or leaf in ("", "mlp") for leaf in formula) for formula in leaves), point


def test_the_tables_ship_with_the_package() -> None:
    import patchctl.dumps

    folder = Path(patchctl.dumps.__file__).parent / "mappings"
    assert {path.name for path in folder.iterdir()} >= {"blocks.json", "families.json", "report_text.json"}
