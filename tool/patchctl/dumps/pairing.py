"""Join the requests of both sides and give each one a status. Pure: logs come in as records, dumps through a look-up.

An inference request is an attempt: its first ("new") step and the steps that follow. The attempt that computed the
whole prompt alone in one step can be compared; every other way to compute a prompt has a status of its own.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from .checks import DumpHead, check_pair
from .logs import ChainMember, Scheduled, Span, Trained

_SUFFIX = re.compile(r"-[0-9a-f]{8}$")
_ALL_SUFFIXES = re.compile(r"(?:-[0-9a-f]{8})+$")
# How far a log's step counter may run from msprobe's before the dump is called lost instead of shifted.
DRIFT_REACH = (-1, 1, -2, 2)
# Without the log's own word on tensor parallelism, a Megatron dump may be padded to a multiple of up to this.
MAX_PADDING = 16


class Status(str, Enum):
    """What became of a request."""

    PAIR = "PAIR"
    CHUNKED = "CHUNKED"
    MIXED = "MIXED"
    PARTIAL = "PARTIAL"
    LENGTH = "LENGTH"
    DRIFT = "DRIFT"
    TRAIN_MULTI = "TRAIN_MULTI"
    AMBIGUOUS = "AMBIGUOUS"
    NO_TRAIN = "NO_TRAIN"
    NO_INFER = "NO_INFER"
    NO_INFER_DUMP = "NO_INFER_DUMP"
    NO_TRAIN_DUMP = "NO_TRAIN_DUMP"


@dataclass(frozen=True)
class Dump:
    """A dump.json: its path, and its head or the reason why it cannot be read."""

    path: str
    head: DumpHead | None
    problem: str = ""


class Dumps(Protocol):
    """Where dumps are looked up; None where no dump.json was written."""

    def infer(self, source: int, rank: int, step: int, pid: int) -> Dump | None:
        """The inference dump of a step of the process that wrote log `source`."""
        ...

    def train(self, rank: int, step: int, pid: int) -> Dump | None:
        """The training dump of a step."""
        ...


@dataclass(frozen=True)
class Pairing:
    """One request's result. `infer` and `train` are places as the JSON document shows them (see `document`)."""

    request_id: str
    status: Status
    infer: dict[str, Any] | None
    train: dict[str, Any] | None
    why: str
    order: tuple[int, int, int]
    infer_other: tuple[Any, ...] = ()
    train_other: tuple[Any, ...] = ()
    tokens: tuple[int | None, int | None] = (None, None)
    checks: dict[str, str] = field(default_factory=dict)
    infer_dumps: tuple[dict[str, Any], ...] = ()
    train_dumps: tuple[dict[str, Any], ...] = ()

    def document(self) -> dict[str, Any]:
        """The entry of this request under `requests` in the pairs document."""
        entry: dict[str, Any] = {
            "status": self.status.value,
            "infer": self.infer,
            "train": self.train,
            "why": self.why,
            "tokens": {"infer": self.tokens[0], "train": self.tokens[1]},
        }
        for key in ("infer_other", "train_other", "infer_dumps", "train_dumps"):
            if value := getattr(self, key):
                entry[key] = list(value)
        if self.checks:
            entry["checks"] = self.checks
        return entry


class Lives:
    """Tells which steps were overwritten: a process that started over writes the same step folders again."""

    def __init__(self, infer: Iterable[Span], train: Iterable[Span]) -> None:
        self._infer: dict[tuple[int, int], list[Span]] = {}
        for span in infer:
            self._infer.setdefault((span.source, span.rank), []).append(span)
        for spans in self._infer.values():
            spans.sort(key=lambda span: span.offset)
        self._train: dict[int, list[Span]] = {}
        for span in train:
            self._train.setdefault(span.rank, []).append(span)

    def infer_overwritten(self, entry: Scheduled) -> bool:
        """A later life of the same process folder wrote this step again."""
        spans = self._infer.get((entry.source, entry.rank), [])
        own = bisect_right([span.offset for span in spans], entry.offset)
        return any(span.first_step <= entry.step <= span.last_step for span in spans[own:])

    def train_overwritten(self, sample: Trained) -> bool:
        """Another trainer of the same rank, started after this one had ended, wrote this step again."""
        spans = self._train.get(sample.rank, [])
        if len(spans) < 2:
            return False
        own = [span for span in spans if span.source == sample.source and span.offset <= sample.offset]
        if not own:
            return False
        ended = own[-1].last_time
        return any(
            span is not own[-1]
            and span.first_step <= sample.step <= span.last_step
            and (span.source, span.offset) != (own[-1].source, own[-1].offset)
            and (span.first_time > ended or (span.source == sample.source and span.offset > own[-1].offset))
            for span in spans
        )


def bare_id(request_id: str) -> str:
    """The id without any vLLM-like suffix: equal for all spellings of one request, for hashing only."""
    return _ALL_SUFFIXES.sub("", request_id)


def without_suffix(request_id: str) -> str:
    """The id without one suffix of 8 hex digits."""
    return _SUFFIX.sub("", request_id)


def pair_requests(
    scheduled: Sequence[Scheduled],
    trained: Sequence[Trained],
    chains: Sequence[ChainMember],
    lives: Lives,
    dumps: Dumps,
) -> list[Pairing]:
    """Every request of the given records with its status. Records of one request must all be given at once."""
    samples: dict[str, list[Trained]] = {}
    for sample in trained:
        samples.setdefault(sample.request_id, []).append(sample)
    entries: dict[str, list[Scheduled]] = {}
    for entry in scheduled:
        key = entry.request_id
        if key not in samples:
            key = without_suffix(key)
        entries.setdefault(key, []).append(entry)
    resumed = {chain.request_id: chain.sample_id for chain in chains}
    result = [_pair_one(key, found, entries.get(key, []), lives, dumps) for key, found in samples.items()]
    result += [_without_training(key, found, resumed.get(key)) for key, found in entries.items() if key not in samples]
    return sorted(result, key=lambda pairing: (pairing.order, pairing.request_id))


def _pair_one(request_id: str, samples: list[Trained], entries: list[Scheduled], lives: Lives, dumps: Dumps) -> Pairing:
    side = _choose_training(samples, lives, dumps)
    first = side.first
    order = (0, first.source, first.offset)
    base = _Draft(request_id, order, side)
    attempts = _attempts(entries)
    if not attempts:
        return base.done(Status.NO_INFER, "no inference line has this request")
    if side.rivals:
        return base.done(
            Status.AMBIGUOUS,
            f"trained at the same time at {_list(side.rivals)}: which one counts cannot be told",
            attempts[0].place(),
        )
    if first.samples > 1:
        return base.done(
            Status.TRAIN_MULTI,
            f"its micro batch holds {first.samples} samples; set log_prob_micro_batch_size_per_gpu=1 and "
            "use_dynamic_bsz=False",
            _best(attempts, None).place(),
        )
    if side.problem:
        return base.done(Status.NO_TRAIN_DUMP, side.problem, _best(attempts, first.prompt_len).place())
    ranked = sorted((_classify(attempt, side, lives) for attempt in attempts), key=lambda option: option.rank)
    equal = [option for option in ranked if option.rank == ranked[0].rank]
    if ranked[0].status is Status.PAIR:
        return _pair_clean(base, _group_ranks(equal), ranked, dumps)
    best = ranked[0]
    return base.done(best.status, best.why, best.place, _others(best, ranked), best.tokens)


@dataclass(frozen=True)
class _Side:
    """The chosen training occurrence: all its ranks and chunks, its length and what is wrong with it."""

    first: Trained
    parts: tuple[Trained, ...]
    others: tuple[Trained, ...]
    rivals: tuple[dict[str, int], ...]
    dumps: tuple[dict[str, Any], ...]
    head: DumpHead | None
    problem: str
    padding: int
    logs_only: bool

    @property
    def tokens(self) -> int | None:
        """N that the training forward saw."""
        if self.head and self.head.tokens is not None:
            return self.head.tokens
        return self.first.seq_len if self.first.seq_len is not None else self.first.prompt_len

    def fits(self, tokens: int) -> bool:
        """`tokens` of inference are the training N, or N less the padding of tensor parallelism.

        With the logs alone, and no length in them, any length fits.
        """
        if self.tokens is None:
            return self.logs_only
        return 0 <= self.tokens - tokens < max(self.padding, 1)


def _choose_training(samples: list[Trained], lives: Lives, dumps: Dumps) -> _Side:
    live = [sample for sample in samples if not lives.train_overwritten(sample)]
    pool = [sample for sample in live or samples if sample.role in (None, "actor")] or live or samples
    by_source: dict[int, list[Trained]] = {}
    for sample in sorted(pool, key=lambda sample: (sample.source, sample.offset)):
        by_source.setdefault(sample.source, []).append(sample)
    heads = sorted((found[0] for found in by_source.values()), key=lambda s: (s.timestamp, s.rank, s.source))
    first = heads[0]
    # Ranks of one model-parallel group log the same micro batch; ranks elsewhere do not.
    group = [
        s for s in heads if s.megatron is not None or (s.step == first.step and s.rank != first.rank) or s is first
    ]
    first = min(group, key=lambda s: (dict(s.megatron or ()).get("pp_rank", 0), s.rank, s.source))
    rivals = [s for s in heads if s not in group and s.timestamp == first.timestamp]
    parts: list[Trained] = []
    for sample in group:
        seen: set[tuple[int, int, int]] = set()
        for found in by_source[sample.source] if sample.megatron is not None else [sample]:
            shape = dict(found.megatron or ())
            key = (shape.get("pp_rank", 0), shape.get("vpp_rank", 0), shape.get("tp_rank", 0))
            if key not in seen:
                seen.add(key)
                parts.append(found)
    parts.sort(key=lambda s: (s is not first, s.rank, s.source, s.offset))
    others = tuple(sample for sample in sorted(samples, key=lambda s: (s.source, s.offset)) if sample not in parts)
    described, head, problem, logs_only = [], None, "", False
    for part in parts:
        dump = dumps.train(part.rank, part.step, part.pid)
        if dump is None or dump.head is None:
            if part is first:
                reason = dump.problem if dump else f"no dump.json for training step {part.step}, rank {part.rank}"
                problem = reason or problem
            continue
        logs_only = logs_only or not dump.path
        if dump.path:
            described.append({"path": dump.path, "step": part.step, "rank": part.rank, **dict(part.megatron or ())})
        if head is None and (part is first or dump.head.embedding_name):
            head = dump.head
    if not live:
        problem = f"training step {first.step}, rank {first.rank} was overwritten by a later run in the same folder"
    shape = dict(first.megatron or ())
    padding = shape.get("seq_padding") or shape.get("tp_size", 1)
    if first.megatron is None and head and head.embedding_name and "word_embeddings" in head.embedding_name:
        padding = MAX_PADDING
    rival_places = tuple({"step": s.step, "rank": s.rank} for s in (first, *rivals)) if rivals else ()
    return _Side(first, tuple(parts), others, rival_places, tuple(described), head, problem, padding, logs_only)


@dataclass(frozen=True)
class _Attempt:
    """The steps of one internal id in one process."""

    entries: tuple[Scheduled, ...]

    @property
    def first(self) -> Scheduled:
        return self.entries[0]

    def place(self) -> dict[str, Any]:
        return _place(self.first)


def _attempts(entries: list[Scheduled]) -> list[_Attempt]:
    """Cut the entries of one request into attempts, whole ones only: without its first step one cannot be read."""
    by_process: dict[tuple[int, int, str], list[Scheduled]] = {}
    for entry in sorted(entries, key=lambda entry: (entry.source, entry.offset)):
        by_process.setdefault((entry.source, entry.rank, entry.request_id), []).append(entry)
    attempts: list[_Attempt] = []
    for found in by_process.values():
        starts = [index for index, entry in enumerate(found) if entry.new]
        for begin, end in zip(starts, [*starts[1:], len(found)], strict=False):
            attempts.append(_Attempt(tuple(found[begin:end])))
    return attempts


@dataclass(frozen=True)
class _Option:
    """An attempt seen against the training length."""

    attempt: _Attempt
    status: Status
    rank: int
    why: str
    place: dict[str, Any]
    tokens: int
    used: tuple[Scheduled, ...]


_RANKS = {
    status: rank
    for rank, status in enumerate(
        (Status.PAIR, Status.MIXED, Status.CHUNKED, Status.PARTIAL, Status.LENGTH, Status.NO_INFER_DUMP)
    )
}


def _classify(attempt: _Attempt, side: _Side, lives: Lives) -> _Option:
    first, length = attempt.first, side.tokens

    def option(status: Status, why: str, place: dict[str, Any], used: Sequence[Scheduled] = (first,)) -> _Option:
        return _Option(attempt, status, _RANKS[status], why, place, sum(entry.tokens for entry in used), tuple(used))

    if lives.infer_overwritten(first):
        return option(
            Status.NO_INFER_DUMP,
            f"step {first.step} was overwritten by a later process with the same pid",
            _place(first),
        )
    if first.computed:
        return option(
            Status.PARTIAL,
            f"{first.tokens} of {first.computed + first.tokens} tokens were computed, {first.computed} came from the "
            "prefix cache; turn prefix caching off",
            _place(first),
        )
    if side.fits(first.tokens):
        if first.line_requests == 1:
            return option(Status.PAIR, "", _place(first))
        place = _place(first)
        why = f"{first.line_requests} requests in step {first.step}"
        if first.start is not None:
            place["slice"] = [first.start, first.start + first.tokens]
            why += "; the slice holds only if the runner kept the order of the log"
        else:
            why += ", decodes among them: where its tokens lie depends on the runner"
        return option(Status.MIXED, why, place)
    chunk = _chunks(attempt, side)
    if chunk is not None:
        steps = [entry.step for entry in chunk]
        total = sum(entry.tokens for entry in chunk)
        why = f"prefill cut in {len(chunk)} steps ({'+'.join(str(entry.tokens) for entry in chunk)}={total})"
        if not side.fits(total):
            why += ", and a last one of a single token that the log shows as a decode"
        why += "; statistics of parts cannot be joined: turn chunked prefill off or raise max_num_batched_tokens"
        place = {"pid": first.pid, "steps": steps, "rank": first.rank}
        return option(Status.CHUNKED, why, place, chunk)
    if length is None:
        return option(Status.LENGTH, "the training dump does not tell its number of tokens", _place(first))
    if first.tokens > length:
        return option(
            Status.LENGTH,
            f"{first.tokens} tokens in inference, {length} in training: not the same prompt",
            _place(first),
        )
    if first.computed == 0 and first.prompt == first.tokens:
        return option(
            Status.LENGTH,
            f"the prompt has {first.tokens} tokens, training saw {length}: was PROMPTS_ONLY=1 set for the trainer?",
            _place(first),
        )
    if first.computed == 0:
        return option(
            Status.PARTIAL,
            f"the prefill stopped after {first.tokens} of {first.prompt or length} tokens",
            _place(first),
        )
    return option(
        Status.PARTIAL,
        f"{first.tokens} of {length} tokens were computed: a prefix cache hit (turn prefix caching off), or training "
        "saw the response too (PROMPTS_ONLY=1)",
        _place(first),
    )


def _chunks(attempt: _Attempt, side: _Side) -> tuple[Scheduled, ...] | None:
    """The steps that make the whole prompt together; the last may be missing where a log cannot show it."""
    total, used = 0, list[Scheduled]()
    for entry in attempt.entries:
        if entry.resumed or (used and entry.tokens <= 0):
            break
        total += entry.tokens
        used.append(entry)
        if side.fits(total):
            return tuple(used) if len(used) > 1 else None
    # A log without our fields shows a last chunk of one token as a decode. A prefix cache works in blocks of 16 and
    # more, so that exactly one token is missing has no other cause.
    first = attempt.first
    if first.computed is None and first.tokens > 1 and side.tokens is not None and side.padding <= 1:
        total, used = 0, []
        for entry in attempt.entries:
            total += entry.tokens
            used.append(entry)
            if total + 1 == side.tokens:
                return tuple(used)
    return None


def _pair_clean(base: _Draft, groups: list[list[_Option]], ranked: list[_Option], dumps: Dumps) -> Pairing:
    """Choose among attempts that fit by the log: their dumps decide, and what they cannot decide is ambiguous."""
    outcomes = [_look(base, group, ranked, dumps) for group in groups]
    good = [outcome for outcome in outcomes if outcome.status is Status.PAIR]
    if len(good) > 1:
        places = [
            group[0].place for group, outcome in zip(groups, outcomes, strict=True) if outcome.status is Status.PAIR
        ]
        return base.done(
            Status.AMBIGUOUS,
            f"{len(good)} inference runs fit equally well: {_list(places)}",
            None,
            tuple(places),
            groups[0][0].tokens,
        )
    return good[0] if good else outcomes[0]


def _look(base: _Draft, group: list[_Option], ranked: list[_Option], dumps: Dumps) -> Pairing:
    """Check one attempt (with all its ranks) against its dumps."""
    best = group[0]
    entry, side = best.attempt.first, base.side
    others = _others(best, ranked)
    dump = dumps.infer(entry.source, entry.rank, entry.step, entry.pid)
    if dump is None or dump.head is None:
        reason = dump.problem if dump else f"no dump.json for step {entry.step}, rank {entry.rank} of pid {entry.pid}"
        return base.done(Status.NO_INFER_DUMP, reason, best.place, others, best.tokens)
    head, checks = dump.head, {}
    if side.head is not None:
        checks = check_pair(head, side.head)
    checks["weights"] = _weight_versions(side.first)
    wrong = head.tokens is not None and head.tokens != entry.line_tokens
    if wrong or checks.get("input_ids", "same") not in ("same", "unknown"):
        place = dict(best.place)
        for reach in DRIFT_REACH:
            near = dumps.infer(entry.source, entry.rank, entry.step + reach, entry.pid)
            fits = near and near.head and near.head.tokens == entry.line_tokens
            if fits and near and near.head and (side.head is None or near.head.ids == side.head.ids):
                place["dump_step"] = entry.step + reach
                break
        why = f"the dump at the logged step holds {head.tokens} tokens, the log says {entry.line_tokens}"
        if not wrong:
            why = f"the dump at the logged step is another prompt's: {checks['input_ids']}"
        if "dump_step" in place:
            why += f"; step {place['dump_step']} would fit"
        return base.done(Status.DRIFT, why, place, others, best.tokens, checks)
    seen = side.first.seq_len
    if side.head and side.head.tokens is not None and seen is not None and not side.fits(seen):
        why = f"the training dump holds {side.head.tokens} tokens, its log line says {seen}: another request's dump"
        return base.done(Status.DRIFT, why, best.place, others, best.tokens, checks)
    described = []
    for option in group:
        found = option.attempt.first
        other = dump if option is best else dumps.infer(found.source, found.rank, found.step, found.pid)
        if other is not None and other.head is not None and other.path:
            described.append({"path": other.path, **option.place})
    padded = (side.tokens or 0) - best.tokens
    why = f"training is padded by {padded} tokens" if padded else ""
    return base.done(Status.PAIR, why, best.place, others, best.tokens, checks, tuple(described))


def _weight_versions(sample: Trained) -> str:
    low, high, trainer = sample.weights
    if low is None or high is None or trainer is None:
        return "unknown"
    if low != high:
        return f"the rollout mixed weight versions {low} to {high}"
    return "same" if low == trainer else f"the rollout used weight version {low}, the trainer {trainer}"


def _group_ranks(options: list[_Option]) -> list[list[_Option]]:
    """Options of one internal id on different ranks are one run of a model-parallel server; lowest rank first."""
    groups: list[list[_Option]] = []
    for option in sorted(options, key=lambda o: (o.attempt.first.rank, o.attempt.first.source, o.attempt.first.offset)):
        first = option.attempt.first
        for group in groups:
            head = group[0].attempt.first
            ranks = {member.attempt.first.rank for member in group}
            if head.request_id == first.request_id and first.rank not in ranks and head.source != first.source:
                group.append(option)
                break
        else:
            groups.append([option])
    return groups


def _others(best: _Option, options: list[_Option]) -> tuple[Any, ...]:
    """The request's other prefill-like steps: numbers where the process is the same, places where it is not."""
    chosen = best.attempt.first
    rest: list[Any] = []
    for option in options:
        for entry in option.attempt.entries:
            if entry in best.used:
                continue
            same = (entry.source, entry.rank) == (chosen.source, chosen.rank)
            rest.append(entry.step if same else _place(entry))
    return tuple(rest)


@dataclass(frozen=True)
class _Draft:
    request_id: str
    order: tuple[int, int, int]
    side: _Side

    def done(
        self,
        status: Status,
        why: str,
        infer: dict[str, Any] | None = None,
        others: tuple[Any, ...] = (),
        tokens: int | None = None,
        checks: dict[str, str] | None = None,
        infer_dumps: tuple[dict[str, Any], ...] = (),
    ) -> Pairing:
        side = self.side
        return Pairing(
            self.request_id,
            status,
            infer,
            {"step": side.first.step, "rank": side.first.rank},
            why,
            self.order,
            others,
            tuple({"step": sample.step, "rank": sample.rank} for sample in (*side.parts[1:], *side.others)),
            (tokens, side.tokens),
            checks or {},
            infer_dumps,
            side.dumps if status is Status.PAIR else (),
        )


def _without_training(request_id: str, entries: list[Scheduled], sample: str | None) -> Pairing:
    best = _best(_attempts(entries) or [_Attempt((entry,)) for entry in entries], None)
    why = f"aborted and resumed; its sample is recorded as {sample}" if sample else "no training line has this request"
    first = best.first
    return Pairing(
        request_id,
        Status.NO_TRAIN,
        best.place(),
        None,
        why,
        (1, first.source, first.offset),
        tokens=(first.tokens, None),
    )


def _best(attempts: list[_Attempt], length: int | None) -> _Attempt:
    """The attempt to show where none can be judged: of the right length, alone, earliest."""
    return min(
        attempts,
        key=lambda a: (
            length is not None and a.first.tokens != length,
            a.first.line_requests != 1,
            a.first.rank,
            a.first.source,
            a.first.offset,
        ),
    )


def _place(entry: Scheduled) -> dict[str, Any]:
    return {"pid": entry.pid, "step": entry.step, "rank": entry.rank}


def _list(places: Sequence[dict[str, Any]]) -> str:
    return ", ".join(" ".join(f"{key} {value}" for key, value in place.items()) for place in places)
