"""What the log says about a micro batch, from the shapes that verl's trainers give it."""

from __future__ import annotations

import json
from typing import Any

import batches
import numpy as np
import torch
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.protocol import DataProto
from verl.utils import tensordict_utils as tu
from verl.utils.consistency_dump import crop_to_prompts
from verl.utils.consistency_dump.training_log import sample_fields
from verl.utils.tensordict_utils import list_of_dict_to_tensordict


def chain(*requests: tuple[str, int, int]) -> str:
    return json.dumps([dict(zip(("request_id", "prompt_len", "num_tokens"), each, strict=True)) for each in requests])


def fields(batch: Any) -> dict[str, Any]:
    return sample_fields([batches.engine_batch(batch)])


def test_whole_sequences() -> None:
    assert fields(batches.make_batch("a")) == {
        "request_ids": ["a0", "a1", "a2", "a3"],
        "num_requests": 4,
        "prompt_lens": [3, 6, 4, 5],
        "seq_lens": [5, 9, 8, 8],
    }


def test_prompts() -> None:
    found = fields(crop_to_prompts(batches.make_batch("a"), global_steps=9))
    assert found["prompt_lens"] == found["seq_lens"] == [3, 6, 4, 5]
    assert found["global_steps"] == 9


def test_no_id_is_never_a_string() -> None:
    batch = batches.make_batch("a")
    batch.non_tensor_batch["request_id"] = batches.object_array([None, "b", None, "d"])
    assert fields(batch)["request_ids"] == [None, "b", None, "d"]
    del batch.non_tensor_batch["request_id"]
    assert fields(batch)["request_ids"] == [None] * 4
    assert fields(batch)["num_requests"] == 4


def test_weight_versions() -> None:
    """Fully Async gives the first and the last version; the hybrid trainer's samples have the server's own field."""
    batch = batches.make_batch("a", min_global_steps=[3, 3, 4, 4], max_global_steps=[3, 4, 4, 4])
    assert fields(batch)["min_global_steps"] == [3, 3, 4, 4]
    assert fields(batch)["max_global_steps"] == [3, 4, 4, 4]
    none = {"min_global_steps": [None] * 4, "max_global_steps": [None] * 4}
    assert fields(batches.make_batch("a", global_steps=[7] * 4, **none))["max_global_steps"] == [7] * 4
    assert "min_global_steps" not in fields(batches.make_batch("a", **none))


def test_chains_only_where_a_sample_was_resumed() -> None:
    once = chain(("a0", 3, 2))
    assert "request_chains" not in fields(batches.make_batch("a", request_chain=[once] * 4))
    twice = chain(("a1", 6, 1), ("x", 7, 2))
    found = fields(batches.make_batch("a", request_chain=[once, twice, None, once]))["request_chains"]
    assert found == [json.loads(once), json.loads(twice), None, json.loads(once)]


def test_several_micro_batches_in_order() -> None:
    parts = [batches.engine_batch(batches.make_batch(prefix)) for prefix in ("a", "b")]
    found = sample_fields(parts)
    assert found["request_ids"] == [f"{prefix}{row}" for prefix in ("a", "b") for row in range(4)]
    assert found["num_requests"] == 8 and found["seq_lens"] == [5, 9, 8, 8] * 2


def test_survives_the_way_to_the_engine() -> None:
    """Concatenation over workers, pickling and micro batches of one, as in Fully Async."""
    batch = DataProto.concat(
        [batches.make_batch(prefix, request_chain=[chain((f"{prefix}0", 3, 2))] * 4) for prefix in ("a", "b")]
    )
    data = tu.chunk_tensordict(batches.engine_batch(batch), 8)
    assert [sample_fields([part])["request_ids"] for part in data] == [
        [f"{prefix}{row}"] for prefix in ("a", "b") for row in range(4)
    ]


def agent_output(row: int) -> AgentLoopOutput:
    prompt, response = [5] * batches.PROMPT_LENS[row], [6] * batches.RESPONSE_LENS[row]
    return AgentLoopOutput(
        prompt_ids=prompt,
        response_ids=response,
        response_mask=[1] * len(response),
        metrics=AgentLoopMetrics(),
        extra_fields={"request_id": f"s{row}", "global_steps": 2, "request_chain": chain((f"s{row}", len(prompt), 1))},
    )


def test_transfer_queue_trainer() -> None:
    """main_ppo_sync keeps the agent loop's extra fields nested, and its own step under "global_steps"."""
    rows = []
    for row in range(2):
        field = {**agent_output(row).as_dict(), "global_steps": 5}
        field["input_ids"] = torch.cat([field["prompts"], field["responses"]])
        rows.append(field)
    assert "request_id" not in rows[0], "they are nested"
    found = sample_fields([list_of_dict_to_tensordict(rows)])
    assert found["request_ids"] == ["s0", "s1"]
    assert found["prompt_lens"] == [3, 6] and found["seq_lens"] == [5, 9]
    assert found["min_global_steps"] == found["max_global_steps"] == [2, 2]


def test_agent_loop_collects_the_id() -> None:
    """verl's own way from an agent loop's output to the batch."""
    array = np.empty(2, dtype=object)
    array[:] = [agent_output(row).extra_fields["request_id"] for row in range(2)]
    assert list(array) == ["s0", "s1"]
