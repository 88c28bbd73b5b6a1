"""These tests import the verl on PYTHONPATH; test_pieces.py runs them, once for each tree."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent)]

import cpu_shims  # noqa: E402

cpu_shims.stub_platform()
cpu_shims.stub_flash_attention()
