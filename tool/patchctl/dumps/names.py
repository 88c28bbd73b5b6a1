"""From a dump's module names to the points that both sides have in common.

The tables are data (`mappings/*.json`): which module of vLLM is which module of transformers or Megatron, in the order
of the data flow. This module reads dumps, undoes wrappers (FSDP1, FSDP2, DDP, LoRA), makes Megatron's stage-local
layer numbers global, and resolves the points.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, reduce
from importlib.resources import files
from operator import mul
from pathlib import Path
from typing import Any

from .checks import UnreadableDump

_ENTRY = re.compile(r"^Module\.(?:\d+\.)?(?:(.*)\.)?([^.]+)\.(forward|backward)\.(\d+)$")
WHOLE_PROMPT = "@whole_prompt"
_LAYER = re.compile(r"^(?:.*\.)?layers\.(\d+)(?:\.(.*))?$")


@dataclass(frozen=True)
class Stats:
    """A tensor's statistics, or those of several tensors taken together. `files` are real tensors, in order.

    msprobe leaves mean and norm out (None) of integer tensors, and of all tensors with `precision: high`.
    """

    dtype: str
    count: int
    low: float
    high: float
    mean: float | None
    norm: float | None
    files: tuple[Path, ...] = ()
    is_sum: bool = False

    @property
    def integral(self) -> bool:
        return "int" in self.dtype


@dataclass(frozen=True)
class Term:
    """PATH:FIELD, taken only where the module lacks the field `unless`."""

    path: str
    field: str
    unless: str | None


@dataclass(frozen=True)
class Formula:
    """Terms that are concatenated, or added."""

    terms: tuple[Term, ...]
    is_sum: bool


@dataclass(frozen=True)
class Point:
    """One thing to compare: `module` is the name to report, `name` says what of it."""

    module: str
    name: str
    kind: str
    infer: tuple[Formula, ...]
    fsdp: tuple[Formula, ...]
    megatron: tuple[Formula, ...]
    permuted: frozenset[str]
    guard: Term | None
    only_with: tuple[str, ...]

    def formulas(self, backend: str) -> tuple[Formula, ...]:
        """How the training side of `backend` ("fsdp", "megatron") has this point."""
        return self.megatron if backend == "megatron" else self.fsdp


@dataclass(frozen=True)
class Family:
    """A model family: its points in order, outside of layers (head, tail) and inside."""

    name: str
    head: tuple[Point, ...]
    layer: tuple[Point, ...]
    tail: tuple[Point, ...]
    model_weights: tuple[Point, ...]
    layer_weights: tuple[Point, ...]


Key = tuple[int | None, str]  # (global layer number, path inside the layer); (None, path) outside of layers


@dataclass(frozen=True)
class Entry:
    """One call of one module. `folder` holds its real tensors."""

    class_name: str
    raw: Mapping[str, Any]
    folder: Path


@dataclass(frozen=True)
class Shard:
    """The modules of one dump.json: key -> calls in order."""

    path: Path
    modules: Mapping[Key, tuple[Entry, ...]]
    task: str


@dataclass(frozen=True)
class Side:
    """One side of a pair: one dump, or those of all ranks and pipeline stages."""

    backend: str
    shards: tuple[Shard, ...]
    layers: tuple[int, ...]
    two_requests: str
    tokens: int | None

    def modules(self) -> Iterator[Key]:
        """Every module once."""
        seen: set[Key] = set()
        for shard in self.shards:
            for key in shard.modules:
                if key not in seen:
                    seen.add(key)
                    yield key

    def class_of(self, key: Key) -> str:
        """The class name of a module, "" when this side has none."""
        return next((shard.modules[key][0].class_name for shard in self.shards if key in shard.modules), "")

    def resolve(self, layer: int | None, formulas: Sequence[Formula]) -> tuple[Stats, ...]:
        """The first formula that this side can fill, once for each shard that has it; () when it has none."""
        for formula in formulas:
            if formula.terms[0].field == WHOLE_PROMPT:
                return () if self.tokens is None else (Stats("int64", self.tokens, 0, self.tokens - 1, 0, 0),)
            found = tuple(stats for shard in self.shards if (stats := _fill(shard, layer, formula)) is not None)
            if found:
                return found
        return ()

    def has(self, layer: int | None, path: str) -> bool:
        return any((layer, path) in shard.modules for shard in self.shards)


def read_side(dumps: Sequence[Mapping[str, Any]], is_training: bool, tokens: int | None = None) -> Side:
    """Read the dumps of one side of a pair: items as `infer_dumps` and `train_dumps` of the pairs document have them.

    `tokens` is the length of the prompt.
    Raises UnreadableDump, OSError.
    """
    shards = [_read_shard(Path(dump["path"]), dump.get("layer_offset") or 0) for dump in dumps]
    if is_training and not any("layer_offset" in dump for dump in dumps):
        shards = _stages(shards)
    two = next((text for text in (_two_requests(shard) for shard in shards) if text), "")
    backend = "infer"
    if is_training:
        backend = "fsdp"
        if any("self_attention" in path or "word_embeddings" in path for s in shards for _, path in s.modules):
            backend = "megatron"
    layers = sorted({layer for shard in shards for layer, _ in shard.modules if layer is not None})
    return Side(backend, tuple(shards), tuple(layers), two, tokens)


def _stages(shards: list[Shard]) -> list[Shard]:
    """Number the layers of pipeline stages whose log says nothing about them.

    Only where it is certain: the first rank alone has the embedding, so that the others are the stages behind it, in
    the order of their ranks. (Of tensor-parallel ranks each has the embedding.)
    """
    first = [any(path.endswith("word_embeddings") for _, path in shard.modules) for shard in shards]
    if len(shards) < 2 or first != [True, *[False] * (len(shards) - 1)]:
        return shards
    numbered, offset = [], 0
    for shard in shards:
        modules = {(None if layer is None else layer + offset, path): c for (layer, path), c in shard.modules.items()}
        numbered.append(Shard(shard.path, modules, shard.task))
        offset += len({layer for layer, _ in shard.modules if layer is not None})
    return numbered


def find_family(infer: Side) -> Family:
    """The family by the classes of the inference side's layers; "unknown" tries every block there is."""
    classes = {_plain_class(infer.class_of(key)) for key in infer.modules() if key[0] is not None}
    for family in families():
        if classes & family[1]:
            return family[0]
    return families()[-1][0]


@cache
def families() -> tuple[tuple[Family, frozenset[str]], ...]:
    """All families with their decoder layers' class names; the last one is "unknown"."""
    blocks, listed = _data("blocks.json"), _data("families.json")

    def points(*names: str) -> tuple[Point, ...]:
        return tuple(_point(raw) for name in names for raw in blocks[name])

    return tuple(
        (
            Family(
                raw["name"],
                points("model_head"),
                points(*raw["layer"]),
                points("model_tail"),
                points("model_weights"),
                points("layer_weights"),
            ),
            frozenset(raw.get("classes", ())),
        )
        for raw in [*listed["families"], listed["unknown"]]
    )


def known_paths(family: Family, backend: str) -> tuple[frozenset[str], dict[str, str]]:
    """Paths that a point of the family uses on this side, and path -> reason for modules that are left out by name."""
    points = (*family.head, *family.layer, *family.tail, *family.model_weights, *family.layer_weights)
    used = {
        term.path
        for point in points
        for formula in (point.infer if backend == "infer" else point.formulas(backend))
        for term in formula.terms
    }
    reasons = {raw[backend]: raw["why"] for raw in _data("blocks.json")["left_out"] if backend in raw}
    return frozenset(used), reasons


def concatenate(parts: Sequence[Stats]) -> Stats:
    """The exact statistics of the concatenated tensors: norms by squares, means by size."""
    if len(parts) == 1:
        return parts[0]
    count = sum(part.count for part in parts)
    means = [part.mean * part.count for part in parts if part.mean is not None]
    squares = [part.norm * part.norm for part in parts if part.norm is not None]
    return Stats(
        dtype=parts[0].dtype,
        count=count,
        low=min(part.low for part in parts),
        high=max(part.high for part in parts),
        mean=math.fsum(means) / count if count and len(means) == len(parts) else None,
        norm=math.sqrt(math.fsum(squares)) if len(squares) == len(parts) else None,
        files=tuple(path for part in parts for path in part.files) if all(part.files for part in parts) else (),
    )


def display(layer: int | None, module: str) -> str:
    """A module as users know it from vLLM."""
    return module if layer is None else f"layers.{layer}.{module}"


def _read_shard(path: Path, layer_offset: int) -> Shard:
    try:
        document = json.loads(path.read_bytes())
        data = document["data"]
        items = data.items()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnreadableDump(f"{path}: no whole dump ({type(error).__name__})") from error
    shared = _settings()["shared_across_layers"]
    folder = path.parent / "dump_tensor_data"
    modules: dict[Key, list[Entry]] = {}
    owners: dict[str, int] = {}
    for name, raw in items:
        parsed = parse_name(name)
        if parsed is None or parsed.direction != "forward" or not isinstance(raw, dict):
            continue
        layer = None if parsed.layer is None else parsed.layer + layer_offset
        if parsed.path in shared and layer is not None and parsed.call > 0:
            # One rotary module serves all layers under the name of the first: its n-th call is the n-th layer's.
            layer = owners.setdefault(parsed.path, layer) + parsed.call
        modules.setdefault((layer, parsed.path), []).append(Entry(parsed.class_name, raw, folder))
    return Shard(path, {key: tuple(calls) for key, calls in modules.items()}, str(document.get("task")))


@dataclass(frozen=True)
class Parsed:
    """A dump key in parts: `layer` as the dump counts it, `path` inside the layer ("." is the layer itself)."""

    layer: int | None
    path: str
    class_name: str
    direction: str
    call: int


@lru_cache(maxsize=65536)
def parse_name(name: str) -> Parsed | None:
    """Read `Module.<path>.<Class>.forward.<call>`; None for what is no module entry."""
    match = _ENTRY.match(name)
    if match is None:
        return None
    settings = _settings()
    path = [part for part in (match[1] or "").split(".") if part and part not in settings["wrappers"]]
    layered = _LAYER.match(".".join(path))
    if layered is not None and not {"visual", "vision_tower", "mtp"} & set(path):
        return Parsed(int(layered[1]), layered[2] or ".", match[2], match[3], int(match[4]))
    while len(path) > 1 and path[0] in settings["model_prefixes"]:
        path = path[1:]
    return Parsed(None, ".".join(path), match[2], match[3], int(match[4]))


def _two_requests(shard: Shard) -> str:
    """Why this step cannot be one request's forward, "" when it can."""
    rows: dict[int, str] = {}
    embedded = False
    for (layer, path), calls in shard.modules.items():
        name = path.rpartition(".")[2]
        if name in ("embed_tokens", "word_embeddings"):
            embedded = True
            if len(calls) > 1:
                return f"{display(layer, path)} ran {len(calls)} times in this step: it holds more than one request"
        if name == "input_layernorm" and layer is not None:
            stats = next(_tensors(calls[0].raw, "output"), None)
            if stats is not None:
                rows.setdefault(reduce(mul, stats["shape"][:-1], 1), display(layer, path))
    if len(rows) > 1:
        listed = ", ".join(f"{count} tokens at {name}" for count, name in rows.items())
        return f"the token count changes inside the step ({listed}): it holds parts of two requests"
    for (layer, path), calls in shard.modules.items():
        # With an embedding that ran once, a layer's second call is activation checkpointing's.
        if not embedded and path == "input_layernorm" and len(calls) > 1:
            return f"{display(layer, path)} ran {len(calls)} times in this step: it holds more than one request"
    return ""


def _fill(shard: Shard, layer: int | None, formula: Formula) -> Stats | None:
    parts = []
    for term in formula.terms:
        calls = shard.modules.get((layer, term.path))
        if not calls or (term.unless and field_stats(calls[0], term.unless) is not None):
            return None
        stats = field_stats(calls[0], term.field)
        if stats is None:
            return None
        parts.append(stats)
    if not formula.is_sum:
        return concatenate(parts)
    if not all(part.files for part in parts):
        return None
    paths = tuple(path for part in parts for path in part.files)
    return Stats(parts[0].dtype, parts[0].count, math.nan, math.nan, None, None, paths, is_sum=True)


def field_stats(entry: Entry, field: str) -> Stats | None:
    """The tensor at `output.0`, `input.1`, `input.positions` or `parameters.weight` of a call."""
    group, _, key = field.partition(".")
    raw: Any
    if group == "parameters":
        raw = (entry.raw.get("parameters") or {}).get(key)
    elif key.isdigit():
        if group == "output" and _plain_class(entry.class_name) in _settings()["ignored_classes"]:
            return None
        values = entry.raw.get("input_args" if group == "input" else "output") or []
        if isinstance(values, dict):
            values = [values] if "shape" in values else list(values.values())
        raw = values[int(key)] if int(key) < len(values) else None
    else:
        raw = (entry.raw.get("input_kwargs") or {}).get(key)
    if not isinstance(raw, dict) or not isinstance(raw.get("shape"), list):
        return None
    name = raw.get("data_name")
    return Stats(
        dtype=str(raw.get("dtype")).removeprefix("torch."),
        count=reduce(mul, raw["shape"], 1),
        low=_float(raw.get("Min")),
        high=_float(raw.get("Max")),
        mean=None if raw.get("Mean") is None else _float(raw["Mean"]),
        norm=None if raw.get("Norm") is None else _float(raw["Norm"]),
        files=(entry.folder / name,) if isinstance(name, str) and name else (),
    )


def _tensors(raw: Mapping[str, Any], group: str) -> Iterator[dict[str, Any]]:
    for item in raw.get(group) or []:
        if isinstance(item, dict) and "float" in str(item.get("dtype")) and item.get("shape"):
            yield item


def _float(value: object) -> float:
    """msprobe writes nan and inf as numbers or as text."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return math.nan


def _plain_class(name: str) -> str:
    for prefix in _settings()["class_prefixes"]:
        name = name.removeprefix(prefix)
    return name


def _point(raw: Mapping[str, Any]) -> Point:
    return Point(
        module=raw["module"],
        name=raw["name"],
        kind=raw.get("kind", "weight"),
        infer=_formulas(raw["infer"]),
        fsdp=_formulas(raw["fsdp"]),
        megatron=_formulas(raw["megatron"]),
        permuted=frozenset(side for side, order in raw.get("order", {}).items() if order == "permuted"),
        guard=_formulas([raw["guard"]])[0].terms[0] if "guard" in raw else None,
        only_with=tuple(raw.get("only_with", ())),
    )


def _formulas(texts: Sequence[str]) -> tuple[Formula, ...]:
    return tuple(
        Formula(tuple(_term(part) for part in re.split(r" [|+] ", text)), is_sum=" + " in text) for text in texts
    )


def _term(text: str) -> Term:
    source, _, unless = text.partition(" unless ")
    path, _, field = source.rpartition(":")
    return Term(path, field, unless or None)


@cache
def _data(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((files(__package__) / "mappings" / name).read_text(encoding="utf-8"))
    return loaded


@cache
def _settings() -> dict[str, tuple[str, ...]]:
    return {key: tuple(value) for key, value in _data("families.json").items() if isinstance(value, list)}
