"""The inference side of a run on a CPU: vLLM's Qwen2 by name, under msprobe, with the dispatch log of its steps.

    python inference_side.py SCENARIO.json

The module tree has vLLM's names, classes and calling convention (packed tokens [N, H], fused q/k/v and gate/up, norms
that add the residual, one rotary module that all layers share) and loads a transformers checkpoint. Each "server" of
the scenario prefills all prompts one by one into a folder of its own, with one thing about it wrong, or nothing.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class VocabParallelEmbedding(nn.Module):
    def __init__(self, vocab: int, hidden: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, hidden), requires_grad=False)

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        return F.embedding(input_, self.weight)


class _Linear(nn.Module):
    """Returns (output, bias that was not added), as vLLM's linear layers do."""

    def __init__(self, width_in: int, width_out: int, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width_out, width_in), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(width_out), requires_grad=False) if bias else None

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, None]:
        return F.linear(input_, self.weight, self.bias), None


class QKVParallelLinear(_Linear):
    pass


class MergedColumnParallelLinear(_Linear):
    pass


class RowParallelLinear(_Linear):
    pass


class ParallelLMHead(VocabParallelEmbedding):
    pass


class RMSNorm(nn.Module):
    def __init__(self, hidden: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden), requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """[N, H] -> the norm; with a residual, (the norm of the sum, the sum)."""
        if residual is not None:
            x = x + residual
            residual = x
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        out = (wide * self.weight.float()).to(x.dtype)
        return out if residual is None else (out, residual)


class RotaryEmbedding(nn.Module):
    def __init__(self, head_dim: int, base: float, length: int):
        super().__init__()
        frequencies = 1.0 / base ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
        self.register_buffer("cos_sin_cache", torch.cat((angles.cos(), angles.sin()), dim=-1), persistent=False)
        self.head_dim = head_dim

    def forward(self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> Any:
        cos, sin = self.cos_sin_cache[positions].to(query.dtype).chunk(2, dim=-1)

        def rotate(x: torch.Tensor) -> torch.Tensor:
            heads = x.view(x.shape[0], -1, self.head_dim)
            a, b = heads.chunk(2, dim=-1)
            c, s = cos.unsqueeze(1), sin.unsqueeze(1)
            return torch.cat((a * c - b * s, b * c + a * s), dim=-1).flatten(1)

        return rotate(query), rotate(key)


class Attention(nn.Module):
    def __init__(self, heads: int, kv_heads: int, head_dim: int):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        n, repeat = query.shape[0], self.heads // self.kv_heads
        q, k, v = (x.view(n, -1, self.head_dim).transpose(0, 1) for x in (query, key, value))
        k, v = k.repeat_interleave(repeat, dim=0), v.repeat_interleave(repeat, dim=0)
        out = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
        return out.transpose(0, 1).flatten(1)


class SiluAndMul(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up


class Qwen2Attention(nn.Module):
    def __init__(self, config: Any, rotary: nn.Module):
        super().__init__()
        dim = config.hidden_size // config.num_attention_heads
        self.q_size, self.kv_size = config.num_attention_heads * dim, config.num_key_value_heads * dim
        self.qkv_proj = QKVParallelLinear(config.hidden_size, self.q_size + 2 * self.kv_size, bias=True)
        self.o_proj = RowParallelLinear(self.q_size, config.hidden_size)
        self.rotary_emb = rotary
        self.attn = Attention(config.num_attention_heads, config.num_key_value_heads, dim)

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q, k = self.rotary_emb(positions, q, k)
        output, _ = self.o_proj(self.attn(q, k, v))
        return output


class Qwen2MLP(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(config.hidden_size, 2 * config.intermediate_size)
        self.down_proj = RowParallelLinear(config.intermediate_size, config.hidden_size)
        self.act_fn = SiluAndMul()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate_up, _ = self.gate_up_proj(x)
        x, _ = self.down_proj(self.act_fn(gate_up))
        return x


class Qwen2DecoderLayer(nn.Module):
    def __init__(self, config: Any, rotary: nn.Module):
        super().__init__()
        self.self_attn = Qwen2Attention(config, rotary)
        self.mlp = Qwen2MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None) -> Any:
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions=positions, hidden_states=hidden_states)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


class Qwen2Model(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        base = getattr(config, "rope_theta", None) or config.rope_parameters["rope_theta"]
        rotary = RotaryEmbedding(config.hidden_size // config.num_attention_heads, base, config.max_position_embeddings)
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Qwen2DecoderLayer(config, rotary) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden_states, residual = self.embed_tokens(input_ids), None
        for layer in self.layers:
            hidden_states, residual = layer(positions, hidden_states, residual)
        hidden_states, _ = self.norm(hidden_states, residual)
        return hidden_states


class Qwen2ForCausalLM(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        self.model = Qwen2Model(config)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids, positions)


_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def load_weights(model: nn.Module, checkpoint: dict[str, torch.Tensor]) -> None:
    """vLLM's weight loading: stack what is fused."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            module = name.split(".")[-2]
            parts = [name.replace(module, part) for part in _FUSED.get(module, (module,))]
            parameter.copy_(torch.cat([checkpoint[part] for part in parts]))


def break_something(model: Qwen2ForCausalLM, fault: dict[str, Any], checkpoint: dict[str, torch.Tensor]) -> None:
    """Plant one fault; `fault` names its kind and where."""
    load_weights(model, checkpoint)
    kind = fault.get("kind")
    layer = model.model.layers[fault.get("layer", 0)]
    with torch.no_grad():
        if kind == "scale":
            layer.mlp.down_proj.weight.mul_(fault["factor"])
        elif kind == "swap_qk":
            size = layer.self_attn.q_size
            for tensor in (layer.self_attn.qkv_proj.weight, layer.self_attn.qkv_proj.bias):
                q, k = tensor[:size].clone(), tensor[size : 2 * size].clone()
                tensor[:size], tensor[size : 2 * size] = k, q
        elif kind == "zero_norm":
            layer.post_attention_layernorm.weight.zero_()
        elif kind == "stale":
            generator = torch.Generator().manual_seed(99)
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_((fault["size"] * noise * parameter.float().std().nan_to_num(1.0)).to(parameter.dtype))


def main() -> None:
    scenario_file = Path(sys.argv[1])
    scenario: dict[str, Any] = json.loads(scenario_file.read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    from msprobe.pytorch import PrecisionDebugger
    from safetensors.torch import load_file
    from transformers import AutoConfig

    dtype = getattr(torch, scenario["dtype"])
    checkpoint = load_file(Path(scenario["model"]) / "model.safetensors")
    model = Qwen2ForCausalLM(AutoConfig.from_pretrained(scenario["model"])).to(dtype)
    debugger = PrecisionDebugger(config_path=scenario["config"])
    step = 0
    for server in scenario["servers"]:
        break_something(model, server["fault"], checkpoint)
        offset = server["fault"].get("offset", 0)
        folder = Path(server["dump_path"]) / str(os.getpid())
        folder.mkdir(parents=True)
        debugger.service.config.dump_path = str(folder)
        with (folder / "dispatch_log.jsonl").open("w", encoding="utf-8") as log:
            for request_id, prompt in zip(scenario["ids"], scenario["prompts"], strict=True):
                debugger.start(model=model)
                step = debugger.service.current_iter
                with torch.no_grad():
                    model(torch.tensor(prompt), torch.arange(offset, offset + len(prompt)))
                record = {
                    "source": "dispatch_logger",
                    "timestamp": time.strftime("%Y-%m-%dT%H:%M:%S"),
                    "pid": os.getpid(),
                    "rank": 0,
                    "step": step,
                    "phase": "prefill",
                    "total_num_scheduled_tokens": len(prompt),
                    "requests": [
                        {
                            "request_id": f"{request_id}-{step:08x}",
                            "type": "new",
                            "tokens": len(prompt),
                            "num_computed_tokens": 0,
                            "num_prompt_tokens": len(prompt),
                            "phase": "prefill",
                            "prefill_complete": True,
                            "resumed": False,
                        }
                    ],
                }
                log.write(json.dumps(record) + "\n")
                debugger.stop()
                debugger.step()


if __name__ == "__main__":
    main()
