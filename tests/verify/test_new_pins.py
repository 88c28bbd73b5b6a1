"""A runner that starts and stops msprobe in helpers: the step is handed to the one that stops."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from patchctl.verify import compiles, dump_calls
from patchctl.verify.files import Files
from patchctl.verify.findings import Finding
from patchctl.verify.rules import check_source, check_tree
from patchctl.verify.source import Source

RUNNER = "vllm_ascend/worker/model_runner_v1.py"
LOGGER = "vllm_ascend/worker/dispatch_logger.py"
FINALIZE = "def _finalize_dump_data("
SIGNATURE = 'scheduler_output: "SchedulerOutput | None" = None, **kwargs'
GUARD = "if self._dispatch_logger is not None and scheduler_output is not None:"
LOG = "            self._dispatch_logger.log_step(scheduler_output, self.attn_state)\n"
CALL = "self._finalize_dump_data(scheduler_output)"
START = "                self._start_dump_data()\n                num_scheduled_tokens_np"


@pytest.fixture
def text(vllm_ascend_tree: Path) -> str:
    found = (vllm_ascend_tree / RUNNER).read_text(encoding="utf-8")
    if FINALIZE not in found:
        pytest.skip("this runner stops msprobe where the step ends, not in a helper")
    return found


def findings(tree: Path, text: str) -> list[Finding]:
    """What the rules find in the runner when it has this text."""
    files = Files(tree)
    sources = {path: source for path in (RUNNER, LOGGER) if (source := files.source(path)) is not None}
    parsed, found = compiles.parse(RUNNER, text.encode())
    if parsed is None:
        return list(found)
    sources[RUNNER] = Source(RUNNER, text.encode(), parsed, files.module)
    count = dump_calls.check_count(list(sources.values()), 1)
    return [*check_source(sources[RUNNER], sources, files.exists), *count]


def test_nothing_is_found(vllm_ascend_tree: Path, text: str) -> None:
    assert findings(vllm_ascend_tree, text) == []
    assert check_tree(vllm_ascend_tree, "vllm-ascend", 1, [RUNNER, LOGGER]) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (f"        {GUARD}\n{LOG}", ""),
        (f"        {GUARD}\n{LOG}", LOG[4:]),
        (GUARD, "if scheduler_output is not None:"),
        (GUARD, "if self._dispatch_logger is None and scheduler_output is not None:"),
        (GUARD, "if self._dispatch_logger is not None and self.use_aclgraph:"),
        (f"        {GUARD}\n{LOG}", f"        {GUARD}\n{LOG}{LOG}"),
        ("log_step(scheduler_output, self.attn_state)", "log_step(self.attn_state, scheduler_output)"),
        ("log_step(scheduler_output, self.attn_state)", "log_step(scheduled, self.attn_state)"),
        ("log_step(scheduler_output, self.attn_state)", "log_step(scheduler_output, self.attention)"),
        ("log_step(scheduler_output, self.attn_state)", "log_step(scheduler_output)"),
        (SIGNATURE, "**kwargs"),
        (CALL, "self._finalize_dump_data()"),
        (CALL, "pass"),
        (CALL, f"self._dispatch_logger.log_step(scheduler_output, self.attn_state)\n{' ' * 8}{CALL}"),
        ("            self.debugger.stop()\n", "            pass\n"),
        ("            self.debugger.stop()\n", "            self.debugger.stop()\n            self.debugger.stop()\n"),
        ("        self.debugger.step(**kwargs)\n", ""),
        (START, START.partition("\n")[2]),
        ("                    self._start_dump_data()\n", ""),
        (START, f"                self.debugger.start(self.model)\n{START}"),
    ],
)
def test_a_careless_change_is_found(vllm_ascend_tree: Path, text: str, old: str, new: str) -> None:
    assert old in text, f"{old!r} is not in {RUNNER}"
    for match in re.finditer(re.escape(old), text):
        changed = text[: match.start()] + new + text[match.end() :]
        assert findings(vllm_ascend_tree, changed), f"at line {text.count(chr(10), 0, match.start()) + 1}"


def test_upstreams_own_start_is_found(vllm_ascend_tree: Path, text: str) -> None:
    """Before it is known that there is anything to compute: a step without tokens leaves it running."""
    without = re.sub(
        r"^ +self\._start_dump_data\(\)\n(?= {16}num_scheduled_tokens_np|  +with self\.maybe)", "", text, flags=re.M
    )
    early = without.replace(
        "        pp_group = get_pp_group()\n        if pp_group.world_size > 1",
        "        self._start_dump_data()\n        pp_group = get_pp_group()\n        if pp_group.world_size > 1",
        1,
    )
    assert early.count("self._start_dump_data()") == text.count("self._start_dump_data()") - 1
    found = findings(vllm_ascend_tree, early)
    assert found and {finding.rule for finding in found} == {"start-stop"}
