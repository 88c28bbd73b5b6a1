"""Judge one pair of dumps: resolve every point of the model family on both sides, form the errors, find the first that
differs."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .checks import MALFORMED, UnreadableDump
from .judge import (
    Bands,
    Divergence,
    Row,
    Verdict,
    add_maxima,
    first_divergence,
    judge,
    stats_document,
    stats_errors,
)
from .names import (
    Family,
    Point,
    Side,
    Stats,
    concatenate,
    field_stats,
    find_family,
    known_paths,
    read_side,
)
from .tensors import readable, tensor_errors

CURVES = {
    "residual": ("input_layernorm", "residual"),
    "attention": ("self_attn.attn", "output"),
    "o_proj": ("self_attn.o_proj", "output"),
    "norm": ("post_attention_layernorm", "output"),
    "down_proj": ("mlp.down_proj", "output"),
}
ROW_COLUMNS = (
    "module",
    "what",
    "kind",
    "verdict",
    "excess",
    "norm_error",
    "max_error",
    "min_error",
    "mean_error",
    "l2_error",
    "infer_dtype",
    "infer_max",
    "infer_min",
    "infer_mean",
    "infer_norm",
    "train_dtype",
    "train_max",
    "train_min",
    "train_mean",
    "train_norm",
    "note",
)
AROUND = 6
# Below this share of rows an agreement says nothing: wrong names, wrong sides, one of many shards.
MIN_SHARE = 0.25


@dataclass(frozen=True)
class PairJudgement:
    """What comparing one pair gave. `verdict`: agrees, diverges, drifts, weights differ, refused, nothing compared."""

    request_id: str
    verdict: str
    reason: str
    family: str = ""
    backend: str = ""
    tasks: tuple[str, str] = ("", "")
    layers: tuple[int, int] = (0, 0)
    rows: tuple[Row, ...] = ()
    weights: tuple[Row, ...] = ()
    divergence: Divergence | None = None
    unmatched: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    left_out: tuple[tuple[str, str], ...] = ()
    environment: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    maxima: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)


def judge_pair(request_id: str, entry: Mapping[str, Any], bands: Bands, statistics_only: bool = False) -> PairJudgement:
    """Compare the dumps of one PAIR entry of the pairs document. Never raises for what a dump holds."""
    try:
        return _judge_pair(request_id, entry, bands, statistics_only)
    except MALFORMED as error:
        return PairJudgement(request_id, "refused", f"an entry of a dump is malformed: {type(error).__name__}: {error}")


def _judge_pair(request_id: str, entry: Mapping[str, Any], bands: Bands, statistics_only: bool) -> PairJudgement:
    tokens = entry.get("tokens") or {}
    try:
        infer = read_side(entry.get("infer_dumps", ()), is_training=False, tokens=tokens.get("infer"))
        train = read_side(entry.get("train_dumps", ()), is_training=True, tokens=tokens.get("infer"))
    except UnreadableDump as error:
        return PairJudgement(request_id, "refused", str(error))
    except OSError as error:
        return PairJudgement(request_id, "refused", f"{error.filename}: {error.strerror}")
    for name, side in (("inference", infer), ("training", train)):
        if not side.shards:
            return PairJudgement(request_id, "refused", f"the pairs document names no {name} dump")
        if side.two_requests:
            return PairJudgement(request_id, "refused", f"{name}: {side.two_requests}")
    family = find_family(infer)
    context = _Context(infer, train, bands, tokens.get("infer"), tokens.get("train"), statistics_only)
    rows = tuple(_attribute_swaps(list(_all_rows(context, family))))
    weights = tuple(_weight_rows(context, family))
    compared = [row for row in rows if row.verdict is not Verdict.LEFT_OUT]
    divergence = first_divergence(rows)
    wrong_weights = [row for row in weights if row.verdict is Verdict.DIFFERS]
    maxima: dict[str, dict[str, dict[str, float]]] = {}
    add_maxima(maxima, [*rows, *weights], context.layers)
    unmatched = {name: _unmatched(side, family) for name, side in (("infer", infer), ("train", train))}
    verdict, reason = _verdict(divergence, wrong_weights, weights)
    numbers = sum(row.kind != "positions" for row in compared)
    if not numbers or (divergence is None and numbers < MIN_SHARE * len(rows)):
        verdict = "nothing compared"
        names = "; ".join(f"{side} has {', '.join(found[:3])}" for side, found in unmatched.items() if found)
        reason = f"only {numbers} of {len(rows)} rows have a partner of the same size" + (f": {names}" if names else "")
    return PairJudgement(
        request_id,
        verdict,
        reason,
        family.name,
        train.backend,
        (infer.shards[0].task, train.shards[0].task),
        (len({row.layer for row in compared if row.layer is not None}), len(set(infer.layers) | set(train.layers))),
        rows,
        weights,
        divergence,
        unmatched,
        tuple(_left_out(infer, train, family)),
        {"infer": _environment(infer), "train": _environment(train)},
        maxima,
    )


def _verdict(divergence: Divergence | None, wrong_weights: Sequence[Row], weights: Sequence[Row]) -> tuple[str, str]:
    weight_note = ""
    if wrong_weights:
        weight_note = f"{len(wrong_weights)} of {len(weights)} weights differ, the first is {wrong_weights[0].where}"
    if divergence is None:
        return ("weights differ", weight_note) if wrong_weights else ("agrees", "")
    row = divergence.row
    reason = f"{row.where} {row.name} differs"
    if row.kind == "positions" and row.infer and row.train:
        reason += (
            f": inference {row.infer.low:.0f}..{row.infer.high:.0f}, training {row.train.low:.0f}..{row.train.high:.0f}"
        )
    elif row.errors:
        metric = max(row.errors, key=lambda name: row.errors[name] / row.band[name] if row.band.get(name) else 0.0)
        name = {"l2": "", "norm": " in its norm"}.get(metric, f" in its {metric}")
        if math.isfinite(row.excess):
            reason += f"{name} by {row.errors[metric]:.2%} ({row.excess:.1f} times the noise band)"
    if row.note:
        reason += f"; {row.note}"
    if weight_note:
        reason += f"; {weight_note}"
    return ("drifts" if divergence.gradual and not wrong_weights else "diverges"), reason


@dataclass(frozen=True)
class _Context:
    infer: Side
    train: Side
    bands: Bands
    infer_tokens: int | None
    train_tokens: int | None
    statistics_only: bool

    @property
    def layers(self) -> int:
        return max((*self.infer.layers, *self.train.layers), default=-1) + 1

    @property
    def padded(self) -> bool:
        return bool(self.infer_tokens and self.train_tokens and self.train_tokens > self.infer_tokens)


def _all_rows(context: _Context, family: Family) -> Iterator[Row]:
    for point in family.head:
        yield from _row(context, None, point)
    for layer in sorted(set(context.infer.layers) | set(context.train.layers)):
        for point in family.layer:
            yield from _row(context, layer, point)
    for point in family.tail:
        yield from _row(context, None, point)


def _weight_rows(context: _Context, family: Family) -> Iterator[Row]:
    for point in family.model_weights:
        yield from _row(context, None, point)
    for layer in sorted(set(context.infer.layers) & set(context.train.layers)):
        for point in family.layer_weights:
            yield from _row(context, layer, point)


def _row(context: _Context, layer: int | None, point: Point) -> Iterator[Row]:
    """The point's row, left out with a reason where it cannot be compared; nothing where no side has it."""
    backend = context.train.backend
    formulas = point.formulas(backend)
    if not formulas or not point.infer:
        return
    if point.only_with and not any(
        side.has(layer, path) for side in (context.infer, context.train) for path in point.only_with
    ):
        return
    infer, train = context.infer.resolve(layer, point.infer), context.train.resolve(layer, formulas)
    if not infer and not train:
        return
    empty = Row(layer, point.module, point.name, point.kind, Verdict.LEFT_OUT, None, None, {}, {}, 0.0)
    if not infer or not train:
        if point.kind == "weight":
            return  # FSDP1 flattens its parameters: no weights on that side is no finding
        yield replace(empty, note=f"not in the {'inference' if not infer else 'training'} dump")
        return
    if point.kind == "positions" and not (infer[0].integral and train[0].integral):
        return
    left, right, reason = _align(context, infer, train)
    if reason:
        yield replace(empty, infer=left, train=right, note=reason)
        return
    yield _judged(context, point, replace(empty, infer=left, train=right), layer)


def _judged(context: _Context, point: Point, row: Row, layer: int | None) -> Row:
    left, right = row.infer, row.train
    assert left is not None and right is not None
    if point.kind == "positions":
        return judge(
            replace(row, errors={"max": abs(left.high - right.high), "min": abs(left.low - right.low)}),
            context.bands,
            context.layers,
        )
    permuted = context.train.backend in point.permuted
    errors: dict[str, float] = {}
    if not context.statistics_only and not permuted and readable(left, right):
        tokens = None if point.kind == "weight" else context.infer_tokens
        errors = tensor_errors(left, right, tokens)
    if not errors and (left.is_sum or right.is_sum):
        return replace(row, note="the sum of two tensors: needs real tensors on both sides")
    extra = 0.0
    if not errors:
        metrics: tuple[str, ...] = ("norm", "max", "min", "mean")
        if context.padded and point.kind != "weight":
            # Padding rows may hold an extreme, and add to the norm about in proportion.
            metrics = ("norm",)
            extra = 3.0 * ((context.train_tokens or 0) / (context.infer_tokens or 1) - 1.0)
        elif _changed_in_place(context, point, layer, left):
            metrics = ("norm",)
        errors = stats_errors(left, right, metrics)
    if not errors:
        return replace(row, note="no statistic that both sides have")
    return judge(replace(row, errors=errors), context.bands, context.layers, extra)


def _changed_in_place(context: _Context, point: Point, layer: int | None, value: Stats) -> bool:
    """A rotary kernel that writes into its inputs: what the dump shows as q is q after the rotation, norm unchanged."""
    if point.guard is None:
        return False
    for shard in context.infer.shards:
        calls = shard.modules.get((layer, point.guard.path))
        guard = field_stats(calls[0], point.guard.field) if calls else None
        if guard is not None:
            return (guard.low, guard.high, guard.mean) == (value.low, value.high, value.mean)
    return False


def _align(context: _Context, infer: tuple[Stats, ...], train: tuple[Stats, ...]) -> tuple[Stats, Stats, str]:
    """The two tensors that have the same size: single dumps, or the shards of all ranks taken together."""
    lefts = [infer[0]] if len(infer) == 1 else [infer[0], concatenate(infer)]
    rights = [train[0]] if len(train) == 1 else [train[0], concatenate(train)]
    for left in lefts:
        for right in rights:
            if left.count == right.count:
                return left, right, ""
    if context.padded:
        for left in lefts:
            for right in rights:
                if left.count * (context.train_tokens or 0) == right.count * (context.infer_tokens or 0):
                    return left, right, ""
    left, right = lefts[0], rights[0]
    small, large = sorted((left.count, right.count))
    sharded = small and large % small == 0
    why = f"{left.count} numbers in inference, {right.count} in training"
    if sharded:
        why += "; sharded by tensor parallelism, and not all ranks have a dump"
    return left, right, why


def _attribute_swaps(rows: list[Row]) -> list[Row]:
    """Where q of one side is k of the other, say so, and blame the module that packs them."""
    by_place = {(row.layer, row.kind, row.name): index for index, row in enumerate(rows) if row.name in ("q", "k")}
    first = first_divergence(rows)
    broken = () if first is None or first.row.layer is None else (first.row.layer, first.row.layer - 1)
    for (layer, kind, name), index in by_place.items():
        other = by_place.get((layer, kind, "k"))
        if name != "q" or other is None:
            continue
        query, key = rows[index], rows[other]
        if not (query.infer and query.train and key.infer and key.train and query.band and key.band):
            continue
        direct = max(query.excess, key.excess)
        crossed = max(
            max((error / query.band[metric] for metric, error in errors.items() if query.band.get(metric)), default=0.0)
            for errors in (
                stats_errors(query.infer, key.train, query.errors),
                stats_errors(key.infer, query.train, key.errors),
            )
        )
        # Statistics of q and k may happen to be close. Where what follows differs, being closer crosswise tells.
        closer = layer in broken and direct > 0.35 and direct > 2.5 * crossed
        if crossed <= 1.0 and (direct > 1.0 or closer):
            note = "q and k look swapped: each agrees with the other's partner"
            for at in (index, other):
                rows[at] = replace(rows[at], module="self_attn.qkv_proj", verdict=Verdict.DIFFERS, note=note)
    return rows


def _unmatched(side: Side, family: Family) -> tuple[str, ...]:
    """Module names that no point uses and no rule leaves out, layers and experts folded to `*`."""
    used, reasons = known_paths(family, side.backend)
    names: dict[str, None] = {}
    for layer, path in side.modules():
        if path in used or path in reasons or not path:
            continue
        entry = next(shard.modules[layer, path][0] for shard in side.shards if (layer, path) in shard.modules)
        if not any(entry.raw.get(group) for group in ("input_args", "output")) or _is_nothing(entry.class_name):
            continue
        folded = ".".join("*" if part.isdigit() else part for part in path.split("."))
        names[folded if layer is None else f"layers.*.{folded}"] = None
    return tuple(names)


def _is_nothing(class_name: str) -> bool:
    return class_name.startswith("Identity") or class_name == "Dropout"


def _left_out(infer: Side, train: Side, family: Family) -> Iterator[tuple[str, str]]:
    """Modules that are left out by name, with the reason, once for each side."""
    for title, side in (("inference", infer), ("training", train)):
        used, reasons = known_paths(family, side.backend)
        present = {path for _, path in side.modules()}
        for path, why in reasons.items():
            if path in present and path not in used:
                yield f"{title}: {path if path != '.' else 'layer'}", why


def _environment(side: Side) -> dict[str, str]:
    """What a dump tells of its environment: classes, dtypes, ranks."""
    wanted = (
        "input_layernorm",
        "self_attn.qkv_proj",
        "self_attn.q_proj",
        "self_attn.attn",
        "self_attn",
        "self_attention.core_attention",
        "mlp",
        "mlp.experts",
        ".",
    )
    classes = {}
    for key in side.modules():
        if key[0] is not None and key[1] in wanted and key[1] not in classes:
            classes[key[1]] = side.class_of(key)
    dtypes: dict[str, None] = {}
    for shard in side.shards[:1]:
        for calls in shard.modules.values():
            stats = field_stats(calls[0], "output.0")
            if stats is not None and not stats.integral:
                dtypes[stats.dtype] = None
    return {
        "task": side.shards[0].task,
        "dumps": str(len(side.shards)),
        "layers": str(len(side.layers)),
        "dtypes": ", ".join(dtypes),
        **{("layer" if k == "." else k): v for k, v in classes.items()},
    }


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """All rows of a pair as csv."""
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(ROW_COLUMNS)
        for row in rows:
            left, right = row.infer, row.train
            writer.writerow(
                [
                    row.where,
                    row.name,
                    row.kind,
                    row.verdict.value,
                    _short(row.excess),
                    *(_short(row.errors.get(metric)) for metric in ("norm", "max", "min", "mean", "l2")),
                    *_numbers(left),
                    *_numbers(right),
                    row.note,
                ]
            )


def _numbers(stats: Stats | None) -> list[Any]:
    if stats is None:
        return [""] * 5
    return [stats.dtype, *map(_short, (stats.high, stats.low, stats.mean, stats.norm))]


def _short(value: float | None) -> Any:
    return "" if value is None else float(f"{value:.6g}") if math.isfinite(value) else str(value)


def pair_document(judgement: PairJudgement) -> dict[str, Any]:
    """A pair's entry in compare.json."""
    rows = judgement.rows
    compared = [row for row in rows if row.verdict is not Verdict.LEFT_OUT]
    left_out: dict[tuple[str, str, str], int] = {}
    for row in rows:
        if row.verdict is Verdict.LEFT_OUT:
            key = (row.module, row.name, row.note)
            left_out[key] = left_out.get(key, 0) + 1
    document: dict[str, Any] = {
        "request_id": judgement.request_id,
        "verdict": judgement.verdict,
        "reason": judgement.reason,
        "family": judgement.family,
        "backend": judgement.backend,
        "tasks": list(judgement.tasks),
        "rows": {
            "compared": len(compared),
            "differ": sum(row.verdict is Verdict.DIFFERS for row in compared),
            "left_out": len(rows) - len(compared),
        },
        "layers": {"compared": judgement.layers[0], "all": judgement.layers[1]},
        "weights": {
            "compared": len(judgement.weights),
            "differ": [row.where for row in judgement.weights if row.verdict is Verdict.DIFFERS][:20],
            "differing": sum(row.verdict is Verdict.DIFFERS for row in judgement.weights),
        },
        "curves": _curves(rows),
        "left_out": [
            {"name": f"{module} {name}", "why": why, "rows": count} for (module, name, why), count in left_out.items()
        ]
        + [{"name": name, "why": why, "rows": None} for name, why in judgement.left_out],
        "unmatched": {side: list(names) for side, names in judgement.unmatched.items()},
        "environment": {side: dict(values) for side, values in judgement.environment.items()},
    }
    if judgement.divergence is not None:
        found = judgement.divergence
        index = rows.index(found.row)
        document["first"] = {
            **row_document(found.row),
            "gradual": found.gradual,
            "inputs_agree": list(found.inputs_agree),
            "around": [
                row_document(row)
                for row in rows[max(0, index - AROUND) : index + AROUND + 1]
                if row.verdict is not Verdict.LEFT_OUT
            ],
        }
    return document


def row_document(row: Row) -> dict[str, Any]:
    """A row with both sides' numbers."""
    return {
        "module": row.where,
        "layer": row.layer,
        "what": row.name,
        "kind": row.kind,
        "verdict": row.verdict.value,
        "error": _short(row.error),
        "excess": _short(row.excess),
        "errors": {metric: _short(value) for metric, value in row.errors.items()},
        "band": {metric: _short(value) for metric, value in row.band.items()},
        "infer": stats_document(row.infer),
        "train": stats_document(row.train),
        "note": row.note,
    }


def _curves(rows: Sequence[Row]) -> dict[str, list[list[Any]]]:
    """Curve name -> [layer, error, band] for every layer that has the row."""
    names = {place: name for name, place in CURVES.items()}
    curves: dict[str, list[list[Any]]] = {}
    for row in rows:
        name = names.get((row.module, row.name))
        if name is None or row.layer is None or row.verdict is Verdict.LEFT_OUT:
            continue
        band = row.band.get("l2" if "l2" in row.errors else "norm", 0.0)
        curves.setdefault(name, []).append([row.layer, _rounded(row.error), _rounded(band)])
    return curves


def _rounded(value: float) -> Any:
    return float(f"{value:.3g}") if math.isfinite(value) else str(value)
