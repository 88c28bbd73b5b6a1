"""What verl, megatron-core and mbridge take for granted of an accelerator, answered on a CPU.

Each function replaces one group of such assumptions in the running process and says why. None of them touches a
schedule, an engine, msprobe or the code under test: where a stub gives a number, it is the number the real thing would
give. Call them before the engine is built; calling one twice is harmless.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch


def stub_platform() -> None:
    """Newer verl has platforms for CUDA, ROCm and NPUs, and falls back to CUDA. Call it before the rest of verl loads.

    The platform for a CPU answers as verl did before it had any: the device is "cpu", with the module `torch.cpu`.
    """
    if importlib.util.find_spec("verl.plugin") is None:
        return
    platform = importlib.import_module("verl.plugin.platform")
    members: dict[str, Any] = {name: lambda self, *_: None for name in platform.PlatformBase.__abstractmethods__}
    members |= {name: property(lambda self: "cpu") for name in ("device_name", "vendor_name")}
    members |= {
        "device_module": property(lambda self: torch.cpu),
        "is_available": lambda self: True,
        "current_device": lambda self: torch.cpu.current_device(),
        "device_count": lambda self: 1,
        "manual_seed": lambda self, seed: torch.manual_seed(seed),
        "manual_seed_all": lambda self, seed: torch.manual_seed(seed),
        "get_device_capability": lambda self, *_: (None, None),
        "communication_backend_name": lambda self: "gloo",
        "visible_devices_envvar": lambda self: "CUDA_VISIBLE_DEVICES",
        "nvtx_range": lambda self, _: nullcontext(),
        "ray_resource_name": lambda self: "CPU",
        "ray_noset_envvars": lambda self: [],
        "is_ipc_supported": lambda self: False,
    }
    platform.set_platform(type("CpuPlatform", (platform.PlatformBase,), members)())


def stub_flash_attention() -> None:
    """flash_attn has no CPU build.

    verl's packing helpers get the pure torch functions that verl ships for NPUs. Value-head models, for which verl
    hard-codes flash_attention_2, load with sdpa.
    """
    from transformers import AutoModelForTokenClassification

    attention = importlib.import_module("verl.utils.attention_utils")
    npu = importlib.import_module("verl.utils.npu_flash_attn_utils")
    functions = (npu.index_first_axis, npu.pad_input, npu.rearrange, npu.unpad_input)
    attention._get_attention_functions = lambda: functions
    load = AutoModelForTokenClassification.from_pretrained.__func__
    AutoModelForTokenClassification.from_pretrained = classmethod(
        lambda cls, *args, **kwargs: load(cls, *args, **{**kwargs, "attn_implementation": "sdpa"})
    )


def stub_fsdp() -> None:
    """FSDP moves states through an accelerator where a CPU-only process group needs no move.

    FSDP1 refuses `sync_module_states` for CPU modules. CPU offload pins memory, which needs an accelerator's driver.
    """
    init_utils = importlib.import_module("torch.distributed.fsdp._init_utils")
    init_utils._check_module_states_for_sync_module_states = lambda *args, **kwargs: None
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self  # type: ignore[method-assign,assignment]


def stub_cuda_for_megatron() -> None:
    """megatron-core 0.16 says "cuda" in literals and default arguments.

    The current device is "cpu", tensors asked for on "cuda" are made there, the CUDA generator is the CPU's, events
    and synchronisation have nothing to wait for. The optimizers accept parameters by their type's name, so that
    `Tensor.type()` says torch.cuda.*.
    """
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    cuda: Any = torch.cuda
    cuda.current_device = lambda: "cpu"
    cuda.synchronize = lambda *args, **kwargs: None
    cuda.empty_cache = lambda: None
    cuda.manual_seed = lambda seed: torch.manual_seed(seed)
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    for name in ("zeros", "empty", "ones", "tensor", "arange", "full"):
        _make_on_cpu(torch, name)
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign,assignment]
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign,assignment,return-value]
    torch.Tensor.type = _type_with_cuda_name(torch.Tensor.type)  # type: ignore[method-assign]


def stub_transformer_engine() -> None:
    """TransformerEngine has no CPU build, and mbridge asks for its layers.

    The layer spec is megatron-core's own local one. Its core attention cannot read packed sequences, so a subclass
    runs sdpa on each. The local spec keeps the two norms in front of qkv and fc1 as modules of their own, where
    TransformerEngine fuses them into the linear layer: their weights get their names.
    """
    bridge = importlib.import_module("mbridge.core.llm_bridge")
    layer_specs = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    qwen2 = importlib.import_module("mbridge.models.qwen2")
    real_spec = layer_specs.get_gpt_decoder_block_spec

    def local_spec(config: Any, use_transformer_engine: bool = False, vp_stage: int | None = None) -> Any:
        spec = real_spec(config, use_transformer_engine=False, vp_stage=vp_stage)
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = _packed_attention()
        return spec

    bridge.get_gpt_decoder_block_spec = local_spec
    _drop_value_model_setting()
    layer = "model.layers.{layer_number}"
    qwen2.Qwen2Bridge._OTHER_MAPPING = {"input_layernorm.weight": [f"{layer}.input_layernorm.weight"]}
    qwen2.Qwen2Bridge._MLP_MAPPING["pre_mlp_layernorm.weight"] = [f"{layer}.post_attention_layernorm.weight"]


def stub_fused_kernels() -> None:
    """verl's fused linear cross entropy is a Triton kernel; plain torch gives the same log-probs and entropy."""
    fused = importlib.import_module("verl.models.mcore.model_forward_fused")

    def linear_cross_entropy(
        hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, temperature: float, *_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden [..., H], weight [V, H], labels with N elements; returns log-probs and entropy of shape [N]."""
        logits = hidden.reshape(-1, hidden.shape[-1]) @ weight.T / temperature
        log_softmax = logits.float().log_softmax(-1)
        log_probs = log_softmax.gather(-1, labels.reshape(-1, 1)).squeeze(-1)
        return log_probs, -(log_softmax.exp() * log_softmax).sum(-1)

    fused.linear_cross_entropy = linear_cross_entropy


def _drop_value_model_setting() -> None:
    """verl 0.9.0 says to every bridge that a value model doesn't share its embeddings; mbridge has no such setting and
    takes it from the model's configuration, where verl says it too."""
    bridge: Any = importlib.import_module("mbridge.core.bridge").Bridge
    real = bridge.set_extra_args

    def set_extra_args(self: Any, **settings: Any) -> None:
        settings.pop("share_embeddings_and_output_weights", None)
        real(self, **settings)

    bridge.set_extra_args = set_extra_args


def _packed_attention() -> type[torch.nn.Module]:
    """DotProductAttention for one micro batch in thd layout: causal attention inside each packed sequence."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class PackedDotProductAttention(DotProductAttention):  # type: ignore[misc]
        def forward(
            self,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attention_mask: torch.Tensor | None,
            attn_mask_type: Any = None,
            attention_bias: torch.Tensor | None = None,
            packed_seq_params: Any = None,
        ) -> torch.Tensor:
            """query [N, heads, dim], key and value [N, groups, dim], all with packed sequences; returns [N, H]."""
            if packed_seq_params is None:
                raise AssertionError("the end-to-end tests run packed sequences only (use_remove_padding=True)")
            repeat = query.shape[1] // key.shape[1]
            ends = packed_seq_params.cu_seqlens_q.tolist()
            parts = []
            for begin, end in pairwise(ends):
                q, k, v = (x[begin:end].transpose(0, 1).unsqueeze(0) for x in (query, key, value))
                k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
                out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
                parts.append(out.squeeze(0).transpose(0, 1).flatten(1))
            return torch.cat(parts)

    return PackedDotProductAttention


def _make_on_cpu(module: ModuleType, name: str) -> None:
    """Let `module.name(..., device="cuda")` make its tensor on the CPU."""
    real = getattr(module, name)
    if hasattr(real, "made_on_cpu"):
        return

    def make(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return real(*args, **kwargs)

    make.made_on_cpu = True  # type: ignore[attr-defined]
    setattr(module, name, make)


def _type_with_cuda_name(real: Callable[..., Any]) -> Callable[..., Any]:
    """`Tensor.type` whose answer names the CUDA class; a conversion stays a conversion."""

    def named(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return real(self, dtype, *args, **kwargs)
        name: str = real(self)
        return name if ".cuda." in name else name.replace("torch.", "torch.cuda.", 1)

    return named
