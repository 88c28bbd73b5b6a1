"""`patchctl config` writes what `patchctl doctor` approves of; doctor names everything else."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from dump_files import run_cli

from patchctl import doctor
from patchctl.config_files import (
    MODES,
    TASKS,
    ModelShape,
    RunPlan,
    config_problems,
    environment,
    estimate_disk,
    launch_script,
    msprobe_config,
    overrides,
)

ROOT = Path(__file__).resolve().parents[2]
SPEC = {
    "task": "statistics",
    "dump_path": "/dump_data/generate_sequence",
    "rank": [],
    "step": [],
    "level": "L0",
    "async_dump": False,
    "statistics": {"scope": [], "list": [], "tensor_list": [], "data_mode": ["all"], "summary_mode": "statistics"},
}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("training", [False, True])
def test_our_files_have_no_problem(task: str, training: bool) -> None:
    config = msprobe_config(RunPlan(task=task), training)
    assert config_problems(config) == []
    assert config["task"] == ("tensor" if task == "tensor" else "statistics")
    assert bool(config.get("statistics", {}).get("tensor_list")) == (task == "tensor_list")


def test_the_dump_documents_own_file_is_only_warned_about() -> None:
    levels = {level for level, _, _ in config_problems(SPEC)}
    assert levels == {"warning"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"precision": "high"}, "norm and mean"),
        ({"dumppath": "/x"}, "`dumppath`"),
        ({"statistics": {"sumary_mode": "md5"}}, "`statistics.sumary_mode`"),
        ({"task": "statistic"}, "statistic"),
        ({"level": "l0"}, "l0"),
        ({"level": "L1"}, "L1"),
        ({"rank": 0}, "`rank`"),
        ({"step": "0"}, "`step`"),
        ({"dump_path": ""}, "no dump_path"),
        ({"dump_path": "/data/训练"}, "characters"),
        ({"dump_path": "/with space"}, "characters"),
        ({"statistics": {"scope": ["a"]}}, "scope"),
        ({"statistics": {"data_mode": "all"}}, "data_mode"),
        ({"statistics": {"data_mode": ["fwd"]}}, "data_mode"),
        ({"statistics": {"data_mode": ["all", "forward"]}}, "data_mode"),
        ({"statistics": {"data_mode": ["backward"]}}, "data_mode"),
        ({"statistics": {"summary_mode": "md5"}}, "md5"),
    ],
)
def test_what_msprobe_would_ignore_or_refuse_late_is_an_error(change: dict[str, Any], says: str) -> None:
    errors = [f"{what} {hint}" for level, what, hint in config_problems({**SPEC, **change}) if level == "error"]
    assert errors and any(says in error for error in errors), errors


def test_an_unknown_key_is_told_its_likely_name() -> None:
    (found,) = [hint for _, what, hint in config_problems({**SPEC, "dump_pth": "/x"}) if "dump_pth" in what]
    assert found == "write `dump_path`"


@pytest.mark.parametrize("mode", MODES)
def test_the_files_in_the_repository_are_what_the_command_writes(mode: str, tmp_path: Path) -> None:
    done = run_cli("config", tmp_path, "--mode", mode, "--config-dir", "/home")
    assert done.returncode == 0, done.stderr
    name = "hybrid.sh" if mode == "hybrid" else "fully_async.sh"
    for file in ("config_generate.json", "config_actor.json"):
        assert (tmp_path / file).read_text() == (ROOT / "configs" / "msprobe" / file).read_text()
    assert (tmp_path / name).read_text() == (ROOT / "configs" / "launch" / name).read_text()
    subprocess.run(["bash", "-n", tmp_path / name], check=True)


@pytest.mark.parametrize("mode", MODES)
def test_the_script_passes_every_override_and_variable_on(mode: str, tmp_path: Path) -> None:
    """Run by a real shell, with a python3 that says what it was given."""
    plan = RunPlan(mode=mode, requests=3, config_dir="/some/where")
    (tmp_path / "launch.sh").write_text(launch_script(plan))
    (tmp_path / "python3").write_text('#!/bin/sh\nfor a in "$@"; do echo "$a"; done\necho "DUMP_ON=$DUMP_ON"\n')
    (tmp_path / "python3").chmod(0o755)
    done = subprocess.run(
        ["bash", tmp_path / "launch.sh", "trainer.n_gpus_per_node=2"],
        capture_output=True,
        text=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        check=True,
    )
    lines = done.stdout.splitlines()
    assert lines[0] == "-m"
    assert lines[2:-2] == [override for override, _ in overrides(plan)]
    assert lines[-2:] == ["trainer.n_gpus_per_node=2", "DUMP_ON=1"]
    assert environment(plan)["DUMP_CONFIG_PATH"] == "/some/where/config_actor.json"


@pytest.mark.parametrize("mode", MODES)
def test_doctor_approves_of_our_launch_script_and_misses_every_line_that_is_gone(mode: str, tmp_path: Path) -> None:
    script = tmp_path / "launch.sh"
    text = launch_script(RunPlan(mode=mode))
    script.write_text(text)
    settings = doctor.read_overrides(script)
    assert list(doctor.check_overrides(settings)) == []
    for key, _, _ in doctor._WANTED:
        (finding,) = doctor.check_overrides({name: value for name, value in settings.items() if name != key})
        assert finding.level == "error" and key in finding.what and key in finding.change


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("actor_rollout_ref.rollout.enable_prefix_caching=False", "no_enable_prefix_caching"),
        ("actor_rollout_ref.rollout.enable_chunked_prefill=False", "no_enable_chunked_prefill"),
        ("global_profiler.tool=precision_debugger", "global_profiler.tool"),
        ("algorithm.rollout_correction.bypass_mode=True", "rollout_correction=null"),
        ("actor_rollout_ref.rollout.n=8", "actor_rollout_ref.rollout.n=1"),
        ("+actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config={dump_config:x}", "dump_config_path"),
    ],
)
def test_what_defeats_a_dump_run_is_named(override: str, says: str, tmp_path: Path) -> None:
    script = tmp_path / "launch.sh"
    script.write_text(launch_script(RunPlan()).replace(")\nexec", f"  {shlex.quote(override)}\n)\nexec"))
    changes = [finding.change for finding in doctor.check_overrides(doctor.read_overrides(script))]
    assert len(changes) == 1 and says in changes[0]


@pytest.mark.parametrize(
    ("packages", "says"),
    [
        ({"torch": "2"}, "is missing"),
        ({"torch": "2", "mindstudio-probe": "25.0.0"}, "never tried"),
        ({"torch": "2", "mindstudio-probe": "26.2.0", "msprobe": "1.0"}, "another project"),
        ({"mindstudio-probe": "26.2.0"}, "torch is missing"),
        ({"torch": "2", "mindstudio-probe": "26.2.0", "vllm": "0.13.0", "vllm-ascend": "0.18.0"}, "vllm 0.13.0"),
    ],
)
def test_packages(packages: dict[str, str | None], says: str) -> None:
    findings = [finding for finding in doctor.check_packages(packages) if finding.level != "ok"]
    assert len(findings) == 1 and says in findings[0].what and findings[0].change


GOOD = {"DUMP_ON": "1", "PROMPTS_ONLY": "1", "DUMP_CONFIG_PATH": __file__}


@pytest.mark.parametrize(
    ("variables", "forwards", "level", "says"),
    [
        ({**GOOD, "VLLM_USE_V2_MODEL_RUNNER": "1"}, True, "error", "v2 model runner"),
        ({**GOOD, "DUMP_PHASE": "update_actor"}, True, "error", "DUMP_PHASE"),
        ({**GOOD, "DUMP_ON": "0"}, True, "warning", "DUMP_ON"),
        ({**GOOD, "PROMPTS_ONLY": ""}, True, "warning", "PROMPTS_ONLY"),
        ({**GOOD, "DUMP_CONFIG_PATH": "/nowhere.json"}, True, "warning", "/nowhere.json"),
        (GOOD, False, "error", "does not forward"),
        ({**GOOD, "RAY_ADDRESS": "auto"}, None, "warning", "RAY_ADDRESS"),
    ],
)
def test_variables(variables: dict[str, str], forwards: bool | None, level: str, says: str) -> None:
    findings = [finding for finding in doctor.check_variables(variables, forwards) if finding.level != "ok"]
    assert [(finding.level, says in finding.what, bool(finding.change)) for finding in findings] == [
        (level, True, True)
    ]
    assert all(finding.level == "ok" for finding in doctor.check_variables(GOOD, True))


def test_files_that_do_not_go_together(tmp_path: Path) -> None:
    left, right = tmp_path / "g.json", tmp_path / "a.json"
    config = {**msprobe_config(RunPlan(dump_root=str(tmp_path)), False), "dump_path": str(tmp_path / "new")}
    left.write_text(json.dumps(config))
    right.write_text(json.dumps({**config, "task": "tensor", "tensor": config["statistics"]}))
    texts = [finding.what for finding in doctor.check_configs(left, right) if finding.level == "error"]
    assert any("different tasks" in text for text in texts) and any("one folder" in text for text in texts)
    right.write_text('{"task": "statistics", // no\n}')
    texts = [finding.what for finding in doctor.check_configs(left, right) if finding.level == "error"]
    assert any("not plain JSON" in text for text in texts)
    texts = [finding.what for finding in doctor.check_configs(tmp_path / "gone.json", None)]
    assert any("No such file" in text for text in texts)


def test_a_used_dump_folder_is_an_error(tmp_path: Path) -> None:
    assert list(doctor.check_dump_path(str(tmp_path / "fresh"), "c.json")) == []
    (tmp_path / "old" / "step0").mkdir(parents=True)
    (finding,) = doctor.check_dump_path(str(tmp_path / "old"), "c.json")
    assert finding.level == "error" and "not empty" in finding.what
    (tmp_path / "file").write_text("")
    (finding,) = doctor.check_dump_path(str(tmp_path / "file"), "c.json")
    assert "not a folder" in finding.what


def test_trees() -> None:
    good, bad = doctor.check_trees({"verl": ("applied", "/v"), "vllm-ascend": ("unapplied", "/a")})
    assert (good.level, bad.level) == ("ok", "error")
    assert bad.change == "patchctl apply --vllm-ascend /a"


def test_the_command_prints_a_document_and_an_environment_for_the_report(tmp_path: Path) -> None:
    done = run_cli("doctor", "--json")
    document = json.loads(done.stdout)
    assert done.returncode == (1 if any(f["level"] == "error" for f in document["findings"]) else 0)
    file = tmp_path / "env.json"
    file.write_text(done.stdout)
    assert doctor.read_environments(file, None)["infer"]["python"]
    done = run_cli("doctor", "--python", tmp_path / "none")
    assert done.returncode == 1 and "Traceback" not in done.stderr and len(done.stderr.splitlines()) == 1


def test_virtual_stages_have_steps_of_their_own() -> None:
    """A bound that counts micro batches alone would cut half of the requests off."""
    assert msprobe_config(RunPlan(requests=4, virtual_stages=2), True)["step"] == ["0-7"]
    assert msprobe_config(RunPlan(requests=4, virtual_stages=2), False)["step"] == ["0-7"]
    assert msprobe_config(RunPlan(requests=4, response=1, virtual_stages=2), False)["step"] == ["0-3"]


@pytest.mark.parametrize("root", ["relative", "/with space", "/数据"])
def test_a_dump_root_that_msprobe_refuses_is_a_usage_error(root: str, tmp_path: Path) -> None:
    done = run_cli("config", tmp_path / "out", "--dump-root", root)
    assert done.returncode == 2 and not (tmp_path / "out").exists()


def test_files_in_the_way_are_kept(tmp_path: Path) -> None:
    (tmp_path / "config_actor.json").write_text("mine")
    done = run_cli("config", tmp_path, "--config-dir", "/home")
    assert done.returncode == 1 and (tmp_path / "config_actor.json").read_text() == "mine"
    assert not (tmp_path / "config_generate.json").exists()
    assert run_cli("config", tmp_path, "--config-dir", "/home", "--overwrite").returncode == 0


def test_the_estimate_fits_measured_dumps() -> None:
    """A 24-layer model's dump.json was 374 KB for 317 modules of one training step."""
    shape = ModelShape(layers=24, hidden=896, q=896, kv=128, intermediate=4864)
    sizes = estimate_disk(RunPlan(requests=1, response=1), shape)
    assert 300_000 < sizes["train"] < 500_000
    tensors = estimate_disk(RunPlan(task="tensor", requests=1, response=1, prompt=512), shape)
    assert 0.5e9 < tensors["train"] < 1.5e9
    some = estimate_disk(RunPlan(task="tensor_list", requests=1, response=1, prompt=512), shape)
    assert sizes["total"] < some["total"] < tensors["total"]
    two = estimate_disk(RunPlan(requests=1, response=1, ranks=2), shape)
    assert two["total"] == 2 * sizes["total"]
