"""Reads a trial's archive: the document of one that ended, or the journal of one that was cut off."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from patchctl.errors import PatchctlError

VERSION = 1
DOCUMENT = "proxy_trajectory.json"
JOURNAL = "proxy_trajectory.jsonl"

MOST = 1e300
"""What no number of an archive comes near."""

Json = Mapping[str, Any]


class _Rubbish(Exception):
    """What is wrong with the file, in a few words."""


@dataclass(frozen=True)
class Span:
    """A part of a turn's new context: ids, or an earlier answer that was put there again."""

    ids: Sequence[int]
    echo: str | None = None


@dataclass(frozen=True)
class Turn:
    """One call of the engine.

    Attributes:
        start: number of ids before the new context.
        log_probs: one a sampled id, None where the engine gave none.
        recomputed: one a context id, None where there is none; empty if nothing was recomputed.
        record: the archive's own line: messages, answer, times, ...
    """

    id: str
    number: int
    parent: str | None
    kind: str
    state: str
    delivered: bool
    proved: bool | None
    start: int
    spans: tuple[Span, ...]
    sampled: Sequence[int]
    log_probs: Sequence[float | None]
    recomputed: Sequence[float | None]
    steps: tuple[int | None, int | None]
    finish_reason: str | None
    record: Json

    @property
    def trained(self) -> bool:
        """Its sampled tokens are actions: the client has the answer."""
        return self.state == "finished" and self.delivered

    @property
    def context_length(self) -> int:
        return sum(len(span.ids) for span in self.spans)

    @property
    def end(self) -> int:
        """Number of ids up to its last sampled one."""
        return self.start + self.context_length + len(self.sampled)


@dataclass(frozen=True)
class Branch:
    """A path from a root to a leaf, as training reads it."""

    label: str
    primary: bool
    turns: tuple[str, ...]


@dataclass(frozen=True)
class Trial:
    """An archive.

    Attributes:
        whole: the trial ended and its document was written.
        lost: lines that could not be read, and turns that lean on them.
        events: (name, labels, count).
    """

    id: str
    created: float
    whole: bool
    lost: int
    turns: tuple[Turn, ...]
    branches: tuple[Branch, ...]
    errors: tuple[Json, ...]
    events: tuple[tuple[str, Mapping[str, str], int], ...]
    settings: tuple[Json, ...]
    tokenizer: str | None = None
    by_id: Mapping[str, Turn] = field(default_factory=dict)

    def path(self, turn: Turn) -> list[Turn]:
        """The turns from the root to this one."""
        found = [turn]
        while (parent := found[-1].parent) is not None:
            found.append(self.by_id[parent])
        return found[::-1]


def read_trial(file: Path) -> Trial:
    """The trial of an archive, or of the folder that holds one.

    Raises:
        PatchctlError: there is none, or it is no archive of a chat proxy.
    """
    path = file
    if file.is_dir():
        path = next((file / name for name in (DOCUMENT, JOURNAL) if (file / name).is_file()), file / DOCUMENT)
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise PatchctlError(
            f"no {DOCUMENT} and no {JOURNAL} in `{file}`; give the folder of a trial"
            if file.is_dir()
            else f"`{file}` does not exist; give a {DOCUMENT} or the folder that holds it"
        ) from None
    except OSError as error:
        raise PatchctlError(f"cannot read `{path}`: {error.strerror}") from error
    try:
        return _read(raw)
    except _Rubbish as error:
        beside = path.with_name(JOURNAL)
        hint = f"; try the journal beside it, `{beside}`" if beside != path and beside.is_file() else ""
        raise PatchctlError(f"`{path}` is no archive of a chat proxy: {error}{hint}") from error


def _read(raw: bytes) -> Trial:
    if not raw.strip():
        raise _Rubbish("it is empty")
    try:
        document = _loads(raw)
    except (ValueError, RecursionError):
        return _trial(*_journal(raw))
    if not isinstance(document, dict):
        raise _Rubbish(f"it holds {type(document).__name__} and no object")
    if document.get("type") == "session":  # a journal of one line
        return _trial([document], 0, False)
    return _trial(list(_lines(document)), 0, True, document)


def _loads(raw: bytes) -> Any:
    """JSON, with nothing for a number that is not finite, or too large to be reckoned with: no browser reads it."""

    def number(text: str) -> float | None:
        value = float(text)
        return value if abs(value) < MOST else None

    return json.loads(raw, parse_float=number, parse_constant=lambda name: None)


def _journal(raw: bytes) -> tuple[list[Json], int, bool]:
    lines: list[Json] = []
    lost = 0
    for line in raw.splitlines():
        try:
            item = _loads(line)
        except (ValueError, RecursionError):
            item = None
        if isinstance(item, dict):
            lines.append(item)
        else:
            lost += 1
    if not any(line.get("type") == "session" for line in lines):
        raise _Rubbish("it is neither one whole JSON document nor a journal that says which session it is of")
    return lines, lost, False


def _lines(document: Json) -> Iterator[Json]:
    """The lines of a journal that a document was made from."""
    if "session_id" not in document or "turns" not in document:
        raise _Rubbish("it has no session_id and no turns")
    yield {**document, "type": "session", "id": document["session_id"]}
    for name, kind in (("settings", "setting"), ("turns", "turn"), ("errors", "error")):
        for item in _objects(document, name):
            yield {**item, "type": kind}


def _trial(lines: Sequence[Json], lost: int, whole: bool, document: Json | None = None) -> Trial:
    first = next(line for line in lines if line.get("type") == "session")
    if first.get("version") != VERSION:
        raise _Rubbish(f"it is of version {first.get('version')!r}, and this reads version {VERSION}")
    turns: dict[str, Turn] = {}
    changes: dict[str, dict[str, Any]] = {}
    records: list[Json] = []
    for line in lines:
        kind = line.get("type")
        if kind == "turn":
            records.append(line)
        elif kind == "delivered":
            changes.setdefault(str(line.get("turn")), {})["delivered"] = True
        elif kind == "recomputed":
            values = {"recomputed": line.get("log_probs"), "recomputed_steps": line.get("global_steps")}
            changes.setdefault(str(line.get("turn")), {}).update(values)
        elif kind == "end":
            proved = line.get("proved")
            for turn_id, value in proved.items() if isinstance(proved, dict) else ():
                changes.setdefault(turn_id, {})["proved"] = value
    for record in records:
        try:
            turn = _turn({**record, **changes.get(str(record.get("id")), {})}, turns)
        except _Rubbish:
            if whole:
                raise
            lost += 1
            continue
        turns[turn.id] = turn
    branches = tuple(_branch(item) for item in _objects(document or {}, "branches"))
    events = tuple((str(item.get("name")), _labels(item), _count(item)) for item in _objects(document or {}, "events"))
    created, tokenizer = first.get("created"), first.get("tokenizer")
    return Trial(
        id=str(first.get("id")),
        created=float(created) if _is_number(created) else 0.0,
        whole=whole,
        lost=lost,
        turns=tuple(turns.values()),
        branches=branches or _leaves(turns),
        errors=tuple({k: v for k, v in line.items() if k != "type"} for line in lines if line.get("type") == "error"),
        events=events,
        settings=tuple(line for line in lines if line.get("type") == "setting"),
        tokenizer=tokenizer if isinstance(tokenizer, str) and tokenizer else None,
        by_id=turns,
    )


def _turn(record: Json, known: Mapping[str, Turn]) -> Turn:
    turn_id, number = record.get("id"), record.get("number")
    if not isinstance(turn_id, str) or not isinstance(number, int):
        raise _Rubbish("a turn has no id or no number")
    if turn_id in known:
        raise _Rubbish(f"turn {number} has the id of an earlier one")
    parent = _name(record, "parent")
    if parent is not None and parent not in known:
        raise _Rubbish(f"turn {number} follows a turn that is not there")
    spans = []
    for item in _objects(record, "spans"):
        echo = _name(item, "echo")
        if echo is not None and echo not in known:
            raise _Rubbish(f"turn {number} repeats a turn that is not there")
        spans.append(Span(known[echo].sampled, echo) if echo is not None else Span(_ids(item, "ids", number)))
    sampled, log_probs = _ids(record, "sampled", number), record.get("log_probs")
    recomputed = record.get("recomputed") or []
    if not isinstance(log_probs, list) or len(log_probs) != len(sampled):
        raise _Rubbish(f"turn {number} has {len(sampled)} sampled tokens and not as many log-probabilities")
    context = sum(len(span.ids) for span in spans)
    if not isinstance(recomputed, list) or len(recomputed) not in (0, context):
        raise _Rubbish(f"turn {number} has {context} tokens of context and not as many recomputed values")
    if not all(value is None or _is_number(value) for value in (*log_probs, *recomputed)):
        raise _Rubbish(f"turn {number} has a log-probability that is no number")
    start = record.get("start")
    if start != (known[parent].end if parent is not None else 0):
        raise _Rubbish(f"turn {number} does not begin where the turn before it ends")
    return Turn(
        id=turn_id,
        number=number,
        parent=parent,
        kind=str(record.get("kind")),
        state=str(record.get("state")),
        delivered=record.get("delivered") is True,
        proved=record["proved"] if isinstance(record.get("proved"), bool) else None,
        start=start,
        spans=tuple(spans),
        sampled=sampled,
        log_probs=log_probs,
        recomputed=recomputed,
        steps=(_step(record, "min_global_steps"), _step(record, "max_global_steps")),
        finish_reason=_name(record, "finish_reason"),
        record=record,
    )


def _branch(item: Json) -> Branch:
    turns = item.get("turns")
    if not isinstance(turns, list):
        raise _Rubbish("a branch has no turns")
    return Branch(str(item.get("label")), item.get("primary") is True, tuple(map(str, turns)))


def _leaves(turns: Mapping[str, Turn]) -> tuple[Branch, ...]:
    """The branches of a trial that was cut off, for which nobody said what each is."""
    trained = [turn for turn in turns.values() if turn.trained]
    inner = {turn.parent for turn in trained}
    found = []
    for leaf in trained:
        if leaf.id in inner:
            continue
        path = [leaf]
        while (parent := path[-1].parent) is not None:
            path.append(turns[parent])
        found.append(Branch("unknown", False, tuple(turn.id for turn in reversed(path))))
    return tuple(sorted(found, key=lambda branch: -len(branch.turns)))


def _objects(item: Json, name: str) -> Iterable[Json]:
    value = item.get(name)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise _Rubbish(f"its {name} are no list of objects")
    return value


def _ids(item: Json, name: str, number: int) -> Sequence[int]:
    value = item.get(name)
    if not isinstance(value, list) or not all(isinstance(one, int) for one in value):
        raise _Rubbish(f"turn {number} has {name} that are no token ids")
    return value


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and abs(value) < MOST


def _name(item: Json, name: str) -> str | None:
    value = item.get(name)
    if not isinstance(value, str | None):
        raise _Rubbish(f"a turn's {name} is no text")
    return value


def _labels(item: Json) -> dict[str, str]:
    labels = item.get("labels")
    return {key: str(value) for key, value in labels.items()} if isinstance(labels, dict) else {}


def _step(record: Json, name: str) -> int | None:
    value = record.get(name)
    return value if isinstance(value, int) else None


def _count(item: Json) -> int:
    value = item.get("count")
    return value if isinstance(value, int) else 0
