"""The environment variables of the dump, and that a Ray worker sees them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from verl_parts import PACKAGE, Anything, load, package


def test_defaults(verl_tree: Path) -> None:
    with package(verl_tree) as code:
        settings = code.settings.DumpSettings.from_env({})
    assert settings == code.settings.DumpSettings(False, "log_prob", False, "/home/config_actor.json", False)
    assert not settings.wants("log_prob") and not settings.wants("update_actor")


@pytest.mark.parametrize(
    ("phase", "wanted"),
    [("log_prob", {"log_prob"}), ("update_actor", {"update_actor"}), ("all", {"log_prob", "update_actor"})],
)
def test_phases(verl_tree: Path, phase: str, wanted: set[str]) -> None:
    with package(verl_tree) as code:
        settings = code.settings.DumpSettings.from_env({"DUMP_ON": "1", "DUMP_PHASE": phase})
    assert {each for each in ("log_prob", "update_actor") if settings.wants(each)} == wanted


@pytest.mark.parametrize(("text", "meant"), [("1", True), ("true", True), ("0", False), ("", False), ("off", False)])
def test_flags(verl_tree: Path, text: str, meant: bool) -> None:
    with package(verl_tree) as code:
        settings = code.settings.DumpSettings.from_env({"DUMP_ON": text, "PROMPTS_ONLY": text, "DUMP_UNSAFE": text})
    assert (settings.on, settings.prompts_only, settings.unsafe) == (meant, meant, meant)


@pytest.mark.parametrize(("name", "value"), [("DUMP_ON", "2"), ("PROMPTS_ONLY", "ja"), ("DUMP_PHASE", "logprob")])
def test_a_value_that_means_nothing_is_refused(verl_tree: Path, name: str, value: str) -> None:
    with package(verl_tree) as code, pytest.raises(RuntimeError, match=f"{name}='{value}'"):
        code.settings.DumpSettings.from_env({"DUMP_ON": "1", name: value})


def test_a_phase_of_another_program_is_no_matter_while_the_dump_is_off(verl_tree: Path) -> None:
    with package(verl_tree) as code:
        assert not code.settings.DumpSettings.from_env({"DUMP_PHASE": "compile"}).on


def test_forwarded_env(verl_tree: Path) -> None:
    env = {"DUMP_ON": "1", "DUMP_CONFIG_PATH": "here.json", "PROMPTS_ONLY": "0", "OTHER": "x"}
    with package(verl_tree) as code:
        forwarded = code.settings.forwarded_env(env)
    assert forwarded == {"DUMP_ON": "1", "PROMPTS_ONLY": "0", "DUMP_CONFIG_PATH": str(Path.cwd() / "here.json")}


def test_ray_workers_get_what_the_driver_has(verl_tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even though verl leaves out of the runtime environment what the driver's own environment sets."""
    monkeypatch.setenv("DUMP_ON", "1")
    monkeypatch.setenv("DUMP_PHASE", "all")
    file = verl_tree / "verl/trainer/constants_ppo.py"
    with package(verl_tree) as code:
        build = load(
            file,
            "get_ppo_ray_runtime_env",
            {
                PACKAGE: {"forwarded_env": code.settings.forwarded_env},
                "ray._private.runtime_env.constants": {"RAY_JOB_CONFIG_JSON_ENV_VAR": "RAY_JOB_CONFIG_JSON_ENV_VAR"},
            },
        )
    build.__globals__["PPO_RAY_RUNTIME_ENV"] = {"env_vars": {"NCCL_DEBUG": "WARN"}}
    # Some upstreams ask for the engine and the GPU too.
    build.__globals__.update(_is_hopper_or_ampere=False, _uses_mindspeed=lambda config: False)
    monkeypatch.delenv("NCCL_DEBUG", raising=False)
    with_dump = build()["env_vars"]
    for name in ("DUMP_ON", "DUMP_PHASE"):
        monkeypatch.delenv(name)
    without = build()["env_vars"]
    assert without["NCCL_DEBUG"] == "WARN" and not any(name.startswith("DUMP_") for name in without)
    assert with_dump == {**without, "DUMP_ON": "1", "DUMP_PHASE": "all"}


def test_the_run_is_checked_before_ray_starts(verl_tree: Path) -> None:
    seen: list[Any] = []

    def check_run(config: Any) -> None:
        seen.append(config)
        raise RuntimeError("refused")

    ray = SimpleNamespace(is_initialized=lambda: seen.append("ray"))
    run_ppo = load(
        verl_tree / "verl/trainer/main_ppo.py",
        "run_ppo",
        {
            PACKAGE: {"check_run": check_run},
            "ray": vars(ray),
            "omegaconf": {"OmegaConf": Anything()},
        },
    )
    with pytest.raises(RuntimeError, match="refused"):
        run_ppo("config", None)
    assert seen == ["config"]


def test_documented_variables_are_the_real_ones(verl_tree: Path) -> None:
    with package(verl_tree) as code:
        names = code.settings.ENV_NAMES
        text = code.settings.__doc__
    assert all(f"``{name}``" in text for name in names)
    assert Path(code.settings.DEFAULT_CONFIG_PATH).is_absolute()
