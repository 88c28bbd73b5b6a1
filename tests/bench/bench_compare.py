"""Judging many pairs: `patchctl compare` of 1,000 pairs of a 64-layer model against 1,000 runs of `msprobe compare`.

python tests/bench/bench_compare.py [--pairs 1000] [--layers 64] [--msprobe COMMAND] [--msprobe-runs 4] [--json OUT]

Every pair has two dump.json files of its own place on disk. msprobe is run a few times, as many at once as there are
cores, and its time is taken times the number of pairs; both sides have the machine to themselves. Prints both times and
the ratio, and fails below 10 times as fast. Without msprobe there is no ratio to check.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tool"), str(ROOT / "tests" / "dumps")]

from dump_files import write_dump  # noqa: E402
from model_dumps import Shape, qwen_dumps  # noqa: E402

DISTINCT = 10
TARGET = 10.0


def make_pairs(root: Path, pairs: int, layers: int) -> Path:
    """A pairs document with `pairs` pairs; the dumps are copies of a few distinct ones."""
    shape = Shape(layers=layers, tokens=512, hidden=5120, q=8192, kv=1024, mlp=25600)
    kinds = []
    for seed in range(DISTINCT):
        faults = {f"layers.{layers // 2}.mlp.down_proj": 1.3} if seed == 0 else None
        infer, train = qwen_dumps(shape, seed, noise=0.003, faults=faults)
        kinds.append(
            [
                write_dump(root / f"{side}{seed}" / "dump.json", data).read_bytes()
                for side, data in (("infer", infer), ("train", train))
            ]
        )
    requests = {}
    for number in range(pairs):
        paths = []
        for side, raw in zip(("infer", "train"), kinds[number % DISTINCT], strict=True):
            path = root / "dumps" / str(number) / side / "dump.json"
            path.parent.mkdir(parents=True)
            path.write_bytes(raw)
            paths.append(str(path))
        requests[f"{number:032x}"] = {
            "status": "PAIR",
            "infer": {"pid": 1, "step": number, "rank": 0},
            "train": {"step": number, "rank": 0},
            "why": "",
            "tokens": {"infer": 512, "train": 512},
            "infer_dumps": [{"path": paths[0]}],
            "train_dumps": [{"path": paths[1]}],
        }
    document = root / "pairs.json"
    document.write_text(json.dumps({"command": "pair", "requests": requests}))
    return document


def time_msprobe(command: str, document: Path, runs: int, cores: int, scratch: Path) -> float:
    """Seconds of wall time a run of `msprobe compare` on all cores."""
    entries = list(json.loads(document.read_text())["requests"].values())[1 : runs + 1]

    def one(number: int) -> None:
        out = scratch / f"msprobe{number}"
        out.mkdir()
        entry = entries[number % len(entries)]
        subprocess.run(
            [
                command,
                "compare",
                "-tp",
                entry["train_dumps"][0]["path"],
                "-gp",
                entry["infer_dumps"][0]["path"],
                "--consistent_check",
                "--backend",
                "fsdp",
                "-o",
                str(out),
            ],
            check=True,
            capture_output=True,
        )

    began = time.perf_counter()
    with ThreadPoolExecutor(cores) as pool:
        list(pool.map(one, range(runs)))
    return (time.perf_counter() - began) / runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--msprobe", default=shutil.which("msprobe"))
    parser.add_argument("--msprobe-runs", type=int, default=4)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, help="keep the comparison's OUT here")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        document = make_pairs(root, options.pairs, options.layers)
        out = options.keep or root / "out"
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "patchctl", "compare", str(document), "-o", str(out), "--no-msprobe", "--json"],
            env={**os.environ, "PYTHONPATH": str(ROOT / "tool")},
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = time.perf_counter() - began
        if done.returncode not in (0, 1):
            raise SystemExit(done.stderr)
        found = json.loads(done.stdout)
        result: dict[str, object] = {
            "bench": "compare",
            "pairs": options.pairs,
            "layers": options.layers,
            "cores": cores,
            "rows": sum(pair["rows"]["compared"] for pair in found["pairs"]),
            "verdicts": found["verdicts"],
            "first": found["first"] and found["first"]["module"],
            "patchctl_s": round(seconds, 2),
        }
        if options.msprobe:
            each = time_msprobe(options.msprobe, document, options.msprobe_runs, cores, root)
            ratio = each * options.pairs / seconds
            result |= {
                "msprobe_s_a_pair": round(each, 2),
                "msprobe_s": round(each * options.pairs, 1),
                "times_as_fast": round(ratio, 1),
            }
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.msprobe and ratio < TARGET:
        raise SystemExit(f"only {ratio:.1f} times as fast as msprobe, {TARGET:.0f} is the target")


if __name__ == "__main__":
    main()
