"""verl asks its device for memory statistics, which torch.cpu does not have."""

from __future__ import annotations

import torch


def stub_memory_statistics() -> None:
    """Nothing is allocated on an accelerator, and there is no cache to empty."""
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved", "empty_cache"):
        setattr(torch.cpu, name, lambda: 0)
