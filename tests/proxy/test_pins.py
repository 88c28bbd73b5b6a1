"""One tree stands for all pins, and the proxy runs on every Python that verl does."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LOOP = Path("verl/experimental/agent_loop")
PARTS = ("chat_proxy", "proxy_agent", "vllm_chat_completion_proxy.py", "proxy_agent_loop.py")
OLDEST = "3.10"


def sources(tree: Path) -> dict[str, bytes]:
    found = [tree / LOOP / part for part in PARTS]
    files = [file for part in found for file in (sorted(part.rglob("*.py")) if part.is_dir() else [part])]
    return {str(file.relative_to(tree)): file.read_bytes() for file in files}


def test_the_proxy_is_the_same_on_every_pin(verl_tree: Path, proxy_tree: Path) -> None:
    """The other tests import it from one tree; only those of the agent loop's worker run on all."""
    mine, first = sources(verl_tree), sources(proxy_tree)
    assert len(mine) > 30 and mine == first


def test_it_needs_nothing_newer_than_the_oldest_python(proxy_tree: Path, tmp_path: Path) -> None:
    """mypy knows since when the standard library has what. Its other findings are no matter of the version."""
    shutil.copytree(proxy_tree / LOOP, tmp_path / LOOP)
    (tmp_path / LOOP / "newer.py").write_text("import asyncio\n\nasyncio.timeout\n")
    options = ["--python-version", OLDEST, "--ignore-missing-imports", "--follow-imports", "skip", "--no-site-packages"]
    options += ["--explicit-package-bases", "--namespace-packages", "--cache-dir", str(tmp_path / "cache")]
    command = [sys.executable, "-m", "mypy", *options, *sources(proxy_tree), str(LOOP / "newer.py")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    wrong = [line for line in done.stdout.splitlines() if line.endswith(("[attr-defined]", "[syntax]"))]
    assert wrong == [f'{LOOP}/newer.py:3: error: Module has no attribute "timeout"  [attr-defined]'], done.stdout


def test_the_oldest_python_compiles_it(proxy_tree: Path, tmp_path: Path) -> None:
    python = shutil.which(f"python{OLDEST}")
    if python is None or subprocess.run([python, "-V"], capture_output=True).returncode:
        pytest.skip(f"there is no python{OLDEST} here")
    program = "import sys\nfor name in sys.argv[1:]: compile(open(name, encoding='utf-8').read(), name, 'exec')"
    files = [str(proxy_tree / name) for name in sources(proxy_tree)]
    done = subprocess.run([python, "-c", program, *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
