"""Run cases, each in a process of its own, and leave what they wrote under --out.

    python run_cases.py --vllm FOLDER --vllm-ascend TREE --out FOLDER [CASE ...]

For each case `OUT/CASE/dump` has what msprobe and the dispatch logger wrote, and `OUT/CASE/result.json` the process's
id, its warnings, the lines it expects if it found them out itself, and the traceback if it failed. Processes are
forked once the sources are imported; msprobe's debugger, of which a process has one, is made in each of them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import ascend_engine
import torch


def run_case(case: Any, folder: Path) -> None:
    from dispatch_cases import Job

    folder.mkdir(parents=True)
    job = Job(folder)
    result: dict[str, Any] = {"pid": os.getpid(), "error": None}
    try:
        result["lines"] = case.run(job)
    except BaseException:
        result["error"] = traceback.format_exc()
    import vllm_ascend.worker.dispatch_logger as dispatch_logger

    result["warnings"] = [str(call) for call in dispatch_logger.logger.warning.call_args_list]
    (folder / "result.json").write_text(json.dumps(result, indent=1))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--vllm", type=Path, required=True)
    parser.add_argument("--vllm-ascend", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("cases", nargs="*")
    args = parser.parse_args()

    torch.set_num_threads(1)
    ascend_engine.install_sources(args.vllm, args.vllm_ascend)
    # Imported before the processes are forked because it takes seconds. A debugger imports Megatron if it is there.
    import msprobe.pytorch  # noqa: F401
    import vllm_ascend.worker.model_runner_v1  # noqa: F401

    with contextlib.suppress(ImportError):
        import megatron.core.pipeline_parallel  # noqa: F401
    from dispatch_cases import CASES

    died = 0
    for case in CASES:
        if args.cases and case.name not in args.cases:
            continue
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            run_case(case, args.out / case.name)
            sys.stdout.flush()
            os._exit(0)
        died += os.waitpid(child, 0)[1] != 0
    return int(died > 0)


if __name__ == "__main__":
    sys.exit(main())
