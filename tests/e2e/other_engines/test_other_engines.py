"""The micro batch loops of VeOmni, TorchTitan and Automodel under the patched dump: each micro batch is a step."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from batches import PROMPT_LENS, RESPONSE_LENS
from verl_runs import Run, environment

HERE = Path(__file__).resolve().parent
SEQ_LENS = [prompt + response for prompt, response in zip(PROMPT_LENS, RESPONSE_LENS, strict=True)]
BACKWARD = {"veomni": False, "torchtitan": True, "automodel": True}
"""Whether the engine's backward pass is in the block that is dumped."""


def run_loop(tree: Path, folder: Path, engines: Iterable[str], switches: dict[str, str]) -> Run:
    env = environment(tree, folder, switches, None, {})
    env["PYTHONPATH"] += os.pathsep + str(HERE.parent / "verl")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", HERE / "run_loop.py", folder / "result.json", *engines],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return Run(folder, (done.returncode,), (done.stdout,))


@pytest.mark.parametrize("engine", BACKWARD)
def test_each_micro_batch_is_a_step(verl_tree: Path, tmp_path: Path, engine: str) -> None:
    run = run_loop(verl_tree, tmp_path, [engine], {"DUMP_ON": "1", "DUMP_PHASE": "all"})
    lines = run.lines()
    assert [line["request_ids"] for line in lines] == [[f"{prefix}{row}"] for prefix in "az" for row in range(4)]
    assert [line["phase"] for line in lines] == ["log_prob"] * 4 + ["update_actor"] * 4
    assert run.steps() == {line["step"] for line in lines} == set(range(8))
    for line, length in zip(lines, SEQ_LENS * 2, strict=True):
        assert line["seq_lens"] == [length]
        calls = run.dump(line["step"])
        (up,) = (entry for name, entry in calls.items() if name.endswith("up.Linear.forward.0"))
        assert up["input_args"][0]["shape"] == [length, 8]
        with_backward = any(".backward." in name for name in calls)
        assert with_backward == (BACKWARD[engine] and line["phase"] == "update_actor")
    assert "dump_path" in run.result()["engines"][engine]["refusal"]  # the constructor found the steps of this engine


def test_off_computes_what_upstream_computes(verl_tree: Path, pristine_verl_tree: Path, tmp_path: Path) -> None:
    results: list[dict[str, Any]] = []
    for name, tree in (("off", verl_tree), ("pristine", pristine_verl_tree)):
        (tmp_path / name).mkdir()
        results.append(run_loop(tree, tmp_path / name, BACKWARD, {}).result()["engines"])
    off, pristine = results
    assert off == pristine
    assert [engine["refusal"] for engine in off.values()] == [None] * 3
