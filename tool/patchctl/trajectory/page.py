"""One self-contained HTML page of a trial: no network, nothing but its own script may run, 128k tokens and more."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from .summary import summary
from .trial import Json, Span, Trial, Turn

SCALE = 10_000
"""Log-probabilities are whole numbers of this fraction: a third of the size, and no digit that is shown is lost."""

TURN_FIELDS = ("error", "max_tokens", "sampling", "num_preempted", "generation_prompt", "lineage", "times", "engine")


def write_page(trial: Trial, texts: Mapping[int, str], path: Path, made: str) -> None:
    """Write the page; `made` is the date to show. Raises OSError."""
    template = (files(__package__) / "page.html").read_text(encoding="utf-8")
    script = re.search(r"<script>(.*?)</script>", template, re.DOTALL)
    assert script is not None
    # The browser runs this script and no other, whatever a message of the trial may hold.
    digest = base64.b64encode(hashlib.sha256(script.group(1).encode()).digest()).decode()
    data = json.dumps(page_data(trial, texts, made), separators=(",", ":"), allow_nan=False)
    page = template.replace("/*SHA256*/", digest).replace("/*DATA*/", data.replace("<", "\\u003c"))
    path.write_text(page, encoding="utf-8")


def page_data(trial: Trial, texts: Mapping[int, str], made: str) -> dict[str, Any]:
    """What the page reads: see the template's `D`."""
    order = {turn.id: index for index, turn in enumerate(trial.turns)}
    branches = [
        {"label": branch.label, "primary": branch.primary, "turns": [order[one] for one in branch.turns]}
        for branch in trial.branches
        if all(one in order for one in branch.turns)
    ]
    return {
        "id": trial.id,
        "made": made,
        "created": trial.created,
        "whole": trial.whole,
        "lost": trial.lost,
        "scale": SCALE,
        "summary": summary(trial),
        "turns": [_turn(turn, order) for turn in trial.turns],
        "branches": branches,
        "lanes": lanes(trial),
        "errors": [_error(error, trial, order) for error in trial.errors],
        "events": [[name, labels, count] for name, labels, count in trial.events],
        "tools": [_tool_names(setting) for setting in trial.settings],
        "texts": {str(index): text for index, text in texts.items()},
    }


def _turn(turn: Turn, order: Mapping[str, int]) -> dict[str, Any]:
    record = turn.record
    return {
        "id": turn.id,
        "n": turn.number,
        "parent": order[turn.parent] if turn.parent is not None else None,
        "kind": turn.kind,
        "state": turn.state,
        "delivered": turn.delivered,
        "trained": turn.trained,
        "proved": turn.proved,
        "finish": turn.finish_reason,
        "steps": turn.steps,
        "again_steps": record.get("recomputed_steps"),
        "start": turn.start,
        "spans": [_span(span, order) for span in turn.spans],
        "ids": turn.sampled,
        "lp": scaled(turn.log_probs),
        "again": scaled(turn.recomputed),
        "messages": [_message(message) for message in _list(record, "messages")],
        "answer": _message(record["answer"]) if isinstance(record.get("answer"), dict) else None,
        "text": record.get("text"),
        **{name: record.get(name) for name in TURN_FIELDS},
    }


def _span(span: Span, order: Mapping[str, int]) -> dict[str, Any]:
    return {"echo": order[span.echo]} if span.echo is not None else {"ids": span.ids}


def scaled(values: Sequence[float | None]) -> list[int | None]:
    """Log-probabilities as whole numbers."""
    return [None if value is None else round(value * SCALE) for value in values]


def _message(message: Json) -> dict[str, Any]:
    """A message as it is shown. Media are told of and not embedded."""
    parts = [part for part in _list(message, "parts") if part.get("type") != "text"]
    shown: dict[str, Any] = {"role": str(message.get("role")), "content": str(message.get("content") or "")}
    for name in ("reasoning", "tool_call_id", "is_error"):
        if message.get(name):
            shown[name] = message[name]
    if parts:
        shown["media"] = [f"{part.get('type')}, {len(str(part.get('source') or ''))} characters" for part in parts]
    calls = _list(message, "tool_calls")
    if calls:
        shown["calls"] = [[str(call.get(name) or "") for name in ("id", "name", "arguments")] for call in calls]
    return shown


def _error(error: Json, trial: Trial, order: Mapping[str, int]) -> dict[str, Any]:
    """An error, and the turn that it names."""
    message = str(error.get("message") or "")
    turn = next((order[turn.id] for turn in trial.turns if turn.id in message), None)
    return {"kind": str(error.get("kind")), "message": message, "time": error.get("time"), "turn": turn}


def _tool_names(setting: Json) -> list[str]:
    functions = [tool.get("function") for tool in _list(setting, "tools")]
    return [str(function.get("name")) for function in functions if isinstance(function, dict)]


def _list(item: Json, name: str) -> list[Json]:
    value = item.get(name)
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def lanes(trial: Trial) -> list[int]:
    """The column of each turn in the drawn tree: of the children of a turn, the one with the longest way to go stays in
    its column, the others move out to the first one that is free from there on."""
    order = {turn.id: index for index, turn in enumerate(trial.turns)}
    last: dict[str, int] = {}  # the last row that a column is needed for: that of the turn's last child
    depth: dict[str, int] = {}  # the longest way to a leaf
    heir: dict[str, str] = {}
    for index, turn in reversed(list(enumerate(trial.turns))):
        last.setdefault(turn.id, index)
        depth.setdefault(turn.id, 0)
        if turn.parent is not None:
            last.setdefault(turn.parent, index)
            if depth[turn.id] + turn.trained >= depth.get(turn.parent, 0):
                depth[turn.parent] = depth[turn.id] + turn.trained
                heir[turn.parent] = turn.id
    taken: list[int] = []  # the last row of each column
    column: dict[str, int] = {}
    for index, turn in enumerate(trial.turns):
        parent = turn.parent
        if parent is not None and heir[parent] == turn.id:
            at = column[parent]
        else:
            begin = order[parent] if parent is not None else index
            at = next((lane for lane, row in enumerate(taken) if row < begin), len(taken))
            if at == len(taken):
                taken.append(-1)
        column[turn.id] = at
        taken[at] = max(taken[at], last[turn.id])
    return [column[turn.id] for turn in trial.turns]
