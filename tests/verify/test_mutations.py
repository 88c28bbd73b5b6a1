"""The rules on real patched trees: nothing to find there, and something as soon as a line that matters is changed."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import trees
from patchctl.verify import compiles, dump_calls, request_chain
from patchctl.verify.files import Files
from patchctl.verify.findings import Finding
from patchctl.verify.rules import check_source, check_tree
from patchctl.verify.source import Source

RUNNER = "vllm_ascend/worker/model_runner_v1.py"
LOGGER = "vllm_ascend/worker/dispatch_logger.py"
PACKAGE = "verl/utils/consistency_dump"
BRACKET = f"{PACKAGE}/bracket.py"
CLIENT = "verl/workers/rollout/llm_server.py"
ROLLOUTER = "verl/experimental/fully_async_policy/fully_async_rollouter.py"
RESUMING = "class FullyAsyncLLMServerClient"
PPO = "verl/trainer/ppo/ray_trainer.py"
FULLY_ASYNC = "verl/experimental/fully_async_policy/fully_async_trainer.py"
ENGINES = "verl/workers/engine"
FSDP = f"{ENGINES}/fsdp/transformer_impl.py"
HOOKS = r"\b(micro_batch_dump|prepare_dump|dump_schedule|crop_to_prompts|prompts_only|forwarded_env|check_run)\b"

# The lines that the rules guard, by what is on them: a series that does it otherwise has to say so here.
GUARDED_LINES = {
    RUNNER: r"log_step\(|if self\._dispatch_logger|attach_dispatch_logger|debugger\.(start|stop|step)\(",
    CLIENT: r"server_request_id",
    ROLLOUTER: r"^import json|\brequests\b|^ +steps[:.]|=steps\[|prompt_request|request_chain|last = piece"
    r"|\"(request_id|num_tokens)\": |_global_steps(\"\]|=)|super\(\)\.generate",
    BRACKET: r"\.log_step\(|debugger\.(start|stop|step)\(|^        (try|finally):|\b__(enter|exit)__\(",
    PPO: HOOKS,
    FULLY_ASYNC: HOOKS,
    "verl/trainer/constants_ppo.py": HOOKS,
    "verl/trainer/main_ppo.py": HOOKS,
    **{
        f"{ENGINES}/{name}/transformer_impl.py": HOOKS
        for name in ("fsdp", "megatron", "veomni", "torchtitan", "automodel")
    },
}


@dataclass(frozen=True, eq=False)
class Patched:
    """A patched tree, its touched files parsed.

    Attributes:
        stops: how many stops it has.
    """

    root: Path
    files: Files
    sources: dict[str, Source]
    stops: int

    @property
    def touched(self) -> list[str]:
        return list(self.sources)

    def place(self, path: str) -> str:
        """Where the code that is known to live in a file lives in this tree: an upstream may have moved it."""
        moved = path == ROLLOUTER and RESUMING in self.text(CLIENT)
        return CLIENT if moved else path

    def text(self, path: str) -> str:
        return self.sources[path].data.decode()

    def check(self, path: str, text: str) -> Iterator[Finding]:
        """What the rules find in a file, and in the number of stops, when it has another text."""
        data = text.encode()
        tree, findings = compiles.parse(path, data)
        yield from findings
        if tree is not None:
            changed = Source(path, data, tree, self.files.module)
            sources = {**self.sources, path: changed}
            yield from check_source(changed, sources, self.files.exists, changed=False)
            yield from dump_calls.check_count(list(sources.values()), self.stops)
            yield from check_source(changed, sources, self.files.exists)
            clients = [sources[name] for name in (CLIENT, ROLLOUTER) if name in sources]
            yield from request_chain.check_presence(clients, (CLIENT, ROLLOUTER)) if clients else ()

    def survives(self, path: str, text: str) -> bool:
        """Whether a change is not found at a line of the file, or in the number of stops."""
        return not any(
            found.path == path and (found.line is not None or found.rule == dump_calls.COUNT_RULE)
            for found in self.check(path, text)
        )


@cache
def patched(root: Path) -> Patched:
    files = Files(root)
    added = sorted(path.relative_to(root).as_posix() for path in (root / PACKAGE).glob("*.py"))
    hooked = (b"log_step", b"consistency_dump", b"request_id")
    touched = [path for path in (*GUARDED_LINES, LOGGER) if (root / path).exists()]
    touched = [path for path in touched if any(word in (root / path).read_bytes() for word in hooked)]
    sources = {path: source for path in (*touched, *added) if (source := files.source(path)) is not None}
    return Patched(root, files, sources, sum(len(dump_calls.stops(source)) for source in sources.values()))


@pytest.fixture
def verl(verl_tree: Path) -> Patched:
    return patched(verl_tree)


@pytest.fixture
def vllm_ascend(vllm_ascend_tree: Path) -> Patched:
    return patched(vllm_ascend_tree)


def test_nothing_is_found_in_a_verl_tree(verl: Patched) -> None:
    assert len(verl.touched) >= 12
    assert verl.stops == 1
    assert check_tree(verl.root, "verl", verl.stops, verl.touched) == []
    assert check_tree(verl.root, "verl", verl.stops, verl.touched, unchanged=True) == []
    assert check_tree(verl.root, "verl", None, verl.touched) == []
    assert check_tree(verl.root, "verl", None, []) == []


def test_nothing_is_found_in_a_vllm_ascend_tree(vllm_ascend: Patched) -> None:
    assert vllm_ascend.stops in {pin.debugger_stops for pin in trees.PROJECT.pins.of("vllm-ascend")}
    assert check_tree(vllm_ascend.root, "vllm-ascend", vllm_ascend.stops, vllm_ascend.touched) == []
    assert check_tree(vllm_ascend.root, "vllm-ascend", vllm_ascend.stops, vllm_ascend.touched, unchanged=True) == []
    assert check_tree(vllm_ascend.root, "vllm-ascend", None, []) == []


def survivors_of_deletion(tree: Patched, known: str) -> tuple[int, list[str]]:
    """How many guarded lines a file has, and which of them can be deleted without a finding."""
    path = tree.place(known)
    assert tree.survives(path, tree.text(path))
    lines = tree.text(path).splitlines(keepends=True)
    guarded = [index for index, line in enumerate(lines) if re.search(GUARDED_LINES[known], line)]
    if path != known:  # of the file that it has moved to, only what has moved
        classes = [index for index, line in enumerate(lines) if line.startswith("class ")]
        first = next(index for index in classes if lines[index].startswith(RESUMING))
        guarded = [index for index in guarded if first < index < min(i for i in (*classes, len(lines)) if i > first)]
    return len(guarded), [
        f"{path}:{index + 1}: {lines[index].strip()}"
        for index in guarded
        if tree.survives(path, "".join([*lines[:index], *lines[index + 1 :]]))
    ]


@pytest.mark.parametrize("path", [path for path in GUARDED_LINES if path != RUNNER])
def test_a_deleted_line_is_missed_in_verl(verl: Patched, path: str) -> None:
    if verl.place(path) not in verl.sources:
        assert path.startswith(ENGINES), f"{path} is not hooked"
        pytest.skip(f"{path} is not in the series")
    count, survivors = survivors_of_deletion(verl, path)
    assert count >= 2
    assert survivors == []


def test_a_deleted_line_is_missed_in_vllm_ascend(vllm_ascend: Patched) -> None:
    count, survivors = survivors_of_deletion(vllm_ascend, RUNNER)
    assert count >= 4 * vllm_ascend.stops
    assert survivors == []


Lines = list[str]
LOG = re.compile(
    r"(?P<log>^ +if self\._dispatch_logger is not None:\n +self\._dispatch_logger\.log_step\(\S.*\n)"
    r"(?P<stop>^ +self\.debugger\.stop\(\)\n^ +self\.debugger\.step\(\)\n)",
    re.MULTILINE,
)


def at(log: Lines, text: str) -> str:
    """A line as deep as the log's guard."""
    return log[0][: len(log[0]) - len(log[0].lstrip())] + text + "\n"


def deeper(lines: Lines) -> Lines:
    return ["    " + line for line in lines]


def replaced(old: str, new: str) -> Callable[[Lines, Lines], Lines]:
    def change(log: Lines, stop: Lines) -> Lines:
        assert any(old in line for line in log)
        return [line.replace(old, new) for line in log] + stop

    return change


# What a careless edit makes of the lines of a log (its guard, its call) and of a stop (the stop, the step).
CHANGES: dict[str, Callable[[Lines, Lines], Lines]] = {
    "deleted": lambda log, stop: stop,
    "commented out": lambda log, stop: ["#" + line for line in log] + stop,
    "in a string": lambda log, stop: [at(log, repr("".join(log))), *stop],
    "unguarded": lambda log, stop: [log[1][4:], *stop],
    "behind the stop": lambda log, stop: [stop[0], *log, stop[1]],
    "behind the step": lambda log, stop: stop + log,
    "twice": lambda log, stop: log + log + stop,
    "twice under its guard": lambda log, stop: [*log, log[1], *stop],
    "in a function that nothing calls": lambda log, stop: [at(log, "def log():"), *deeper(log), *stop],
    "in a branch": lambda log, stop: [at(log, "if self.use_aclgraph:"), *deeper(log), *stop],
    "in another branch": lambda log, stop: [at(log, "if self.x:"), *deeper(log), at(log, "else:"), *deeper(stop)],
    "in a loop": lambda log, stop: [at(log, "for _ in range(1):"), *deeper(log), *stop],
    "a return between": lambda log, stop: [*log, at(log, "if self.use_aclgraph: return None"), *stop],
    "a call between": lambda log, stop: [*log, at(log, "self.model(1)"), *stop],
    "another debugger's": replaced("_dispatch_logger", "debugger"),
    "of an attribute that is not there": replaced("_dispatch_logger", "_logger"),
    "guarded by nothing": replaced("if self._dispatch_logger is not None", "if True"),
    "never reached": replaced(" is not None:", " is not None and False:"),
    "guarded the other way": replaced("is not None", "is None"),
    "guarded by something else": replaced("if self._dispatch_logger is", "if self.attn_state is"),
    "on one more condition": replaced("is not None:", "is not None and self.use_aclgraph:"),
    "another method": replaced(".log_step(", ".log("),
    "first argument renamed": replaced("scheduler_output", "scheduled"),
    "second argument renamed": replaced("self.attn_state", "self.attention"),
    "first argument left out": replaced("scheduler_output, ", ""),
    "arguments swapped": replaced("scheduler_output, self.attn_state", "self.attn_state, scheduler_output"),
    "two stops": lambda log, stop: [*log, stop[0], *stop],
    "no stop": lambda log, stop: [*log, stop[1]],
    "no step": lambda log, stop: [*log, stop[0]],
    "no stop and no step": lambda log, stop: log,
    "step before the stop": lambda log, stop: [*log, stop[1], stop[0]],
    "a return before the stop": lambda log, stop: [*log, at(log, "return None"), *stop],
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_changed_log_is_found_at_every_stop(vllm_ascend: Patched, change: Callable[[Lines, Lines], Lines]) -> None:
    text = re.sub(r"(?<=log_step\()\s+", "", vllm_ascend.text(RUNNER))  # an older tree's style breaks the call
    if "def _finalize_dump_data(" in text:
        pytest.skip("its one stop is in a helper; tests/verify/test_new_pins.py changes that")
    assert not vllm_ascend.survives(RUNNER, text + "(")
    assert vllm_ascend.survives(RUNNER, text)
    found = list(LOG.finditer(text))
    assert len(found) == vllm_ascend.stops
    for match in found:
        log, stop = (match[group].splitlines(keepends=True) for group in ("log", "stop"))
        changed = text[: match.start()] + "".join(change(log, stop)) + text[match.end() :]
        assert not vllm_ascend.survives(RUNNER, changed), match[0]


MICRO_BATCH = "micro_batch_dump(self, micro_batch, forward_only=forward_only)"
CROP = "self._compute_old_log_prob(crop_to_prompts(batch, self.global_steps))"


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        (CLIENT, "request_id=server_request_id,", "request_id=request_id,"),
        (CLIENT, "request_id=server_request_id,", "request_id=uuid4().hex,"),
        (CLIENT, '["request_id"] = server_request_id', '["request_id"] = request_id'),
        (CLIENT, '["request_id"] = server_request_id', '["request_id"] = uuid4().hex'),
        (
            CLIENT,
            '            output.extra_fields["request_id"]',
            '            if output.token_ids: output.extra_fields["request_id"]',
        ),
        (CLIENT, '"request_id": server_request_id,', '"request_id": request_id,'),
        (CLIENT, '"request_id": server_request_id,', '"request_id": uuid4().hex,'),
        (CLIENT, "if piece.stop_reason is not None or", "if piece.stop_reason is not None and"),
        (CLIENT, "if piece.stop_reason is not None or piece.extra_fields", "if piece.token_ids"),
        (
            CLIENT,
            "if piece.stop_reason is not None or",
            "yield piece\n                if piece.stop_reason is not None or",
        ),
        (CLIENT, 'output.extra_fields["request_id"] = server_request_id\n                yield output', "yield output"),
        (ROLLOUTER, "request_id=prompt_request[", "request_id=requests[-1]["),
        (ROLLOUTER, 'request_id=prompt_request["request_id"]', 'request_id=last.extra_fields["request_id"]'),
        (ROLLOUTER, "request_chain=json.dumps(requests)", "request_chain=json.dumps(prompt_request)"),
        (ROLLOUTER, "min_global_steps=steps[0]", "min_global_steps=steps[-1]"),
        (ROLLOUTER, "max_global_steps=steps[-1]", "max_global_steps=steps[0]"),
        (ROLLOUTER, "last = piece\n", "last = pieces\n"),
        (ROLLOUTER, "piece.stop_reason is None and not", "piece.stop_reason is None or not"),
        (ROLLOUTER, "async def generate_stream(", "async def stream("),
        (ROLLOUTER, '["request_id"] = prompt_request["request_id"]', '["request_id"] = requests[-1]["request_id"]'),
        (ROLLOUTER, '= prompt_request["request_id"]', '= output.extra_fields["request_id"]'),
        (ROLLOUTER, "while True:\n            # 1.", "while True:\n            requests = []\n            # 1."),
        (ROLLOUTER, "            requests.append(", "            if output.token_ids: requests.append("),
        (PPO, f"if prompts_only():\n                        {CROP}", f"if True:\n                        {CROP}"),
        (PPO, CROP, "crop_to_prompts(batch)"),
        (PPO, CROP, "self._compute_old_log_prob(batch)"),
        (FULLY_ASYNC, "if prompts_only():", "if not prompts_only():"),
        (FULLY_ASYNC, CROP, "self._compute_old_log_prob(batch)"),
        (FSDP, f", {MICRO_BATCH}", ""),
        (FSDP, MICRO_BATCH, MICRO_BATCH.replace("micro_batch,", "data,")),
        (FSDP, MICRO_BATCH, MICRO_BATCH.replace("=forward_only", "=True")),
        (BRACKET, "finally:", "except ValueError:"),
        (BRACKET, "debugger.start(", "debugger.restart("),
        (BRACKET, "debugger.stop()", "debugger.step()"),
        (BRACKET, "training_log.log_step(step, ", "training_log.log_step(step), ("),
        (BRACKET, "training_log.log_step(step, ", "training_log.log_step(fields=step, step="),
        (BRACKET, "training_log.log_step(step, ", "training_log.log_step(phase, "),
        (BRACKET, "training_log.log_step(step, ", "self.debugger.log_step(step, "),
        (BRACKET, "training_log is not None", "training_log is None"),
        (BRACKET, "if training_log is not None and", "if self._debugger is not None and"),
    ],
)
def test_a_change_in_verl_is_found(verl: Patched, path: str, old: str, new: str) -> None:
    path = verl.place(path)
    text = verl.text(path)
    assert verl.survives(path, text)
    assert old in text, f"{old!r} is not in {path}"
    for match in re.finditer(re.escape(old), text):
        assert not verl.survives(path, text[: match.start()] + new + text[match.end() :])


def test_an_id_that_is_not_made_for_each_request_is_found(verl: Patched) -> None:
    text = verl.text(CLIENT)
    made = list(re.finditer(r"(?<=server_request_id = )(uuid4\(\)\.hex|self\._\w+\(request_id\))", text))
    assert len(made) == 2
    for match in made:
        for other in ("request_id", "self.request_id", "None"):
            assert not verl.survives(CLIENT, text[: match.start()] + other + text[match.end() :])


def test_what_is_found_by_lines_is_all_there_is(verl: Patched, vllm_ascend: Patched) -> None:
    """The functions and imports of a file are looked for by their lines; a walk over the whole tree has to agree."""
    for source in (*verl.sources.values(), *vllm_ascend.sources.values()):
        walked = [node for node in ast.walk(source.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        assert {function.node for function in source.functions} == set(walked)
        imports = [node for node in ast.walk(source.tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        assert {statement for statement, _ in source.import_statements} == set(imports)
