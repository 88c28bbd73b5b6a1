"""The log readers: any damage is counted, nothing else is lost, and the fast path reads what a parser reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patchctl.dumps import logs

hex_ids = st.text("0123456789abcdef", min_size=4, max_size=12)
odd_ids = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=8)


@st.composite
def requests(draw: st.DrawFn, extended: bool) -> dict[str, Any]:
    new = draw(st.booleans())
    entry: dict[str, Any] = {
        "request_id": draw(hex_ids | odd_ids),
        "type": "new" if new else "cached",
        "tokens": draw(st.sampled_from([1, 1, 1, 2, 64])),
    }
    if extended:
        phase = draw(st.sampled_from(["prefill", "decode", "decode", "resumed"]))
        entry |= {
            "num_computed_tokens": draw(st.integers(0, 99)),
            "num_prompt_tokens": draw(st.integers(1, 99)),
            "phase": phase,
            "prefill_complete": draw(st.booleans()),
            "resumed": phase == "resumed",
        }
    return entry


@st.composite
def records(draw: st.DrawFn) -> dict[str, Any]:
    extended = draw(st.booleans())
    entries = draw(st.lists(requests(extended), max_size=6))
    record: dict[str, Any] = {"source": "dispatch_logger", "timestamp": "2026-05-13T10:00:00"}
    if extended:
        record["host"] = draw(st.sampled_from(["node1", 'a"b', "节点"]))
    record |= {
        "pid": draw(st.integers(1, 9)),
        "rank": draw(st.integers(0, 1)),
        "step": draw(st.integers(0, 99)),
        "phase": draw(st.sampled_from(["prefill", "decode"])),
    }
    if extended:
        record["attn_state"] = draw(st.sampled_from(["DecodeOnly", None]))
    total = sum(entry["tokens"] for entry in entries)
    return {**record, "total_num_scheduled_tokens": total, "requests": entries}


def scan(path: Path, size: int | None = None) -> list[logs.RangeScan]:
    length = path.stat().st_size
    return [logs.scan_dispatch(path, 0, *span) for span in logs.byte_ranges(length, size or max(length, 1))]


@settings(max_examples=300, deadline=None)
@given(record=records(), compact=st.booleans(), ascii_only=st.booleans())
def test_the_fast_path_reads_what_the_parser_reads(
    tmp_path_factory: pytest.TempPathFactory, record: dict[str, Any], compact: bool, ascii_only: bool
) -> None:
    separators = (",", ":") if compact else None
    line = json.dumps(record, separators=separators, ensure_ascii=ascii_only).encode()
    path = tmp_path_factory.mktemp("log") / "dispatch_log.jsonl"
    path.write_bytes(line + b"\n")
    with pytest.MonkeyPatch.context() as patch:
        fast = scan(path)[0]
        patch.setattr(logs, "_plain_dispatch_line", lambda _: None)
        slow = scan(path)[0]
    assert fast.scheduled == slow.scheduled
    assert (fast.spans, fast.pids, fast.damaged) == (slow.spans, slow.pids, slow.damaged)


def test_the_fast_path_is_taken_for_a_busy_step(tmp_path: Path) -> None:
    entries = [{"request_id": f"r{n}", "type": "cached", "tokens": 1} for n in range(50)]
    entries.append({"request_id": "n", "type": "new", "tokens": 7})
    record = {
        "source": "dispatch_logger",
        "timestamp": "t",
        "pid": 1,
        "rank": 0,
        "step": 3,
        "phase": "prefill",
        "total_num_scheduled_tokens": 57,
        "requests": entries,
    }
    found = logs._plain_dispatch_line(json.dumps(record).encode())
    assert found is not None
    assert [entry.id for entry in found[1]] == ["n"]
    record["total_num_scheduled_tokens"] = 58  # one of the cached entries is no plain decode
    assert logs._plain_dispatch_line(json.dumps(record).encode()) is None


@settings(max_examples=100, deadline=None)
@given(lines=st.lists(records(), min_size=1, max_size=8), size=st.integers(1, 400))
def test_byte_ranges_read_every_line_once(
    tmp_path_factory: pytest.TempPathFactory, lines: list[dict[str, Any]], size: int
) -> None:
    path = tmp_path_factory.mktemp("log") / "dispatch_log.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    whole, parts = scan(path)[0], scan(path, size)
    assert [entry for part in parts for entry in part.scheduled] == whole.scheduled
    assert sum(part.lines for part in parts) == len(lines)
    assert logs.merge_spans([part.spans for part in parts]) == logs.merge_spans([whole.spans])


DAMAGE = [
    (b'{"source": "dispatch_logger", "pid": 1', "not whole JSON"),
    (b"\0" * 300, "only NUL bytes"),
    (b'{"source": "dispatch_\0logger"}', "NUL bytes inside"),
    (b"Traceback (most recent call last):", "not whole JSON"),
    (b'{"source": "dispatch_logger", "pid": 1, "rank": 0, "step": 2}', "malformed"),
    (b'{"source": "dispatch_logger", "pid": 1, "rank": 0, "step": -2, "requests": []}', "malformed"),
    (b'{"source": "dispatch_logger", "pid": true, "rank": 0, "step": 2, "requests": []}', "malformed"),
    (b'{"source": "dispatch_logger", "pid": 1, "rank": 0, "step": 2, "requests": [{"request_id": 7}]}', "malformed"),
    (b"[" * 5000, "not whole JSON"),
    (b"\xff\xfe\xfa", "not whole JSON"),
]
GOOD = (
    b'{"source": "dispatch_logger", "timestamp": "t", "pid": 1, "rank": 0, "step": %d, "phase": "prefill", '
    b'"total_num_scheduled_tokens": 5, "requests": [{"request_id": "r%d", "type": "new", "tokens": 5}]}'
)


@pytest.mark.parametrize(("bad", "cause"), DAMAGE)
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_damage_is_counted_and_costs_one_line(tmp_path: Path, bad: bytes, cause: str, place: str) -> None:
    lines = [GOOD % (step, step) for step in range(4)]
    at = {"first": 0, "middle": 2, "last": 4}[place]
    lines.insert(at, bad)
    path = tmp_path / "dispatch_log.jsonl"
    path.write_bytes(b"\n".join(lines) + (b"" if place == "last" else b"\n"))
    (found,) = scan(path)
    assert [entry.request_id for entry in found.scheduled] == ["r0", "r1", "r2", "r3"]
    assert found.damaged == 1
    assert found.damage[0].line == at + 1
    assert cause in found.damage[0].cause


@pytest.mark.parametrize("foreign", [b'{"source": "update_actor", "x": 1}', b"{}", b"[1, 2]", b"17", b'"text"'])
def test_a_foreign_line_is_counted_apart(tmp_path: Path, foreign: bytes) -> None:
    path = tmp_path / "dispatch_log.jsonl"
    path.write_bytes(foreign + b"\n" + GOOD % (0, 0) + b"\n\n")
    (found,) = scan(path)
    assert (found.foreign, found.damaged, len(found.scheduled)) == (1, 0, 1)


def test_a_line_behind_a_nul_tail_is_kept(tmp_path: Path) -> None:
    """A file system that lost power leaves NULs where the tail was; the next process appends behind them."""
    path = tmp_path / "dispatch_log.jsonl"
    path.write_bytes(GOOD % (0, 0) + b"\n" + b"\0" * 64 + GOOD % (1, 1) + b"\n" + b"\0" * 4096)
    (found,) = scan(path)
    assert [entry.request_id for entry in found.scheduled] == ["r0", "r1"]
    assert found.damaged == 2


def test_two_lines_in_one_are_not_read_as_one(tmp_path: Path) -> None:
    path = tmp_path / "dispatch_log.jsonl"
    path.write_bytes((GOOD % (0, 0))[:150] + GOOD % (1, 1) + b"\n" + GOOD % (2, 2) + b"\n")
    (found,) = scan(path)
    assert [entry.request_id for entry in found.scheduled] == ["r2"]
    assert found.damaged == 1


def test_an_endless_line_costs_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_LINE_BYTES", 1000)
    path = tmp_path / "dispatch_log.jsonl"
    path.write_bytes(GOOD % (0, 0) + b"\n" + b"x" * 5000 + b"\n" + GOOD % (1, 1) + b"\n" + b"\0" * 5000)
    found = scan(path)[0]
    assert [entry.request_id for entry in found.scheduled] == ["r0", "r1"]
    assert [damage.cause for damage in found.damage] == ["a line of 5001 bytes", "only NUL bytes"]


def test_a_byte_order_mark_and_carriage_returns_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "dispatch_log.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD % (0, 0) + b"\r\n" + GOOD % (1, 1) + b"\r\n")
    (found,) = scan(path)
    assert (len(found.scheduled), found.damaged) == (2, 0)


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=300), size=st.integers(1, 50))
def test_any_bytes_are_read_without_an_error(tmp_path_factory: pytest.TempPathFactory, data: bytes, size: int) -> None:
    path = tmp_path_factory.mktemp("log") / "dispatch_log.jsonl"
    path.write_bytes(data)
    for read in (logs.scan_dispatch, logs.scan_training):
        for span in logs.byte_ranges(len(data), size):
            assert not read(path, 0, *span).scheduled


def test_speculative_decoding_in_a_plain_log_stays_bounded(tmp_path: Path) -> None:
    line = GOOD.replace(b"new", b"cached").replace(b"r%d", b"r") + b"\n"
    path = tmp_path / "dispatch_log.jsonl"
    path.write_bytes(b"".join(line % step for step in range(500)))
    (found,) = scan(path)
    assert len(found.scheduled) == logs.MAX_CACHED_ENTRIES
