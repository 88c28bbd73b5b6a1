"""Batches as verl's trainers hold them after a rollout: left-padded prompts, right-padded responses, request ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

PROMPT_LENS = (3, 6, 4, 5)
RESPONSE_LENS = (2, 3, 4, 3)
PROMPT_WIDTH = 7
RESPONSE_WIDTH = 5
VOCAB = 128


def make_batch(prefix: str, **non_tensors: list[Any]) -> Any:
    """A DataProto of four samples with the request ids `{prefix}0` to `{prefix}3`.

    Every keyword is one more non-tensor field with one value per sample.
    """
    from verl.protocol import DataProto

    generator = torch.Generator().manual_seed(11)
    rows = len(PROMPT_LENS)
    input_ids = torch.zeros(rows, PROMPT_WIDTH + RESPONSE_WIDTH, dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    for row, (prompt, response) in enumerate(zip(PROMPT_LENS, RESPONSE_LENS, strict=True)):
        filled = slice(PROMPT_WIDTH - prompt, PROMPT_WIDTH + response)
        input_ids[row, filled] = torch.randint(4, VOCAB, (prompt + response,), generator=generator)
        attention_mask[row, filled] = 1
    tensors = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(-1) - 1).clamp(min=0),
        "prompts": input_ids[:, :PROMPT_WIDTH],
        "responses": input_ids[:, PROMPT_WIDTH:],
        "response_mask": attention_mask[:, PROMPT_WIDTH:],
    }
    columns = {"request_id": [f"{prefix}{row}" for row in range(rows)], **non_tensors}
    return DataProto.from_single_dict({**tensors, **{name: object_array(column) for name, column in columns.items()}})


def object_array(values: list[Any]) -> np.ndarray[Any, Any]:
    """One object per element, whatever the objects are."""
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def add_training_fields(batch: Any) -> None:
    """What the actor's and the critic's losses read, random but fixed."""
    generator = torch.Generator().manual_seed(12)
    shape = batch.batch["responses"].shape
    mask = batch.batch["response_mask"]
    for name in ("old_log_probs", "advantages", "returns", "values"):
        batch.batch[name] = torch.randn(shape, generator=generator) * mask


def engine_batch(batch: Any, micro_batch_size: int = 1, **settings: Any) -> Any:
    """A DataProto in the form that `infer_batch` and `train_batch` take."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    data = left_right_2_no_padding(batch.to_tensordict())
    defaults = {
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": micro_batch_size,
        "use_remove_padding": True,
        "use_fused_kernels": False,
        "calculate_entropy": True,
        "temperature": 1.0,
        "global_batch_size": len(PROMPT_LENS),
    }
    tu.assign_non_tensor(data, **{**defaults, **settings})
    return data
