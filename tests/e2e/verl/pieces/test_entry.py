"""Where every PPO run starts: it is checked before Ray starts, and Ray's workers get the dump's variables."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import ray
import world

sys.modules.setdefault("aiohttp", ModuleType("aiohttp"))  # only reward servers talk to it

from verl.trainer.constants_ppo import get_ppo_ray_runtime_env  # noqa: E402
from verl.trainer.main_ppo import run_ppo  # noqa: E402


def test_runtime_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DUMP_ON", "DUMP_PHASE", "PROMPTS_ONLY", "DUMP_CONFIG_PATH", "DUMP_UNSAFE"):
        monkeypatch.delenv(name, raising=False)
    before = get_ppo_ray_runtime_env()
    values = {"DUMP_ON": "1", "PROMPTS_ONLY": "1", "DUMP_CONFIG_PATH": "/etc/dump.json"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    after = get_ppo_ray_runtime_env()
    assert after == {**before, "env_vars": {**before["env_vars"], **values}}


def test_refused_before_ray_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINY_MODEL", "/nowhere")
    monkeypatch.setenv("DUMP_ON", "1")
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray was started"))
    config = world.compose("ppo_trainer", "trainer/config", ["actor_rollout_ref.actor.use_dynamic_bsz=True"])
    with pytest.raises(RuntimeError, match="use_dynamic_bsz=False"):
        run_ppo(config, task_runner_class=None)
