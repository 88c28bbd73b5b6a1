"""Runs of both sides on a CPU, and what they leave behind: dump trees to pair and to compare."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tiny_model

from patchctl.config_files import RunPlan, msprobe_config
from patchctl.dumps.join import open_trees, pair_trees

HERE = Path(__file__).resolve().parent
E2E_FOLDER = Path(sys.prefix).parent  # setup_env.py puts the environment into a folder with all else that it makes
LAYERS = 4
PROMPTS = 4  # virtual pipeline stages want a multiple of the stages
FAULTS: dict[str, dict[str, Any]] = {
    "correct": {},
    "scaled": {"kind": "scale", "layer": 2, "factor": 1.5},
    "swapped": {"kind": "swap_qk", "layer": 1},
    "zeroed": {"kind": "zero_norm", "layer": 3},
    "stale": {"kind": "stale", "size": 0.05},
    "offset": {"kind": "offset", "offset": 3},
}
NAMED = {
    "scaled": "layers.2.mlp.down_proj",
    "swapped": "layers.1.self_attn.qkv_proj",
    "zeroed": "layers.3.post_attention_layernorm",
    "stale": "embed_tokens",
    "offset": "layers.0.self_attn.rotary_emb",
}


@dataclass(frozen=True)
class Scenario:
    """One model and its prompts, trained on by one backend. `precise` asks msprobe for `precision: high`."""

    backend: str
    seed: int
    task: str = "statistics"
    precise: bool = False
    parallel: tuple[tuple[str, int], ...] = ()

    @property
    def world_size(self) -> int:
        sizes = dict(self.parallel)
        return sizes.get("tp", 1) * sizes.get("pp", 1)

    @property
    def name(self) -> str:
        parts = [self.backend, *(f"{key}{size}" for key, size in self.parallel), self.task, str(self.seed)]
        return "-".join([*parts, "precise"] if self.precise else parts)


@dataclass
class Runs:
    """Makes a scenario's dumps when they are first asked for."""

    tree: Path
    folder: Path
    _made: dict[Scenario, Path] = field(default_factory=dict)

    def dumps(self, scenario: Scenario) -> Path:
        """The folder with `update_actor` and, for every fault, `generate_{fault}`."""
        if scenario not in self._made:
            root = self.folder / scenario.name
            make_dumps(self.tree, root, scenario)
            self._made[scenario] = root
        return self._made[scenario]

    def pairs(self, scenario: Scenario, fault: str) -> dict[str, dict[str, Any]]:
        """The pairs document's entries for one fault."""
        root = self.dumps(scenario)
        with pair_trees(open_trees(root / f"generate_{fault}", root / "update_actor")) as run:
            return {name: json.loads(text) for name, _, text in run.results}


def make_dumps(tree: Path, root: Path, scenario: Scenario) -> None:
    """Run both sides on a CPU: `root/update_actor`, and a `root/generate_{fault}` for every fault."""
    root.mkdir(parents=True)
    # As many key heads as heads: else q and k have different widths and cannot be swapped.
    shape = tiny_model.TinyModel(layers=LAYERS, hidden=128, heads=4, kv_heads=4, intermediate=256, seed=scenario.seed)
    model = tiny_model.write_model(root / "model", shape)
    rng = random.Random(scenario.seed)
    prompts = [[rng.randrange(4, shape.vocab) for _ in range(rng.randrange(20, 60))] for _ in range(PROMPTS)]
    common = {
        "model": str(model),
        "dtype": "bfloat16",
        "backend": scenario.backend,
        **dict(scenario.parallel),
        "prompts": prompts,
        "ids": [f"{rng.getrandbits(128):032x}" for _ in prompts],
    }
    configs = {}
    stages = dict(scenario.parallel).get("vpp", 1)
    for side, dump_path in (("actor", root / "update_actor"), ("generate", root / "generate_")):
        plan = RunPlan(task=scenario.task, requests=PROMPTS, response=len(FAULTS), virtual_stages=stages)
        config = {**msprobe_config(plan, is_training=side == "actor"), "dump_path": str(dump_path)}
        if scenario.precise:
            config["precision"] = "high"
        configs[side] = root / f"config_{side}.json"
        configs[side].write_text(json.dumps(config))
    servers = [{"fault": fault, "dump_path": str(root / f"generate_{name}")} for name, fault in FAULTS.items()]
    inference = {**common, "config": str(configs["generate"]), "servers": servers}
    (root / "inference.json").write_text(json.dumps(inference))
    training = root / "training"
    training.mkdir()
    (training / "scenario.json").write_text(json.dumps(common))
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tree}:{HERE.parent}",
        "DUMP_ON": "1",
        "PROMPTS_ONLY": "1",
        "DUMP_CONFIG_PATH": str(configs["actor"]),
        "WORLD_SIZE": str(scenario.world_size),
    }
    commands = [
        ([str(HERE / "training_side.py"), str(training / "scenario.json")], {**environment, "RANK": str(rank)})
        for rank in range(scenario.world_size)
    ]
    commands.append(([str(HERE / "inference_side.py"), str(root / "inference.json")], dict(os.environ)))
    running = [
        subprocess.Popen(
            [sys.executable, *command], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for command, env in commands
    ]
    outputs = [process.communicate(timeout=600)[0] for process in running]
    for process, output in zip(running, outputs, strict=True):
        assert process.returncode == 0, output[-4000:]
