"""Delete each line that the series inserts into an upstream file, one at a time: some test has to fail.

    python tests/e2e/delete_lines.py [--pin verl/v0.8.0] [--patch 0004] [--runs-only]

For each line, in this order: does the file still compile, does a rule of `patchctl verify` find it, does an end-to-end
test fail. `--runs-only` leaves the rules out, so that every line that compiles is judged by what happens at run time.
Prints a line for each deletion and then the survivors; exit code 1 if there is one that SURVIVES_BECAUSE does not
explain. The end-to-end environment has to be there (`make e2e`).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tool"), str(HERE)]

import setup_env  # noqa: E402

import trees  # noqa: E402
from patchctl.pins import Pin  # noqa: E402
from patchctl.verify.rules import check_tree  # noqa: E402

TESTS = {
    "llm_server.py": ["tests/e2e/verl/test_pieces.py"],
    "fully_async_rollouter.py": ["tests/e2e/verl/test_pieces.py"],
    "fsdp/transformer_impl.py": ["tests/e2e/verl/test_fsdp_dump.py"],
    "megatron/transformer_impl.py": ["tests/e2e/megatron"],
    "ray_trainer.py": ["tests/e2e/verl/test_prompts_only.py", "tests/e2e/verl/test_unchanged_training.py"],
    "fully_async_trainer.py": ["tests/e2e/verl/test_prompts_only.py"],
    "main_ppo.py": ["tests/e2e/verl/test_pieces.py"],
    "constants_ppo.py": ["tests/e2e/verl/test_pieces.py"],
    "model_runner_v1.py": ["tests/e2e/vllm_ascend"],
    "worker/worker.py": ["tests/e2e/vllm_ascend"],
}
"""Which tests run a file, by the end of its path; all of the upstream's where none is named."""

SURVIVES_BECAUSE: dict[str, str] = {}
"""A line that no test can miss, and why."""


def inserted(pin: Pin, wanted: str | None) -> list[tuple[str, str, int]]:
    """(patch, path, line number in the patched file) of every line that a patch inserts into an upstream file."""
    found = []
    tree, pristine = trees.applied(pin), trees.pristine(pin)
    for path, chain in trees.PROJECT.lock.for_pin(pin).items():
        if chain[0].pre is None:
            continue
        added = _added_lines(pristine / path, tree / path)
        patch = chain[-1].patch
        if wanted is None or any(wanted in step.patch for step in chain):
            found += [(patch, path, line) for line in added]
    return found


def _added_lines(before: Path, after: Path) -> list[int]:
    """Numbers of the lines of `after` that a diff adds."""
    done = subprocess.run(
        ["git", "diff", "--no-index", "--unified=0", str(before), str(after)],
        capture_output=True,
        text=True,
        check=False,
    )
    numbers = []
    for line in done.stdout.splitlines():
        if line.startswith("@@"):
            start, _, count = line.split()[2][1:].partition(",")
            numbers += list(range(int(start), int(start) + int(count or 1)))
    return numbers


def killed_by(pin: Pin, mutant: Path, path: str, python: Path, rules: bool) -> str | None:
    """What notices that the line is gone; None if nothing does."""
    try:
        compile((mutant / path).read_bytes(), path, "exec")
    except SyntaxError:
        return "the compiler"
    if rules:
        touched = list(trees.PROJECT.lock.for_pin(pin))
        if found := check_tree(mutant, pin.upstream.name, pin.debugger_stops, touched):
            return f"the rule {found[0].rule}"
    variables = {
        "verl": ("PATCHED_VERL_TREES", "PRISTINE_VERL_TREES"),
        "vllm-ascend": ("PATCHED_VLLM_ASCEND_TREES", ""),
    }
    patched, pristine = variables[pin.upstream.name]
    link = mutant.with_name("pristine") / mutant.name
    link.parent.mkdir(exist_ok=True)
    if not link.exists():
        link.symlink_to(trees.pristine(pin))
    environment = {**os.environ, patched: str(mutant), (pristine or "_"): str(link)}
    tests = next((tests for end, tests in TESTS.items() if path.endswith(end)), [f"tests/e2e/{pin.upstream.package}"])
    command = [python, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split(" - ")[0] if failed else f"pytest (exit code {done.returncode})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pin", default=None, help="one pin (default: all that can be had)")
    parser.add_argument("--patch", default=None, help="only files of the patches whose name has this in it")
    parser.add_argument("--runs-only", action="store_true", help="do not ask the rules of verify")
    options = parser.parse_args()
    python = setup_env.ensure(ROOT / "build" / "e2e")
    survivors, total = [], 0
    for pin in trees.PROJECT.pins.pins:
        if options.pin not in (None, pin.key):
            continue
        if reason := trees.available(pin):
            print(f"skipped: {reason}")
            continue
        for _, path, line in inserted(pin, options.patch):
            with tempfile.TemporaryDirectory() as scratch:
                mutant = trees.copy(trees.applied(pin), Path(scratch) / "tree")
                lines = (mutant / path).read_bytes().split(b"\n")
                text = lines.pop(line - 1).decode().strip()
                (mutant / path).unlink()
                (mutant / path).write_bytes(b"\n".join(lines))
                if not text or text.startswith("#"):
                    continue
                total += 1
                killer = killed_by(pin, mutant, path, python, not options.runs_only)
                print(f"{pin} {path}:{line} `{text}`: {killer or 'SURVIVES'}", flush=True)
                if killer is None:
                    survivors.append((f"{path}:{line}", text))
                shutil.rmtree(Path(scratch) / "pristine", ignore_errors=True)
    unexplained = [place for place, text in survivors if text not in SURVIVES_BECAUSE]
    print(f"{total} lines deleted, {len(survivors)} survive, {len(unexplained)} of them unexplained")
    for place, text in survivors:
        print(f"  {place} `{text}`: {SURVIVES_BECAUSE.get(text, 'no test notices')}")
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
