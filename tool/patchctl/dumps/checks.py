"""Cheap checks of a pair from the two dumps themselves: prompt length, input ids, embedding output.

Only the head of a dump.json is parsed: the token embedding is the first module that completes.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import reduce
from operator import mul
from pathlib import Path
from typing import Any

HEAD_BYTES = 32 * 1024
_EMBEDDING = re.compile(r'"(Module\.[^"]*\.(?:embed_tokens|word_embeddings)\.[^"]*\.forward\.\d+)":\s*(?=\{)')
# An embedding is a table look-up: with equal weights and ids both sides hold the same numbers, up to the dtype.
EMBEDDING_TOLERANCE = {"torch.bfloat16": 4e-3, "torch.float16": 5e-4, "torch.float32": 1e-6}
SAME_DTYPE_TOLERANCE = 1e-5


# What reading a field of a wrong type raises: a dump is another program's file.
MALFORMED = (TypeError, ValueError, AttributeError, KeyError, IndexError, OverflowError)


class UnreadableDump(Exception):
    """A dump.json that is cut or no dump; the message says what is wrong with it."""


@dataclass(frozen=True)
class DumpHead:
    """What the start of a dump.json tells: N tokens, smallest and largest input id, the embedding's output."""

    tokens: int | None
    ids: tuple[int, int] | None
    embedding_norm: float | None
    embedding_dtype: str | None
    embedding_name: str | None


def read_head(path: Path) -> DumpHead:
    """The head of `path`. Raises UnreadableDump, OSError."""
    try:
        return _read_head(path)
    except MALFORMED as error:
        raise UnreadableDump(f"dump.json is malformed ({type(error).__name__}: {error})") from error


def _read_head(path: Path) -> DumpHead:
    with path.open("rb") as stream:
        raw = stream.read(HEAD_BYTES)
        stream.seek(0, 2)
        size = stream.tell()
        stream.seek(max(0, size - 64))
        if not stream.read().rstrip().endswith(b"}"):
            raise UnreadableDump(f"dump.json is cut after {size} bytes")
        match = _EMBEDDING.search(raw.decode("utf-8", "replace"))
        if match is not None:
            try:
                entry, _ = json.JSONDecoder().raw_decode(match.string, match.end())
                return _head(match[1], entry)
            except ValueError:
                pass  # the entry goes on past the head: parse the file
        stream.seek(0)
        try:
            data = json.loads(stream.read())["data"]
            names = iter(data)
        except (ValueError, KeyError, TypeError) as error:
            raise UnreadableDump(f"dump.json is no dump ({type(error).__name__})") from error
    first = None
    for name in names:
        first = first or name
        if _EMBEDDING.match(f'"{name}":{{'):
            return _head(name, data[name])
    return DumpHead(_rows(data[first]) if first else None, None, None, None, None)


def check_pair(infer: DumpHead, train: DumpHead) -> dict[str, str]:
    """Check name -> "same", "unknown" or what differs, for the checks that a head allows."""
    return {"input_ids": _compare_ids(infer, train), "embedding_output": _compare_embedding(infer, train)}


def _compare_ids(infer: DumpHead, train: DumpHead) -> str:
    if infer.ids is None or train.ids is None:
        return "unknown"
    if infer.ids == train.ids:
        return "same"
    if infer.tokens != train.tokens and train.ids[0] <= infer.ids[0] and infer.ids[1] <= train.ids[1]:
        return "unknown"  # training is padded, and the padding's id counts
    return f"inference ids are {infer.ids[0]}..{infer.ids[1]}, training ids {train.ids[0]}..{train.ids[1]}"


def _compare_embedding(infer: DumpHead, train: DumpHead) -> str:
    left, right = infer.embedding_norm, train.embedding_norm
    if left is None or right is None or infer.tokens != train.tokens:
        return "unknown"
    tolerance = SAME_DTYPE_TOLERANCE
    if infer.embedding_dtype != train.embedding_dtype:
        tolerance = max(
            EMBEDDING_TOLERANCE.get(str(dtype), SAME_DTYPE_TOLERANCE)
            for dtype in (infer.embedding_dtype, train.embedding_dtype)
        )
    if abs(left - right) <= tolerance * max(abs(left), abs(right)):
        return "same"
    return f"norm {left:.6g} on the inference side, {right:.6g} in training"


def _head(name: str, entry: Any) -> DumpHead:
    tensors = [*_tensors(entry.get("input_args")), *_tensors(entry.get("input_kwargs"))]
    ids = next((t for t in tensors if "int" in str(t.get("dtype"))), None)
    output = next(iter(_tensors(entry.get("output"))), None)
    tokens = reduce(mul, ids["shape"], 1) if ids is not None else _rows(entry)
    low, high = (ids.get("Min"), ids.get("Max")) if ids is not None else (None, None)
    return DumpHead(
        tokens=tokens,
        ids=(int(low), int(high)) if isinstance(low, (int, float)) and isinstance(high, (int, float)) else None,
        embedding_norm=_number(output.get("Norm")) if output else None,
        embedding_dtype=str(output.get("dtype")) if output else None,
        embedding_name=name,
    )


def _rows(entry: Any) -> int | None:
    """Tokens of the first floating tensor of a module: all dimensions but the last."""
    for tensor in [*_tensors(entry.get("input_args")), *_tensors(entry.get("output"))]:
        if "float" in str(tensor.get("dtype")) and len(tensor.get("shape") or []) >= 2:
            return reduce(mul, tensor["shape"][:-1], 1)
    return None


def _tensors(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, dict):
        value = [value] if "shape" in value else list(value.values())
    return [item for item in value or [] if isinstance(item, dict) and isinstance(item.get("shape"), list)]


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None
