"""Runs `msprobe compare` for many pairs in one process. Started with the Python that msprobe is installed in.

    python msprobe_worker.py < JOBS

Importing msprobe takes seconds and comparing one pair less than that, so that the import is done once and every pair
is compared in a fork. Each line of JOBS is {"id", "argv", "out", "log"}; each line of stdout is {"id", "rc", "rows",
"matched", "results", "file", "seconds"}. Standard library and msprobe's own dependencies only.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

MISSING = ("", "N/A", "nan", "None")


def read_result(out: str) -> tuple[str | None, list[str], list[list[str]]]:
    """The newest result table in `out`: (file name, header, rows as text)."""
    files = sorted(path for path in Path(out).iterdir() if path.name.startswith("compare_result"))
    if not files:
        return None, [], []
    path = files[-1]
    if path.suffix == ".csv":
        with path.open(encoding="utf-8-sig", newline="") as stream:
            rows = list(csv.reader(stream))
    else:
        sheet = importlib.import_module("openpyxl").load_workbook(str(path), read_only=True, data_only=True).active
        rows = [["" if cell is None else str(cell) for cell in row] for row in sheet.iter_rows(values_only=True)]
    return path.name, rows[0] if rows else [], rows[1:]


def summarize(out: str) -> dict[str, Any]:
    """How many rows have both sides, and msprobe's own results."""
    name, header, rows = read_result(out)
    if name is None or "NPU Name" not in header or "Bench Name" not in header:
        return {"file": name, "rows": len(rows), "matched": 0, "results": {}}
    left, right = header.index("NPU Name"), header.index("Bench Name")
    result = header.index("Result") if "Result" in header else None
    results: dict[str, int] = {}
    matched = 0
    for row in rows:
        if row[left].strip() in MISSING or row[right].strip() in MISSING:
            continue
        matched += 1
        if result is not None:
            results[row[result].strip()] = results.get(row[result].strip(), 0) + 1
    return {"file": name, "rows": len(rows), "matched": matched, "results": results}


def run_one(main: Callable[[], object], job: dict[str, Any]) -> dict[str, Any]:
    """Compare one pair in a fork; its output goes to the job's log."""
    began = time.time()
    child = os.fork()
    if child == 0:
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o640)
        os.dup2(log, 1)
        os.dup2(log, 2)
        code = 1
        try:
            sys.argv = ["msprobe", *job["argv"]]
            main()
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
    return {"id": job["id"], "rc": code, **summarize(job["out"]), "seconds": round(time.time() - began, 3)}


def serve() -> None:
    """Read jobs until the end of stdin."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # msprobe prints to stdout while it is imported
    sys.path.pop(0)  # this folder's modules are not msprobe's
    main = importlib.import_module("msprobe.msprobe").main

    # Compare imports this late: once here, not once a pair. What is missing, it says itself, in the log of each pair.
    with contextlib.suppress(ImportError):
        importlib.import_module("msprobe.pytorch")

    for line in sys.stdin:
        if line.strip():
            answers.write(json.dumps(run_one(main, json.loads(line))) + "\n")
            answers.flush()


if __name__ == "__main__":
    serve()
