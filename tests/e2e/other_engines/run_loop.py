"""The micro batch loop of an engine whose own library is not installed here, on a small model under the real msprobe.

    PYTHONPATH=<verl tree>:tests/e2e:tests/e2e/verl python run_loop.py OUT.json veomni|torchtitan|automodel ...

The engine's module is the real one; the library it imports (veomni, torchtitan, nemo_automodel) is replaced by mocks.
`forward_backward_batch` runs as it is, on an engine that has only what this method reads. One process can dump one
engine only.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import batches
import cpu_shims
import torch

ENGINES = {
    "veomni": ("veomni", "VeOmniEngine"),
    "torchtitan": ("torchtitan", "TorchTitanEngine"),
    "automodel": ("nemo_automodel", "AutomodelEngine"),
}
"""Name in verl -> the library to mock, the engine's class."""


class MockModule(ModuleType):
    """A module of which every name exists."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        # A class is one, as others are derived from it; everything else is a mock.
        setattr(self, name, type(name, (), {"Config": type("Config", (), {})}) if name[0].isupper() else MagicMock())
        return getattr(self, name)


class MockLibrary(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes every module of a library importable."""

    def __init__(self, library: str):
        self.library = library

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] != self.library:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return MockModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class TinyModel(torch.nn.Module):
    """An embedding and two linear layers; one score per token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(batches.VOCAB, 8)
        self.up = torch.nn.Linear(8, 16)
        self.down = torch.nn.Linear(16, 1)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.embed_tokens(input_ids)))).squeeze(-1)


def forward_step(model: torch.nn.Module, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
    """What an engine's subclass supplies: the scores of all tokens, and their sum as the loss."""
    tokens = micro_batch["input_ids"]
    scores = torch.nested.nested_tensor_from_jagged(model(tokens.values()), tokens.offsets())
    return scores.values().sum(), {"model_output": {"scores": scores.detach()}, "loss": 0.0, "metrics": {}}


def build_engine(engine_class: Any) -> Any:
    """An engine with a model, and without what its library would build around it."""
    engine = object.__new__(engine_class)
    torch.manual_seed(3)
    model = TinyModel()
    engine.module = [model] if engine_class.__name__ == "TorchTitanEngine" else model
    engine.engine_config = SimpleNamespace(forward_only=False, tensor_parallel_size=1, ep_size=1, use_dynamic_bsz=False)
    engine.model_config = SimpleNamespace(use_remove_padding=True)
    engine.model_fwd_context = engine.model_bwd_context = nullcontext()
    engine.trainer = SimpleNamespace(train_context=nullcontext)
    engine._moe_monitor = engine._router_replay = None
    engine.enable_routing_replay = False
    engine.get_data_parallel_size = lambda: 1
    engine.get_data_parallel_group = lambda: torch.distributed.group.WORLD
    engine.forward_step = lambda micro_batch, **kwargs: forward_step(model, micro_batch, **kwargs)
    return engine


def construct(engine_class: Any) -> str | None:
    """What the real constructor says to a dump path that is in use; None where it goes on to the library."""
    config = MagicMock(forward_only=False, fsdp_size=-1, ulysses_parallel_size=1)
    try:
        engine_class(MagicMock(), config, MagicMock(), MagicMock())
    except RuntimeError as error:
        return str(error)
    except Exception as error:  # a mock in the place of a number; it came past the check
        print(f"constructor: {error!r}", file=sys.stderr)
    return None


def run(name: str) -> dict[str, Any]:
    """A log_prob and an update pass over four micro batches, then the constructor."""
    module = importlib.import_module(f"verl.workers.engine.{name}.transformer_impl")
    if name == "veomni":
        module.parallel_state.get_parallel_state.return_value.ulysses_size = 1
    engine = build_engine(getattr(module, ENGINES[name][1]))
    outputs = []
    for prefix, forward_only in (("a", True), ("z", False)):
        data = batches.engine_batch(batches.make_batch(prefix))
        with torch.set_grad_enabled(not forward_only):
            output = engine.forward_backward_batch(data, loss_function=None, forward_only=forward_only)
        outputs.append([row.tolist() for row in output["model_output"]["scores"].unbind()])
    model = engine.module[0] if isinstance(engine.module, list) else engine.module
    return {
        "outputs": outputs,
        "grads": [parameter.grad.flatten().tolist() for parameter in model.parameters()],
        "refusal": construct(type(engine)),
    }


def main() -> None:
    out, names = Path(sys.argv[1]).resolve(), sys.argv[2:]
    for library, _ in ENGINES.values():
        sys.meta_path.insert(0, MockLibrary(library))
    cpu_shims.stub_platform()
    cpu_shims.stub_flash_attention()
    torch.distributed.init_process_group("gloo", init_method=f"file://{out.parent}/rendezvous", rank=0, world_size=1)
    result = {"pid": os.getpid(), "engines": {name: run(name) for name in names}}
    out.write_text(json.dumps(result), encoding="utf-8")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
