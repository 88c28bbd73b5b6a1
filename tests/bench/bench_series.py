"""How long patchctl's commands take, as ratios to their peers in the same run.

    python tests/bench/bench_series.py [--rounds 15]

The tree is verl at a pin, as a git checkout with the series for it; peers are `git am` and, where it is installed,
`quilt push -a` of the same patches, and the bare start of Python with the packages that the commands import. Every
round runs all of them once, in turn, so that a busy machine slows them alike; figures are medians.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "tool")]

import trees  # noqa: E402
from patchctl.pins import Pin  # noqa: E402

PATCHCTL = [sys.executable, "-c", "from patchctl.__main__ import main; main()"]  # as the installed program does
BARE = [sys.executable, "-c", "import click, unidiff"]
IDENTITY = {
    "GIT_AUTHOR_NAME": "b",
    "GIT_AUTHOR_EMAIL": "b@invalid",
    "GIT_COMMITTER_NAME": "b",
    "GIT_COMMITTER_EMAIL": "b@invalid",
}
ENVIRONMENT = {
    **os.environ,
    **IDENTITY,
    "PYTHONPATH": str(trees.ROOT / "tool"),
    "PYTHONDONTWRITEBYTECODE": "",  # an installed package has its modules compiled, and so do the peers
    "GIT_CONFIG_GLOBAL": os.devnull,
}


def run(command: list[str], cwd: Path, stdin: bytes | None = None, environment: dict[str, str] = ENVIRONMENT) -> None:
    done = subprocess.run(command, cwd=cwd, env=environment, input=stdin, capture_output=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr.decode()}{done.stdout.decode()}")


def checkout(pin: Pin, folder: Path) -> Path:
    """The pin's package as a git repository with one commit."""
    shutil.copytree(trees.pristine(pin) / pin.upstream.package, folder / pin.upstream.package)
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "upstream"]):
        run(["git", *command], folder)
    return folder


def reset(folder: Path) -> None:
    run(["git", "reset", "-q", "--hard"], folder)
    run(["git", "clean", "-qfd"], folder)


def quilt_folder(names: list[str], folder: Path) -> None:
    (folder / "patches").mkdir()
    for name in names:
        shutil.copy(trees.ROOT / "patches" / name, folder / "patches" / Path(name).name)
    (folder / "patches" / "series").write_text("".join(f"{Path(name).name}\n" for name in names))


def medians(cases: dict[str, tuple[Callable[[], None], Callable[[], None]]], rounds: int) -> dict[str, float]:
    """Milliseconds of each case; its preparation is not timed."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, (prepare, measured) in cases.items():
            prepare()
            start = time.perf_counter()
            measured()
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def long_project(count: int, folder: Path) -> tuple[Path, Path]:
    """A project of `count` patches, each one line in one of 15 files, and the tree it is for."""
    from patchctl import series
    from patchctl.series import Lock, Step
    from patchctl.tree import blob_id

    tree, project = folder / "tree", folder / "project"
    (tree / "verl").mkdir(parents=True)
    (tree / "verl" / "__init__.py").write_text("")
    (project / "configs").mkdir(parents=True)
    (project / "patches" / "verl").mkdir(parents=True)
    (project / "configs" / "pins.toml").write_text(
        '[upstreams.verl]\npackage = "verl"\nurl = ""\nurl_variable = "NONE"\n'
        f'[[pins]]\nupstream = "verl"\nname = "base"\ncommit = "{"a" * 40}"\n'
    )
    contents = {f"verl/f{i:02d}.py": [f"line {n} of {i}\n" for n in range(400)] for i in range(15)}
    for path, lines in contents.items():
        (tree / path).write_text("".join(lines))
    chains: dict[str, list[Step]] = {path: [] for path in contents}
    hashes, names = {}, []
    for number in range(1, count + 1):
        path = f"verl/f{number % 15:02d}.py"
        lines = contents[path]
        at = (number * 7) % 380 + 5
        pre = blob_id("".join(lines).encode())
        old, new = lines[at - 3 : at + 3], [*lines[at - 3 : at], f"added {number}\n", *lines[at : at + 3]]
        lines.insert(at, f"added {number}\n")
        post = blob_id("".join(lines).encode())
        body = "".join(("+" if index == 3 else " ") + line for index, line in enumerate(new))
        name = f"verl/{number:04d}-line.patch"
        text = (
            f"From {'0' * 40} Mon Sep 17 00:00:00 2001\nFrom: B <b@invalid>\nDate: Thu, 1 Jan 2026 00:00:00 +0000\n"
            f"Subject: [verl] bench: line {number}\n\nA line.\n\n---\n\ndiff --git a/{path} b/{path}\n"
            f"index {pre}..{post} 100644\n--- a/{path}\n+++ b/{path}\n"
            f"@@ -{at - 2},{len(old)} +{at - 2},{len(new)} @@\n{body}"
        )
        (project / "patches" / name).write_text(text)
        names.append(name)
        hashes[name] = series.sha256(text.encode())
        chains[path].append(Step(name, pre, post))
    (project / "series").write_text("".join(f"{name}\n" for name in names))
    lock = Lock(hashes, {"verl/base": {path: tuple(chain) for path, chain in chains.items() if chain}})
    (project / "series.lock").write_text(lock.dump())
    return project, tree


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    project = trees.PROJECT
    verl = next(pin for pin in project.pins.of("verl") if trees.available(pin) is None)
    ascend = project.pins.paired(verl)
    names = list(project.series.for_pin(verl))
    mailbox = b"".join((trees.ROOT / "patches" / name).read_bytes() for name in names)
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch)
        tree = checkout(verl, base / "verl")
        quilt = checkout(verl, base / "quilt")
        quilt_folder(names, quilt)
        applied = [str(trees.applied(pin)) for pin in (verl, ascend)]
        head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=tree, text=True).strip()

        def nothing() -> None:
            pass

        def patchctl(*arguments: str) -> Callable[[], None]:
            return lambda: run([*PATCHCTL, *arguments], base)

        only = ("--only", "verl", "--verl", str(tree))
        commit = ("--verl-commit", verl.name)

        def undo_am() -> None:
            run(["git", "reset", "-q", "--hard", head], tree)
            run(["git", "clean", "-qfd"], tree)

        def undo_quilt() -> None:
            shutil.rmtree(quilt / ".pc", ignore_errors=True)
            run(["git", "reset", "-q", "--hard"], quilt)
            run(["git", "clean", "-qfd", "-e", "patches"], quilt)

        cases: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
            "python -c 'import click, unidiff'": (nothing, lambda: run(BARE, base)),
            "git am": (undo_am, lambda: run(["git", "am", "-q", "--keep-non-patch"], tree, mailbox)),
            "apply": (undo_am, patchctl("apply", *commit, *only)),
            "apply again": (nothing, patchctl("apply", *commit, *only)),
            "status": (nothing, patchctl("status", "--verl", str(tree))),
            "apply --dry-run": (undo_am, patchctl("apply", "--dry-run", *commit, *only)),
            "verify": (nothing, patchctl("verify")),
            "verify, two trees": (nothing, patchctl("verify", "--verl", applied[0], "--vllm-ascend", applied[1])),
        }
        if shutil.which("quilt"):
            cases["quilt push -a"] = (
                undo_quilt,
                lambda: run(
                    ["quilt", "push", "-a", "-q"], quilt, environment={**ENVIRONMENT, "QUILT_PATCHES": "patches"}
                ),
            )
        for count in (15, 150):
            root, target = long_project(count, base / f"long{count}")
            run(["git", "init", "-q"], target)
            for command in (["add", "-A"], ["commit", "-qm", "upstream"]):
                run(["git", *command], target)
            cases[f"apply, {count} patches"] = (
                lambda target=target: reset(target),
                patchctl("--root", str(root), "apply", "--only", "verl", "--verl", str(target)),
            )
        found = medians(cases, options.rounds)

    bare, am, push = found["python -c 'import click, unidiff'"], found["git am"], found.get("quilt push -a")
    rows = [
        ("apply", "git am", found["apply"] / am, 2.0),
        ("apply", "quilt push -a", found["apply"] / push if push else None, 0.5),
        ("apply --dry-run", "git am", found["apply --dry-run"] / am, 1.7),
        ("apply again", "import click, unidiff", found["apply again"] / bare, 1.3),
        ("status", "import click, unidiff", found["status"] / bare, 1.3),
        ("verify (the series)", "import click, unidiff", found["verify"] / bare, 1.4),
        ("verify (with two trees)", "import click, unidiff", found["verify, two trees"] / bare, 4.0),
        ("apply, 150 patches", "apply, 15 patches", found["apply, 150 patches"] / found["apply, 15 patches"], 3.0),
    ]
    if options.json:
        print(json.dumps({"milliseconds": found, "ratios": [row[:3] for row in rows]}, indent=1))
        return
    print(f"verl {verl.name}: {len(names)} patches, {options.rounds} rounds, Python {sys.version.split()[0]}\n")
    print("| what | median ms |\n|---|---|")
    for name, value in found.items():
        print(f"| {name} | {value:.1f} |")
    print("\n| command | peer | ratio | goal |\n|---|---|---|---|")
    for command, peer, ratio, goal in rows:
        print(f"| {command} | {peer} | {'not installed' if ratio is None else f'{ratio:.2f}'} | <= {goal} |")


if __name__ == "__main__":
    main()
