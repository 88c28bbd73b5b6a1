"""The launch scripts and the documents' launch commands compose with verl's settings and start a good dump."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import documents
from documents import ROOT

hydra = pytest.importorskip("hydra")

CONFIGS = {
    "verl.trainer.main_ppo": ("verl/trainer/config", "ppo_trainer"),
    "verl.experimental.fully_async_policy.fully_async_main": (
        "verl/experimental/fully_async_policy/config",
        "fully_async_ppo_trainer",
    ),
}
"""The configuration that each entry point composes: its folder and name."""

PROXY_AGENT = ROOT / "configs" / "launch" / "proxy_agent.yaml"


@dataclass(frozen=True)
class Launch:
    """What a script would start: the module, its overrides, the environment it gives it."""

    module: str
    overrides: list[str]
    environment: dict[str, str]


def launched(script: str, folder: Path) -> Launch:
    """Run the script with a python3 that only says how it was called; `patchctl` in it is the real one."""
    programs = {
        "python3": f"#!{sys.executable}\nimport json, os, sys\nprint(json.dumps([sys.argv[1:], dict(os.environ)]))\n",
        "patchctl": f"#!/bin/sh\nPYTHONPATH={shlex.quote(str(ROOT / 'tool'))} "
        f'exec {shlex.quote(sys.executable)} -m patchctl "$@"\n',
    }
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    said = subprocess.check_output(["bash", "-euc", script], env=environment, text=True, cwd=folder)
    (_, module, *overrides), given = json.loads(said.splitlines()[-1])
    return Launch(module, overrides, given)


def compose(tree: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch) -> Any:
    folder, name = CONFIGS[launch.module]
    monkeypatch.chdir(tree)  # one of the configurations names the other's folder relative to it
    with hydra.initialize_config_dir(str(tree / folder), version_base=None):
        return hydra.compose(name, overrides=launch.overrides)


def document_scripts() -> Iterator[Any]:
    """Each launch command of a document, behind the `patchctl config` commands that stand before it."""
    for path in documents.documents():
        configured: list[str] = []
        for command in documents.commands(path):
            if command.text.startswith("patchctl config "):
                configured.append(re.sub(r" --model \S+", "", command.text))  # for the estimate of the disk only
            elif re.search(r"python3 -m verl\.|^bash \S+\.sh", command.text):
                yield pytest.param("\n".join([*configured, command.text]), id=f"{path.name}:{command.line}")


def written_scripts() -> Iterator[Any]:
    for path in sorted((ROOT / "configs" / "launch").glob("*.sh")):
        yield pytest.param(path.read_text(encoding="utf-8"), id=path.name)


@pytest.fixture
def preflight(verl_tree: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The tree's own check of a run, without the rest of verl."""
    monkeypatch.syspath_prepend(str(verl_tree))
    for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:
        monkeypatch.delitem(sys.modules, name)
    spec = importlib.util.find_spec("verl.utils.consistency_dump.preflight")
    assert spec and spec.origin and Path(spec.origin).is_relative_to(verl_tree)
    yield importlib.import_module(spec.name)
    for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:
        del sys.modules[name]


def test_the_documents_start_both_modes() -> None:
    shown = "\n".join(parameters.values[0] for parameters in document_scripts())
    assert "hybrid.sh " in shown
    assert "fully_async.sh " in shown


@pytest.mark.parametrize("script", [*written_scripts(), *document_scripts()])
def test_a_launch_composes_and_starts_a_good_dump(
    verl_tree: Path, preflight: ModuleType, script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = launched(script, tmp_path)
    config = compose(verl_tree, launch, monkeypatch)
    settings = preflight.DumpSettings.from_env(launch.environment)
    assert settings.on
    assert settings.prompts_only
    assert [str(finding) for finding in preflight.run_refusals(config, settings)] == []
    assert [str(finding) for finding in preflight.run_warnings(config, settings)] == []


def test_a_launch_with_a_setting_that_verl_does_not_have_fails(
    verl_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = launched("exec python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.no_such=1", tmp_path)
    with pytest.raises(Exception, match="no_such"):
        compose(verl_tree, launch, monkeypatch)


def test_the_proxy_agent_overrides_compose(verl_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = PROXY_AGENT.read_text(encoding="utf-8").splitlines()
    overrides = [line[1:].split()[0] for line in lines if line.startswith("#   actor_rollout_ref.")]
    assert len(overrides) == 5
    config = compose(verl_tree, Launch("verl.trainer.main_ppo", overrides, {}), monkeypatch)
    agent = config.actor_rollout_ref.rollout.agent
    assert agent.default_agent_loop == "proxy_agent"
    assert (ROOT / agent.agent_loop_config_path) == PROXY_AGENT
