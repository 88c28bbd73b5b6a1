"""Probes of vLLM's own KV cache managers, of kinds of caches that the CPU engine's model does not have. Prints JSON.

    python run_managers.py TREE

TREE is a patched verl tree. For every kind: rows of what was asked, the probe's answer, and the number of
tokens that the manager finds for a request with that prompt; and the usage while a request held its blocks.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.request import Request

BLOCK, BLOCKS = 16, 100
SHAPE = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 16, "dtype": torch.float32}
FULL = KVCacheGroupSpec(["full"], FullAttentionSpec(**SHAPE))
WINDOW = KVCacheGroupSpec(["window"], SlidingWindowSpec(**SHAPE, sliding_window=64))
FILE = "verl/workers/rollout/vllm_rollout/vllm_cache_probes.py"


def ask(
    probes: Any, groups: list[KVCacheGroupSpec], *, eagle: bool = False, lora: LoRARequest | None = None
) -> dict[str, Any]:
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    manager = KVCacheManager(
        KVCacheConfig(num_blocks=BLOCKS + 1, kv_cache_tensors=[], kv_cache_groups=groups),
        max_model_len=8192,
        scheduler_block_size=BLOCK,
        hash_block_size=BLOCK,
        use_eagle=eagle,
    )
    core = SimpleNamespace(request_block_hasher=hasher, scheduler=SimpleNamespace(kv_cache_manager=manager))

    def request(name: str, ids: list[int]) -> Request:
        params = SamplingParams(max_tokens=1)
        return Request(name, ids, params, pooling_params=None, lora_request=lora, block_hasher=hasher)

    rows: list[Any] = []

    def row(name: str, ids: list[int]) -> None:
        told = probes.resident_prefix_tokens(core, ids, (lora.lora_name, lora.lora_path) if lora else None)
        rows.append([name, told, manager.get_computed_blocks(request(name, ids))[1]])

    ids = list(range(500))
    row("nothing cached", ids)
    held = request("held", ids)
    blocks, cached = manager.get_computed_blocks(held)[:2]
    manager.allocate_slots(held, len(ids), cached, blocks)
    usage = probes.kv_cache_usage(core)
    manager.free(held)
    for tokens in (500, 499, 497, 496, 495, 33, 32, 17, 16, 1):
        row(f"{tokens} tokens", ids[:tokens])
    row("new text", [*ids, *range(1000, 1200)])
    row("one token changed", [*ids[:100], 7777, *ids[101:]])
    without = probes.resident_prefix_tokens(core, ids, None) if lora else None
    return {"rows": rows, "usage": usage, "without_lora": without}


if __name__ == "__main__":
    module = SimpleNamespace(**runpy.run_path(str(Path(sys.argv[1]) / FILE)))
    found = {
        "full attention": ask(module, [FULL]),
        "draft model": ask(module, [FULL], eagle=True),
        "adapter": ask(module, [FULL], lora=LoRARequest("adapter", 1, "/adapter")),
        "sliding window": ask(module, [WINDOW]),
        "two kinds of layers": ask(module, [FULL, WINDOW]),
    }
    print(json.dumps(found))
