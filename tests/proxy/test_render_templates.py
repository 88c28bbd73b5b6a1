"""Every chat template of TRL on a byte-level vocabulary, and with PROXY_TESTS=all llama.cpp's too: random trials.

A template passes if all its prompts are proved equal to a render of the whole conversation, or if the places where it
changes its history were declared as new segments.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import real_tokenizers
from test_property import Trial

FOLDER = real_tokenizers.FOLDER / "templates"
ALL = os.environ.get("PROXY_TESTS") == "all"
TRIALS = 6 if ALL else 2


def templates() -> list[Any]:
    """The templates as paths below the folder, or one skipped entry that says why there are none."""
    try:
        folders = [real_tokenizers.trl_templates(), *([real_tokenizers.llama_cpp_templates()] if ALL else [])]
    except real_tokenizers.Unavailable as reason:
        return [pytest.param("", marks=pytest.mark.skip(str(reason)))]
    files = sorted(file for folder in folders for file in folder.glob("*.jinja"))
    return [str(file.relative_to(FOLDER)) for file in files if not file.stem.endswith("_training")]


REFUSES_ALL = {"llama.cpp/fireworks-ai-llama-3-firefunction-v2.jinja": "it wants a variable `functions`"}


@pytest.mark.parametrize("name", templates())
def test_template(name: str, tmp_path: Path) -> None:
    from verl.experimental.agent_loop.chat_proxy.errors import RenderError
    from verl.experimental.agent_loop.chat_proxy.rendering import Renderer

    tokenizer = real_tokenizers.byte_level((FOLDER / name).read_text(encoding="utf-8"))
    try:
        renderer = Renderer(tokenizer)
    except RenderError as error:
        assert name in REFUSES_ALL, str(error)
        return

    async def go() -> Iterator[int]:
        for seed in range(TRIALS):
            trial = Trial(renderer, random.Random(seed), tmp_path / str(seed), moe=False)
            await trial.run(14)
            await trial.check()

    asyncio.run(go())
    renderer.close()
