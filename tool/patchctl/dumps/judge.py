"""From two sides' numbers to a verdict: errors, the noise band, the first module that differs.

Statistics are judged by the ratio of norms, by max and min, and by the mean in units of the root mean square; real
tensors by the relative L2 error (a cosine cannot see a pure scale). A row differs when an error leaves the noise band
of its dtype and kind of module, which grows with the depth of the layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from .names import Stats, display

_WIDTH = {"float32": 0, "float16": 1, "bfloat16": 2}
METRICS = ("norm", "max", "min", "mean", "l2")
# An error that is this much larger than those just before it is a step, not accumulated rounding.
STEP = 2.0
EXACT_KINDS = ("embedding", "weight")
BASELINE_MARGIN = 2.0


class Verdict(str, Enum):
    """What became of a row."""

    SAME = "same"
    DIFFERS = "differs"
    LEFT_OUT = "left out"


@dataclass(frozen=True)
class Row:
    """One compared point. `errors` has the metrics that could be formed; `excess` is the worst error over its band."""

    layer: int | None
    module: str
    name: str
    kind: str
    verdict: Verdict
    infer: Stats | None
    train: Stats | None
    errors: Mapping[str, float]
    band: Mapping[str, float]
    excess: float
    note: str = ""

    @property
    def where(self) -> str:
        """The module's full name."""
        return display(self.layer, self.module)

    @property
    def error(self) -> float:
        """The headline error: relative L2 when there are tensors, else the norm's, else an extreme's."""
        return next((self.errors[metric] for metric in ("l2", "norm", "max", "min") if metric in self.errors), 0.0)


@dataclass(frozen=True)
class Bands:
    """Noise bands: dtype -> kind -> metric -> limit at layer 0. A limit grows with the square root of the depth.

    Rounding errors of layers add up like a random walk: relative L2 and single elements drift, norms hardly do.
    """

    limits: Mapping[str, Mapping[str, Mapping[str, float]]]
    source: str = "built in"

    def of(self, dtype: str, kind: str, depth: int) -> dict[str, float]:
        """The limits of a row `depth` layers down."""
        kinds = self.limits.get(dtype) or self.limits["bfloat16"]
        limits = kinds.get(kind) or kinds["other"]
        return {metric: value * _growth(metric, kind, depth) for metric, value in limits.items()}


_DEPTH = {"norm": 0.15, "mean": 0.5, "max": 1.0, "min": 1.0, "l2": 2.0}


def _growth(metric: str, kind: str, depth: int) -> float:
    return 1.0 if kind in EXACT_KINDS else 1.0 + _DEPTH[metric] * math.sqrt(depth)


def _depth(row: Row, layers: int) -> int:
    """Layers that came before a row; a point outside of layers is behind all of them, unless it is the embedding."""
    return row.layer if row.layer is not None else 0 if row.kind in EXACT_KINDS else layers


def _built_in(unit: float) -> dict[str, dict[str, float]]:
    """Bands in units of the dtype's rounding step.

    About 1.5 times the largest errors seen in correct bfloat16 runs of random models with 4 to 24 layers, HF against
    vLLM's formulation. Trained models are less chaotic; a baseline makes the bands theirs.
    """

    def band(norm: float, extreme: float, mean: float, l2: float) -> dict[str, float]:
        return {"norm": norm * unit, "max": extreme * unit, "min": extreme * unit, "mean": mean * unit, "l2": l2 * unit}

    # A look-up and a weight are not computed: they differ by rounding to the coarser dtype, or not at all.
    exact = band(2, 2, 2, 1)
    return {
        "embedding": exact,
        "weight": exact,
        "norm": band(4, 8, 4, 5),
        "linear": band(4, 10, 4, 7),
        "rope": band(4, 10, 4, 7),
        "attention": band(4, 14, 5, 7),
        "activation": band(4, 12, 4, 7),
        "residual": band(4, 8, 4, 5),
        "router": band(5, 14, 6, 9),
        "moe": band(8, 24, 10, 16),
        "other": band(6, 18, 8, 12),
    }


# The statistics' own step: msprobe computes them in the tensor's dtype unless precision is high.
BUILT_IN = Bands({"bfloat16": _built_in(2.0**-8), "float16": _built_in(2.0**-11), "float32": _built_in(2.0**-16)})


def coarser(left: str, right: str) -> str:
    """The dtype with fewer digits."""
    return max((left, right), key=lambda dtype: _WIDTH.get(dtype, 2))


def stats_errors(infer: Stats, train: Stats, metrics: Iterable[str] = METRICS) -> dict[str, float]:
    """Errors of two tensors' statistics: 0 for equal ones, about 1 for unrelated ones, inf where one is not finite.

    A statistic that one side does not have gives no error.
    """
    values = [(infer.low, train.low), (infer.high, train.high), (infer.norm, train.norm)]
    known = [(left, right) for left, right in values if left is not None and right is not None]
    if not all(math.isfinite(value) for pair in known for value in pair):
        same = all(left == right or (math.isnan(left) and math.isnan(right)) for left, right in known)
        return {"max": 0.0 if same else math.inf}
    extreme = max(abs(infer.low), abs(infer.high), abs(train.low), abs(train.high))
    errors = {
        "max": abs(infer.high - train.high) / extreme if extreme else 0.0,
        "min": abs(infer.low - train.low) / extreme if extreme else 0.0,
    }
    if infer.norm is not None and train.norm is not None:
        norm = max(infer.norm, train.norm)
        errors["norm"] = abs(infer.norm - train.norm) / norm if norm else 0.0
        if infer.mean is not None and train.mean is not None and norm:
            count = max(infer.count, train.count)
            errors["mean"] = abs(infer.mean - train.mean) * math.sqrt(count) / norm
    wanted = set(metrics)
    return {metric: errors[metric] for metric in METRICS if metric in errors and metric in wanted}


def judge(row: Row, bands: Bands, layers: int, extra: float = 0.0) -> Row:
    """Give a row its band and verdict; `extra` widens the band (padding), errors must be set."""
    if row.infer is None or row.train is None:
        return row
    if row.kind == "positions":
        excess = 0.0 if not any(row.errors.values()) else math.inf
        return replace(row, excess=excess, verdict=Verdict.DIFFERS if excess else Verdict.SAME)
    dtype = coarser(row.infer.dtype, row.train.dtype)
    band = bands.of(dtype, row.kind, _depth(row, layers))
    if row.kind in EXACT_KINDS and row.infer.dtype == row.train.dtype:
        # The same numbers in the same dtype: an extreme is one of them. (A norm's sum may be added in another order.)
        band = {metric: 1e-6 if metric in ("max", "min") else value for metric, value in band.items()}
    band = {metric: value + extra for metric, value in band.items()}
    excess = _excess(row, {metric: value / band[metric] for metric, value in row.errors.items() if band.get(metric)})
    verdict = Verdict.DIFFERS if excess > 1.0 else Verdict.SAME
    note = row.note or (_hint(row.infer, row.train) if verdict is Verdict.DIFFERS else "")
    return replace(row, band=band, excess=excess, verdict=verdict, note=note)


def _excess(row: Row, ratios: Mapping[str, float]) -> float:
    """How far outside of the band a row is. One extreme is one element, and noisy: it counts half without the other."""
    extremes = sorted(ratios[metric] for metric in ("max", "min") if metric in ratios)
    rest = max((value for metric, value in ratios.items() if metric not in ("max", "min")), default=0.0)
    if row.kind in EXACT_KINDS or not extremes:
        return max(rest, *extremes, 0.0)
    return max(rest, extremes[0] if len(extremes) == 2 else 0.0, extremes[-1] / 2.0)


def _hint(infer: Stats, train: Stats) -> str:
    """A word on the shape of a difference, where the numbers show one."""
    for name, stats in (("inference", infer), ("training", train)):
        numbers = [stats.low, stats.high, *(value for value in (stats.norm,) if value is not None)]
        if not all(map(math.isfinite, numbers)):
            return f"not finite on the {name} side"
        if not any(numbers):
            return f"all zero on the {name} side"
    pairs = [(infer.high, train.high), (infer.low, train.low), (infer.norm, train.norm)]
    ratios = [left / right for left, right in pairs if left is not None and right]
    middle = (
        sorted(ratios)[len(ratios) // 2] if len(ratios) == len([1 for left, _ in pairs if left is not None]) else 1.0
    )
    if abs(middle - 1.0) > 0.03 and all(abs(ratio / middle - 1.0) < 0.03 for ratio in ratios):
        return f"looks scaled: inference is {middle:.3g} times training"
    return ""


@dataclass(frozen=True)
class Divergence:
    """The first module whose output differs while what came before agrees."""

    row: Row
    inputs_agree: tuple[str, ...]
    gradual: bool


def first_divergence(rows: Sequence[Row]) -> Divergence | None:
    """The first differing row in the order of the data flow; `gradual` when noise crept up to the band before it."""
    for index, row in enumerate(rows):
        if row.verdict is not Verdict.DIFFERS:
            continue
        before = [old for old in rows[:index] if old.verdict is Verdict.SAME]
        alike = [old.excess for old in before if old.kind == row.kind and old.name == row.name][-2:]
        gradual = row.excess < STEP and bool(alike) and max(alike) * STEP > row.excess
        return Divergence(row, tuple(f"{old.where} {old.name}" for old in before[-3:]), gradual)
    return None


def calibrate(maxima: Mapping[str, Mapping[str, Mapping[str, float]]], source: str) -> Bands:
    """Bands from a run that is known to be good: its largest errors (at depth 0) with a margin, never quite zero."""
    limits: dict[str, dict[str, dict[str, float]]] = {}
    for dtype, kinds in BUILT_IN.limits.items():
        seen = maxima.get(dtype, {})
        limits[dtype] = {
            kind: {
                metric: max(seen[kind][metric] * BASELINE_MARGIN, value / 8) if metric in seen.get(kind, {}) else value
                for metric, value in metrics.items()
            }
            for kind, metrics in kinds.items()
        }
    return Bands(limits, source)


def add_maxima(maxima: dict[str, dict[str, dict[str, float]]], rows: Iterable[Row], layers: int) -> None:
    """Fold the errors of rows, taken back to depth 0, into `maxima` (dtype -> kind -> metric)."""
    for row in rows:
        if row.infer is None or row.train is None or row.kind == "positions" or row.verdict is Verdict.LEFT_OUT:
            continue
        dtype = coarser(row.infer.dtype, row.train.dtype)
        kinds = maxima.setdefault(dtype, {}).setdefault(row.kind, {})
        for metric, value in row.errors.items():
            if math.isfinite(value):
                kinds[metric] = max(kinds.get(metric, 0.0), value / _growth(metric, row.kind, _depth(row, layers)))


def stats_document(stats: Stats | None) -> dict[str, Any] | None:
    """A side's numbers for the JSON documents."""
    if stats is None:
        return None
    numbers = {"max": stats.high, "min": stats.low, "mean": stats.mean, "norm": stats.norm}
    return {
        "dtype": stats.dtype,
        "count": stats.count,
        **{key: value if value is None or math.isfinite(value) else str(value) for key, value in numbers.items()},
    }
