"""Rule micro-batch: an engine dumps every micro batch by itself."""

from __future__ import annotations

import pytest
from made_up import source

from patchctl.verify import micro_batch
from patchctl.verify.rules import is_hook

FSDP = "verl/workers/engine/fsdp/transformer_impl.py"
LOOP = """
    from verl.utils.consistency_dump import micro_batch_dump

    class Engine:
        def forward_backward_batch(self, data, forward_only=False):
            for micro_batch in split(data):
                with ctx, micro_batch_dump(self, micro_batch, forward_only=forward_only):
                    loss, meta = self.forward_step(micro_batch)
                    if not forward_only:
                        loss.backward()
                outputs.append(meta)
"""
DIRECT = """
    class Engine:
        def forward_backward_batch(self, data, forward_only=False):
            for i, micro_batch in enumerate(split(data)):
                if self._debugger is not None:
                    self._debugger.start(model=self.module)
                with ctx:
                    loss, meta = self.forward_step(micro_batch)
                    loss.backward()
                if self._debugger is not None:
                    self._debugger.stop()
                    self._debugger.step()
"""
SCHEDULE = """
    from verl.utils.consistency_dump import micro_batch_dump

    class Engine:
        def forward_backward_batch(self, data, forward_only=False):
            losses = forward_backward_func(forward_step_func=partial(self.forward_step), model=self.module)

        def forward_step(self, batch_iter, model):
            raise NotImplementedError

    class EngineWithLMHead(Engine):
        def forward_step(self, batch_iter, model):
            batch = next(batch_iter)
            unwrapped = unwrap_model(model)
            with micro_batch_dump(self, batch, forward_only=self.forward_only, model=model):
                if fused:
                    output = fused_forward_fn(model, batch)
                else:
                    output = forward_fn(model, batch)
            return output

    class EngineWithValueHead(EngineWithLMHead):
        def forward_step(self, batch_iter, model):
            return forward_fn(model, next(batch_iter))
"""
AROUND_SCHEDULE = """
    from verl.utils.consistency_dump import micro_batch_dump

    class Engine:
        def forward_backward_batch(self, data, forward_only=False):
            with micro_batch_dump(self, batches, forward_only=forward_only):
                losses = forward_backward_func(forward_step_func=partial(self.forward_step), model=self.module)

        def forward_step(self, batch_iter, model):
            return forward_fn(model, next(batch_iter))
"""


WRAPPED = """
    from verl.utils.consistency_dump.megatron import dump_schedule

    class Engine:
        def forward_backward_batch(self, data, forward_only=False):
            forward_backward_func = get_forward_backward_func()
            forward_step = partial(self.forward_step)
            forward_step, forward_backward_func = dump_schedule(
                self, micro_batches, forward_step, forward_backward_func, forward_only
            )
            losses = forward_backward_func(forward_step_func=forward_step, model=self.module)

        def forward_step(self, batch_iter, model):
            return forward_fn(model, next(batch_iter))
"""


def check(text: str, path: str = FSDP) -> list[tuple[int | None, str]]:
    return [(finding.line, finding.message) for finding in micro_batch.check(source(text, path), is_hook)]


@pytest.mark.parametrize(
    "text",
    [
        LOOP,
        DIRECT,
        SCHEDULE,
        AROUND_SCHEDULE,
        WRAPPED,
        LOOP.replace("micro_batch_dump(self,", "self._consistency_dump.micro_batch("),
        LOOP.replace("for micro_batch in split(data)", "for index, micro_batch in enumerate(split(data))"),
    ],
    ids=[
        "loop",
        "start and stop",
        "forward_step",
        "around the schedule",
        "wrapped",
        "method of an attribute",
        "enumerate",
    ],
)
def test_accepts(text: str) -> None:
    assert check(text) == []


@pytest.mark.parametrize(
    ("text", "old", "new", "line", "message"),
    [
        (LOOP, ", micro_batch_dump(self, micro_batch, forward_only=forward_only)", "", 8, "this forward is in no dump"),
        (LOOP, "        loss.backward()\n", "        pass\n                loss.backward()\n", 11,
         "this backward is in no dump"),
        (LOOP, "self, micro_batch,", "self, data,", 7, "is not given `micro_batch`"),
        (LOOP, ", forward_only=forward_only)", ", forward_only=True)", 7, "is not given `forward_only`"),
        (LOOP, "micro_batch_dump(self", "nullcontext(self", 8, "this forward is in no dump"),
        (DIRECT, "self._debugger.start(model=self.module)", "pass", 8, "this forward is in no dump"),
        (DIRECT, "self._debugger.stop()", "pass", 8, "this forward is in no dump"),
        (SCHEDULE, "            with micro_batch_dump(self, batch, forward_only=self.forward_only, model=model):\n"
         "                if fused", "            if True:\n                if fused", 17,
         "this forward is in no dump"),
        (AROUND_SCHEDULE, "with micro_batch_dump(self, batches, forward_only=forward_only)", "if data", 10, "no dump"),
        (WRAPPED, "forward_step, forward_backward_func = dump", "forward_backward_func, forward_step = dump", 8,
         "taken as"),
        (WRAPPED, "forward_step, forward_backward_func = dump", "_, forward_backward_func = dump", 8, "taken as"),
        (WRAPPED, "forward_step, forward_backward_func = dump_schedule", "dumped = dump_schedule", 14, "in no dump"),
        (WRAPPED, "forward_step, forward_backward_func = dump_schedule", "forward_step, forward_backward_func = keep",
         14, "in no dump"),
        (WRAPPED, "forward_step, forward_backward_func, forward_only", "forward_step, forward_backward_func, True", 8,
         "is not given `forward_only`"),
        (WRAPPED, "micro_batches, forward_step, ", "micro_batches, ", 8, "is not given `forward_step`"),
        (WRAPPED, "            losses", "            forward_step = partial(self.forward_step)\n            losses", 11,
         "is replaced after"),
        (LOOP, "forward_backward_batch", "train_batch", None, "no engine with a forward_backward_batch"),
    ],
)  # fmt: skip
def test_refuses(text: str, old: str, new: str, line: int | None, message: str) -> None:
    assert old in text
    found = check(text.replace(old, new))
    assert any(at == line and message in said for at, said in found), found


def test_a_dump_around_the_loop_is_one_step() -> None:
    text = """
        from verl.utils.consistency_dump import micro_batch_dump

        class Engine:
            def forward_backward_batch(self, data, forward_only=False):
                with micro_batch_dump(self, data, forward_only=forward_only):
                    for micro_batch in split(data):
                        loss, meta = self.forward_step(micro_batch)
    """
    assert check(text) == [(8, "this forward is in no dump of its micro batch")]


def test_one_of_two_forwards_outside() -> None:
    text = SCHEDULE.replace(
        "            return output\n", "            again = forward_fn(model, batch)\n            return output\n"
    )
    assert check(text) == [(20, "this forward is in no dump of its micro batch")]


def test_the_backward_of_other_engines_may_be_elsewhere() -> None:
    text = LOOP.replace("                    if not forward_only:\n                        loss.backward()\n", "") + (
        "                if not forward_only:\n                    loss.backward()\n"
    )
    assert check(text, "verl/workers/engine/veomni/transformer_impl.py") == []
    assert [line for line, _ in check(text)] == [11]
