"""Pair two dump trees of any size: read the logs in byte ranges, partition by request id on disk, join each partition.

The ranges are read by a few processes. What matters of a log (a prompt's steps, not its decodes) goes to partitions by
a hash of the bare request id, so that a partition holds everything about its requests and fits in memory.
"""

from __future__ import annotations

import heapq
import json
import pickle
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

from patchctl.errors import PatchctlError

from . import logs
from .checks import DumpHead, UnreadableDump, read_head
from .layout import DumpTree
from .logs import ChainMember, LogFile, RangeScan, Scheduled, Span, Trained
from .pairing import Dump, Lives, bare_id, pair_requests
from .workers import Progress, RunAll, worker_count, worker_pool

PARTITION_BYTES = 64 * 1024 * 1024
SMALL_BYTES = 16 * 1024 * 1024
MAX_PARTITIONS = 128
SPILL_RECORDS = 4096


@dataclass(frozen=True)
class PairTrees:
    """The two sides of a run: folders, their logs, and whether to look at dump.json files (or at logs alone)."""

    generate: Path
    actor: Path
    dispatch_logs: tuple[LogFile, ...]
    training_logs: tuple[LogFile, ...]
    look_at_dumps: bool = True

    @property
    def size(self) -> int:
        """Bytes of all logs."""
        return sum(log.size for log in (*self.dispatch_logs, *self.training_logs))


@dataclass
class PairRun:
    """A running result: iterate `results`; counts and warnings are complete when it is exhausted."""

    trees: PairTrees
    results: Iterator[tuple[str, str, str]] = field(repr=False)
    counts: Counter[str] = field(default_factory=Counter)
    warnings: list[str] = field(default_factory=list)
    lines: dict[str, int] = field(default_factory=dict)


def open_trees(generate: Path, actor: Path, look_at_dumps: bool = True) -> PairTrees:
    """Find the logs under both folders. Raises PatchctlError when a side has none."""
    dispatch = logs.find_logs(generate, logs.DISPATCH_LOG)
    training = logs.find_logs(actor, logs.TRAINING_LOG)
    if not dispatch:
        hint = (
            " (it holds training logs: are the two folders swapped?)"
            if logs.find_logs(generate, logs.TRAINING_LOG)
            else ""
        )
        raise PatchctlError(
            f"no {{pid}}/{logs.DISPATCH_LOG} under `{generate}`{hint}; give the dump_path of config_generate.json"
        )
    if not training:
        raise PatchctlError(
            f"no {{pid}}/{logs.TRAINING_LOG} under `{actor}`; give the dump_path of config_actor.json "
            "(was DUMP_ON=1 set for the Ray workers?)"
        )
    return PairTrees(generate, actor, tuple(dispatch), tuple(training), look_at_dumps)


@contextmanager
def pair_trees(trees: PairTrees, jobs: int | None = None, progress: Progress | None = None) -> Iterator[PairRun]:
    """Pair every request of both trees.

    `results` yields (request id, status, JSON text of its entry), training order first, then requests that only
    inference knows. `progress(done, total)` counts log bytes. Raises OSError when a log or the temporary folder fails.
    """
    count = max(1, min(MAX_PARTITIONS, trees.size // PARTITION_BYTES))
    jobs = jobs or worker_count()
    if trees.size <= SMALL_BYTES:
        jobs = 1
    with tempfile.TemporaryDirectory(prefix="patchctl-pair-") as folder:
        with worker_pool(jobs) as run_all:
            spill = _Spill(Path(folder), count)
            dispatch = _read_logs(trees.dispatch_logs, logs.scan_dispatch, spill, run_all, progress, 0, trees.size)
            read = sum(log.size for log in trees.dispatch_logs)
            training = _read_logs(trees.training_logs, logs.scan_training, spill, run_all, progress, read, trees.size)
            spill.flush()
            spans = ([s for scan in dispatch for s in scan.spans], [s for scan in training for s in scan.spans])
            tasks = [(trees, Path(folder), index, spans) for index in range(count)]
            joined: dict[int, tuple[int, int]] = {}
            for found in run_all(_pair_partition, tasks):
                for source, (requests, paired) in found.items():
                    old = joined.get(source, (0, 0))
                    joined[source] = (old[0] + requests, old[1] + paired)
        run = PairRun(trees, iter(()))
        run.lines = {"dispatch": sum(s.lines for s in dispatch), "training": sum(s.lines for s in training)}
        run.warnings = [
            *_log_warnings(trees.dispatch_logs, dispatch),
            *_log_warnings(trees.training_logs, training),
            *_left_over(trees, joined),
        ]
        run.results = _merged(Path(folder), count, run.counts)
        yield run


@dataclass
class _LogScan:
    """One whole log: sums over its ranges, damage with absolute line numbers, spans joined."""

    lines: int
    damage: list[logs.Damage]
    damaged: int
    foreign: int
    without_id: int
    without_id_steps: list[tuple[int, int]]
    cut: bool
    spans: list[Span]
    pids: set[int]
    trained: int


class _Spill:
    """Records by partition, on disk."""

    def __init__(self, folder: Path, count: int) -> None:
        self._paths = [_partition_path(folder, index) for index in range(count)]
        self._buffers: list[list[Any]] = [[] for _ in range(count)]

    def add(self, records: Iterable[Scheduled | Trained | ChainMember]) -> None:
        count = len(self._paths)
        for record in records:
            index = crc32(bare_id(record.request_id).encode("utf-8", "surrogatepass")) % count if count > 1 else 0
            buffer = self._buffers[index]
            buffer.append(record)
            if len(buffer) >= SPILL_RECORDS:
                self._write(index)

    def flush(self) -> None:
        for index in range(len(self._paths)):
            self._write(index)

    def _write(self, index: int) -> None:
        with self._paths[index].open("ab") as stream:
            pickle.dump(self._buffers[index], stream, protocol=pickle.HIGHEST_PROTOCOL)
        self._buffers[index] = []


def _partition_path(folder: Path, index: int) -> Path:
    return folder / f"partition{index}.pickle"


def _result_path(folder: Path, index: int) -> Path:
    return folder / f"result{index}.pickle"


def _read_logs(
    files: tuple[LogFile, ...],
    scan: Callable[[Path, int, int, int], RangeScan],
    spill: _Spill,
    run_all: RunAll,
    progress: Progress | None,
    done: int,
    total: int,
) -> list[_LogScan]:
    """Read every range of every log into the spill; one summary a log."""
    tasks = [(log.path, source, *span) for source, log in enumerate(files) for span in logs.byte_ranges(log.size)]
    whole = [_LogScan(0, [], 0, 0, 0, [], False, [], set(), 0) for _ in files]
    spans: list[list[list[Span]]] = [[] for _ in files]
    for (_, source, start, end), found in zip(tasks, run_all(scan, tasks), strict=True):
        spill.add(found.scheduled)
        spill.add(found.trained)
        spill.add(found.chains)
        log = whole[source]
        log.damage += [logs.Damage(source, log.lines + damage.line, damage.cause) for damage in found.damage]
        log.lines += found.lines
        log.damaged += found.damaged
        log.foreign += found.foreign
        log.without_id += found.without_id
        log.without_id_steps = (log.without_id_steps + found.without_id_steps)[:20]
        log.cut = found.last_line_cut
        log.pids |= found.pids
        log.trained += len(found.trained)
        spans[source].append(found.spans)
        if progress is not None:
            done += end - start
            progress(done, total)
    for source, log in enumerate(whole):
        log.spans = logs.merge_spans(spans[source])
    return whole


@dataclass(frozen=True)
class _TreeDumps:
    """Looks dumps up in the two folders."""

    trees: PairTrees
    generate: DumpTree
    actor: DumpTree

    def infer(self, source: int, rank: int, step: int, pid: int) -> Dump | None:
        if not self.trees.look_at_dumps:
            return _UNSEEN
        return _dump(self.generate.find(step, rank, self.trees.dispatch_logs[source].folder, pid))

    def train(self, rank: int, step: int, pid: int) -> Dump | None:
        if not self.trees.look_at_dumps:
            return _UNSEEN
        return _dump(self.actor.find(step, rank, "", pid))


_UNSEEN = Dump("", DumpHead(None, None, None, None, None))


def _dump(path: Path | None) -> Dump | None:
    if path is None:
        return None
    try:
        return Dump(str(path), read_head(path))
    except UnreadableDump as error:
        return Dump(str(path), None, f"{path}: {error}")
    except OSError as error:
        return Dump(str(path), None, f"{path}: {error.strerror or error}")


def _pair_partition(
    trees: PairTrees, folder: Path, index: int, spans: tuple[list[Span], list[Span]]
) -> dict[int, tuple[int, int]]:
    """Join one partition into its result file; for each inference log, its requests and how many were trained on."""
    scheduled: list[Scheduled] = []
    trained: list[Trained] = []
    chains: list[ChainMember] = []
    with _partition_path(folder, index).open("rb") as stream:
        while True:
            try:
                records = pickle.load(stream)
            except EOFError:
                break
            for record in records:
                if isinstance(record, Scheduled):
                    scheduled.append(record)
                elif isinstance(record, Trained):
                    trained.append(record)
                else:
                    chains.append(record)
    dumps = _TreeDumps(trees, DumpTree(trees.generate), DumpTree(trees.actor))
    pairings = pair_requests(scheduled, trained, chains, Lives(*spans), dumps)
    sources = {(entry.source, entry.pid): entry.source for entry in scheduled}
    by_pid = {pid: source for source, pid in sources}
    joined: dict[int, tuple[int, int]] = {}
    with _result_path(folder, index).open("wb") as stream:
        for at in range(0, len(pairings), SPILL_RECORDS):
            batch = []
            for pairing in pairings[at : at + SPILL_RECORDS]:
                batch.append((pairing.order, pairing.request_id, pairing.status.value, json.dumps(pairing.document())))
                source = by_pid.get(pairing.infer["pid"]) if pairing.infer else None
                if source is not None:
                    requests, paired = joined.get(source, (0, 0))
                    joined[source] = (requests + 1, paired + (pairing.train is not None))
            pickle.dump(batch, stream, protocol=pickle.HIGHEST_PROTOCOL)
    return joined


def _merged(folder: Path, count: int, counts: Counter[str]) -> Iterator[tuple[str, str, str]]:
    """All results in order; counts statuses on the way."""
    for _, request_id, status, text in heapq.merge(*(_results(_result_path(folder, i)) for i in range(count))):
        counts[status] += 1
        yield request_id, status, text


def _results(path: Path) -> Iterator[tuple[tuple[int, int, int], str, str, str]]:
    with path.open("rb") as stream:
        while True:
            try:
                yield from pickle.load(stream)
            except EOFError:
                return


def _log_warnings(files: tuple[LogFile, ...], scans: list[_LogScan]) -> list[str]:
    """What was wrong with the logs, one line a kind and process."""
    warnings = []
    for log, scan in zip(files, scans, strict=True):
        who = f"pid {log.folder or log.path}"
        if scan.damaged:
            only_last = scan.damaged == 1 and scan.damage[0].line == scan.lines
            where = (
                "last line"
                if only_last
                else ", ".join(f"line {damage.line}: {damage.cause}" for damage in scan.damage[:5])
            )
            more = f", and {scan.damaged - 5} more" if scan.damaged > 5 else ""
            warnings.append(f"{_count(scan.damaged, 'unreadable line')} ({who}, {where}{more})")
        if scan.foreign:
            warnings.append(f"{_count(scan.foreign, 'foreign line')} ({who}): not written by the dump's logger")
        if scan.without_id:
            steps = ", ".join(str(step) for _, step in scan.without_id_steps[:5])
            more = ", ..." if scan.without_id > 5 else ""
            line = f"{_count(scan.without_id, 'training line')} with no request id (step {steps}{more})"
            if not scan.trained:
                line += f"; {who} has no id at all: the patch that keeps the id through the rollout is missing"
            warnings.append(line)
        lives = Counter(span.rank for span in scan.spans)
        for rank, times in sorted(lives.items()):
            if times > 1:
                warnings.append(
                    f"{who}: the steps of rank {rank} start over {_count(times - 1, 'time')}: a later process with the "
                    "same pid wrote into the same folder"
                )
        if log.folder.isdigit() and scan.pids - {int(log.folder)}:
            other = ", ".join(str(pid) for pid in sorted(scan.pids - {int(log.folder)})[:3])
            warnings.append(f"{who}: its log was written by pid {other}: a moved folder, or two hosts share it")
    return warnings


def _left_over(trees: PairTrees, joined: dict[int, tuple[int, int]]) -> list[str]:
    """Processes none of whose requests was trained on, when others were: most often an older run's folder."""
    if not any(paired for _, paired in joined.values()):
        return []
    return [
        f"pid {trees.dispatch_logs[source].folder}: none of its {_count(requests, 'request')} was trained on; "
        "left over from an older run?"
        for source, (requests, paired) in sorted(joined.items())
        if not paired
    ]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
