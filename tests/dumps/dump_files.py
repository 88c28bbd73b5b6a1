"""Small dump trees, written line by line, for the tests of pairing and comparing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HIDDEN = 8
EMBEDDING = {
    "infer": "Module.model.embed_tokens.VocabParallelEmbedding.forward.0",
    "train": "Module._fsdp_wrapped_module.model.embed_tokens.Embedding.forward.0",
}


def tensor(shape: list[int], norm: float = 1.0, dtype: str = "torch.bfloat16", **changes: Any) -> dict[str, Any]:
    """A tensor's entry in a dump.json, with statistics that hang together loosely."""
    entry = {
        "type": "torch.Tensor",
        "dtype": dtype,
        "shape": shape,
        "Max": norm / 2,
        "Min": -norm / 3,
        "Mean": norm / 100,
        "Norm": norm,
        "requires_grad": False,
    }
    return {**entry, **changes}


def ids(shape: list[int], low: int = 3, high: int = 90) -> dict[str, Any]:
    return tensor(shape, dtype="torch.int64", Max=high, Min=low, Mean=None, Norm=None)


def write_dump(path: Path, data: dict[str, Any], task: str = "statistics") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"task": task, "level": "L0", "framework": "pytorch", "dump_data_dir": None, "data": data}
    path.write_text(json.dumps(document, indent=1))
    return path


def embedding_only(side: str, tokens: int, low: int = 3, high: int = 90) -> dict[str, Any]:
    """A dump with nothing but the token embedding: all that pairing looks at."""
    shape = [tokens] if side == "infer" else [1, tokens]
    entry = {"input_args": [ids(shape, low, high)], "input_kwargs": {}, "output": [tensor([*shape, HIDDEN], 5.0)]}
    return {EMBEDDING[side]: entry}


def request(request_id: str, tokens: int, kind: str = "new", **fields: Any) -> dict[str, Any]:
    return {"request_id": request_id, "type": kind, "tokens": tokens, **fields}


@dataclass
class Tree:
    """Both sides of a run under one folder."""

    root: Path
    lines: dict[Path, list[str]] = field(default_factory=dict)

    @property
    def generate(self) -> Path:
        return self.root / "generate"

    @property
    def actor(self) -> Path:
        return self.root / "actor"

    def infer(
        self,
        step: int,
        requests: list[dict[str, Any]],
        pid: int = 1,
        rank: int = 0,
        dump: int | None = -1,
        folder: str | None = None,
        **fields: Any,
    ) -> None:
        """One inference step; `dump` is its dump's token count: as logged by default, None for no dump."""
        total = sum(entry["tokens"] for entry in requests)
        record = {
            "source": "dispatch_logger",
            "timestamp": f"2026-05-13T10:00:{step % 60:02d}",
            "pid": pid,
            "rank": rank,
            "step": step,
            "phase": "prefill",
            "total_num_scheduled_tokens": total,
            "requests": requests,
            **fields,
        }
        base = self.generate / (folder or str(pid))
        self.lines.setdefault(base / "dispatch_log.jsonl", []).append(json.dumps(record))
        if dump is not None:
            tokens = total if dump < 0 else dump
            write_dump(base / f"step{step}" / f"rank{rank}" / "dump.json", embedding_only("infer", tokens))

    def train(
        self,
        step: int,
        request_ids: list[Any],
        tokens: int,
        pid: int = 9,
        rank: int = 0,
        dump: bool = True,
        time: str = "2026-05-13T11:00:00",
        **fields: Any,
    ) -> None:
        """One training micro batch with its dump."""
        record = {
            "source": "update_actor",
            "timestamp": time,
            "pid": pid,
            "rank": rank,
            "step": step,
            "request_ids": request_ids,
            "num_requests": len(request_ids),
            **fields,
        }
        self.lines.setdefault(self.actor / str(pid) / "update_actor_log.jsonl", []).append(json.dumps(record))
        if dump:
            write_dump(self.actor / f"step{step}" / f"rank{rank}" / "dump.json", embedding_only("train", tokens))

    def write(self, extra: Iterable[tuple[Path, bytes]] = ()) -> Tree:
        """Write the logs; `extra` appends raw bytes to them."""
        tails = dict(extra)
        for path, lines in self.lines.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes("".join(line + "\n" for line in lines).encode() + tails.get(path, b""))
        return self

    def pair(self) -> tuple[dict[str, dict[str, Any]], list[str]]:
        """What pairing says: request id -> entry, and the warnings."""
        from patchctl.dumps.join import open_trees, pair_trees

        self.write()
        with pair_trees(open_trees(self.generate, self.actor)) as run:
            return {name: json.loads(text) for name, _, text in run.results}, run.warnings


def run_cli(
    *arguments: str | Path, cwd: Path | None = None, path: Sequence[Path] = ()
) -> subprocess.CompletedProcess[str]:
    """`patchctl ARGUMENTS` as a user runs it; `path` goes on PYTHONPATH."""
    tool = Path(__file__).resolve().parents[2] / "tool"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*path, tool]))}
    command = [sys.executable, "-m", "patchctl", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=cwd)
