"""A trial in numbers, for the terminal, for programs, and for the head of the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from .trial import Trial


def summary(trial: Trial) -> dict[str, Any]:
    """Counts of turns, branches, tokens, events; means over the sampled tokens that are trained."""
    turns = trial.turns
    trained = [turn for turn in turns if turn.trained]
    values = [value for turn in trained for value in turn.log_probs if value is not None]
    steps = [step for turn in trained for step in turn.steps if step is not None]
    recomputed = sum(value is not None for turn in turns for value in turn.recomputed)
    lowest = min(
        ((value, turn.number) for turn in trained for value in turn.log_probs if value is not None), default=None
    )
    sampled = sum(len(turn.sampled) for turn in turns)
    used = sum(len(turn.sampled) for turn in trained)
    events = Counter[str]()
    for name, labels, count in trial.events:
        if name in ("drift", "replay", "overflow"):
            events[name] += count
        if name == "turn_opened" and labels.get("kind") == "rewrite":
            events["rewrite"] += count
    if not trial.events:  # a journal holds no counters
        events["rewrite"] = sum(turn.kind == "rewrite" for turn in turns)
        events["drift"] = sum(turn.proved is False for turn in turns)
    return {
        "session": trial.id,
        "whole": trial.whole,
        "lost_lines": trial.lost,
        "turns": len(turns),
        "states": dict(Counter(turn.state for turn in turns)),
        "undelivered": sum(turn.state == "finished" and not turn.delivered for turn in turns),
        "branches": dict(Counter(branch.label for branch in trial.branches)),
        "longest": max((turn.end for turn in turns), default=0),
        "sampled": sampled,
        "trained": used,
        "recomputed": recomputed,
        "without_log_prob": used - len(values),
        "mean_log_prob": round(sum(values) / len(values), 4) if values else None,
        "lowest_log_prob": {"value": round(lowest[0], 4), "turn": lowest[1]} if lowest else None,
        "policy_versions": [min(steps), max(steps)] if steps else None,
        "turns_over_an_update": sum(None not in turn.steps and turn.steps[0] != turn.steps[1] for turn in trained),
        "finish": dict(Counter(turn.finish_reason for turn in turns if turn.finish_reason is not None)),
        "proved": sum(turn.proved is True for turn in turns),
        "drifted": sum(turn.proved is False for turn in turns),
        "errors": len(trial.errors),
        "events": dict(events),
    }


def summary_lines(trial: Trial) -> Iterator[str]:
    """The summary for people."""
    s = summary(trial)
    end = "ended" if trial.whole else "cut off before its end"
    lost = f", {trial.lost} lines of its journal are lost" if trial.lost else ""
    yield f"session {s['session']}: {end}{lost}"
    labels = ", ".join(f"{count} {label}" for label, count in s["branches"].items()) or "none with an answer"
    states = ", ".join(f"{count} {state}" for state, count in s["states"].items())
    undelivered = f", {s['undelivered']} of them undelivered" if s["undelivered"] else ""
    yield f"turns: {s['turns']}" + (f" ({states}{undelivered})" if states else "") + f"; branches: {labels}"
    yield (
        f"tokens: {s['sampled']} sampled, {s['trained']} trained, {s['recomputed']} recomputed; "
        f"the longest path has {s['longest']}"
    )
    if s["mean_log_prob"] is not None:
        lowest = s["lowest_log_prob"]
        missing = f"; {s['without_log_prob']} tokens have none" if s["without_log_prob"] else ""
        yield (
            f"log-probability: mean {s['mean_log_prob']}, lowest {lowest['value']} in turn {lowest['turn']}{missing}"
        )
    if s["policy_versions"] is not None:
        low, high = s["policy_versions"]
        over = f"; turns over an update: {s['turns_over_an_update']}" if s["turns_over_an_update"] else ""
        yield f"policy versions: {low if low == high else f'{low} to {high}'}{over}"
    yield (
        "finish: "
        + (", ".join(f"{count} {reason}" for reason, count in s["finish"].items()) or "none")
        + f"; proved {s['proved']}, drifted {s['drifted']}; "
        + f"rewrites {s['events'].get('rewrite', 0)}, replays {s['events'].get('replay', 0)}, errors {s['errors']}"
    )
