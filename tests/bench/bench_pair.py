"""Pairing a large run: `patchctl pair --logs-only` against DuckDB's bare join of the same files.

python tests/bench/bench_pair.py [--requests 10000000] [--steps 100000] [--plain] [--json OUT]

Needs `pip install duckdb`. Prints both times (the best of the rounds, rounds interleaved), the peak resident memory of
all processes of each, and fails when pairing takes more than 1.5 times DuckDB's time or 400 MB.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

TOOL = Path(__file__).resolve().parents[2] / "tool"
LIMIT_RATIO, LIMIT_MB = 1.5, 400

JOIN = """
import sys, duckdb
generate, actor = sys.argv[1:3]
connection = duckdb.connect()
connection.execute(f"set threads = {sys.argv[3]}")
rows = connection.execute(f'''
with infer as (
  select pid, rank, step, len(requests) as n, unnest(requests) as r
  from read_json('{generate}/*/dispatch_log.jsonl', format='newline_delimited', maximum_object_size=67108864,
    columns={{pid: 'BIGINT', rank: 'INTEGER', step: 'BIGINT',
              requests: 'STRUCT(request_id VARCHAR, "type" VARCHAR, tokens INTEGER)[]'}})
), train as (
  select rank, step, unnest(request_ids) as id
  from read_json('{actor}/*/update_actor_log.jsonl', format='newline_delimited',
    columns={{rank: 'INTEGER', step: 'BIGINT', request_ids: 'VARCHAR[]'}})
)
select count(*), sum(case when infer.n = 1 and infer.r."type" = 'new' then 1 else 0 end)
from infer join train on train.id = regexp_replace(infer.r.request_id, '-[0-9a-f]{{8}}$', '')
''').fetchall()
print(rows)
"""


def make_logs(root: Path, entries: int, steps: int, plain: bool, seed: int = 1) -> int:
    """Write both logs: `entries` request entries over `steps` inference steps. Returns the number of requests."""
    rng = random.Random(seed)
    width = max(1, entries // steps)
    pid, trainer = 4001, 5001
    (root / "generate" / str(pid)).mkdir(parents=True)
    (root / "actor" / str(trainer)).mkdir(parents=True)
    running: list[list[object]] = []
    ids: list[tuple[str, int]] = []
    # A request lives for about `life` steps, so that the batch stays full.
    life = max(2, steps // 10 if steps < 1000 else 1000)

    def start() -> list[object]:
        request_id, prompt = f"{rng.getrandbits(128):032x}", rng.randrange(16, 2048)
        ids.append((request_id, prompt))
        return [f"{request_id}-{rng.getrandbits(32):08x}", prompt, 0, rng.randrange(life // 2, life * 3 // 2)]

    with (root / "generate" / str(pid) / "dispatch_log.jsonl").open("w") as stream:
        for step in range(steps):
            requests, total, prefill = [], 0, False
            for slot in range(width):
                if slot >= len(running):
                    running.append(start())
                elif running[slot][2] > running[slot][3]:  # type: ignore[operator]
                    running[slot] = start()
                name, prompt, age, _ = running[slot]
                new = age == 0
                tokens = prompt if new else 1
                entry = {"request_id": name, "type": "new" if new else "cached", "tokens": tokens}
                if not plain:
                    done = 0 if new else prompt + age - 1  # type: ignore[operator]
                    entry |= {
                        "num_computed_tokens": done,
                        "num_prompt_tokens": prompt,
                        "phase": "prefill" if new else "decode",
                        "prefill_complete": True,
                        "resumed": False,
                    }
                running[slot][2] = age + 1  # type: ignore[operator]
                total += tokens  # type: ignore[operator]
                prefill = prefill or new
                requests.append(entry)
            line: dict[str, object] = {"source": "dispatch_logger", "timestamp": "2026-05-13T10:00:00"}
            line |= {} if plain else {"host": "node1"}
            line |= {"pid": pid, "rank": 0, "step": step, "phase": "prefill" if prefill else "decode"}
            line |= {} if plain else {"attn_state": "ChunkedPrefill" if prefill else "DecodeOnly"}
            line |= {"total_num_scheduled_tokens": total, "requests": requests}
            stream.write(json.dumps(line, separators=None if plain else (",", ":")) + "\n")
    with (root / "actor" / str(trainer) / "update_actor_log.jsonl").open("w") as stream:
        for step, (request_id, prompt) in enumerate(ids):
            record = {
                "source": "update_actor",
                "timestamp": "2026-05-13T11:00:00",
                "pid": trainer,
                "rank": 0,
                "step": step,
                "request_ids": [request_id],
                "num_requests": 1,
            }
            if not plain:
                record |= {"role": "actor", "phase": "log_prob", "prompt_lens": [prompt], "seq_lens": [prompt]}
            stream.write(json.dumps(record) + "\n")
    return len(ids)


def run(command: list[str], env: dict[str, str]) -> tuple[float, float, str]:
    """Wall seconds, peak MB of the command and all its children together, and its output."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True)
    peak = [0.0]
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.05):
            peak[0] = max(peak[0], sum(map(unshared_mb, family(process.pid))))

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    output = process.communicate()[0]
    seconds = time.perf_counter() - began
    stop.set()
    watcher.join()
    if process.returncode not in (0, 1):  # 1: a busy server has no step with a lone prompt
        raise SystemExit(f"{command} ended with {process.returncode}")
    return seconds, peak[0], output


def family(pid: int) -> list[int]:
    """The process and its descendants."""
    found = [pid]
    for process in found:
        try:
            for task in Path(f"/proc/{process}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
        except OSError:
            continue
    return found


def unshared_mb(pid: int) -> float:
    """Resident memory in MB, shared pages divided among their users."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in text.splitlines() if line.startswith("Pss:")), 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000_000, help="request entries in the inference log")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--plain", action="store_true", help="write the logs without the extra fields")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, help="write the logs here and keep them")
    options = parser.parse_args()
    env = {**os.environ, "PYTHONPATH": str(TOOL)}
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as scratch:
        root = options.keep or Path(scratch)
        if not (root / "generate").exists():
            make_logs(root, options.requests, options.steps, options.plain)
        size = sum(path.stat().st_size for path in root.rglob("*.jsonl"))
        ours = [
            sys.executable,
            "-m",
            "patchctl",
            "pair",
            str(root / "generate"),
            str(root / "actor"),
            "--logs-only",
            "--json",
        ]
        peer = [sys.executable, "-c", JOIN, str(root / "generate"), str(root / "actor"), str(cores)]
        best: dict[str, tuple[float, float]] = {}
        counts: dict[str, int] = {}
        for _ in range(options.rounds):
            for name, command in (("duckdb", peer), ("patchctl", ours)):
                seconds, memory, output = run(command, env)
                if name == "patchctl":
                    counts = json.loads(output)["counts"]
                old = best.get(name, (seconds, memory))
                best[name] = (min(old[0], seconds), max(old[1], memory))
    ratio = best["patchctl"][0] / best["duckdb"][0]
    result = {
        "bench": "pair",
        "gigabytes": round(size / 1e9, 3),
        "requests": options.requests,
        "steps": options.steps,
        "plain_logs": options.plain,
        "cores": cores,
        "counts": counts,
        "ratio": round(ratio, 3),
        **{
            f"{name}_{key}": round(value, 2)
            for name, pair in best.items()
            for key, value in zip(("s", "mb"), pair, strict=True)
        },
    }
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if ratio > LIMIT_RATIO or best["patchctl"][1] > LIMIT_MB:
        raise SystemExit(f"too slow or too large: {ratio:.2f} x DuckDB, {best['patchctl'][1]:.0f} MB")


if __name__ == "__main__":
    main()
