"""Cropping verl's own batches to their prompts."""

from __future__ import annotations

import logging
from typing import Any

import batches
import pytest
import torch
from verl import DataProto
from verl.utils import tensordict_utils as tu
from verl.utils.consistency_dump import crop_to_prompts
from verl.utils.consistency_dump.prompts_only import DUMP_KEY
from verl.workers.engine.utils import prepare_micro_batches
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

P, R, B = batches.PROMPT_WIDTH, batches.RESPONSE_WIDTH, 4
RESPONSE_FIELDS = (
    "responses", "response_mask", "rollout_log_probs", "rm_scores", "token_level_scores", "token_level_rewards",
    "old_log_probs", "ref_log_prob", "advantages", "returns", "values", "entropys", "sum_pi_squared",
)  # fmt: skip


def full_batch() -> DataProto:
    """Every field that a trainer can have put into a batch by the time of the log_prob phase, and later ones."""
    batch: DataProto = batches.make_batch("a", multi_modal_inputs=[{"pixel_values": torch.ones(2)}] * B, uid=["u"] * B)
    for name in RESPONSE_FIELDS[2:]:
        batch.batch[name] = torch.arange(B * R, dtype=torch.float32).reshape(B, R)
    positions = torch.arange(P + R).repeat(B, 1)
    batch.batch["routed_experts"] = positions[..., None, None].repeat(1, 1, 2, 3)
    batch.batch["teacher_logprobs"] = positions[..., None].float().repeat(1, 1, 3)
    batch.batch["teacher_ids"] = positions[..., None].repeat(1, 1, 3)
    batch.batch["reward_baselines"] = torch.ones(B)
    batch.batch["dummy_tensor"] = torch.zeros(B, 1)
    batch.meta_info.update({"temperature": 1.0, "global_token_num": [5, 9, 8, 8]})
    return batch


def test_every_width() -> None:
    batch = full_batch()
    cropped = crop_to_prompts(batch, global_steps=3)
    assert len(cropped) == B
    for name in RESPONSE_FIELDS:
        assert cropped.batch[name].shape == (B, 0), name
    for name in ("input_ids", "attention_mask", "position_ids", "prompts"):
        assert cropped.batch[name].shape == (B, P), name
        assert torch.equal(cropped.batch[name], batch.batch[name][:, :P])
    assert cropped.batch["routed_experts"].shape == (B, P, 2, 3)
    assert cropped.batch["teacher_logprobs"].shape == cropped.batch["teacher_ids"].shape == (B, P, 3)
    assert cropped.batch["reward_baselines"].shape == (B,)
    assert cropped.batch["dummy_tensor"].shape == (B, 1)
    assert cropped.meta_info["global_token_num"] == list(batches.PROMPT_LENS)
    assert cropped.meta_info["temperature"] == 1.0
    assert list(cropped.non_tensor_batch["request_id"]) == ["a0", "a1", "a2", "a3"]
    assert set(cropped.non_tensor_batch) == set(batch.non_tensor_batch)


def test_multi_modal_positions() -> None:
    """Position ids of (B, 3, P+R): three coordinates of each token."""
    batch = full_batch()
    batch.batch["position_ids"] = torch.arange(P + R).repeat(B, 3, 1)
    cropped = crop_to_prompts(batch)
    assert torch.equal(cropped.batch["position_ids"], torch.arange(P).repeat(B, 3, 1))


def test_prompts_as_wide_as_responses() -> None:
    batch = batches.make_batch("a")
    wide = torch.cat([torch.zeros(B, P - R, dtype=torch.long), batch.batch["responses"]], dim=1)
    for name in ("input_ids", "attention_mask", "position_ids"):
        batch.batch[name] = torch.cat([batch.batch[name][:, :P], wide], dim=1)
    batch.batch["responses"] = wide
    batch.batch["response_mask"] = torch.ones_like(wide)
    cropped = crop_to_prompts(batch)
    assert cropped.batch["prompts"].shape == cropped.batch["input_ids"].shape == (B, P)
    assert cropped.batch["responses"].shape == cropped.batch["response_mask"].shape == (B, 0)


def test_a_second_crop_changes_nothing() -> None:
    once = crop_to_prompts(full_batch(), global_steps=3)
    assert crop_to_prompts(once, global_steps=4) is once
    assert once.batch["input_ids"].shape == (B, P)


def test_the_batch_itself_is_left_as_it_is() -> None:
    """It goes on through the trainer; the mark keeps it out of the dump, and its crop in."""
    batch, before = full_batch(), full_batch()
    cropped = crop_to_prompts(batch)
    for name, tensor in before.batch.items():
        assert torch.equal(batch.batch[name], tensor), name
    assert {name: value for name, value in batch.meta_info.items() if name != DUMP_KEY} == before.meta_info
    assert batch.meta_info[DUMP_KEY] is False and cropped.meta_info[DUMP_KEY] is True
    assert crop_to_prompts(batch).meta_info[DUMP_KEY] is True, "the next crop of the batch is dumped as well"


def test_no_prompt_left() -> None:
    batch = batches.make_batch("a")
    batch.batch["responses"] = torch.zeros(B, P + R)
    with pytest.raises(ValueError, match="leave no prompt"):
        crop_to_prompts(batch)


def test_says_what_it_cut(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        crop_to_prompts(full_batch(), global_steps=3)
    (record,) = caplog.records
    message = record.getMessage()
    assert "step 3" in message and "4 prompts" in message and "no weight is updated" in message
    assert "input_ids (4, 12) -> (4, 7)" in message and "rm_scores (4, 5) -> (4, 0)" in message
    assert "prompts (" not in message and "reward_baselines" not in message


@pytest.mark.parametrize("dynamic", [False, True])
def test_micro_batches_are_consistent(dynamic: bool) -> None:
    """What the engine gets: each sample's prompt, and of every field per token the rows of that prompt."""
    data = left_right_2_no_padding(crop_to_prompts(full_batch()).to_tensordict())
    tu.assign_non_tensor(data, use_dynamic_bsz=dynamic, micro_batch_size_per_gpu=1, max_token_len_per_gpu=12, sp_size=1)
    micro_batches, _ = prepare_micro_batches(data)
    seen: dict[str, Any] = {}
    for micro_batch in micro_batches:
        rows = zip(
            tu.get(micro_batch, "request_id"),
            micro_batch["input_ids"].unbind(),
            micro_batch["routed_experts"].unbind(),
            micro_batch["teacher_ids"].unbind(),
            strict=True,
        )
        for request_id, tokens, experts, teacher in rows:
            seen[request_id] = (tokens.tolist(), experts[:, 0, 0].tolist(), teacher[:, 0].tolist())
    whole = full_batch().batch["input_ids"]
    for row, length in enumerate(batches.PROMPT_LENS):
        columns = list(range(P - length, P))
        assert seen[f"a{row}"] == (whole[row, P - length : P].tolist(), columns, columns)


def test_output_of_the_engine_is_empty() -> None:
    data = left_right_2_no_padding(crop_to_prompts(full_batch()).to_tensordict())
    per_token = torch.ones(sum(batches.PROMPT_LENS))
    assert no_padding_2_padding(per_token, data).shape == (B, 0)
