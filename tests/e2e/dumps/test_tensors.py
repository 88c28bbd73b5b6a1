"""Relative L2 errors of tensors on disk, whatever shape each side has them in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from patchctl.dumps.names import Stats
from patchctl.dumps.tensors import readable, tensor_errors

N, H = 6, 8


def saved(folder: Path, *tensors: torch.Tensor, is_sum: bool = False) -> Stats:
    files = []
    for tensor in tensors:
        files.append(folder / f"{len(list(folder.iterdir()))}.pt")
        torch.save(tensor, files[-1])
    count = sum(tensor.numel() for tensor in tensors)
    return Stats("bfloat16", count, 0.0, 0.0, None, None, tuple(files), is_sum)


@pytest.mark.parametrize("shape", [(N, H), (1, N, H), (N, 1, H), (N, 1, 2, H // 2), (N, 2, H // 2)])
def test_shapes_of_both_sides_are_laid_over_each_other(tmp_path: Path, shape: tuple[int, ...]) -> None:
    values = torch.randn(N, H)
    errors = tensor_errors(saved(tmp_path, values), saved(tmp_path, values.reshape(shape).bfloat16().float()), N)
    assert 0 < errors["l2"] < 0.004
    assert tensor_errors(saved(tmp_path, values * 1.5), saved(tmp_path, values.reshape(shape)), N)[
        "l2"
    ] == pytest.approx(0.5)


def test_parts_are_joined_along_the_width_and_weights_along_the_rows(tmp_path: Path) -> None:
    q, k = torch.randn(N, H), torch.randn(N, 4)
    fused = saved(tmp_path, torch.cat([q, k], dim=1))
    assert tensor_errors(fused, saved(tmp_path, q[None], k[None]), N)["l2"] == 0
    swapped = saved(tmp_path, torch.cat([k, q], dim=1))
    assert tensor_errors(swapped, saved(tmp_path, q[None], k[None]), N)["l2"] > 0.5
    wq, wk = torch.randn(H, H), torch.randn(4, H)
    assert tensor_errors(saved(tmp_path, torch.cat([wq, wk])), saved(tmp_path, wq, wk), None)["l2"] == 0


def test_a_sum_is_added_and_padding_is_cut(tmp_path: Path) -> None:
    a, b = torch.randn(N, H), torch.randn(N, H)
    padded = torch.cat([a + b, torch.full((2, H), 9.0)])
    assert tensor_errors(saved(tmp_path, a, b, is_sum=True), saved(tmp_path, padded[:, None]), N)["l2"] < 1e-6


def test_what_cannot_be_laid_over_each_other_gives_nothing(tmp_path: Path) -> None:
    assert tensor_errors(saved(tmp_path, torch.randn(N, H)), saved(tmp_path, torch.randn(N, H + 1)), N) == {}
    assert not readable(Stats("bfloat16", 1, 0, 0, None, None, (tmp_path / "gone.pt",)))


def test_a_value_that_is_not_finite_is_infinitely_wrong(tmp_path: Path) -> None:
    bad = torch.randn(N, H)
    bad[0, 0] = float("nan")
    assert tensor_errors(saved(tmp_path, bad), saved(tmp_path, torch.randn(N, H)), N)["l2"] == float("inf")
