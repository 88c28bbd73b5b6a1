"""A whole comparison: every clean pair of the pairs documents judged, msprobe run beside it, one document out."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchctl.errors import PatchctlError

from . import msprobe_compare
from .compare import judge_pair, pair_document, write_rows
from .judge import BUILT_IN, Bands, calibrate
from .tensors import require_torch
from .workers import Progress, worker_count, worker_pool

FORMAT = 1
GOOD = ("agrees",)
_NAME = re.compile(r"[^A-Za-z0-9_.-]")
_ORDER = ("diverges", "weights differ", "drifts", "refused", "nothing compared", "agrees")


@dataclass(frozen=True)
class CompareOptions:
    """What to run: our own judgement always, msprobe where it is found and wanted."""

    msprobe: msprobe_compare.Msprobe | None = None
    jobs: int | None = None
    bands: Bands = BUILT_IN
    statistics_only: bool = False
    environment: Mapping[str, Any] | None = None


def read_pairs(paths: Sequence[Path]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """All requests of the pairs documents, and their warnings. Raises PatchctlError for what is no pairs document."""
    requests: dict[str, dict[str, Any]] = {}
    warnings: list[str] = []
    for path in paths:
        try:
            document = json.loads(path.read_bytes())
            found = document["requests"]
            if document.get("command") != "pair" or not isinstance(found, dict):
                raise KeyError("command")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PatchctlError(
                f"`{path}` is no pairs document; `patchctl pair GENERATE_DIR ACTOR_DIR --json > {path.name}` makes one"
            ) from error
        for request_id, entry in found.items():
            name, number = request_id, 2
            while name in requests:
                name, number = f"{request_id}#{number}", number + 1
            requests[name] = entry
        warnings += document.get("warnings", [])
    return requests, warnings


def read_baseline(path: Path) -> Bands:
    """Noise bands from the comparison of a run that is known to be good: its OUT folder or its compare.json."""
    file = path / "compare.json" if path.is_dir() else path
    try:
        document = json.loads(file.read_bytes())
        maxima = document["calibration"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PatchctlError(f"`{file}` is no result of `patchctl compare`: {type(error).__name__}") from error
    return calibrate(maxima, str(file))


def run_compare(
    requests: Mapping[str, Mapping[str, Any]],
    warnings: Sequence[str],
    out: Path,
    options: CompareOptions,
    progress: Callable[[str], Progress] | None = None,
) -> dict[str, Any]:
    """Compare every PAIR entry and write `out`/compare.json and `out`/pairs/*; returns the document.

    Raises PatchctlError when there is no pair, or `out` holds something else.
    """
    clean = {name: entry for name, entry in requests.items() if entry["status"] == "PAIR"}
    if not clean:
        counts = Counter(entry["status"] for entry in requests.values())
        listed = ", ".join(f"{number} {status}" for status, number in counts.most_common()) or "no request at all"
        raise PatchctlError(f"no request can be compared ({listed}); `patchctl pair` says why for each")
    if any(not entry.get("infer_dumps") or not entry.get("train_dumps") for entry in clean.values()):
        raise PatchctlError(
            "the pairs document names no dumps: it was made with --logs-only; run `patchctl pair` without"
        )
    if out.exists() and any(out.iterdir()) and not (out / "compare.json").is_file():
        raise PatchctlError(f"`{out}` is not empty and no result of this command; choose a new folder")
    folders = _folders(out, clean)
    jobs = min(options.jobs or worker_count(), len(clean))
    if not options.statistics_only and _has_tensors(clean):
        require_torch()
    began = time.perf_counter()
    tick = progress("judging") if progress else None
    pairs: list[dict[str, Any]] = []
    maxima: dict[str, dict[str, dict[str, float]]] = {}
    tasks = [(name, entry, options.bands, options.statistics_only, folders[name]) for name, entry in clean.items()]
    with worker_pool(jobs) as run_all:
        for number, (document, seen) in enumerate(run_all(_judge_one, tasks), 1):
            pairs.append(document)
            _fold(maxima, seen)
            if tick:
                tick(number, len(tasks))
    seconds = time.perf_counter() - began
    if options.msprobe is not None:
        _run_msprobe(options.msprobe, pairs, clean, folders, jobs, progress("msprobe") if progress else None)
    document = {
        "command": "compare",
        "format": FORMAT,
        "verdict": _overall(pairs),
        "pairs_by_status": dict(Counter(entry["status"] for entry in requests.values())),
        "verdicts": dict(Counter(pair["verdict"] for pair in pairs)),
        "first": _most_common_first(pairs),
        "warnings": list(warnings),
        "judged_in_seconds": round(seconds, 3),
        "bands": {"source": options.bands.source, "limits": options.bands.limits},
        "msprobe": None
        if options.msprobe is None
        else {
            "version": options.msprobe.version,
            "pairs": len(pairs),
            "nothing_matched": sum(not pair["msprobe"]["matched"] for pair in pairs),
        },
        "environment": options.environment or {},
        "pairs": [_with_places(pair, clean[pair["request_id"]]) for pair in pairs],
        "others": [
            {"request_id": name, **{key: entry.get(key) for key in ("status", "infer", "train", "why", "tokens")}}
            for name, entry in requests.items()
            if entry["status"] != "PAIR"
        ],
        "calibration": maxima,
    }
    (out / "compare.json").write_text(json.dumps(document, ensure_ascii=False, allow_nan=False), encoding="utf-8")
    return document


def succeeded(document: Mapping[str, Any]) -> bool:
    """Everything agrees, and msprobe (where it ran) matched rows of every pair."""
    msprobe = document["msprobe"]
    return document["verdict"] in GOOD and not (msprobe and msprobe["nothing_matched"])


def _judge_one(
    name: str, entry: Mapping[str, Any], bands: Bands, statistics_only: bool, folder: Path
) -> tuple[dict[str, Any], Mapping[str, Mapping[str, Mapping[str, float]]]]:
    judgement = judge_pair(name, entry, bands, statistics_only)
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "rows.csv", [*judgement.weights, *judgement.rows])
    return pair_document(judgement), judgement.maxima


def _run_msprobe(
    msprobe: msprobe_compare.Msprobe,
    pairs: list[dict[str, Any]],
    clean: Mapping[str, Mapping[str, Any]],
    folders: Mapping[str, Path],
    jobs: int,
    tick: Progress | None,
) -> None:
    """Add "msprobe" to every pair."""
    by_name = {pair["request_id"]: pair for pair in pairs}
    prepared = []
    for name, pair in by_name.items():
        try:
            backend = pair["backend"] or "fsdp"
            prepared.append(msprobe_compare.prepare(name, clean[name], backend, (folders[name] / "msprobe").resolve()))
        except (OSError, ValueError, KeyError) as error:
            pair["msprobe"] = {"rc": None, "matched": 0, "rows": 0, "results": {}, "file": None, "error": str(error)}
    for number, answer in enumerate(msprobe_compare.run_jobs(msprobe, prepared, jobs), 1):
        pair = by_name[answer.pop("id")]
        pair["msprobe"] = answer
        if tick:
            tick(number, len(prepared))


def _folders(out: Path, names: Mapping[str, Any]) -> dict[str, Path]:
    """A folder for every pair; names that msprobe would refuse are made plain."""
    folders: dict[str, Path] = {}
    taken: set[str] = set()
    for name in names:
        plain = _NAME.sub("_", name)[:100]
        number = 2
        while plain in taken:
            plain, number = f"{plain[:90]}_{number}", number + 1
        taken.add(plain)
        folders[name] = out / "pairs" / plain
    return folders


def _has_tensors(clean: Mapping[str, Mapping[str, Any]]) -> bool:
    first = next(iter(clean.values()))
    return all(
        (Path(first[key][0]["path"]).parent / "dump_tensor_data").is_dir() for key in ("infer_dumps", "train_dumps")
    )


def _fold(
    maxima: dict[str, dict[str, dict[str, float]]], seen: Mapping[str, Mapping[str, Mapping[str, float]]]
) -> None:
    for dtype, kinds in seen.items():
        for kind, metrics in kinds.items():
            into = maxima.setdefault(dtype, {}).setdefault(kind, {})
            for metric, value in metrics.items():
                into[metric] = max(into.get(metric, 0.0), value)


def _overall(pairs: Sequence[Mapping[str, Any]]) -> str:
    """The worst verdict; a pair that could not be judged counts only when no pair was."""
    found = {pair["verdict"] for pair in pairs}
    judged = found - {"refused", "nothing compared"}
    return next(verdict for verdict in _ORDER if verdict in (judged or found))


def _most_common_first(pairs: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The module that most pairs name as the first to differ."""
    firsts = [pair["first"] for pair in pairs if "first" in pair]
    if not firsts:
        return None
    counts = Counter(first["module"] for first in firsts)
    module, number = counts.most_common(1)[0]
    example = next(pair for pair in pairs if pair.get("first", {}).get("module") == module)
    return {
        "module": module,
        "pairs": number,
        "of": len(pairs),
        "example": example["request_id"],
        "reason": example["reason"],
        "others": dict(counts.most_common()[1:8]),
    }


def _with_places(pair: dict[str, Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("infer", "train", "tokens", "checks", "infer_other", "train_other", "infer_dumps", "train_dumps")
    return {**pair, **{key: entry[key] for key in keys if key in entry}}
