"""What a dump run refuses or warns about before it starts."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from verl_parts import package

GOOD: dict[str, Any] = {
    "actor_rollout_ref": {
        "model": {"use_remove_padding": True},
        "actor": {"strategy": "fsdp", "use_dynamic_bsz": False, "ppo_micro_batch_size_per_gpu": 1, "profiler": {}},
        "rollout": {
            "name": "vllm",
            "n": 1,
            "log_prob_use_dynamic_bsz": False,
            "log_prob_micro_batch_size_per_gpu": 1,
            "engine_kwargs": {"vllm": {"no_enable_prefix_caching": True, "no_enable_chunked_prefill": True}},
        },
    },
    "algorithm": {"rollout_correction": {"bypass_mode": False}},
    "global_profiler": {"tool": None, "steps": None},
    "transfer_queue": {"enable": False},
    "trainer": {"val_before_train": False},
}
MSPROBE: dict[str, Any] = {"task": "statistics", "dump_path": "", "rank": [], "step": [], "level": "L0"}
PROMPTS = {"DUMP_ON": "1", "PROMPTS_ONLY": "1"}
FULL = {"DUMP_ON": "1"}


def changed(*changes: tuple[str, Any]) -> dict[str, Any]:
    """GOOD with other values at dotted paths."""
    config = copy.deepcopy(GOOD)
    for path, value in changes:
        *parents, name = path.split(".")
        section = config
        for parent in parents:
            section = section[parent]
        section[name] = value
    return config


@pytest.fixture
def found(verl_tree: Path) -> Callable[[str, dict[str, Any], dict[str, str]], list[str]]:
    """The findings of "refusals" or "warnings" on a configuration, under an environment."""

    def find(kind: str, config: dict[str, Any], env: dict[str, str]) -> list[str]:
        with package(verl_tree) as code:
            settings = code.settings.DumpSettings.from_env(env)
            return [str(finding) for finding in getattr(code.preflight, f"run_{kind}")(config, settings)]

    return find


def fixed_mask(tree: Path) -> bool:
    """Whether this verl builds the attention mask without remove_padding from the whole sequence."""
    return "def build_attention_mask_from_nested" in (tree / "verl/workers/utils/padding.py").read_text("utf-8")


@pytest.mark.parametrize("env", [{}, PROMPTS, FULL])
def test_a_good_configuration_is_not_refused(found: Any, env: dict[str, str]) -> None:
    assert found("refusals", GOOD, env) == []
    expected = [] if env != FULL else ["whole sequences are dumped, and the rollout's prefill saw the prompts"]
    assert [text.split(";")[0] for text in found("warnings", GOOD, env)] == expected


@pytest.mark.parametrize(
    ("env", "changes", "reason", "change"),
    [
        (
            PROMPTS,
            [("actor_rollout_ref.actor.use_dynamic_bsz", True)],
            "several requests",
            "set actor_rollout_ref.actor.use_dynamic_bsz=False",
        ),
        (
            PROMPTS,
            [("actor_rollout_ref.rollout.log_prob_use_dynamic_bsz", True)],
            "several requests",
            "set actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=False",
        ),
        (
            PROMPTS,
            [("actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu", 4)],
            "no step of its own",
            "set actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
        ),
        (
            {"DUMP_ON": "1", "DUMP_PHASE": "update_actor"},
            [("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", None)],
            "no step of its own",
            "set actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        ),
        (
            FULL,
            [("algorithm.rollout_correction.bypass_mode", True)],
            "no log_prob phase",
            "set algorithm.rollout_correction=null",
        ),
        (
            PROMPTS,
            [("global_profiler.tool", "precision_debugger"), ("global_profiler.steps", [1])],
            "same msprobe singleton",
            "set global_profiler.tool=null",
        ),
        ({**PROMPTS, "DUMP_PHASE": "update_actor"}, [], "no update phase", "set DUMP_PHASE=log_prob"),
        (PROMPTS, [("transfer_queue.enable", True)], "main_ppo_sync trains", "unset PROMPTS_ONLY"),
    ],
)
def test_refused(found: Any, env: dict[str, str], changes: list[tuple[str, Any]], reason: str, change: str) -> None:
    refusals = found("refusals", changed(*changes), env)
    assert len(refusals) == 1
    assert reason in refusals[0] and change in refusals[0]


@pytest.mark.parametrize(
    ("env", "changes"),
    [
        # The pass over the prompts is the run's own, whatever the trainer does about log probs.
        (PROMPTS, [("algorithm.rollout_correction.bypass_mode", True)]),
        (PROMPTS, [("algorithm.rollout_correction", None)]),
        (PROMPTS, [("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", 8)]),
        (PROMPTS, [("global_profiler.tool", "precision_debugger")]),
        ({"DUMP_ON": "1", "DUMP_PHASE": "update_actor"}, [("algorithm.rollout_correction.bypass_mode", True)]),
        (FULL, [("transfer_queue.enable", True)]),
        ({}, [("actor_rollout_ref.actor.use_dynamic_bsz", True), ("algorithm.rollout_correction.bypass_mode", True)]),
    ],
)
def test_not_refused(found: Any, env: dict[str, str], changes: list[tuple[str, Any]]) -> None:
    assert found("refusals", changed(*changes), env) == []


def test_remove_padding(verl_tree: Path, found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, one of the two commits attends with the mask of the responses."""
    names = {"build_attention_mask_from_nested": None} if fixed_mask(verl_tree) else {}
    workers_utils = SimpleNamespace(padding=SimpleNamespace(**names))
    monkeypatch.setitem(__import__("sys").modules, "verl.workers.utils", workers_utils)
    without = ("actor_rollout_ref.model.use_remove_padding", False)
    refusals = found("refusals", changed(without), PROMPTS)
    assert len(refusals) == (0 if fixed_mask(verl_tree) else 1)
    assert all("set actor_rollout_ref.model.use_remove_padding=True" in text for text in refusals)
    assert found("refusals", changed(without, ("actor_rollout_ref.actor.strategy", "megatron")), PROMPTS) == []


@pytest.mark.parametrize(
    ("env", "changes", "text"),
    [
        (PROMPTS, [("actor_rollout_ref.rollout.n", 8)], "rollout.n=8"),
        (PROMPTS, [("actor_rollout_ref.rollout.engine_kwargs", {})], "no_enable_prefix_caching=True"),
        (PROMPTS, [("actor_rollout_ref.rollout.engine_kwargs", {"vllm": {}})], "no_enable_chunked_prefill=True"),
        (PROMPTS, [("actor_rollout_ref.rollout.enable_prefix_caching", False)], None),
        (PROMPTS, [("trainer.val_before_train", True)], "set trainer.val_before_train=False"),
        (PROMPTS, [("actor_rollout_ref.actor.ulysses_sequence_parallel_size", 2)], "splits each prompt"),
        ({"PROMPTS_ONLY": "1"}, [], "without DUMP_ON=1"),
        ({**PROMPTS, "DUMP_PHASE": "all"}, [], "only log_prob is dumped"),
    ],
)
def test_warned(found: Any, env: dict[str, str], changes: list[tuple[str, Any]], text: str | None) -> None:
    warnings = found("warnings", changed(*changes), env)
    assert any(text in warning for warning in warnings) if text else warnings == []


def test_refusal_names_all_reasons_and_can_be_overridden(
    verl_tree: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in PROMPTS.items():
        monkeypatch.setenv(name, value)
    bad = changed(
        ("actor_rollout_ref.actor.use_dynamic_bsz", True),
        ("actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu", 2),
    )
    with package(verl_tree) as code:
        with pytest.raises(RuntimeError) as refusal:
            code.preflight.check_run(bad)
        assert "use_dynamic_bsz=False" in str(refusal.value)
        assert "log_prob_micro_batch_size_per_gpu=1" in str(refusal.value)
        assert "DUMP_UNSAFE=1" in str(refusal.value)
        monkeypatch.setenv("DUMP_UNSAFE", "1")
        with caplog.at_level(logging.WARNING):
            code.preflight.check_run(bad)
    assert "use_dynamic_bsz=False" in caplog.text


def write_config(folder: Path, text: str | None = None, **changes: Any) -> str:
    path = folder / "config_actor.json"
    values = {**MSPROBE, "dump_path": str(folder / "dump"), **changes}
    path.write_text(text if text is not None else json.dumps(values), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("text", "changes", "reason"),
    [
        (None, {}, None),
        (None, {"level": "mix"}, None),
        ("{", {}, "is not JSON"),
        ("[]", {}, "has no dump_path"),
        (None, {"dump_path": 3}, "has no dump_path"),
        (None, {"dump_path": "/tmp/with space"}, "refuses the characters"),
        (None, {"dump_path": "~/dump"}, "refuses the characters"),
        (None, {"dump_path": "/数据"}, "refuses the characters"),
        (None, {"dump_path": "/dev/null"}, "is not a directory"),
        (None, {"dump_path": "/dev/null/below"}, "is not writable"),
        (None, {"level": "L1"}, "dumps no modules"),
        (None, {"level": None}, "dumps no modules"),
        (None, {"statistics": {"scope": ["one"]}}, "scope has 1 names"),
        (None, {"statistics": {"scope": ["one", "two"]}}, None),
    ],
)
def test_msprobe_config(
    verl_tree: Path, tmp_path: Path, text: str | None, changes: dict[str, Any], reason: str | None
) -> None:
    path = write_config(tmp_path, text, **changes)
    with package(verl_tree) as code:
        refusals = [str(finding) for finding in code.preflight.msprobe_config_refusals(path)]
    assert len(refusals) == (0 if reason is None else 1), refusals
    assert all(reason in text for text in refusals if reason)


def test_missing_config(verl_tree: Path, tmp_path: Path) -> None:
    with package(verl_tree) as code:
        (refusal,) = code.preflight.msprobe_config_refusals(str(tmp_path / "none.json"))
    assert "No such file" in str(refusal) and "DUMP_CONFIG_PATH" in str(refusal)


def test_dump_path_of_another_run(verl_tree: Path, tmp_path: Path) -> None:
    path = write_config(tmp_path)
    with package(verl_tree) as code:
        assert code.preflight.msprobe_config_refusals(path) == []
        (tmp_path / "dump").mkdir()
        assert code.preflight.msprobe_config_refusals(path) == [], "an empty one is fine"
        (tmp_path / "dump" / "step0").mkdir()
        (refusal,) = code.preflight.msprobe_config_refusals(path)
    assert "is not empty" in str(refusal)
