"""What verl's real FSDP engines dump and log under the real msprobe: one step, one line, the right request."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from verl_runs import MSPROBES, Run, run_engine

PROMPT_LENS = [3, 6, 4, 5]
SEQ_LENS = [5, 9, 8, 8]
LAYERS = 4
PROJECTION = r"q_proj\.\w+\.forward\.\d+$"


def infer(prefix: str, **more: Any) -> dict[str, Any]:
    return {"do": "infer", "role": "actor", "prefix": prefix, **more}


def train(prefix: str, **more: Any) -> dict[str, Any]:
    return {"do": "train", "role": "actor", "prefix": prefix, **more}


def ids(lines: list[dict[str, Any]]) -> list[str]:
    return [request_id for line in lines for request_id in line["request_ids"]]


def check_lines_match_dumps(run: Run, rank: int) -> None:
    """Each line has its dump, and every layer in it saw as many tokens as the line says, recomputed or not."""
    for line in run.lines(rank):
        step, tokens = line["step"], line["seq_lens"][0]
        assert run.dumped_tokens(step, rank) == tokens
        modules = run.dump(step, rank)
        seen = [value["input_args"][0]["shape"] for name, value in modules.items() if re.search(PROJECTION, name)]
        assert len(seen) >= LAYERS and all(shape[-2] == tokens for shape in seen), (step, seen)
        if line["phase"] == "log_prob":
            assert all(name.endswith(".0") for name in modules), "each module ran once"


@pytest.mark.parametrize(
    ("strategy", "world_size", "msprobe"),
    [("fsdp", 1, "26.2.0"), ("fsdp2", 2, "26.2.0"), ("fsdp2", 1, "26.0.0"), ("fsdp", 2, "26.0.0")],
)
def test_log_prob_phase(
    verl_tree: Path, model: Path, tmp_path: Path, strategy: str, world_size: int, msprobe: str
) -> None:
    """Cropped batches of the actor are dumped; their originals, the critic, the reference and failures are not."""
    actions = [
        infer("a", crop="prompts"),
        infer("b", crop="original"),
        {"do": "infer", "role": "critic", "prefix": "c"},
        {"do": "infer", "role": "ref", "prefix": "d"},
        infer("e", fail="outputs"),
        infer("f"),
        train("g"),
    ]
    run = run_engine(
        verl_tree, tmp_path, model, actions,
        env={"DUMP_ON": "1"}, world_size=world_size, msprobe=MSPROBES[msprobe], strategy=strategy,
    )  # fmt: skip
    rows = 4 // world_size
    for rank in range(world_size):
        lines = run.lines(rank)
        mine = range(rank * rows, (rank + 1) * rows)
        # The second micro batch of "e" fails: its step has a dump, though not a whole one, and no line.
        failed = rows + 1
        first = [f"a{row}" for row in mine] + [f"e{mine[0]}"]
        assert ids(lines) == [*first, *(f"f{row}" for row in mine)]
        assert [line["step"] for line in lines] == [step for step in range(2 * rows + 2) if step != failed]
        assert run.steps(rank) == set(range(2 * rows + 2))
        assert [line["seq_lens"] for line in lines[:rows]] == [[PROMPT_LENS[row]] for row in mine]
        assert [line["seq_lens"] for line in lines[-rows:]] == [[SEQ_LENS[row]] for row in mine]
        assert [line["prompt_lens"] for line in lines[-rows:]] == [[PROMPT_LENS[row]] for row in mine]
        assert {(line["role"], line["phase"], line["rank"], line["source"]) for line in lines} == {
            ("actor", "log_prob", rank, "update_actor")
        }
        assert [line.get("global_steps") for line in lines] == [7] * rows + [None] * (len(lines) - rows)
        assert {line["num_requests"] for line in lines} == {1}
        check_lines_match_dumps(run, rank)
        assert any("lm_head" in name for name in run.dump(0, rank))
        assert run.result(rank)["dumping"] is False
        assert run.result(rank)["outcomes"][4]["error"] == "planted failure"


def test_failure_inside_a_layer(verl_tree: Path, model: Path, tmp_path: Path) -> None:
    """The step after a pass that broke off holds one request, from its first layer to its last.

    The layer's second call is the forward of the second micro batch, or in training, where activations are recomputed,
    the backward of the first one.
    """
    if "no_sync()" in (verl_tree / "verl/workers/engine/fsdp/transformer_impl.py").read_text(encoding="utf-8"):
        pytest.skip("this verl's FSDP can't train behind a pass that broke off, dumped or not: no_sync() wants it idle")
    actions = [infer("a", fail="layer"), infer("b"), train("c", fail="layer"), train("d")]
    run = run_engine(verl_tree, tmp_path, model, actions, env={"DUMP_ON": "1", "DUMP_PHASE": "all"}, strategy="fsdp")
    lines = run.lines()
    assert ids(lines) == ["a0", "b0", "b1", "b2", "b3", "d0", "d1", "d2", "d3"]
    assert [line["step"] for line in lines] == [0, 2, 3, 4, 5, 7, 8, 9, 10]
    assert run.steps() == set(range(11))
    check_lines_match_dumps(run, 0)
    assert not any("layers.3" in name for name in run.dump(1)), "the failed step stops where it failed"


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_update_phase(verl_tree: Path, model: Path, tmp_path: Path, strategy: str) -> None:
    """DUMP_PHASE=update_actor dumps forward and backward of whole sequences, and says which modules it leaves out."""
    run = run_engine(
        verl_tree, tmp_path, model, [infer("a"), train("b")],
        env={"DUMP_ON": "1", "DUMP_PHASE": "update_actor"}, strategy=strategy,
    )  # fmt: skip
    lines = run.lines()
    assert ids(lines) == ["b0", "b1", "b2", "b3"]
    assert [(line["step"], line["phase"]) for line in lines] == [(step, "update_actor") for step in range(4)]
    check_lines_match_dumps(run, 0)
    for step in range(4):
        assert any(".backward." in name for name in run.dump(step))
        assert not any("lm_head" in name for name in run.dump(step))
    assert len(run.warnings("lm_head, and msprobe's")) == 1


def test_lora_reference(verl_tree: Path, model: Path, tmp_path: Path) -> None:
    """The actor with its adapters switched off is the reference policy: no step of the actor's dump."""
    actions = [{**infer("a", adapter_off=True), "role": "lora"}, {**infer("b"), "role": "lora"}]
    run = run_engine(verl_tree, tmp_path, model, actions, env={"DUMP_ON": "1"}, strategy="fsdp2")
    assert ids(run.lines()) == ["b0", "b1", "b2", "b3"]
    assert run.steps() == {0, 1, 2, 3}


def test_step_and_rank_lists(newest_verl_tree: Path, model: Path, tmp_path: Path) -> None:
    """A line is written for a step that msprobe dumps, under msprobe's number, and none after its last step."""
    run = run_engine(
        newest_verl_tree, tmp_path, model, [infer("a"), infer("b"), infer("c")],
        env={"DUMP_ON": "1"}, world_size=2, strategy="fsdp2", dump_config={"step": [1, 2], "rank": [1]},
    )  # fmt: skip
    assert run.lines(0) == [] and run.steps(0) == set()
    assert [(line["step"], line["request_ids"]) for line in run.lines(1)] == [(1, ["a3"]), (2, ["b2"])]
    assert run.steps(1) == {1, 2}


def test_what_is_said_once(newest_verl_tree: Path, model: Path, tmp_path: Path) -> None:
    """Several requests in a step, and samples without an id: warned about once, logged as what they are."""
    actions = [
        infer("a", settings={"micro_batch_size_per_gpu": 2}),
        infer("b", non_tensors={"request_id": ["b0", None, "b2", None]}),
        infer("c", crop="original"),
    ]
    run = run_engine(
        newest_verl_tree, tmp_path, model, actions, env={"DUMP_ON": "1", "PROMPTS_ONLY": "1"}, strategy="fsdp2"
    )
    lines = run.lines()
    assert [line["request_ids"] for line in lines] == [["a0", "a1"], ["a2", "a3"], ["b0"], [None], ["b2"], [None]]
    assert [line["num_requests"] for line in lines] == [2, 2, 1, 1, 1, 1]
    assert lines[0]["seq_lens"] == [5, 9] and lines[0]["prompt_lens"] == [3, 6]
    for text in ("has several requests", "has no request id", "does not crop"):
        assert len(run.warnings(text)) == 1, text


@pytest.fixture(scope="module")
def losses_without_dump(
    newest_verl_tree: Path, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], list[dict[str, Any]]]:
    """Outcomes of the actions of `test_dump_that_fails` with the dump off."""
    run = run_engine(newest_verl_tree, tmp_path_factory.mktemp("off"), model, BREAKING, strategy="fsdp2")
    return lambda: run.result()["outcomes"]


BREAKING: list[dict[str, Any]] = [infer("a"), infer("b"), train("c"), infer("d")]


@pytest.mark.parametrize(
    ("broken", "config", "cause"),
    [
        ("full", {"task": "statistics"}, "Save json file"),
        ("full", {"task": "tensor"}, "save pt file"),
        ("blocked", {"task": "statistics"}, "step6"),
        ("missing", {}, "No module named 'msprobe'"),
    ],
)
def test_dump_that_fails(
    newest_verl_tree: Path,
    model: Path,
    tmp_path: Path,
    losses_without_dump: Callable[[], list[dict[str, Any]]],
    broken: str,
    config: dict[str, Any],
    cause: str,
) -> None:
    """A full disk, a start that fails, no msprobe: one warning with the cause, and the run goes on, to the bit."""
    actions = [dict(action) for action in BREAKING]
    msprobe = None
    if broken == "missing":
        msprobe = tmp_path / "without_msprobe"
        (msprobe / "msprobe").mkdir(parents=True)
        (msprobe / "msprobe" / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'msprobe'\")\n")
    else:
        actions[1]["break"] = broken
    run = run_engine(
        newest_verl_tree, tmp_path, model, actions,
        env={"DUMP_ON": "1"}, strategy="fsdp2", dump_config=config, msprobe=msprobe,
    )  # fmt: skip
    assert run.result()["outcomes"] == losses_without_dump()
    warnings = run.warnings("no more dumps from here")
    assert len(warnings) == 1 and cause in warnings[0], warnings
    assert run.result()["dumping"] in (False, None)
    assert [line["step"] for line in run.lines()] == ([] if broken == "missing" else list(range(len(run.lines()))))
    for line in run.lines():
        assert line["request_ids"][0] in ("a0", "a1", "a2", "a3", "b0", "b1")


def test_refused_before_the_model_is_loaded(verl_tree: Path, model: Path, tmp_path: Path) -> None:
    (tmp_path / "dump").mkdir()
    (tmp_path / "dump" / "step0").mkdir()
    run = run_engine(verl_tree, tmp_path, model, [infer("a")], env={"DUMP_ON": "1"})
    assert run.exit_codes == (1,)
    assert "is not empty: steps of two runs would mix" in run.output[0]
    assert "Loading weights" not in run.output[0]
    forced = run_engine(verl_tree, tmp_path, model, [infer("a")], env={"DUMP_ON": "1", "DUMP_UNSAFE": "1"})
    assert ids(forced.lines()) == ["a0", "a1", "a2", "a3"]
