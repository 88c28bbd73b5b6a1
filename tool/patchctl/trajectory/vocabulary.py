"""What each token id says, read from a Hugging Face tokenizer.json without the tokenizer's own package."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from patchctl.errors import PatchctlError


def byte_letters() -> dict[str, int]:
    """The printable letter that byte-level vocabularies write for each byte, turned round."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters = {chr(byte): byte for byte in printable}
    rest = [byte for byte in range(256) if byte not in printable]
    return letters | {chr(256 + index): byte for index, byte in enumerate(rest)}


def find_tokenizer(given: Path | None, recorded: str | None) -> Path | None:
    """The tokenizer.json to read: the given one, else that of the model the trial names, where it is on this machine.

    Raises:
        PatchctlError: the given one is not there.
    """
    if given is not None:
        path = given / "tokenizer.json" if given.is_dir() else given
        if not path.is_file():
            raise PatchctlError(f"no tokenizer.json at `{given}`; give the file or the folder of the model")
        return path
    if recorded is None:
        return None
    path = Path(recorded) / "tokenizer.json"
    return path if path.is_file() else None


def token_texts(path: Path, ids: Iterable[int]) -> dict[int, str]:
    """The text of each of `ids`, those aside that the vocabulary doesn't have. A part of a character is given as its
    bytes in hexadecimal digits.

    Raises:
        PatchctlError: the file can't be read, or is no tokenizer.json.
    """
    wanted = set(ids)
    try:
        document = json.loads(path.read_bytes())
        vocab = document["model"]["vocab"]
        words = {index: word for word, index in _words(vocab) if index in wanted}
        special = {item["id"]: item["content"] for item in document.get("added_tokens", ()) if item["id"] in wanted}
        byte_level = _has(document.get("decoder"), "ByteLevel") or _has(document.get("pre_tokenizer"), "ByteLevel")
    except OSError as error:
        raise PatchctlError(f"cannot read `{path}`: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise PatchctlError(f"`{path}` is no tokenizer.json; give the one of the model that was trained") from error
    letters = byte_letters()
    return {index: _text(word, letters if byte_level else None) for index, word in words.items()} | special


def _words(vocab: Any) -> Iterable[tuple[str, int]]:
    """Words and ids: a mapping, or (unigram models) a list of words with their scores."""
    return vocab.items() if isinstance(vocab, dict) else ((entry[0], index) for index, entry in enumerate(vocab))


def _has(part: Any, kind: str) -> bool:
    """Whether a part of a tokenizer is of a kind, or one of the parts in it is."""
    if isinstance(part, dict):
        return part.get("type") == kind or any(_has(inner, kind) for inner in part.values())
    return isinstance(part, list) and any(_has(inner, kind) for inner in part)


def _text(word: str, letters: dict[str, int] | None) -> str:
    if letters is not None and all(letter in letters for letter in word):
        return _decoded(bytes(letters[letter] for letter in word))
    if len(word) == 6 and word.startswith("<0x") and word.endswith(">"):
        return _decoded(bytes([int(word[3:5], 16)]))
    return word.replace("▁", " ")


def _decoded(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return f"⟨{raw.hex(' ')}⟩"
