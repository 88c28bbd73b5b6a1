"""verl's real Megatron engine under the patched dump: one rank, pipeline stages, virtual stages, tensor parallel."""

from __future__ import annotations

import math
from typing import Any

import pytest
from batches import PROMPT_LENS, RESPONSE_LENS
from megatron_runs import SCENARIOS, Runs, calls, model_layers, shape
from verl_runs import Run

SEQ_LENS = [prompt + response for prompt, response in zip(PROMPT_LENS, RESPONSE_LENS, strict=True)]
LAYERS = range(4)
DUMPED = [name for name, scenario in SCENARIOS.items() if scenario.dump]
STAGE = {
    "pp_rank": 0, "pp_size": 1, "tp_rank": 0, "tp_size": 1, "cp_rank": 0, "cp_size": 1, "vpp_rank": None,
    "vpp_size": None, "layer_offset": 0, "num_layers": 4, "sequence_parallel": False, "seq_padding": 1,
}  # fmt: skip


def of_phase(run: Run, phase: str, rank: int = 0) -> list[dict[str, Any]]:
    return [line for line in run.lines(rank) if line["phase"] == phase]


def tokens_by_call(run: Run, step: int, rank: int = 0) -> list[int]:
    """Number of tokens in the calls of attention's output projection, whose output is [N, 1, H], by call."""
    found: dict[int, set[int]] = {}
    for call, entry in calls(run.dump(step, rank)).items():
        if call.module == "self_attention.linear_proj.RowParallelLinear" and call.kind == "forward":
            found.setdefault(call.call, set()).add(shape(entry)[0])
    assert all(len(lengths) == 1 for lengths in found.values()), found
    return [found[call].pop() for call in sorted(found)]


@pytest.mark.parametrize("name", DUMPED)
def test_a_line_for_every_completed_step(runs: Runs, name: str) -> None:
    run = runs[name]
    for rank in range(SCENARIOS[name].ranks):
        result, lines = run.result(rank), run.lines(rank)
        logged = [line["step"] for line in lines]
        assert logged == sorted(set(logged))
        failed = [outcome for outcome in result["outcomes"] if "error" in outcome]
        assert len(run.steps(rank) - set(logged)) == len(failed)
        assert set(logged) <= run.steps(rank)
        assert result["dumping"] is False
        for line in lines:
            assert (line["role"], line["rank"], line["pid"]) == ("actor", rank, result["pid"])
            assert line["num_requests"] == len(line["request_ids"])


def test_each_micro_batch_is_a_step_of_the_log_prob_phase(runs: Runs) -> None:
    run = runs["one rank"]
    lines = of_phase(run, "log_prob")[:4]
    assert [line["request_ids"] for line in lines] == [["a0"], ["a1"], ["a2"], ["a3"]]
    for line, prompt, length in zip(lines, PROMPT_LENS, SEQ_LENS, strict=True):
        assert (line["prompt_lens"], line["seq_lens"]) == ([prompt], [length])
        assert line["megatron"] == STAGE
        assert tokens_by_call(run, line["step"]) == [length]
        assert {(call.kind, call.chunk) for call in calls(run.dump(line["step"]))} == {("forward", None)}


def test_the_update_phase_is_one_step_with_backward(runs: Runs) -> None:
    run = runs["one rank"]
    (line,) = of_phase(run, "update_actor")
    assert line["request_ids"] == ["z0", "z1", "z2", "z3"]
    assert (line["prompt_lens"], line["seq_lens"]) == (list(PROMPT_LENS), SEQ_LENS)
    assert tokens_by_call(run, line["step"]) == SEQ_LENS
    dump = calls(run.dump(line["step"]))
    for kind in ("forward", "backward"):
        for layer in LAYERS:
            got = [c.call for c in dump if c.kind == kind and c.layer == layer and c.module == "mlp.MLP"]
            assert sorted(got) == [0, 1, 2, 3], (kind, layer)
    assert any(call.kind == "parameters_grad" for call in dump)


def test_critic_and_reference_write_nothing(runs: Runs) -> None:
    run = runs["one rank"]
    actor, critic, reference = run.result()["outcomes"][:3]
    assert "values" in critic
    assert reference["log_probs"] == actor["log_probs"]
    assert [line["request_ids"][0] for line in run.lines()] == [
        "a0",
        "a1",
        "a2",
        "a3",
        "b0",
        "c0",
        "c1",
        "c2",
        "c3",
        "z0",
    ]


def test_the_step_after_a_failure_is_clean(runs: Runs) -> None:
    run = runs["one rank"]
    outcomes = run.result()["outcomes"]
    assert [outcome.get("error") for outcome in outcomes] == [None] * 3 + ["planted failure", None] * 2
    after = next(line for line in run.lines() if line["request_ids"] == ["c0"])
    first = run.lines()[0]
    assert list(run.dump(after["step"])) == list(run.dump(first["step"]))
    assert tokens_by_call(run, after["step"]) == [SEQ_LENS[0]]
    (update,) = of_phase(run, "update_actor")
    assert tokens_by_call(run, update["step"]) == SEQ_LENS


@pytest.mark.parametrize("name", ["stages", "virtual stages"])
def test_layer_numbers_of_all_stages_line_up(runs: Runs, name: str) -> None:
    for request_id in ("a0", "a1", "a2", "a3"):
        whole = model_layers(runs["one rank"], request_id, 1)
        assert sorted(whole) == list(LAYERS)
        assert len({str(whole[layer]) for layer in LAYERS}) == 4  # no layer could be taken for another
        # Identical, and with every module: no stage lost one.
        assert model_layers(runs[name], request_id, 2) == whole


@pytest.mark.parametrize("name", ["stages", "virtual stages", "tensor parallel"])
def test_a_module_of_every_layer_is_dumped_on_every_rank(runs: Runs, name: str) -> None:
    run = runs[name]
    for rank in range(2):
        for line in of_phase(run, "log_prob", rank):
            down = [
                c.layer for c in calls(run.dump(line["step"], rank)) if c.module == "mlp.linear_fc2.RowParallelLinear"
            ]
            assert down == list(range(line["megatron"]["num_layers"]))


def test_stages(runs: Runs) -> None:
    run = runs["stages"]
    for rank, offset in ((0, 0), (1, 2)):
        stage = {**STAGE, "pp_rank": rank, "pp_size": 2, "layer_offset": offset, "num_layers": 2}
        lines = run.lines(rank)
        assert [line["request_ids"] for line in lines] == [["a0"], ["a1"], ["a2"], ["a3"], ["z0", "z1", "z2", "z3"]]
        assert all(line["megatron"] == stage for line in lines)
        assert tokens_by_call(run, lines[-1]["step"], rank) == SEQ_LENS
    assert run.result(1)["outcomes"][0]["log_probs"] == runs["one rank"].result()["outcomes"][0]["log_probs"]


def test_virtual_stages(runs: Runs) -> None:
    run = runs["virtual stages"]
    for rank in range(2):
        lines = of_phase(run, "log_prob", rank)
        # Two micro batches through the first chunk, then through the second.
        assert [(line["request_ids"][0], line["megatron"]["vpp_rank"]) for line in lines] == [
            ("a0", 0), ("a1", 0), ("a0", 1), ("a1", 1), ("a2", 0), ("a3", 0), ("a2", 1), ("a3", 1),
        ]  # fmt: skip
        for line in lines:
            chunk = line["megatron"]["vpp_rank"]
            stage = {"pp_rank": rank, "pp_size": 2, "vpp_size": 2, "layer_offset": 2 * chunk + rank, "num_layers": 1}
            assert line["megatron"] == {**STAGE, **stage, "vpp_rank": chunk}
            assert {call.chunk for call in calls(run.dump(line["step"], rank))} == {chunk}
        (update,) = of_phase(run, "update_actor", rank)
        assert update["request_ids"] == ["z0", "z1", "z2", "z3"]
        chunks = {name: update["megatron"][name] for name in ("vpp_rank", "layer_offset", "num_layers")}
        assert chunks == {"vpp_rank": [0, 1], "layer_offset": [rank, 2 + rank], "num_layers": [1, 1]}
        assert tokens_by_call(run, update["step"], rank) == SEQ_LENS
        backward = {(c.chunk, c.call) for c in calls(run.dump(update["step"], rank)) if c.kind == "backward"}
        assert backward == {(chunk, call) for chunk in (0, 1) for call in range(4)}


def test_tensor_parallel_pads_each_sequence(runs: Runs) -> None:
    run = runs["tensor parallel"]
    for rank in range(2):
        stage = {**STAGE, "tp_rank": rank, "tp_size": 2, "seq_padding": 2}
        lines = of_phase(run, "log_prob", rank)
        assert [line["request_ids"] for line in lines] == [["a0"], ["a1"], ["a2"], ["a3"]]
        for line, length in zip(lines, SEQ_LENS, strict=True):
            assert line["megatron"] == stage
            assert line["seq_lens"] == [length]
            assert tokens_by_call(run, line["step"], rank) == [math.ceil(length / 2) * 2]
        assert any(length % 2 for length in SEQ_LENS)


def test_stages_of_other_models(runs: Runs) -> None:
    vision, empty = runs["one rank"].result()["other_models"]
    parallel = {"tp_size": 4, "cp_rank": 1, "cp_size": 2}
    layers = {"layer_offset": 6, "num_layers": 2}
    assert vision == {**STAGE, **parallel, **layers, "sequence_parallel": True, "seq_padding": 16}
    assert empty == {**STAGE, **parallel, "layer_offset": None, "num_layers": 0, "seq_padding": None}


def test_fused_kernels_are_dumped_too(runs: Runs) -> None:
    run, plain = runs["fused kernels"], runs["one rank"]
    assert [line["request_ids"] for line in run.lines()] == [["a0"], ["a1"], ["a2"], ["a3"], ["z0", "z1", "z2", "z3"]]
    assert model_layers(run, "a1", 1) == model_layers(plain, "a1", 1)


def test_mindspeed_engines_inherit_the_dump(runs: Runs) -> None:
    """With the older msprobe, in the default phase, and on a batch cropped to its prompts."""
    run = runs["mindspeed"]
    assert "msprobe-26.0.0" in run.result()["msprobe"]
    whole, cropped = run.lines()[:4], run.lines()[4:]
    assert [line["request_ids"] for line in whole] == [["a0"], ["a1"], ["a2"], ["a3"]]
    assert [line["request_ids"] for line in cropped] == [["p0"], ["p1"], ["p2"], ["p3"]]
    for line, length in zip(cropped, PROMPT_LENS, strict=True):
        assert line["prompt_lens"] == line["seq_lens"] == [length]
        assert tokens_by_call(run, line["step"]) == [length]


def test_off_is_upstream_to_the_bit(runs: Runs) -> None:
    off = runs["off"]
    assert off.result()["outcomes"] == runs["pristine"].result()["outcomes"]
    assert off.result()["msprobe"] is None
    assert off.result()["passed_on"] == ["actor", "critic", "ref"]
    assert runs["one rank"].result()["passed_on"] == ["critic", "ref"]
    assert not (off.folder / "dump").exists()


def test_the_dump_changes_nothing_that_is_computed(runs: Runs) -> None:
    on, off = runs["one rank"].result()["outcomes"], runs["off"].result()["outcomes"]
    assert on == off
    assert on[-1]["weights"] != on[0]["weights"]  # it did train
    assert on[-1]["grad_norm"] > 0


def test_refuses_at_construction_what_would_spoil_the_dump(runs: Runs) -> None:
    assert "dump_path" in runs["one rank"].result()["refusal"]  # it has the steps of the first engine
    assert runs["off"].result()["refusal"] is None
