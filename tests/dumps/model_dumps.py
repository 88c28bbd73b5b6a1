"""Both sides' dumps of a dense model as msprobe writes them, made of random statistics that hang together exactly.

The statistics of q, k and v add up to those of vLLM's fused q/k/v, gate and up to gate_up; the residual stream is what
the norms of vLLM return. Nothing is computed by a model, so that sizes are free: 64 layers are a second's work.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

from dump_files import ids, tensor

Data = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """Sizes of the model. Equal q and k widths let the two be swapped."""

    layers: int = 4
    tokens: int = 16
    hidden: int = 64
    q: int = 64
    kv: int = 64
    mlp: int = 128
    with_qk_norm: bool = False


class _Side:
    """Collects the entries of one side; shapes get the side's leading dimensions."""

    def __init__(self, prefix: str, lead: list[int]) -> None:
        self.data: Data = {}
        self._prefix, self._lead = prefix, lead

    def t(self, stats: dict[str, float], width: int) -> dict[str, Any]:
        return tensor([*self._lead, width], stats["Norm"], **{k: stats[k] for k in ("Max", "Min", "Mean")})

    def add(
        self,
        path: str,
        cls: str,
        inputs: list[Any],
        outputs: list[Any],
        weight: Any = None,
        call: int = 0,
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        entry: dict[str, Any] = {"input_args": inputs, "input_kwargs": kwargs or {}, "output": outputs}
        if weight is not None:
            entry["parameters"] = {"weight": weight}
        self.data[f"{self._prefix}{path}.{cls}.forward.{call}"] = entry


def _concat(parts: list[tuple[dict[str, float], int]]) -> dict[str, float]:
    total = sum(width for _, width in parts)
    return {
        "Norm": math.sqrt(sum(stats["Norm"] ** 2 for stats, _ in parts)),
        "Max": max(stats["Max"] for stats, _ in parts),
        "Min": min(stats["Min"] for stats, _ in parts),
        "Mean": sum(stats["Mean"] * width for stats, width in parts) / total,
    }


def qwen_dumps(
    shape: Shape = Shape(),
    seed: int = 1,
    noise: float = 0.0,
    backend: str = "fsdp",
    faults: dict[str, float] | None = None,
) -> tuple[Data, Data]:
    """(inference data, training data). `faults` maps "layers.1.mlp.down_proj" and the like to a factor on the
    inference side's output; `noise` is the largest relative difference that every other number gets."""
    rng, jitter = random.Random(seed), random.Random(seed + 1)
    faults = faults or {}
    n, lead = shape.tokens, [1, shape.tokens]
    infer = _Side("Module.model.", [n])
    wrap = "Module._fsdp_wrapped_module.model." if backend == "fsdp" else "Module.model."
    train = _Side(wrap, lead)

    def stats(scale: float = 10.0) -> dict[str, float]:
        return {
            "Norm": scale * rng.uniform(1, 2),
            "Max": rng.uniform(2, 4),
            "Min": -rng.uniform(2, 4),
            "Mean": rng.uniform(-0.01, 0.01),
        }

    def seen(values: dict[str, float], factor: float = 1.0) -> dict[str, float]:
        return {key: value * factor * (1 + noise * jitter.uniform(-1, 1)) for key, value in values.items()}

    def weight(width: int, factor: float = 1.0) -> Any:
        return tensor([width, shape.hidden], 3.0 * factor, Max=0.5 * factor, Min=-0.5 * factor, Mean=0.0)

    with_weights = backend != "fsdp"
    positions = ids([n], 0, n - 1)
    h = shape.hidden
    embedded = stats()
    infer.add("embed_tokens", "VocabParallelEmbedding", [ids([n])], [infer.t(seen(embedded, 1.0), h)], weight(h))
    infer.data[next(iter(infer.data))]["output"][0] = infer.t(embedded, h)
    train.add(
        "embed_tokens",
        "Embedding" if backend == "fsdp" else "FSDPEmbedding",
        [ids(lead)],
        [train.t(embedded, h)],
        weight(h) if with_weights else None,
    )
    residual = embedded
    for layer in range(shape.layers):
        base = f"layers.{layer}."
        inner = base + ("_fsdp_wrapped_module." if backend == "fsdp" else "")

        def factor(module: str, base: str = base) -> float:
            return faults.get(base + module, 1.0)

        normed, q, k, v = stats(), stats(), stats(), stats()
        attended, projected, middle, normed2 = stats(), stats(), stats(), stats()
        gate, up, activated, down = stats(), stats(), stats(), stats()
        first = [infer.t(seen(residual), h)] if layer == 0 else [infer.t(stats(), h), infer.t(stats(), h)]
        outs = [infer.t(seen(normed, factor("input_layernorm")), h)]
        infer.add(
            base + "input_layernorm",
            "RMSNorm",
            first,
            outs if layer == 0 else [*outs, infer.t(seen(residual), h)],
            weight(1, factor("input_layernorm")),
        )
        fused = _concat([(q, shape.q), (k, shape.kv), (v, shape.kv)])
        bad = factor("self_attn.qkv_proj")
        infer.add(
            base + "self_attn.qkv_proj",
            "QKVParallelLinear",
            [infer.t(seen(normed), h)],
            [infer.t(seen(fused, bad), shape.q + 2 * shape.kv), None],
            weight(3, bad),
        )
        rotated = [infer.t(seen(q, bad), shape.q), infer.t(seen(k, bad), shape.kv)]
        infer.add(
            "layers.0.self_attn.rotary_emb",
            "RotaryEmbedding",
            [positions, *rotated],
            [infer.t(stats(), shape.q), infer.t(stats(), shape.kv)],
            call=layer,
        )
        infer.add(
            base + "self_attn.attn",
            "Attention",
            [infer.t(stats(), shape.q), infer.t(stats(), shape.kv), infer.t(seen(v, bad), shape.kv)],
            [infer.t(seen(attended), shape.q)],
        )
        infer.add(
            base + "self_attn.o_proj",
            "RowParallelLinear",
            [infer.t(seen(attended), shape.q)],
            [infer.t(seen(projected, factor("self_attn.o_proj")), h), None],
            weight(4, factor("self_attn.o_proj")),
        )
        infer.add(
            base + "self_attn",
            "Qwen2Attention",
            [],
            [infer.t(seen(projected), h)],
            kwargs={"positions": positions, "hidden_states": infer.t(seen(normed), h)},
        )
        infer.add(
            base + "post_attention_layernorm",
            "RMSNorm",
            [infer.t(stats(), h), infer.t(stats(), h)],
            [infer.t(seen(normed2, factor("post_attention_layernorm")), h), infer.t(seen(middle), h)],
            weight(1, factor("post_attention_layernorm")),
        )
        infer.add(
            base + "mlp.gate_up_proj",
            "MergedColumnParallelLinear",
            [infer.t(seen(normed2), h)],
            [
                infer.t(seen(_concat([(gate, shape.mlp), (up, shape.mlp)]), factor("mlp.gate_up_proj")), 2 * shape.mlp),
                None,
            ],
            weight(5, factor("mlp.gate_up_proj")),
        )
        infer.add(
            base + "mlp.act_fn", "SiluAndMul", [infer.t(stats(), 2 * shape.mlp)], [infer.t(seen(activated), shape.mlp)]
        )
        infer.add(
            base + "mlp.down_proj",
            "RowParallelLinear",
            [infer.t(seen(activated), shape.mlp)],
            [infer.t(seen(down, factor("mlp.down_proj")), h), None],
            weight(6, factor("mlp.down_proj")),
        )
        infer.add(base.rstrip("."), "Qwen2DecoderLayer", [positions, infer.t(stats(), h), None], [infer.t(stats(), h)])

        linear = "Linear"
        train.add(
            inner + "input_layernorm",
            "Qwen2RMSNorm",
            [train.t(residual, h)],
            [train.t(normed, h)],
            weight(1) if with_weights else None,
        )
        for name, values, width in (("q_proj", q, shape.q), ("k_proj", k, shape.kv), ("v_proj", v, shape.kv)):
            train.add(inner + f"self_attn.{name}", linear, [train.t(normed, h)], [train.t(values, width)])
        train.add(
            inner + "self_attn.o_proj",
            linear,
            [train.t(attended, shape.q)],
            [train.t(projected, h)],
            weight(4) if with_weights else None,
        )
        train.add(
            inner + "self_attn",
            "Qwen2Attention",
            [],
            [train.t(projected, h)],
            kwargs={"hidden_states": train.t(normed, h), "position_ids": ids(lead, 0, n - 1)},
        )
        train.add(
            inner + "post_attention_layernorm",
            "Qwen2RMSNorm",
            [train.t(middle, h)],
            [train.t(normed2, h)],
            weight(1) if with_weights else None,
        )
        train.add(inner + "mlp.gate_proj", linear, [train.t(normed2, h)], [train.t(gate, shape.mlp)])
        train.add(inner + "mlp.act_fn", "SiLUActivation", [train.t(gate, shape.mlp)], [train.t(stats(), shape.mlp)])
        train.add(inner + "mlp.up_proj", linear, [train.t(normed2, h)], [train.t(up, shape.mlp)])
        train.add(
            inner + "mlp.down_proj",
            linear,
            [train.t(activated, shape.mlp)],
            [train.t(down, h)],
            weight(6) if with_weights else None,
        )
        residual = stats()
        train.add(
            inner.rstrip("."),
            "Qwen2DecoderLayer" if backend == "fsdp" else "FSDPQwen2DecoderLayer",
            [train.t(stats(), h)],
            [train.t(residual, h)],
        )
    last = stats()
    infer.add(
        "norm",
        "RMSNorm",
        [infer.t(stats(), h), infer.t(stats(), h)],
        [infer.t(seen(last), h), infer.t(seen(residual), h)],
        weight(1),
    )
    train.add("norm", "Qwen2RMSNorm", [train.t(residual, h)], [train.t(last, h)], weight(1) if with_weights else None)
    return infer.data, train.data
