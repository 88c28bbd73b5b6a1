"""One self-contained HTML file of a comparison: no network, both languages inside, compact enough for 1,000 pairs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from .compare import CURVES

# Rows around the first divergence are kept for this many pairs; the others keep the divergence itself.
PAIRS_WITH_CONTEXT = 200
MUST_MATCH = ("task", "layers")
OTHER_KEYS = ("status", "infer", "train", "why", "tokens")


def write_report(document: Mapping[str, Any], path: Path, made: str) -> None:
    """Write the report of compare.json's `document`; `made` is the date to show. Raises OSError."""
    template = (files(__package__) / "report.html").read_text(encoding="utf-8")
    data = json.dumps(report_data(document, made), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # "</script>" inside a string would end the element; "<" never needs to be written as such in JSON.
    path.write_text(template.replace("/*DATA*/", data.replace("<", "\\u003c")), encoding="utf-8")


def report_data(document: Mapping[str, Any], made: str) -> dict[str, Any]:
    """What the page reads: see the template's `D`."""
    texts = json.loads((files(__package__) / "mappings" / "report_text.json").read_text(encoding="utf-8"))
    pairs = document["pairs"]
    layers = sorted({point[0] for pair in pairs for curve in pair["curves"].values() for point in curve})
    names = [name for name in CURVES if any(name in pair["curves"] for pair in pairs)] or ["residual"]
    bands = {name: _band(pairs, name, layers) for name in names}
    msprobe = document["msprobe"]
    matched = [pair["msprobe"]["matched"] for pair in pairs if "msprobe" in pair]
    worst = next(
        (
            number
            for number, pair in enumerate(pairs)
            if document["first"] and pair["request_id"] == document["first"]["example"]
        ),
        0,
    )
    return {
        "start_curve": _start_curve(pairs[worst] if pairs else {}, names),
        "text": {"en": texts["en"], "zh": texts["zh"]},
        "zh": texts["sentences"],
        "made": made,
        "verdict": document["verdict"],
        "first": document["first"],
        "warnings": document["warnings"],
        "coverage": _coverage(document),
        "layers": layers,
        "curve_names": names,
        "bands": bands,
        "start": worst,
        "band_source": document["bands"]["source"],
        "must_match": MUST_MATCH,
        "msprobe": None
        if not msprobe
        else {**msprobe, "low": min(matched, default=0), "high": max(matched, default=0)},
        "pairs": [
            _pair(pair, layers, number < PAIRS_WITH_CONTEXT or number == worst) for number, pair in enumerate(pairs)
        ],
        "others": [
            {"id": other["request_id"], **{key: other.get(key) for key in OTHER_KEYS}} for other in document["others"]
        ],
        "left_out": _left_out(pairs),
        "environment": _environment(document, pairs),
        "unmatched": {
            side: sorted({name for pair in pairs for name in pair["unmatched"].get(side, ())})
            for side in ("infer", "train")
        },
    }


def _start_curve(pair: Mapping[str, Any], names: Sequence[str]) -> str:
    """The curve that leaves its band the furthest in the example."""

    def furthest(name: str) -> float:
        return max((_ratio(error, band) for _, error, band in pair.get("curves", {}).get(name, ())), default=0.0)

    return max(names, key=furthest)


def _coverage(document: Mapping[str, Any]) -> dict[str, Any]:
    pairs = document["pairs"]
    compared, left_out = (sum(pair["rows"][key] for pair in pairs) for key in ("compared", "left_out"))
    layers = min(((pair["layers"]["compared"], pair["layers"]["all"]) for pair in pairs), default=(0, 0))
    weights = max(((pair["weights"]["differing"], pair["weights"]["compared"]) for pair in pairs), default=(0, 0))
    return {
        "pairs": len(pairs),
        "requests": sum(document["pairs_by_status"].values()),
        "compared": compared,
        "left_out": left_out,
        "share": compared / (compared + left_out) if compared + left_out else 0,
        "layers": layers,
        "weights": weights,
    }


def _band(pairs: Sequence[Mapping[str, Any]], name: str, layers: Sequence[int]) -> list[float | None]:
    """The widest band of all pairs at every layer."""
    found: dict[int, float] = {}
    for pair in pairs:
        for layer, _, band in pair["curves"].get(name, ()):
            if isinstance(band, (int, float)):
                found[layer] = max(found.get(layer, 0.0), band)
    return [found.get(layer) for layer in layers]


def _pair(pair: Mapping[str, Any], layers: Sequence[int], with_context: bool) -> dict[str, Any]:
    curves = {}
    for name, points in pair["curves"].items():
        known = {layer: error for layer, error, _ in points}
        curves[name] = [known.get(layer) for layer in layers]
    compact: dict[str, Any] = {
        "id": pair["request_id"],
        "verdict": pair["verdict"],
        "reason": pair["reason"],
        "curves": curves,
        **{key: pair[key] for key in ("infer", "train", "tokens", "checks") if key in pair},
    }
    if "msprobe" in pair:
        compact["msprobe"] = {key: pair["msprobe"].get(key) for key in ("matched", "rows", "results")}
    for side in ("infer_dumps", "train_dumps"):
        if with_context and side in pair:
            compact[side] = [dump["path"] for dump in pair[side]]
    if "first" in pair:
        compact["first"] = _first(pair["first"], with_context)
    return compact


def _first(first: Mapping[str, Any], with_context: bool) -> dict[str, Any]:
    errors, band = first["errors"], first["band"]
    worst = max(errors, key=lambda metric: _ratio(errors[metric], band.get(metric)), default="norm")
    compact = {
        **{key: first[key] for key in ("module", "what", "kind", "excess", "errors", "band", "infer", "train", "note")},
        "worst": [worst, errors.get(worst, 0.0)],
        "inputs_agree": first["inputs_agree"],
        "around": [
            [
                row["module"],
                row["what"],
                row["verdict"],
                row["error"],
                row["excess"],
                *((row[side] or {}).get("norm") for side in ("infer", "train")),
            ]
            for row in first["around"]
        ]
        if with_context
        else None,
    }
    if not with_context:
        del compact["around"]
    if isinstance(compact["excess"], float):
        compact["excess"] = float(f"{compact['excess']:.3g}")
    return compact


def _ratio(error: object, band: object) -> float:
    if not isinstance(error, (int, float)):
        return math.inf
    return error / band if isinstance(band, (int, float)) and band else float(error)


def _left_out(pairs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Names and reasons of all pairs together, rows added up."""
    rows: dict[tuple[str, str], int | None] = {}
    for pair in pairs:
        for item in pair["left_out"]:
            key = (item["name"], item["why"])
            rows[key] = None if item["rows"] is None else (rows.get(key) or 0) + item["rows"]
    return [{"name": name, "why": why, "rows": count} for (name, why), count in rows.items()]


def _environment(document: Mapping[str, Any], pairs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Both sides: what their dumps tell, and what `patchctl doctor` said where it was given."""
    sides: dict[str, dict[str, str]] = {}
    for side in ("infer", "train"):
        known: dict[str, str] = {}
        for pair in pairs:
            for key, value in pair["environment"].get(side, {}).items():
                known.setdefault(key, value)
        for key, value in document["environment"].get(side, {}).items():
            known[key] = str(value)
        sides[side] = known
    return sides
