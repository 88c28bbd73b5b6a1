"""Every engine's micro batch loop runs inside the bracket, and every engine checks its dump when it is made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from verl_parts import PACKAGE, Anything, load

ENGINES = {
    "fsdp": "FSDPEngine",
    "veomni": "VeOmniEngine",
    "torchtitan": "TorchTitanEngine",
    "automodel": "AutomodelEngine",
}


class Events(list[str]):
    """What happened, in order; stands for `micro_batch_dump` too."""

    @contextmanager
    def micro_batch_dump(self, engine: Any, micro_batch: Any, *, forward_only: bool) -> Iterator[None]:
        self.append(f"start {micro_batch} {forward_only}")
        yield
        self.append(f"stop {micro_batch}")

    def prepare_dump(self, engine: Any) -> None:
        # Of the configuration, both are there and nothing else has been built.
        assert (engine.engine_config, engine.model_config) == ("engine", "model")
        self.append("prepare")
        raise RuntimeError("refused")


class OneOfEach:
    """Every parallel size is 1."""

    def __getattr__(self, name: str) -> int:
        return 1


def engine_class(tree: Path, name: str, events: Events) -> Any:
    @contextmanager
    def no_grad() -> Iterator[None]:
        yield

    torch = SimpleNamespace(
        no_grad=nullcontext,
        distributed=SimpleNamespace(all_reduce=lambda *_, **__: None, ReduceOp=Anything(), get_rank=lambda: 0),
        get_rank=lambda: 0,
        all_reduce=lambda *_, **__: None,
        ReduceOp=Anything(),
    )
    return load(
        tree / f"verl/workers/engine/{name}/transformer_impl.py",
        ENGINES[name],
        {
            PACKAGE: {"micro_batch_dump": events.micro_batch_dump, "prepare_dump": events.prepare_dump},
            "torch": vars(torch),
        },
    )


@pytest.mark.parametrize("name", ENGINES)
def test_checked_before_anything_is_built(verl_tree: Path, name: str) -> None:
    events = Events()
    with pytest.raises(RuntimeError, match="refused"):
        engine_class(verl_tree, name, events)(
            model_config="model", engine_config="engine", optimizer_config="optimizer", checkpoint_config="checkpoint"
        )
    assert events == ["prepare"]


@pytest.mark.parametrize("forward_only", [True, False])
@pytest.mark.parametrize("name", ENGINES)
def test_forward_is_inside_the_bracket(verl_tree: Path, name: str, forward_only: bool) -> None:
    events = Events()
    engine = object.__new__(engine_class(verl_tree, name, events))
    loss = SimpleNamespace(backward=lambda: events.append("backward"))

    def forward_step(micro_batch: Any, loss_function: Any, forward_only: bool) -> tuple[Any, dict[str, Any]]:
        events.append(f"forward {micro_batch}")
        return loss, {}

    engine.__dict__.update(
        forward_step=forward_step, module=Anything(), ulysses_sequence_parallel_size=1, use_ulysses_sp=False,
        get_data_parallel_size=lambda: 1, get_data_parallel_group=lambda: None,
        model_fwd_context=nullcontext(), model_bwd_context=nullcontext(),
        trainer=SimpleNamespace(train_context=nullcontext),
        enable_routing_replay=False, engine_config=OneOfEach(), _router_replay=None, _moe_monitor=None,
    )  # fmt: skip
    function = type(engine).forward_backward_batch
    function.__globals__["prepare_micro_batches"] = lambda **_: (["A", "B"], None)
    function.__globals__["postprocess_batch_func"] = lambda **_: "output"
    data = {"loss_mask": SimpleNamespace(sum=lambda: SimpleNamespace(to=lambda _: SimpleNamespace(item=lambda: 1)))}
    engine.forward_backward_batch(data, None, forward_only=forward_only)
    inside = [event for event in events if event != "backward"]
    assert inside == [
        f"start A {forward_only}", "forward A", "stop A", f"start B {forward_only}", "forward B", "stop B",
    ]  # fmt: skip
    assert events.count("backward") == (0 if forward_only else 2)
    if not forward_only:
        # VeOmni's backward has a context of its own, after the bracket.
        stop = events.index("stop A")
        assert (events.index("backward") > stop) == (name == "veomni")
