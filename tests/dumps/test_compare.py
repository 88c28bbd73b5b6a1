"""Comparing a pair, case by case, on dumps whose statistics hang together exactly."""

from __future__ import annotations

import contextlib
import copy
import csv
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from dump_files import ids, run_cli, tensor, write_dump
from hypothesis import given, settings
from hypothesis import strategies as st
from model_dumps import Data, Shape, qwen_dumps

from patchctl.dumps.checks import UnreadableDump, read_head
from patchctl.dumps.compare import PairJudgement, judge_pair, pair_document, write_rows
from patchctl.dumps.judge import BUILT_IN, Verdict, calibrate, first_divergence, stats_errors
from patchctl.dumps.names import Stats, concatenate, parse_name

SHAPE = Shape()
SMALL_DUMPS = qwen_dumps(Shape(layers=1), backend="fsdp2")
BACKENDS = ["fsdp", "fsdp2"]


def judged(
    folder: Path,
    infer: Data | list[Data],
    train: Data | list[Data],
    tokens: tuple[int, int] = (16, 16),
    places: list[dict[str, int]] | None = None,
) -> PairJudgement:
    """The judgement of dumps written into `folder`, one for each rank or stage of a side."""
    entry: dict[str, Any] = {"tokens": {"infer": tokens[0], "train": tokens[1]}}
    for side, data in (("infer", infer), ("train", train)):
        entry[f"{side}_dumps"] = []
        for number, one in enumerate(data if isinstance(data, list) else [data]):
            path = write_dump(folder / f"{side}{number}" / "dump.json", one)
            place = places[number] if places and side == "train" else {}
            entry[f"{side}_dumps"].append({"path": str(path), **place})
    return judge_pair("r", entry, BUILT_IN)


def changed(data: Data, part: str, **values: Any) -> Data:
    """A copy in which the first output of every module whose name has `part` is changed."""
    copied = copy.deepcopy(data)
    hits = [entry for name, entry in copied.items() if part in name]
    assert hits, part
    for entry in hits:
        entry["output"][0].update(values)
    return copied


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("noise", [0.0, 0.005])
def test_equal_sides_agree_and_every_point_is_compared(tmp_path: Path, backend: str, noise: float) -> None:
    found = judged(tmp_path, *qwen_dumps(SHAPE, noise=noise, backend=backend))
    assert (found.verdict, found.reason) == ("agrees", "")
    assert found.layers == (SHAPE.layers, SHAPE.layers)
    assert len(found.rows) == 1 + 14 * SHAPE.layers + 2
    assert not any(found.unmatched.values()), found.unmatched
    assert len(found.weights) == (0 if backend == "fsdp" else 2 + 4 * SHAPE.layers)


MODULES = [
    "input_layernorm",
    "self_attn.qkv_proj",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp.gate_up_proj",
    "mlp.down_proj",
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("module", MODULES)
def test_a_scaled_output_is_named(tmp_path: Path, backend: str, module: str) -> None:
    where = f"layers.2.{module}"
    found = judged(tmp_path, *qwen_dumps(SHAPE, noise=0.002, backend=backend, faults={where: 1.1}))
    assert found.verdict == "diverges"
    assert found.divergence is not None and found.divergence.row.where == where
    assert "looks scaled: inference is 1.1 times training" in found.reason


def test_the_synthetic_divergence_from_layer_1_is_named_there(tmp_path: Path) -> None:
    import subprocess
    import sys

    from test_pair_tree import MAKE_TREE

    subprocess.run([sys.executable, str(MAKE_TREE), str(tmp_path)], check=True, capture_output=True)
    pairs = tmp_path / "pairs.json"
    pairs.write_text(run_cli("pair", tmp_path / "generate_sequence", tmp_path / "update_actor", "--json").stdout)
    done = run_cli("compare", pairs, "-o", tmp_path / "out", "--no-msprobe", "--json")
    document = json.loads(done.stdout)
    cases = {
        name: entry["case"] for name, entry in json.loads((tmp_path / "expected.json").read_text())["requests"].items()
    }
    (diverging,) = [pair for pair in document["pairs"] if "divergence" in cases[pair["request_id"]]]
    # The tree's fused tensors differ by construction: its plain ones must not, before layer 1.
    plain = [
        row
        for row in csv.DictReader((tmp_path / "out" / "pairs" / diverging["request_id"] / "rows.csv").open())
        if row["what"] == "output" and "qkv" not in row["module"] and "gate_up" not in row["module"]
    ]
    bad = [row["module"] for row in plain if row["verdict"] == "differs"]
    assert bad[0] == "layers.1.input_layernorm"


def test_swapped_q_and_k_are_told_although_their_sum_is_the_same(tmp_path: Path) -> None:
    infer, train = qwen_dumps(SHAPE, noise=0.002)
    entry = infer["Module.model.layers.0.self_attn.rotary_emb.RotaryEmbedding.forward.1"]
    entry["input_args"][1:3] = reversed(entry["input_args"][1:3])
    found = judged(tmp_path, infer, train)
    assert found.divergence is not None and found.divergence.row.where == "layers.1.self_attn.qkv_proj"
    assert "swapped" in found.reason
    fused = next(row for row in found.rows if row.where == "layers.1.self_attn.qkv_proj" and row.name == "output")
    assert fused.verdict is Verdict.SAME


def test_a_rotary_kernel_that_writes_in_place_does_no_harm(tmp_path: Path) -> None:
    """Its dumped inputs are already rotated: the norm alone is comparable, and it is."""
    infer, train = qwen_dumps(SHAPE)
    for name, entry in infer.items():
        if "rotary_emb" in name:
            for at, query in ((1, entry["input_args"][1]), (2, entry["input_args"][2])):
                rotated = {**query, "Max": query["Max"] * 1.4, "Min": query["Min"] * 0.7, "Mean": 0.2}
                entry["input_args"][at] = entry["output"][at - 1] = rotated
    assert judged(tmp_path, infer, train).verdict == "agrees"


def test_positions_are_compared_exactly(tmp_path: Path) -> None:
    infer, train = qwen_dumps(SHAPE)
    for entry in infer.values():
        entry["input_args"] = [
            ids([16], 1, 16) if arg and arg["dtype"] == "torch.int64" and arg["Max"] == 15 else arg
            for arg in entry["input_args"]
        ]
    found = judged(tmp_path, infer, train)
    assert found.divergence is not None and found.divergence.row.where == "layers.0.self_attn.rotary_emb"
    assert "inference 1..16, training 0..15" in found.reason


def test_weights_are_compared_first_and_reported(tmp_path: Path) -> None:
    infer, train = qwen_dumps(SHAPE, backend="fsdp2")
    for name, entry in infer.items():
        if "parameters" in entry and "layers.3.mlp.down_proj" in name:
            entry["parameters"]["weight"]["Max"] *= 1.01
    found = judged(tmp_path, infer, train)
    assert found.verdict == "weights differ"
    assert "1 of 18 weights differ, the first is layers.3.mlp.down_proj" in found.reason


def test_a_step_that_holds_two_requests_is_refused(tmp_path: Path) -> None:
    infer, train = qwen_dumps(SHAPE)
    name = "Module._fsdp_wrapped_module.model.embed_tokens.Embedding.forward."
    twice = {**train, name + "1": train[name + "0"]}
    found = judged(tmp_path / "a", infer, twice)
    assert found.verdict == "refused" and "2 times" in found.reason
    other = changed(train, "layers.2._fsdp_wrapped_module.input_layernorm", shape=[1, 17, 64])
    found = judged(tmp_path / "b", infer, other)
    assert found.verdict == "refused" and "two requests" in found.reason


def test_activation_checkpointing_is_not_taken_for_a_second_request(tmp_path: Path) -> None:
    infer, train = qwen_dumps(SHAPE)
    again = {name[:-1] + "1": entry for name, entry in train.items() if "layers." in name}
    assert judged(tmp_path, infer, {**train, **again}).verdict == "agrees"


def test_backward_entries_are_left_alone(tmp_path: Path) -> None:
    infer, train = qwen_dumps(SHAPE)
    backward = {name.replace(".forward.", ".backward."): {"input": [tensor([1, 16, 64], 99)]} for name in train}
    assert judged(tmp_path, infer, {**train, **backward}).verdict == "agrees"


def split(data: Data, parts: int) -> list[Data]:
    """What each rank of a tensor-parallel server dumps: column-parallel outputs and row-parallel inputs are cut."""
    cut_out = ("qkv_proj", "gate_up_proj", "act_fn", ".attn.")
    cut_in = ("o_proj", "down_proj", "act_fn", ".attn.", "rotary_emb")

    def cut(value: Any) -> Any:
        if value is None or "int" in value["dtype"]:
            return value
        shape = [*value["shape"][:-1], value["shape"][-1] // parts]
        return {**value, "shape": shape, "Norm": value["Norm"] / math.sqrt(parts)}

    ranks = []
    for _ in range(parts):
        rank = copy.deepcopy(data)
        for name, entry in rank.items():
            if any(part in name for part in cut_out) or "rotary_emb" in name:
                entry["output"] = [cut(value) for value in entry["output"]]
            if any(part in name for part in cut_in):
                entry["input_args"] = [cut(value) for value in entry["input_args"]]
        ranks.append(rank)
    return ranks


def test_shards_of_all_ranks_are_gathered_exactly(tmp_path: Path) -> None:
    infer, train = qwen_dumps(SHAPE)
    found = judged(tmp_path, split(infer, 2), train)
    assert found.verdict == "agrees"
    assert not [row for row in found.rows if row.verdict is Verdict.LEFT_OUT]


def test_a_single_shard_is_left_out_with_the_reason(tmp_path: Path) -> None:
    infer, train = qwen_dumps(SHAPE)
    found = judged(tmp_path, split(infer, 2)[0], train)
    assert found.verdict == "agrees"
    left_out = {row.module for row in found.rows if row.verdict is Verdict.LEFT_OUT}
    assert left_out == {"self_attn.qkv_proj", "self_attn.attn", "mlp.gate_up_proj", "mlp.act_fn"}
    assert all("tensor parallelism" in row.note for row in found.rows if row.verdict is Verdict.LEFT_OUT)


def megatron(train: Data, tokens: int) -> Data:
    """An FSDP dump under Megatron's names, sequence first."""
    names = {
        "embed_tokens.Embedding": "embedding.word_embeddings.VocabParallelEmbedding",
        "post_attention_layernorm.Qwen2RMSNorm": "pre_mlp_layernorm.RMSNorm",
        "self_attn.o_proj.Linear": "self_attention.linear_proj.RowParallelLinear",
        "mlp.down_proj.Linear": "mlp.linear_fc2.RowParallelLinear",
        "input_layernorm.Qwen2RMSNorm": "input_layernorm.RMSNorm",
        "norm.Qwen2RMSNorm": "final_layernorm.RMSNorm",
    }
    found: Data = {}
    for name, entry in train.items():
        plain = name.replace("_fsdp_wrapped_module.", "")
        for old, new in names.items():
            if plain.removeprefix("Module.model.").startswith(old) or (".layers" in plain and f".{old}." in plain):
                path = plain.replace(old, new).replace("Module.model.", "Module.module.module.decoder.", 1)
                path = path.replace("decoder.embedding", "embedding")
                text = json.dumps(entry).replace(f"[1, {tokens}, ", f"[{tokens}, 1, ")
                found[path] = json.loads(text)
    return found


def stages(data: Data, layers: int, count: int) -> list[Data]:
    """Pipeline stages: each counts its layers from 0."""
    size = layers // count
    found = []
    for stage in range(count):
        part: Data = {}
        for name, entry in data.items():
            parsed = parse_name(name)
            assert parsed is not None
            if parsed.layer is None:
                keep = stage == (0 if "embedding" in name else count - 1)
            else:
                keep = stage * size <= parsed.layer < (stage + 1) * size
                name = name.replace(f"layers.{parsed.layer}.", f"layers.{parsed.layer - stage * size}.")
            if keep:
                part[name] = entry
        found.append(part)
    return found


JUNK = [None, "x", -1, 1.5, True, [], {}, [None], {"a": 1}, [[]], 10**400, ""]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_dump_however_malformed_raises(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Any value anywhere in a dump may be anything."""
    sides = [copy.deepcopy(side) for side in SMALL_DUMPS]
    document: Any = data.draw(st.sampled_from(sides))
    place = [document]
    while isinstance(place[-1], (dict, list)) and place[-1] and data.draw(st.integers(0, 5)):
        keys = list(place[-1]) if isinstance(place[-1], dict) else range(len(place[-1]))
        key = data.draw(st.sampled_from(list(keys)))
        if data.draw(st.integers(0, 2)) == 0 and len(place) > 1:
            break
        place.append(place[-1][key])
    for parent in reversed(place):
        if isinstance(parent, (dict, list)) and parent:
            keys = list(parent) if isinstance(parent, dict) else list(range(len(parent)))
            parent[data.draw(st.sampled_from(keys))] = data.draw(st.sampled_from(JUNK))
            break
    folder = tmp_path_factory.mktemp("junk")
    found = judged(folder, *sides)
    write_rows(folder / "rows.csv", found.rows)
    json.dumps(pair_document(found), allow_nan=False)
    for path in folder.glob("*/dump.json"):
        with contextlib.suppress(UnreadableDump):
            read_head(path)


@pytest.mark.parametrize("logged", [True, False])
@pytest.mark.parametrize("fault", [None, "layers.3.mlp.down_proj"])
def test_stage_local_layer_numbers_are_made_global(tmp_path: Path, fault: str | None, logged: bool) -> None:
    """By what the log says; by the embedding, which only the first stage has, where the log says nothing."""
    infer, train = qwen_dumps(SHAPE, faults={fault: 1.2} if fault else None)
    parts = stages(megatron(train, 16), 4, 2)
    assert any("layers.1." in name for name in parts[1]) and not any("layers.3." in name for name in parts[1])
    places = [{"layer_offset": 0, "pp_rank": 0}, {"layer_offset": 2, "pp_rank": 1}]
    found = judged(tmp_path, infer, parts, places=places if logged else None)
    assert found.backend == "megatron" and found.layers == (4, 4)
    if fault is None:
        assert found.verdict == "agrees", found.reason
    else:
        assert found.divergence is not None and found.divergence.row.where == fault


def test_padding_widens_the_band_and_drops_extremes(tmp_path: Path) -> None:
    infer, train = qwen_dumps(Shape(tokens=64))
    text = json.dumps(megatron(train, 64)).replace("[64, 1, ", "[66, 1, ").replace("[1, 64]", "[1, 66]")
    padded = json.loads(text)
    for entry in padded.values():
        for value in (*entry["input_args"], *entry["output"]):
            value.update(Max=value["Max"] * 2, Min=value["Min"] * 2)
            if value["Norm"]:
                value["Norm"] *= 1.03
    assert judged(tmp_path / "a", infer, padded, (64, 66)).verdict == "agrees"
    assert judged(tmp_path / "b", infer, padded, (64, 64)).verdict == "nothing compared"
    broken = changed(padded, "layers.1.mlp.linear_fc2", Norm=1e4)
    found = judged(tmp_path / "c", infer, broken, (64, 66))
    assert found.divergence is not None and found.divergence.row.where == "layers.1.mlp.down_proj"


def test_an_unknown_model_is_compared_as_far_as_its_names_go(tmp_path: Path) -> None:
    infer, train = qwen_dumps(SHAPE)

    def renamed(data: Data) -> Data:
        text = json.dumps(data).replace("Qwen2", "Brandnew").replace("self_attn.o_proj", "self_attn.out_thing")
        return dict(json.loads(text))

    found = judged(tmp_path, renamed(infer), renamed(train))
    assert found.family == "unknown"
    assert found.verdict == "agrees"
    assert "layers.*.self_attn.out_thing" in found.unmatched["infer"]
    assert "layers.*.self_attn.out_thing" in found.unmatched["train"]


def test_nothing_in_common_is_no_success(tmp_path: Path) -> None:
    infer, _ = qwen_dumps(SHAPE)
    found = judged(
        tmp_path, infer, {"Module.thing.Linear.forward.0": {"input_args": [], "output": [tensor([1, 16, 8])]}}
    )
    assert found.verdict == "nothing compared"
    assert "thing" in found.reason


def test_agreement_of_a_few_rows_is_no_agreement(tmp_path: Path) -> None:
    infer, train = qwen_dumps(SHAPE)
    found = judged(tmp_path, infer, {name: entry for name, entry in train.items() if "layers." not in name})
    assert found.verdict == "nothing compared"
    assert found.reason.startswith("only 3 of 59 rows have a partner")


@pytest.mark.parametrize("bad", [math.nan, math.inf, "nan"])
def test_a_side_that_is_not_finite_differs(tmp_path: Path, bad: Any) -> None:
    infer, train = qwen_dumps(SHAPE)
    found = judged(tmp_path, changed(infer, "layers.1.self_attn.o_proj", Norm=bad, Max=bad), train)
    assert found.divergence is not None and found.divergence.row.where == "layers.1.self_attn.o_proj"
    assert found.reason == "layers.1.self_attn.o_proj output differs; not finite on the inference side"
    write_rows(tmp_path / "rows.csv", found.rows)


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_without_norms_the_extremes_decide(tmp_path: Path, factor: float) -> None:
    """What msprobe dumps with `precision: high`."""
    infer, train = qwen_dumps(SHAPE, noise=0.002, faults={"layers.2.mlp.down_proj": factor})
    for entry in (*infer.values(), *train.values()):
        for value in (*entry["input_args"], *entry["output"]):
            if value:
                value.update(Norm=None, Mean=None)
    found = judged(tmp_path, infer, train)
    if factor == 1.0:
        assert found.verdict == "agrees", found.reason
    else:
        assert found.divergence is not None and found.divergence.row.where == "layers.2.mlp.down_proj"


def test_noise_that_creeps_up_is_a_drift(tmp_path: Path) -> None:
    shape = Shape(layers=12)
    infer, train = qwen_dumps(shape)
    for name, entry in infer.items():
        parsed = parse_name(name)
        if (
            parsed
            and parsed.layer is not None
            and "rotary" not in name
            and "int" not in str(entry["output"][0]["dtype"])
        ):
            for value in entry["output"]:
                if value:
                    value["Norm"] *= 1 + 0.0033 * parsed.layer
    found = judged(tmp_path, infer, train)
    assert found.verdict == "drifts"


finite = st.floats(-1e3, 1e3, allow_nan=False)


@given(st.lists(st.lists(finite, min_size=1, max_size=30), min_size=1, max_size=4))
def test_concatenated_statistics_are_those_of_the_concatenated_numbers(parts: list[list[float]]) -> None:
    def stats(values: list[float]) -> Stats:
        return Stats(
            "float32",
            len(values),
            min(values),
            max(values),
            math.fsum(values) / len(values),
            math.sqrt(math.fsum(value * value for value in values)),
        )

    joined, direct = concatenate([stats(part) for part in parts]), stats([value for part in parts for value in part])
    assert (joined.count, joined.low, joined.high) == (direct.count, direct.low, direct.high)
    assert math.isclose(joined.mean, direct.mean, rel_tol=1e-9, abs_tol=1e-9)
    assert math.isclose(joined.norm, direct.norm, rel_tol=1e-9, abs_tol=1e-9)


@given(finite, finite, st.floats(0, 1e3), finite, finite, st.floats(0, 1e3))
def test_errors_are_symmetric_and_zero_for_equal_sides(
    a: float, b: float, c: float, d: float, e: float, f: float
) -> None:
    left, right = Stats("bfloat16", 9, min(a, b), max(a, b), 0.0, c), Stats("bfloat16", 9, min(d, e), max(d, e), 0.0, f)
    assert stats_errors(left, right) == stats_errors(right, left)
    assert not any(stats_errors(left, left).values())


def test_a_baseline_follows_the_run_and_is_never_zero() -> None:
    bands = calibrate({"bfloat16": {"linear": {"norm": 1e-4, "max": 0.0}}}, "base")
    assert bands.limits["bfloat16"]["linear"]["norm"] < BUILT_IN.limits["bfloat16"]["linear"]["norm"]
    assert bands.limits["bfloat16"]["linear"]["max"] > 0
    assert bands.limits["bfloat16"]["norm"] == BUILT_IN.limits["bfloat16"]["norm"]
    assert bands.limits["float16"] == BUILT_IN.limits["float16"]


def test_no_row_differs_by_chance(tmp_path: Path) -> None:
    """Noise of the size that bfloat16 shows (0.4 % in norms) never leaves the band."""
    rng = random.Random(4)
    for _ in range(20):
        found = judged(tmp_path, *qwen_dumps(Shape(layers=2), seed=rng.randrange(10**6), noise=0.004))
        assert first_divergence(found.rows) is None


@pytest.mark.parametrize(
    ("name", "layer", "path"),
    [
        (
            "Module._fsdp_wrapped_module.model.layers.3._fsdp_wrapped_module.mlp.up_proj.Linear.forward.0",
            3,
            "mlp.up_proj",
        ),
        ("Module.model.layers.11.self_attn.q_norm.RMSNorm.forward.2", 11, "self_attn.q_norm"),
        (
            "Module.module.module.decoder.layers.0.self_attention.linear_qkv.ColumnParallelLinear.forward.0",
            0,
            "self_attention.linear_qkv",
        ),
        ("Module.1.module.module.decoder.layers.0.mlp.MLP.forward.0", 0, "mlp"),
        ("Module.base_model.model.model.layers.2.mlp.down_proj.lora.Linear.forward.0", 2, "mlp.down_proj.lora"),
        ("Module.model.layers.2.Qwen2DecoderLayer.forward.0", 2, "."),
        ("Module.model.norm.RMSNorm.forward.0", None, "norm"),
        ("Module.module.module.decoder.final_layernorm.RMSNorm.forward.0", None, "final_layernorm"),
        ("Module.model.language_model.layers.2.input_layernorm.RMSNorm.forward.0", 2, "input_layernorm"),
    ],
)
def test_names_lose_their_wrappers(name: str, layer: int | None, path: str) -> None:
    parsed = parse_name(name)
    assert parsed is not None and (parsed.layer, parsed.path) == (layer, path)


@pytest.mark.parametrize("name", ["Functional.linear.0.forward", "Module", "Module.x", "", "Tensor.__add__.0.forward"])
def test_other_entries_are_no_modules(name: str) -> None:
    assert parse_name(name) is None
