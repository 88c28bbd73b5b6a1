"""Runs of the patched verl in processes of their own, and what they leave behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
E2E_FOLDER = Path(sys.prefix).parent  # setup_env.py puts the environment into a folder with all else that it makes
MSPROBES = {"26.2.0": None, "26.0.0": E2E_FOLDER / "msprobe-26.0.0"}
"""msprobe version -> folder to put first on the path, or None for the one in the environment."""
DUMP_VARIABLES = ("DUMP_ON", "DUMP_PHASE", "PROMPTS_ONLY", "DUMP_CONFIG_PATH", "DUMP_UNSAFE")
ENDED = "no more dumps from here"


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        folder: has the dump in `dump/`, and the results.
        exit_codes: of each rank.
        output: stdout and stderr of each rank.
    """

    folder: Path
    exit_codes: tuple[int, ...]
    output: tuple[str, ...]

    def result(self, rank: int = 0) -> dict[str, Any]:
        """What the run itself reports; fails with the run's last words where there is none."""
        assert self.exit_codes[rank] == 0, self.output[rank][-4000:]
        name = f"result_rank{rank}.json" if (self.folder / f"result_rank{rank}.json").exists() else "result.json"
        found: dict[str, Any] = json.loads((self.folder / name).read_text(encoding="utf-8"))
        return found

    def lines(self, rank: int = 0) -> list[dict[str, Any]]:
        """The log lines of a rank, in order."""
        log = self.folder / "dump" / str(self.result(rank)["pid"]) / "update_actor_log.jsonl"
        return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []

    def steps(self, rank: int = 0) -> set[int]:
        """The steps for which there is a directory of this rank."""
        return {
            int(folder.parent.name.removeprefix("step")) for folder in (self.folder / "dump").glob(f"step*/rank{rank}")
        }

    def dump(self, step: int, rank: int = 0) -> dict[str, Any]:
        """The modules in the dump of a step."""
        file = self.folder / "dump" / f"step{step}" / f"rank{rank}" / "dump.json"
        data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["data"]
        return data

    def dumped_tokens(self, step: int, rank: int = 0) -> int:
        """Number of tokens that the model saw in this step."""
        names = [name for name in self.dump(step, rank) if re.search(r"embed_tokens\.\w+\.forward\.0$", name)]
        assert len(names) == 1, names
        shape: list[int] = self.dump(step, rank)[names[0]]["input_args"][0]["shape"]
        return shape[-1]

    def warnings(self, text: str, rank: int = 0) -> list[str]:
        """The lines of a rank's output that have `text`."""
        return [line for line in self.output[rank].splitlines() if text in line]


def run_engine(
    tree: Path,
    folder: Path,
    model: Path,
    actions: list[dict[str, Any]],
    *,
    env: dict[str, str] | None = None,
    world_size: int = 1,
    msprobe: Path | None = None,
    dump_config: dict[str, Any] | None = None,
    **scenario: Any,
) -> Run:
    """`run_engine.py` on every rank, with the dump configuration in `folder` and `env` as the dump's variables."""
    (folder / "s.json").write_text(json.dumps({"model": str(model), "actions": actions, **scenario}), encoding="utf-8")
    base = environment(tree, folder, env or {}, msprobe, dump_config or {})
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", HERE / "run_engine.py", folder / "s.json"],
            env={**base, "RANK": str(rank), "WORLD_SIZE": str(world_size)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    output = tuple(process.communicate()[0] for process in processes)
    return Run(folder, tuple(process.returncode for process in processes), output)


def run_trainers(
    tree: Path, folder: Path, model: Path, scenario: dict[str, Any], *, env: dict[str, str] | None = None
) -> Run:
    """`run_trainers.py` with the dump configuration in `folder` and `env` as the dump's variables."""
    (folder / "s.json").write_text(json.dumps(scenario), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", HERE / "run_trainers.py", folder / "s.json"],
        env={**environment(tree, folder, env or {}, None, {}), "TINY_MODEL": str(model)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return Run(folder, (done.returncode,), (done.stdout,))


def environment(
    tree: Path, folder: Path, env: dict[str, str], msprobe: Path | None, dump_config: dict[str, Any]
) -> dict[str, str]:
    """The variables of a process that runs `tree`, with msprobe's configuration written to `folder`.

    Args:
        env: the dump's own variables; those of this process are left out.
        msprobe: a folder to take msprobe from.
        dump_config: keys of msprobe's configuration that differ from a plain L0 statistics dump.
    """
    config = folder / "config_actor.json"
    config.write_text(
        json.dumps(
            {
                "task": "statistics",
                "dump_path": str(folder / "dump"),
                "rank": [],
                "step": [],
                "level": "L0",
                "async_dump": False,
                "statistics": {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"},
                "tensor": {"scope": [], "list": [], "data_mode": ["all"]},
                **dump_config,
            }
        ),
        encoding="utf-8",
    )
    inherited = {name: value for name, value in os.environ.items() if name not in DUMP_VARIABLES}
    path = [str(part) for part in (msprobe, tree, HERE.parent) if part is not None]
    return {
        **inherited,
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONDONTWRITEBYTECODE": "1",
        "DUMP_CONFIG_PATH": str(config),
        **env,
    }
