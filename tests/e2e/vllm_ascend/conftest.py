"""`written`: a folder with what every case wrote, once for each vllm-ascend tree and msprobe version."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import vllm_sources

HERE = Path(__file__).resolve().parent
E2E_FOLDER = Path(sys.prefix).parent  # setup_env.py puts the environment into a folder with all else that it makes
MSPROBES = {"26.2.0": None, "26.0.0": E2E_FOLDER / "msprobe-26.0.0"}
"""msprobe version -> folder to put first on the path, or None for the one in the environment."""


@pytest.fixture(scope="session")
def python_path(vllm_ascend_tree: Path) -> dict[str, Path]:
    """The vLLM source of the tree, and the packages that it needs."""
    version = vllm_sources.vllm_version_for(vllm_ascend_tree)
    return {"vllm": vllm_sources.ensure_vllm(E2E_FOLDER, version), "packages": vllm_sources.ensure_packages(E2E_FOLDER)}


@pytest.fixture(scope="session", params=MSPROBES, ids=lambda version: f"msprobe-{version}")
def written(
    request: pytest.FixtureRequest,
    vllm_ascend_tree: Path,
    python_path: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    msprobe = MSPROBES[request.param]
    out = tmp_path_factory.mktemp("dispatch_log")
    search = [path for path in (msprobe, python_path["packages"], os.environ.get("PYTHONPATH")) if path]
    done = subprocess.run(
        [
            *(sys.executable, HERE / "run_cases.py", "--vllm", python_path["vllm"]),
            *("--vllm-ascend", vllm_ascend_tree, "--out", out),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, search)), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return out
