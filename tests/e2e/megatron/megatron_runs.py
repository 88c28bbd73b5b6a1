"""The runs that the Megatron tests look at, each made once, and what is in their dumps."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_runs import MSPROBES, Run, environment

HERE = Path(__file__).resolve().parent
TIMEOUT = 300.0
"""Seconds for all ranks of a run together."""

INFER: dict[str, Any] = {"role": "actor", "do": "infer", "prefix": "a"}
TRAIN: dict[str, Any] = {"role": "actor", "do": "train", "prefix": "z"}
EVERYTHING = (
    INFER,
    {"role": "critic", "do": "infer", "prefix": "a"},
    {"role": "ref", "do": "infer", "prefix": "a"},
    {**INFER, "prefix": "b", "fail_at_call": 2},
    {**INFER, "prefix": "c"},
    {**TRAIN, "prefix": "d", "fail_at_call": 2},
    TRAIN,
)
"""The actor alone writes; its second and fourth call fail in the second micro batch."""


@dataclass(frozen=True)
class Scenario:
    """One run.

    Attributes:
        parallel: the engine's settings, and the backend.
        dump: False for a run with the instrumentation off.
        phase: None for the default.
    """

    actions: tuple[dict[str, Any], ...] = (INFER, TRAIN)
    parallel: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1
    dump: bool = True
    phase: str | None = "all"
    pristine: bool = False
    msprobe: str = "26.2.0"


SCENARIOS = {
    "one rank": Scenario(EVERYTHING),
    "off": Scenario(EVERYTHING, dump=False),
    "pristine": Scenario(EVERYTHING, dump=False, pristine=True),
    "stages": Scenario((INFER, TRAIN), {"pp": 2}, ranks=2),
    "virtual stages": Scenario((INFER, TRAIN), {"pp": 2, "vpp": 2}, ranks=2),
    "tensor parallel": Scenario((INFER, TRAIN), {"tp": 2}, ranks=2),
    "fused kernels": Scenario((INFER, TRAIN), {"fused_kernels": True}),
    "mindspeed": Scenario(
        (INFER, {**INFER, "prefix": "p", "crop": True}, TRAIN), {"backend": "mindspeed"}, phase=None, msprobe="26.0.0"
    ),
}


@dataclass
class Runs:
    """The finished runs of one tree, by name; a run is made when it is first asked for."""

    tree: Path
    pristine_tree: Path
    model: Path
    folder: Path
    _finished: dict[str, Run] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Run:
        if name not in self._finished:
            folder = self.folder / name.replace(" ", "_")
            folder.mkdir()
            self._finished[name] = self._run(SCENARIOS[name], folder)
        return self._finished[name]

    def _run(self, scenario: Scenario, folder: Path) -> Run:
        scenario_file = folder / "s.json"
        settings = {"model": str(self.model), "actions": scenario.actions, **scenario.parallel}
        scenario_file.write_text(json.dumps(settings), encoding="utf-8")
        switches = {"DUMP_ON": "1"} if scenario.dump else {}
        if scenario.phase:
            switches["DUMP_PHASE"] = scenario.phase
        tree = self.pristine_tree if scenario.pristine else self.tree
        env = environment(tree, folder, switches, MSPROBES[scenario.msprobe], {})
        env["PYTHONPATH"] += os.pathsep + str(HERE.parent / "verl")
        logs = [folder / f"output_rank{rank}.txt" for rank in range(scenario.ranks)]
        processes = []
        for rank, log in enumerate(logs):
            with log.open("w") as out:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-W", "ignore", HERE / "run_engine.py", scenario_file],
                        env={**env, "RANK": str(rank), "WORLD_SIZE": str(scenario.ranks)},
                        stdout=out,
                        stderr=subprocess.STDOUT,
                    )
                )
        exit_codes = wait_for_all(processes)
        return Run(folder, exit_codes, tuple(log.read_text(encoding="utf-8", errors="replace") for log in logs))


def wait_for_all(processes: list[subprocess.Popen[bytes]]) -> tuple[int, ...]:
    """Exit codes of all ranks. When one fails, the others wait for it in a collective: they are ended."""
    deadline = time.monotonic() + TIMEOUT
    while any(process.poll() is None for process in processes):
        if time.monotonic() > deadline or any(process.poll() for process in processes):
            for process in processes:
                process.kill()
        time.sleep(0.05)
    return tuple(process.wait() for process in processes)


@dataclass(frozen=True)
class Call:
    """One entry of a dump's `data`: `Module.0.module.module.decoder.layers.1.mlp.MLP.forward.2` and the like.

    Attributes:
        chunk: index of the model chunk; None where msprobe was given one model.
        layer: as the stage numbers it; None outside the layers.
        module: the path below the layer, or below the model, with the class name last.
        kind: "forward", "backward" or "parameters_grad".
        call: which call of the module in this step.
    """

    chunk: int | None
    layer: int | None
    module: str
    kind: str
    call: int


NAME = re.compile(
    r"Module\.(?:(?P<chunk>\d+)\.)?module\.module\.(?:decoder\.layers\.(?P<layer>\d+)\.)?(?P<module>.+)"
    r"\.(?P<kind>forward|backward|parameters_grad)(?:\.(?P<call>\d+))?"
)


def calls(dump: dict[str, Any]) -> dict[Call, dict[str, Any]]:
    """A dump by what its names mean; fails on a name of another form."""
    found = {}
    for name, entry in dump.items():
        match = NAME.fullmatch(name)
        assert match, name
        chunk, layer, module, kind, call = match.group("chunk", "layer", "module", "kind", "call")
        number = None if layer is None else int(layer)
        found[Call(None if chunk is None else int(chunk), number, module, kind, int(call or 0))] = entry
    return found


def shape(entry: dict[str, Any]) -> list[int]:
    """Of the first output, or of the first input where the output is none."""
    tensor = next(part for part in [*entry["output"], *entry["input_args"]] if part and part.get("shape"))
    found: list[int] = tensor["shape"]
    return found


def model_layers(run: Run, request_id: str, ranks: int) -> dict[int, dict[str, Any]]:
    """Statistics of a request's pass through each layer of the whole model, brought together by what the logs say.

    Layer number in the model -> module below the layer -> statistics of its first output, of the log_prob step.
    """
    layers: dict[int, dict[str, Any]] = defaultdict(dict)
    for rank in range(ranks):
        for line in run.lines(rank):
            if line["phase"] != "log_prob" or line["request_ids"] != [request_id]:
                continue
            for call, entry in calls(run.dump(line["step"], rank)).items():
                if call.layer is not None and entry["output"] and entry["output"][0]:
                    output = entry["output"][0]
                    statistics = tuple(output.get(name) for name in ("Max", "Min", "Mean", "Norm"))
                    layers[line["megatron"]["layer_offset"] + call.layer][call.module] = statistics
    return dict(layers)
