"""check_tree: reads a tree's files and runs every rule on the ones that it is about."""

from __future__ import annotations

import gc
import textwrap
from pathlib import Path

from made_up import GOOD, LOGGER, RESUMES, SENDS

from patchctl.verify.findings import Finding
from patchctl.verify.rules import check_tree

RUNNER = "vllm_ascend/worker/model_runner_v1.py"
LOG = "vllm_ascend/worker/dispatch_logger.py"
TEXT = """\
from vllm_ascend.worker.dispatch_logger import DispatchLogger


class Runner:
    def __init__(self, debugger):
        self.attn_state = None
        self.debugger = debugger
        self._dispatch_logger = DispatchLogger()

    def execute_model(self, scheduler_output):
        if self.debugger is not None:
            self.debugger.start()
"""


def tree(folder: Path) -> Path:
    for path, text in ((RUNNER, TEXT + textwrap.indent(GOOD.strip("\n"), "    ")), (LOG, textwrap.dedent(LOGGER))):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


def shown(findings: list[Finding]) -> list[str]:
    return [str(finding).partition(";")[0] for finding in findings]


def test_a_good_tree(tmp_path: Path) -> None:
    tree(tmp_path)
    assert check_tree(tmp_path, "vllm-ascend", 1, [RUNNER, LOG]) == []
    assert check_tree(tmp_path, "vllm-ascend", None, []) == []
    assert check_tree(tmp_path, "vllm-ascend", None, [RUNNER, LOG, "vllm_ascend/added_later.py"]) == []


def test_every_failure_is_reported_in_order(tmp_path: Path) -> None:
    tree(tmp_path)
    runner = tmp_path / RUNNER
    runner.write_text(runner.read_text().replace("log_step(scheduler_output", "log_step(output") + "\nnothing\n")
    (tmp_path / LOG).write_text("x = = 1\n")
    (tmp_path / "vllm_ascend/latin.py").write_bytes(b"x = '\xe9'\n")
    found = check_tree(tmp_path, "vllm-ascend", 3, [RUNNER, LOG, "vllm_ascend/latin.py", "vllm_ascend/gone.py"])
    assert shown(found) == [
        "vllm_ascend/gone.py: [present] the file is missing",
        "vllm_ascend/latin.py:1: [compiles] does not compile: (unicode error) 'utf-8' codec can't decode byte 0xe9 in"
        " position 0: unexpected end of data",
        f"{LOG}:1: [compiles] does not compile: invalid syntax",
        f"{RUNNER}: [stop-count] 1 calls of debugger.stop() ({RUNNER}:16), but this pin has 3",
        f"{RUNNER}:15: [imports] name `output` is not defined",
        f"{RUNNER}:15: [log-before-stop] `output` is not bound in `execute_model` on every path to this log_step",
        f"{RUNNER}:15: [log-before-stop] `self._dispatch_logger` is no logger in `execute_model`: nothing with a"
        " log_step is assigned to it",
        f"{RUNNER}:18: [imports] name `nothing` is not defined",
    ]


def test_a_finding_says_where_what_and_what_to_do() -> None:
    assert (
        str(Finding("a-rule", "a/b.py", 3, "is wrong", "make it right")) == "a/b.py:3: [a-rule] is wrong; make it right"
    )
    assert (
        str(Finding("a-rule", "a/b.py", None, "is wrong", "make it right"))
        == "a/b.py: [a-rule] is wrong; make it right"
    )


def test_without_a_pin_every_stop_of_the_package_is_found(tmp_path: Path) -> None:
    tree(tmp_path)
    new = tmp_path / "vllm_ascend/worker/v2/model_runner.py"
    new.parent.mkdir()
    new.write_text(
        "class Runner:\n    def run(self):\n        self.debugger.start()\n        self.debugger.stop()\n"
        "        self.debugger.step()\n"
    )
    assert check_tree(tmp_path, "vllm-ascend", 1, [RUNNER, LOG]) == []
    [finding] = check_tree(tmp_path, "vllm-ascend", None, [RUNNER, LOG])
    assert (finding.rule, finding.path, finding.line) == ("log-before-stop", "vllm_ascend/worker/v2/model_runner.py", 4)


def test_without_a_pin_there_is_a_stop_at_all(tmp_path: Path) -> None:
    tree(tmp_path)
    (tmp_path / RUNNER).write_text("class Runner: pass\n")
    [finding] = check_tree(tmp_path, "vllm-ascend", None, [])
    assert (finding.rule, finding.path) == ("stop-count", RUNNER)
    (tmp_path / RUNNER).unlink()
    assert [finding.rule for finding in check_tree(tmp_path, "vllm-ascend", None, [])] == ["present", "stop-count"]


def test_upstreams_own_profiler_is_another_tool(tmp_path: Path) -> None:
    profiler = tmp_path / "verl/utils/profiler/precision_debugger_profile.py"
    profiler.parent.mkdir(parents=True)
    profiler.write_text("class P:\n    def stop(self):\n        self._debugger.stop()\n")
    found = check_tree(tmp_path, "verl", None, [])
    assert {finding.rule for finding in found if finding.path != str(profiler.relative_to(tmp_path))} == {
        "present",
        "stop-count",
        "request-id",
    }
    assert not [finding for finding in found if "profiler" in finding.path]


def test_clients_are_found_wherever_they_live(tmp_path: Path) -> None:
    """A tree that is no pin may have them in other files than the series knows, or in one, or none at all."""

    def found() -> list[tuple[str, int | None]]:
        every = check_tree(tmp_path, "verl", None, [])
        return [(finding.path, finding.line) for finding in every if finding.rule == "request-id"]

    known = ["verl/experimental/fully_async_policy/fully_async_rollouter.py", "verl/workers/rollout/llm_server.py"]
    assert found() == [(path, None) for path in known]
    moved = tmp_path / "verl/rollout/moved_clients.py"
    moved.parent.mkdir(parents=True)
    moved.write_text(textwrap.dedent(SENDS) + textwrap.dedent(RESUMES))
    assert found() == []
    moved.write_text(moved.read_text().replace("        chain = []\n", ""))
    line = next(number for number, text in enumerate(moved.read_text().splitlines(), 1) if "chain.append" in text)
    assert found() == [("verl/rollout/moved_clients.py", line)]
    moved.write_text(textwrap.dedent(SENDS))
    assert found() == [(known[0], None)]


def test_engines_are_hooked_somewhere(tmp_path: Path) -> None:
    engine = tmp_path / "verl/workers/engine/fsdp/transformer_impl.py"
    engine.parent.mkdir(parents=True)
    text = """\
    class Engine:
        def forward_backward_batch(self, data):
            for micro_batch in data:
                self.forward_step(micro_batch)
    """
    engine.write_text(textwrap.dedent(text))
    found = [finding for finding in check_tree(tmp_path, "verl", None, []) if finding.rule == "micro-batch"]
    assert [(finding.path, finding.line) for finding in found] == [("verl/workers/engine/fsdp/transformer_impl.py", 4)]


def test_an_unreadable_file_is_a_finding(tmp_path: Path) -> None:
    tree(tmp_path)
    (tmp_path / LOG).unlink()
    (tmp_path / LOG).mkdir()
    found = check_tree(tmp_path, "vllm-ascend", 1, [RUNNER, LOG])
    assert f"{LOG}: [present] can't be read: Is a directory" in shown(found)


def test_files_that_are_not_python_are_only_there(tmp_path: Path) -> None:
    tree(tmp_path)
    (tmp_path / "notes.md").write_text("x = = 1")
    assert check_tree(tmp_path, "vllm-ascend", 1, [RUNNER, LOG, "notes.md"]) == []


def test_the_garbage_collector_is_as_before(tmp_path: Path) -> None:
    tree(tmp_path)
    assert gc.isenabled()
    check_tree(tmp_path, "vllm-ascend", 1, [RUNNER, LOG])
    assert gc.isenabled()
    gc.disable()
    try:
        check_tree(tmp_path, "vllm-ascend", 1, [RUNNER, LOG])
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_the_lock_proves_is_not_asked_again(tmp_path: Path) -> None:
    """Names and grammar of unchanged files are not looked at, but what the rules about the dump look at still is."""
    tree(tmp_path)
    runner = tmp_path / RUNNER
    runner.write_text(runner.read_text().replace("self.debugger.stop()", "self.debugger.halt()") + "\nnothing\n")
    touched = [RUNNER, LOG]
    every = {finding.rule for finding in check_tree(tmp_path, "vllm-ascend", 1, touched)}
    fewer = {finding.rule for finding in check_tree(tmp_path, "vllm-ascend", 1, touched, unchanged=True)}
    assert every == {"imports", "log-before-stop", "start-stop", "stop-count"}
    assert fewer == every - {"imports"}
