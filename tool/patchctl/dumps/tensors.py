"""Relative L2 errors of real tensors (`task: tensor` or `tensor_list`). torch is imported only when there are any."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from patchctl.errors import PatchctlError

from .names import Stats


def readable(*sides: Stats) -> bool:
    """All of them have their tensors on disk."""
    return all(stats.files and all(path.is_file() for path in stats.files) for stats in sides)


def require_torch() -> None:
    """Raises PatchctlError where torch is not installed."""
    if find_spec("torch") is None:
        raise PatchctlError(
            "these dumps hold real tensors, and reading them needs torch: run patchctl in the training environment, "
            "or compare the statistics alone with --statistics-only"
        )


def tensor_errors(infer: Stats, train: Stats, tokens: int | None) -> dict[str, float]:
    """{"l2": ||infer - train|| / ||train||, "norm": ...}; {} when the shapes cannot be laid over each other.

    Activations are flattened to [tokens, width]; training rows beyond `tokens` are padding and left out. Weights have
    no tokens (None): those of q, k and v are stacked, where activations are laid side by side.
    """
    torch = import_module("torch")
    with torch.no_grad():
        left, right = _load(infer, tokens), _load(train, tokens)
        if left is None or right is None:
            return {}
        if right.shape[0] > left.shape[0] and right.shape[1] == left.shape[1]:
            right = right[: left.shape[0]]
        if left.shape != right.shape:
            return {}
        scale = float(right.norm())
        difference = float((left - right).norm())
        norms = (float(left.norm()), scale)
        if not math.isfinite(difference):
            return {"l2": math.inf, "norm": math.inf}
        top = max(norms)
        return {
            "l2": difference / scale if scale else (math.inf if difference else 0.0),
            "norm": abs(norms[0] - norms[1]) / top if top else 0.0,
        }


def _load(stats: Stats, tokens: int | None) -> Any:
    """The tensors in float32, [rows, width]: concatenated along the width, or added."""
    torch = import_module("torch")
    parts = []
    for path in stats.files:
        tensor = torch.load(path, map_location="cpu", weights_only=True).float()
        # [1, N, H], [N, 1, H], [N, heads, dim] and [N, H] all mean N rows.
        shape = [size for size in tensor.shape if size != 1] or [1]
        rows = shape[0] if tokens is None or shape[0] >= tokens else 1
        parts.append(tensor.reshape(rows, -1))
    return _join(parts, stats.is_sum, 0 if tokens is None else 1, torch)


def _join(parts: Sequence[Any], is_sum: bool, dim: int, torch: Any) -> Any:
    if len({part.shape[1 - dim] for part in parts}) != 1:
        return None
    if not is_sum:
        return torch.cat(list(parts), dim=dim)
    total = parts[0]
    for part in parts[1:]:
        if part.shape != total.shape:
            return None
        total = total + part
    return total
