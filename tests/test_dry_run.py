"""The main job on a fresh tree of every pin: fetch, apply, verify, apply again, revert."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import trees
from patchctl.pins import Pin


def patchctl(*arguments: str, cwd: Path) -> str:
    """What the command prints; the test fails with its message where it ends with an error."""
    environment = {**os.environ, "PYTHONPATH": str(trees.ROOT / "tool")}
    command = [sys.executable, "-m", "patchctl", *arguments]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
    return done.stdout


def contents(tree: Path) -> dict[str, bytes]:
    files = (path for path in tree.rglob("*") if path.is_file() and ".git" not in path.relative_to(tree).parts)
    return {path.relative_to(tree).as_posix(): path.read_bytes() for path in files}


@pytest.mark.xdist_group("dry-run")
def test_a_fresh_tree_is_patched_proved_and_restored(pin: Pin, tmp_path: Path) -> None:
    upstream = pin.upstream.name
    source = "pypi" if pin.wheel else "git"
    patchctl("fetch", "--only", upstream, f"--{upstream}-commit", pin.name, "--source", source, cwd=tmp_path)
    tree = tmp_path / "src" / upstream
    pristine = contents(tree)

    patches = trees.PROJECT.series.for_pin(pin)
    said = patchctl("apply", "--only", upstream, f"--{upstream}-commit", pin.name, cwd=tmp_path)
    assert f"applied {len(patches)} patches" in said
    changed = {name for name, data in contents(tree).items() if pristine.get(name) != data}
    stamp = {f".patchctl-{upstream}.json"}
    assert changed - stamp == set(trees.PROJECT.lock.for_pin(pin))
    assert "ok" in patchctl("verify", cwd=tmp_path)
    assert "already applied" in patchctl("apply", "--only", upstream, f"--{upstream}-commit", pin.name, cwd=tmp_path)

    patchctl("revert", cwd=tmp_path)
    assert contents(tree) == pristine
    if (tree / ".git").exists():
        assert subprocess.check_output(["git", "status", "--porcelain"], cwd=tree) == b""
