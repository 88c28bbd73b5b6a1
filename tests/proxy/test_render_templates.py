"""Every chat template that the packages carry, on a byte-level vocabulary: random trials, and what each declares.

A template passes if all its prompts are proved equal to a render of the whole conversation, or if the places where it
changes its history were declared as new segments.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import real_tokenizers
from test_property import Trial

FOLDER = real_tokenizers.FOLDER / "templates"
TRIALS = int(os.environ.get("PROXY_TEMPLATE_TRIALS", "3"))


def templates() -> list[str]:
    """The templates that were fetched, as paths below the folder; TRL's are fetched if they are not there."""
    try:
        real_tokenizers.trl_templates()
    except real_tokenizers.Unavailable:
        return []
    files = sorted(FOLDER.glob("*/*.jinja"))
    return [str(file.relative_to(FOLDER)) for file in files if not file.stem.endswith("_training")]


REFUSES_ALL = {"llama.cpp/fireworks-ai-llama-3-firefunction-v2.jinja": "it wants a variable `functions`"}


@pytest.mark.parametrize("name", templates() or [pytest.param("", marks=pytest.mark.skip("pip reaches no registry"))])
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
