"""The terminal summary of a comparison."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

VERDICTS = {
    "agrees": "no module differs",
    "diverges": "a module differs",
    "drifts": "the error grows gradually beyond the noise band, no single module stands out",
    "weights differ": "the weights differ, although no module's output leaves the noise band",
    "refused": "no pair could be compared",
    "nothing compared": "no module of one side has a partner on the other",
}


def summary_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """Verdict, first diverging module, coverage, pairs by status, warnings."""
    pairs = document["pairs"]
    yield f"verdict: {document['verdict']} ({VERDICTS[document['verdict']]})"
    first = document["first"]
    if first is not None:
        yield f"first to differ: {first['module']} in {first['pairs']} of {len(pairs)} pairs"
        yield f"  {first['example']}: {first['reason']}"
        for module, number in first["others"].items():
            yield f"  {module} in {number}"
    differing = [pair for pair in pairs if pair["weights"]["differing"]]
    if differing:
        worst = max(differing, key=lambda pair: pair["weights"]["differing"])["weights"]
        yield (
            f"weights: {worst['differing']} of {worst['compared']} differ, first {worst['differ'][0]}: "
            "a wrong or stale weight sync"
        )
    yield coverage_line(pairs)
    yield "pairs: " + ", ".join(f"{number} {verdict}" for verdict, number in document["verdicts"].items())
    yield "requests: " + ", ".join(f"{number} {status}" for status, number in document["pairs_by_status"].items())
    for pair in [pair for pair in pairs if pair["verdict"] in ("refused", "nothing compared")][:5]:
        yield f"  {pair['request_id']}: {pair['verdict']}: {pair['reason']}"
    stale = [pair for pair in pairs if pair.get("checks", {}).get("weights", "unknown") not in ("same", "unknown")]
    if stale:
        yield f"weight versions: {len(stale)} pairs, e.g. {stale[0]['checks']['weights']}"
    msprobe = document["msprobe"]
    if msprobe:
        matched = [pair["msprobe"]["matched"] for pair in pairs]
        text = f"msprobe {msprobe['version']}: {min(matched)} to {max(matched)} rows matched a pair"
        if msprobe["nothing_matched"]:
            text += f"; NOTHING matched in {msprobe['nothing_matched']} pairs (msprobe itself calls that a success)"
        yield text
    unmatched = sorted({name for pair in pairs for names in pair["unmatched"].values() for name in names})
    if unmatched:
        yield f"no partner: {', '.join(unmatched[:6])}{', ...' if len(unmatched) > 6 else ''}"
    for warning in document["warnings"]:
        yield f"warning: {warning}"


def coverage_line(pairs: list[Mapping[str, Any]]) -> str:
    """How much of the two sides was compared."""
    compared = sum(pair["rows"]["compared"] for pair in pairs)
    left_out = sum(pair["rows"]["left_out"] for pair in pairs)
    share = compared / (compared + left_out) if compared + left_out else 0.0
    layers = [(pair["layers"]["compared"], pair["layers"]["all"]) for pair in pairs if pair["layers"]["all"]]
    low = min(layers, default=(0, 0))
    text = f"coverage: {compared} rows compared, {share:.0%} of those that could be"
    return f"{text}; {low[0]} of {low[1]} layers or more"
