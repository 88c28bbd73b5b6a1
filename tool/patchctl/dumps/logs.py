"""Streaming readers of the two logs that a dump run writes.

`dispatch_log.jsonl` has one line per inference step with every request in it, `update_actor_log.jsonl` one line per
training micro batch. Both readers work on a byte range of a file, so that a log of any size is read in pieces, by
several processes, in constant memory. Nothing in a log stops a reader: a damaged line is counted and named.

Lines written by the original snippets of the dump document (no extra fields) are read as well; what they do not say
is None.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

DISPATCH_LOG = "dispatch_log.jsonl"
TRAINING_LOG = "update_actor_log.jsonl"
RANGE_BYTES = 32 * 1024 * 1024
MAX_LINE_BYTES = 64 * 1024 * 1024
# Cached entries of one request kept from one range: enough for every chunk of a prefill and for resumptions.
# Speculative decoding logs several tokens in every step, which looks the same in a log without our fields.
MAX_CACHED_ENTRIES = 64


@dataclass(frozen=True)
class LogFile:
    """One log: where it lies, its size in bytes and the folder name (normally the pid) that the dumps lie under."""

    path: Path
    folder: str
    size: int


class Scheduled(NamedTuple):
    """One request in one inference step. `tokens` were computed for it, `line_tokens` for the whole step.

    `start` is the first token's place in the step when that is certain (only whole new prompts in the step), else None.
    `computed` and `prompt` are num_computed_tokens before the step and num_prompt_tokens, None in a log without them.
    """

    request_id: str
    source: int
    pid: int
    rank: int
    step: int
    offset: int
    tokens: int
    line_tokens: int
    line_requests: int
    new: bool
    start: int | None
    computed: int | None
    prompt: int | None
    resumed: bool


class Trained(NamedTuple):
    """One sample in one training micro batch; `samples` counts the samples in it.

    `weights` is (rollout's first version, rollout's last version, trainer's version), each may be None.
    `megatron` is the line's own "megatron" object as sorted items, None for other engines.
    """

    request_id: str
    source: int
    pid: int
    rank: int
    step: int
    offset: int
    timestamp: str
    samples: int
    prompt_len: int | None
    seq_len: int | None
    role: str | None
    phase: str | None
    weights: tuple[int | None, int | None, int | None]
    megatron: tuple[tuple[str, int], ...] | None


class ChainMember(NamedTuple):
    """A request that was aborted and resumed under other ids: `sample_id` is the id that training recorded."""

    request_id: str
    sample_id: str


@dataclass(frozen=True)
class Damage:
    """A line that was left out (or repaired): its number in the range (absolute once merged), cause and source file."""

    source: int
    line: int
    cause: str


@dataclass(frozen=True)
class Span:
    """A stretch of lines of one (source, rank) without a fall to its first step: one life of the process."""

    source: int
    rank: int
    offset: int
    first_step: int
    last_step: int
    first_time: str
    last_time: str


@dataclass
class RangeScan:
    """What one byte range of one log holds."""

    lines: int = 0
    scheduled: list[Scheduled] = field(default_factory=list)
    trained: list[Trained] = field(default_factory=list)
    chains: list[ChainMember] = field(default_factory=list)
    damage: list[Damage] = field(default_factory=list)
    damaged: int = 0
    foreign: int = 0
    without_id: int = 0
    without_id_steps: list[tuple[int, int]] = field(default_factory=list)
    last_line_cut: bool = False
    spans: list[Span] = field(default_factory=list)
    pids: set[int] = field(default_factory=set)

    def add_damage(self, source: int, line: int, cause: str) -> None:
        """Count one damaged line; the first 20 of a range are kept by name."""
        self.damaged += 1
        if len(self.damage) < 20:
            self.damage.append(Damage(source, line, cause))


def find_logs(root: Path, name: str) -> list[LogFile]:
    """The logs called `name` under `root/{pid}/`, and one right in `root`, sorted by folder."""
    found = [LogFile(root / name, "", (root / name).stat().st_size)] if (root / name).is_file() else []
    with os.scandir(root) as entries:
        for entry in entries:
            path = Path(entry.path) / name
            if entry.is_dir() and path.is_file():
                found.append(LogFile(path, entry.name, path.stat().st_size))
    return sorted(found, key=lambda log: (not log.folder.isdigit(), len(log.folder), log.folder))


def byte_ranges(size: int, step: int = RANGE_BYTES) -> list[tuple[int, int]]:
    """Cut `size` bytes into (start, end) ranges; a line belongs to the range in which it starts."""
    return [(start, min(start + step, size)) for start in range(0, size, step)]


def scan_dispatch(path: Path, source: int, start: int, end: int) -> RangeScan:
    """Read the inference lines that start in bytes [start, end) of `path`. Raises OSError only."""
    scan = RangeScan()
    spans = _Spans(source)
    kept: dict[str, int] = {}
    for line, offset in _lines(path, source, start, end, scan):
        fast = _plain_dispatch_line(line)
        if fast is None:
            record = _decode(line, "dispatch_logger", scan, source)
            if record is None:
                continue
            try:
                head, requests = _dispatch_record(record)
            except (KeyError, TypeError, ValueError) as error:
                scan.add_damage(source, scan.lines, f"malformed: {error}")
                continue
        else:
            head, requests = fast
        timestamp, pid, rank, step, total, count = head
        scan.pids.add(pid)
        spans.add(rank, step, offset, timestamp)
        for request in requests:
            if not request.new:
                if request.decoding or (request.tokens <= 1 and not request.resumed and not request.prefilling):
                    continue
                kept[request.id] = kept.get(request.id, 0) + 1
                if kept[request.id] > MAX_CACHED_ENTRIES:
                    continue
            scan.scheduled.append(
                Scheduled(
                    request.id,
                    source,
                    pid,
                    rank,
                    step,
                    offset,
                    request.tokens,
                    total,
                    count,
                    request.new,
                    request.start,
                    request.computed,
                    request.prompt,
                    request.resumed,
                )
            )
    scan.spans = spans.spans
    return scan


def scan_training(path: Path, source: int, start: int, end: int) -> RangeScan:
    """Read the training lines that start in bytes [start, end) of `path`. Raises OSError only."""
    scan = RangeScan()
    spans = _Spans(source)
    for line, offset in _lines(path, source, start, end, scan):
        record = _decode(line, "update_actor", scan, source)
        if record is None:
            continue
        try:
            trained, chains = _training_record(record, source, offset)
        except (KeyError, TypeError, ValueError) as error:
            scan.add_damage(source, scan.lines, f"malformed: {error}")
            continue
        scan.pids.add(record["pid"])
        spans.add(record["rank"], record["step"], offset, _text(record.get("timestamp")) or "")
        missing = max(_integer(record.get("num_requests")) or 0, len(record["request_ids"])) - len(trained)
        if not trained or missing:
            scan.without_id += 1
            if len(scan.without_id_steps) < 20:
                scan.without_id_steps.append((record["rank"], record["step"]))
        scan.trained += trained
        scan.chains += chains
    scan.spans = spans.spans
    return scan


def merge_spans(scans: list[list[Span]]) -> list[Span]:
    """Join the spans of consecutive ranges of one file into lives of the process."""
    merged: list[Span] = []
    last: dict[int, int] = {}
    for span in (span for spans in scans for span in spans):
        at = last.get(span.rank)
        if at is None or _starts_over(merged[at], span.first_step):
            last[span.rank] = len(merged)
            merged.append(span)
        else:
            old = merged[at]
            merged[at] = replace(old, last_step=max(old.last_step, span.last_step), last_time=span.last_time)
    return merged


def _starts_over(life: Span, step: int) -> bool:
    """A step that falls back to the first one (or before) is a new process; msprobe's own counter never falls."""
    return step < life.last_step and step <= life.first_step


class _Spans:
    """Collects spans line by line."""

    def __init__(self, source: int) -> None:
        self.source = source
        self.spans: list[Span] = []
        self._current: dict[int, int] = {}

    def add(self, rank: int, step: int, offset: int, timestamp: str) -> None:
        at = self._current.get(rank)
        if at is None or _starts_over(self.spans[at], step):
            self._current[rank] = len(self.spans)
            self.spans.append(Span(self.source, rank, offset, step, step, timestamp, timestamp))
        else:
            old = self.spans[at]
            self.spans[at] = replace(old, last_step=max(old.last_step, step), last_time=timestamp)


def _lines(path: Path, source: int, start: int, end: int, scan: RangeScan) -> Iterator[tuple[bytes, int]]:
    """The whole lines that start in [start, end), without blank ones; NULs and over-long lines are named in `scan`."""
    with path.open("rb", buffering=1024 * 1024) as stream:
        if start:
            stream.seek(start - 1)
            _skip_line(stream.readline)
        offset = stream.tell()
        while offset < end:
            line = stream.readline(MAX_LINE_BYTES)
            if not line:
                break
            scan.lines += 1
            here, size = offset, len(line)
            if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                size += _skip_line(stream.readline)
                nuls = not line.strip(b"\0")
                scan.add_damage(source, scan.lines, "only NUL bytes" if nuls else f"a line of {size} bytes")
                offset += size
                continue
            offset += size
            scan.last_line_cut = not line.endswith(b"\n")
            if b"\0" in line:
                line = line.strip(b"\0\r\n\t ")
                if not line:
                    scan.add_damage(source, scan.lines, "only NUL bytes")
                    continue
                if b"\0" in line:
                    scan.add_damage(source, scan.lines, "NUL bytes inside")
                    continue
                scan.add_damage(source, scan.lines, "NUL bytes around it (the line itself was kept)")
            if here == 0 and line.startswith(b"\xef\xbb\xbf"):
                line = line[3:]
            if line.strip():
                yield line, here


def _skip_line(readline: Callable[[int], bytes]) -> int:
    """Read on to the end of the line; how many bytes that were."""
    size = 0
    while True:
        part = readline(1024 * 1024)
        size += len(part)
        if not part or part.endswith(b"\n"):
            return size


def _decode(line: bytes, source_name: str, scan: RangeScan, source: int) -> dict[str, Any] | None:
    """The line's object; None (and counted) when it is not JSON or another program's."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        scan.add_damage(source, scan.lines, "not whole JSON")
        return None
    if not isinstance(record, dict) or record.get("source") != source_name:
        scan.foreign += 1
        return None
    return record


class _Entry(NamedTuple):
    id: str
    new: bool
    tokens: int
    start: int | None
    computed: int | None
    prompt: int | None
    resumed: bool
    prefilling: bool
    decoding: bool


_Head = tuple[str, int, int, int, int, int]  # timestamp, pid, rank, step, total tokens, requests with tokens

_PLAIN_HEAD = re.compile(
    rb'\{"source": ?"dispatch_logger", ?"timestamp": ?"([^"\\]*)", ?(?:"host": ?"[^"\\]*", ?)?"pid": ?(\d+), ?'
    rb'"rank": ?(\d+), ?"step": ?(\d+), ?"phase": ?"(\w+)", ?(?:"attn_state": ?(?:"\w*"|null), ?)?'
    rb'"total_num_scheduled_tokens": ?(\d+), ?"requests": ?\['
)


def _plain_dispatch_line(line: bytes) -> tuple[_Head, list[_Entry]] | None:
    """Read a line without parsing its decodes, when it is certain that all cached entries are one-token decodes.

    A step of a busy server holds hundreds of decodes and at most a few prefills; only the latter matter. None means:
    parse the line.  The markers cannot appear inside a string value, where a quote is written as backslash-quote.
    """
    head = _PLAIN_HEAD.match(line)
    if head is None or not line.endswith((b"]}\n", b"]}")):
        return None
    # Two lines in one (a process was killed in the middle of the first) must not pass.
    if line.find(b'"source"', 10) >= 0:
        return None
    spaced = line[10:11] == b" "
    colon = b": " if spaced else b":"
    count = line.count(b'{"request_id"')
    total = int(head[6])
    new_marker = b'"type"' + colon + b'"new"'
    entries: list[bytes] = []
    at = line.find(new_marker, head.end())
    while at >= 0:
        begin, finish = line.rfind(b"{", 0, at), line.find(b"}", at)
        if begin < head.end() or finish < 0:
            return None
        entries.append(line[begin : finish + 1])
        at = line.find(new_marker, finish)
    cached = count - len(entries)
    try:
        parsed = [json.loads(entry) for entry in entries]
        if b'"prefill_complete"' in line:
            decode_marker = b'"phase"' + colon + b'"decode"'
            decodes = line.count(decode_marker, head.end()) - sum(entry.count(decode_marker) for entry in entries)
            if decodes != cached or b'"resumed"' + colon + b"true" in line:
                return None
        elif sum(_natural(entry, "tokens") for entry in parsed) + cached != total:
            return None
        fields = [_entry(entry) for entry in parsed]
    except (ValueError, KeyError, TypeError):
        return None
    if len(entries) == count:
        fields = _place(fields)
    return (
        (head[1].decode("utf-8", "replace"), int(head[2]), int(head[3]), int(head[4]), total, count),
        fields,
    )


def _dispatch_record(record: dict[str, Any]) -> tuple[_Head, list[_Entry]]:
    """The same from a parsed line. Raises KeyError, TypeError or ValueError for a missing field or a wrong type."""
    requests = record["requests"]
    if not isinstance(requests, list):
        raise TypeError("requests is not a list")
    entries = [_entry(request) for request in requests]
    entries = [entry for entry in entries if entry.tokens > 0]
    total = (
        _natural(record, "total_num_scheduled_tokens")
        if "total_num_scheduled_tokens" in record
        else sum(entry.tokens for entry in entries)
    )
    head = (
        _text(record.get("timestamp")) or "",
        _natural(record, "pid"),
        _natural(record, "rank"),
        _natural(record, "step"),
        total,
        len(entries),
    )
    return head, _place(entries) if all(entry.new for entry in entries) else entries


def _entry(request: dict[str, Any]) -> _Entry:
    request_id = request["request_id"]
    if not isinstance(request_id, str):
        raise TypeError("request_id is not a string")
    return _Entry(
        id=request_id,
        new=request["type"] == "new",
        tokens=_natural(request, "tokens"),
        start=None,
        computed=_integer(request.get("num_computed_tokens")),
        prompt=_integer(request.get("num_prompt_tokens")),
        resumed=request.get("resumed") is True,
        prefilling=request.get("phase") == "prefill",
        decoding=request.get("phase") == "decode",
    )


def _place(entries: list[_Entry]) -> list[_Entry]:
    """Give each entry the place of its first token: sure only when the step holds nothing but new prompts."""
    placed, start = [], 0
    for entry in entries:
        placed.append(entry._replace(start=start))
        start += entry.tokens
    return placed


def _training_record(record: dict[str, Any], source: int, offset: int) -> tuple[list[Trained], list[ChainMember]]:
    """The samples of a training line that have an id, and the other ids of resumed samples."""
    ids = record["request_ids"]
    if not isinstance(ids, list):
        raise TypeError("request_ids is not a list")
    pid, rank, step = _natural(record, "pid"), _natural(record, "rank"), _natural(record, "step")
    samples = max(len(ids), _integer(record.get("num_requests")) or 0)
    megatron = record.get("megatron")
    shape = None
    if isinstance(megatron, dict):
        shape = tuple(sorted((str(k), int(v)) for k, v in megatron.items() if isinstance(v, int)))
    trained, chains = [], []
    for index, request_id in enumerate(ids):
        # The document's own snippet writes str(None); a real id is never "None".
        if not isinstance(request_id, str) or request_id in ("", "None"):
            continue
        trained.append(
            Trained(
                request_id,
                source,
                pid,
                rank,
                step,
                offset,
                _text(record.get("timestamp")) or "",
                samples,
                _at(record.get("prompt_lens"), index),
                _at(record.get("seq_lens"), index),
                _text(record.get("role")),
                _text(record.get("phase")),
                (
                    _at(record.get("min_global_steps"), index),
                    _at(record.get("max_global_steps"), index),
                    _integer(record.get("global_steps")),
                ),
                shape,
            )
        )
        all_chains = record.get("request_chains")
        chain = all_chains[index] if isinstance(all_chains, list) and index < len(all_chains) else None
        for link in chain if isinstance(chain, list) else []:
            if isinstance(link, dict) and isinstance(link.get("request_id"), str) and link["request_id"] != request_id:
                chains.append(ChainMember(link["request_id"], request_id))
    return trained, chains


def _at(values: object, index: int) -> int | None:
    return _integer(values[index]) if isinstance(values, list) and index < len(values) else None


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _natural(record: dict[str, Any], key: str) -> int:
    value = _integer(record[key])
    if value is None or value < 0:
        raise ValueError(f"{key} is not a whole number")
    return value


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
