"""Run the end-to-end tests: verl's real engines and vllm-ascend's real runner source under the real msprobe, on a CPU.

    python tests/e2e/run.py [PYTEST ARGUMENTS]

Makes the environment where it is missing (about two minutes, 2.5 GB under build/e2e), runs the tests in it, and ends
with what lies on disk under build/e2e/runs: the dump trees and logs of both sides, counted.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import setup_env

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "e2e"
RUNS = BUILD / "runs"


def lines_of(log: Path) -> Iterator[dict[str, object]]:
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            yield json.loads(line)
        except ValueError:  # of a test that fills the disk
            continue


def request_ids(record: dict[str, object]) -> set[str]:
    """The ids that a log line names, without the suffix that vLLM appends."""
    requests = record.get("requests")
    if isinstance(requests, list):
        return {str(request["request_id"]).split("-")[0] for request in requests}
    ids = record.get("request_ids")
    return {str(request_id) for request_id in ids if request_id} if isinstance(ids, list) else set()


def summary() -> str:
    """Steps dumped, lines written and requests named, on both sides."""
    rows = []
    for side, name in (("inference", "dispatch_log.jsonl"), ("training", "update_actor_log.jsonl")):
        logs = sorted(RUNS.rglob(name))
        records = [record for log in logs for record in lines_of(log)]
        folders = {log.parent if side == "inference" else log.parent.parent for log in logs}
        steps = {dump.parent for folder in folders for dump in folder.glob("step*/*/dump.json")}
        ids = set().union(*map(request_ids, records)) if records else set()
        rows.append(f"{side}: {len(logs)} logs, {len(records)} lines, {len(steps)} steps dumped, {len(ids)} requests")
    return "\n".join(rows)


def main() -> int:
    try:
        python = setup_env.ensure(BUILD)
    except setup_env.SetupError as error:
        if sys.version_info < setup_env.OLDEST_PYTHON:
            print(f"e2e: skipped: {error}")
            return 0
        print(f"e2e: {error}", file=sys.stderr)
        return 1
    shutil.rmtree(RUNS, ignore_errors=True)
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [python, "-m", "pytest", f"--basetemp={RUNS}", "-o", "tmp_path_retention_policy=all", *sys.argv[1:]]
    done = subprocess.run([*command, HERE], cwd=ROOT, env=environment, check=False)
    print(f"e2e: {RUNS}\n{summary()}")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
