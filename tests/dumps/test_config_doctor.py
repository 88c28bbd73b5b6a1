"""`patchctl config` writes what `patchctl doctor` approves of; doctor names everything else."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dump_files import run_cli

import documents
from mini_project import Mini
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
    (fine,) = doctor.check_launch(script)
    assert (fine.level, fine.area) == ("ok", "launch") and str(script) in fine.what
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
        ("actor_rollout_ref.rollout.max_num_seqs=256", "actor_rollout_ref.rollout.max_num_seqs=1"),
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
    good, bad = doctor.check_trees({"verl": ("applied", "/v"), "vllm-ascend": ("unapplied", "/a")}, "python3")
    assert (good.level, bad.level) == ("ok", "error")
    assert bad.change == "patchctl apply --vllm-ascend /a --only vllm-ascend"


def test_a_tree_that_python_does_not_import_is_named() -> None:
    verl, ascend = doctor.check_trees({"verl": None, "vllm-ascend": None}, "/some/python")
    assert (verl.level, verl.what, verl.change) == (
        "warning",
        "verl is not importable by /some/python",
        "give --verl DIR",
    )
    assert (ascend.what, ascend.change) == (
        "vllm_ascend is not importable by /some/python",
        "give --vllm-ascend DIR",
    )


def test_an_environment_without_the_trees_is_warned_about(tmp_path: Path) -> None:
    python = tmp_path / "python"
    answer = {"python": "3.11.0", "platform": "Linux", "packages": {}, "places": {"verl": None, "vllm_ascend": None}}
    python.write_text(f"#!/bin/sh\necho {shlex.quote(json.dumps(answer))}\n")
    python.chmod(0o755)
    found = of_area("patches", doctor_findings("--python", python))
    assert [(finding["level"], finding["change"]) for finding in found] == [
        ("warning", "give --verl DIR"),
        ("warning", "give --vllm-ascend DIR"),
    ]
    assert all(f"by {python}" in finding["what"] for finding in found)


def doctor_findings(*arguments: str | Path, cwd: Path | None = None) -> list[dict[str, str]]:
    done = run_cli("doctor", "--json", *arguments, cwd=cwd)
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr, done.stderr
    found: list[dict[str, str]] = json.loads(done.stdout)["findings"]
    return found


def of_area(area: str, findings: list[dict[str, str]]) -> list[dict[str, str]]:
    return [finding for finding in findings if finding["area"] == area]


@pytest.mark.parametrize("name", ["verl", "vllm-ascend"])
def test_the_way_to_an_unpatched_tree_can_be_typed(
    name: str, mini: Mini, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATCHCTL_ROOT", str(mini.root))
    tree = mini.pristine(tmp_path / "a tree", mini.pin(name))
    found = of_area("patches", doctor_findings(f"--{name}", tree.root, cwd=tmp_path))
    (change,) = [finding["change"] for finding in found if finding["level"] == "error"]
    program, *arguments = shlex.split(change)
    assert program == "patchctl"
    done = run_cli(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = of_area("patches", doctor_findings(f"--{name}", tree.root, cwd=tmp_path))
    assert [finding["level"] for finding in found if str(tree.root) in finding["what"]] == ["ok"]


def test_a_folder_that_is_no_tree_is_not_to_be_patched(tmp_path: Path) -> None:
    found = of_area("patches", doctor_findings("--verl", tmp_path))
    (finding,) = [finding for finding in found if finding["level"] == "error"]
    assert str(tmp_path) in finding["what"] and finding["change"] == "give --verl DIR"


def test_the_command_prints_a_document_and_an_environment_for_the_report(tmp_path: Path) -> None:
    done = run_cli("doctor", "--json")
    document = json.loads(done.stdout)
    assert done.returncode == (1 if any(f["level"] == "error" for f in document["findings"]) else 0)
    file = tmp_path / "env.json"
    file.write_text(done.stdout)
    assert doctor.read_environments(file, None)["infer"]["python"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "No such file"),
        ("", "Exec format"),
        ("#!/bin/sh\necho first; echo last >&2; exit 3\n", "last"),
        ("#!/bin/sh\nexit 3\n", "exit code 3"),
        ("#!/bin/sh\necho '{}'\n", "answer"),
        ("#!/bin/sh\necho hello\n", "answer"),
    ],
)
def test_an_interpreter_that_is_none_is_one_line_with_the_next_step(
    text: str | None, says: str, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    if text is not None:
        python.write_text(text)
        python.chmod(0o755)
    done = run_cli("doctor", "--python", python)
    assert done.returncode == 1 and "Traceback" not in done.stderr and "Errno" not in done.stderr
    (line,) = done.stderr.splitlines()
    assert str(python) in line and says in line and "give --python" in line


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_launch_script_that_cannot_be_read_is_one_line(content: bytes | None, tmp_path: Path) -> None:
    script = tmp_path / "launch.sh"
    if content is not None:
        script.write_bytes(content)
    done = run_cli("doctor", "--launch", script)
    assert done.returncode == 1 and "Errno" not in done.stderr
    (line,) = done.stderr.splitlines()
    assert str(script) in line and "give --launch" in line


@pytest.mark.parametrize(
    ("lines", "left"),
    [
        ("export DUMP_ON=1", {"DUMP_ON": "1", "HOME": "/h"}),
        ("  export DUMP_ON=1 PROMPTS_ONLY='1'  # both", {"DUMP_ON": "1", "PROMPTS_ONLY": "1", "HOME": "/h"}),
        ("export DUMP_ON=1\nexport DUMP_ON=0", {"DUMP_ON": "0", "HOME": "/h"}),
        ('export DUMP_CONFIG_PATH="$HOME/a.json"', {"DUMP_CONFIG_PATH": "/h/a.json", "HOME": "/h"}),
        ("export A=/x\nexport B=${A}/y", {"A": "/x", "B": "/x/y", "HOME": "/h"}),
        ("export A='$HOME'", {"A": "$HOME", "HOME": "/h"}),
        ("# export DUMP_ON=1\nDUMP_ON=1\necho export DUMP_ON=1", {"HOME": "/h"}),
        ("unset HOME", {}),
        ("export HOME", {"HOME": "/h"}),
        ("A=1; export A && export B=${C:-2}", {"A": "1", "B": "2", "HOME": "/h"}),
        ("export A=1 \\\n  B=2", {"A": "1", "B": "2", "HOME": "/h"}),
        ("HOME=/x true", {"HOME": "/h"}),
        ("HOME=/x", {"HOME": "/x"}),
        ("unset HOME\nHOME=/x", {}),
    ],
)
def test_what_a_script_exports_counts(lines: str, left: dict[str, str], tmp_path: Path) -> None:
    """And is what a real shell makes of it."""
    script = tmp_path / "launch.sh"
    script.write_text(lines + "\n")
    assert doctor.exported(script, {"HOME": "/h"}) == left
    (tmp_path / "say.py").write_text("import json, os; print(json.dumps(dict(os.environ)))")
    said = subprocess.check_output(
        ["bash", "-c", '. "$1" >&2; exec "$2" -S "$3"', "-", script, sys.executable, tmp_path / "say.py"],
        env={"HOME": "/h"},
        text=True,
    )
    real = json.loads(said)
    assert {name: value for name, value in real.items() if name in {"HOME", "A", "B", *doctor.VARIABLES}} == left


def test_variables_in_front_of_the_command_that_starts_verl_count(tmp_path: Path) -> None:
    script = tmp_path / "launch.sh"
    script.write_text("DUMP_ON=1 \\\n PROMPTS_ONLY=1 python3 -m verl.trainer.main_ppo data.shuffle=False\n")
    assert doctor.exported(script, {}) == {"DUMP_ON": "1", "PROMPTS_ONLY": "1"}


@pytest.mark.parametrize("mode", MODES)
def test_what_config_wrote_is_all_that_doctor_looks_at(mode: str, tmp_path: Path) -> None:
    """The script brings its variables along: with nothing in this shell, there is nothing to say about them."""
    out = tmp_path / "dump-config"
    assert run_cli("config", out, "--mode", mode, "--dump-root", tmp_path / "dump").returncode == 0
    script = out / ("hybrid.sh" if mode == "hybrid" else "fully_async.sh")
    files = ("--generate-config", out / "config_generate.json", "--actor-config", out / "config_actor.json")
    assert of_area("environment", doctor_findings(*files))
    found = doctor_findings(*files, "--launch", script)
    assert of_area("environment", found) == []
    assert [(finding["level"], str(script) in finding["what"]) for finding in of_area("launch", found)] == [
        ("ok", True)
    ]
    script.write_text(script.read_text().replace("export DUMP_ON=1", "").replace("config_actor", "other"))
    found = of_area("environment", doctor_findings(*files, "--launch", script))
    assert [finding["what"].split()[0] for finding in found] == ["DUMP_ON", "the"]
    assert "other.json" in found[1]["what"]


def test_another_file_of_the_training_side_than_the_one_that_is_checked(tmp_path: Path) -> None:
    read, checked = tmp_path / "read.json", tmp_path / "checked.json"
    for file in (read, checked):
        file.write_text("{}")
    variables = {**GOOD, "DUMP_CONFIG_PATH": str(read)}
    (finding,) = doctor.check_variables(variables, None, checked)
    assert finding.level == "warning" and str(read) in finding.what
    assert finding.change == f"export DUMP_CONFIG_PATH={checked}"
    assert list(doctor.check_variables({**variables, "DUMP_CONFIG_PATH": str(checked)}, None, checked)) == []
    read.unlink()
    (finding,) = doctor.check_variables(variables, None, checked)
    assert "does not exist" in finding.what


def test_the_document_explains_every_override_that_is_written() -> None:
    """A table for the hybrid script, one for what is different in fully async's; every value is the script's."""
    text = (ROOT / "docs" / "dump-run.md").read_text(encoding="utf-8")
    hybrid, fully_async = (
        {
            re.sub(r"(additional_config)=.*", r"\1", override.lstrip("+"))
            for override, _ in overrides(RunPlan(mode=mode))
        }
        for mode in MODES
    )
    shown = [
        sorted(code for cell in documents.column(table, 0) for code in documents.code(cell))
        for table in documents.tables(text)
    ]
    assert shown == [sorted(hybrid), sorted(fully_async - hybrid)]


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
