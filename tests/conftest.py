"""Fixtures for real upstream trees. A pin that has no source here is skipped, and the run's summary says so."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import mini_project
import trees
from mini_project import Mini
from patchctl.pins import Pin
from patchctl.project import Project

_TREES = {"verl_tree": ("verl", "PATCHED_VERL_TREES"), "vllm_ascend_tree": ("vllm-ascend", "PATCHED_VLLM_ASCEND_TREES")}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`verl_tree`, `vllm_ascend_tree`: a patched tree of every pin, or those that an environment variable lists."""
    for name, (upstream, variable) in _TREES.items():
        if name in metafunc.fixturenames:
            if listed := os.environ.get(variable):
                folders = [Path(folder) for folder in listed.split(":")]
                metafunc.parametrize(
                    name, folders, ids=[folder.name for folder in folders], indirect=True, scope="session"
                )
            else:
                pins = trees.PROJECT.pins.of(upstream)
                metafunc.parametrize(name, pins, ids=[pin.name for pin in pins], indirect=True, scope="session")
    if "pin" in metafunc.fixturenames:
        pins = trees.PROJECT.pins.pins
        metafunc.parametrize(
            "pin", pins, ids=[f"{pin.upstream.name}-{pin.name}" for pin in pins], indirect=True, scope="session"
        )


def _tree(request: pytest.FixtureRequest) -> Path:
    if isinstance(request.param, Path):
        return request.param
    try:
        return trees.applied(request.param)
    except trees.Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def verl_tree(request: pytest.FixtureRequest) -> Path:
    """A verl tree with the series applied; shared, so not to be written to."""
    return _tree(request)


@pytest.fixture(scope="session")
def vllm_ascend_tree(request: pytest.FixtureRequest) -> Path:
    """A vllm-ascend tree with the series applied; shared, so not to be written to."""
    return _tree(request)


@pytest.fixture(scope="session")
def pin(request: pytest.FixtureRequest) -> Pin:
    """Every pin that has a source here."""
    if reason := trees.available(request.param):
        pytest.skip(reason)
    return request.param


@pytest.fixture
def pristine_copy(pin: Pin, tmp_path: Path) -> Path:
    """The pin's upstream tree, in a place whose name has a space and Chinese characters, free to be changed."""
    return trees.copy(trees.pristine(pin), tmp_path / "树 tree")


@pytest.fixture
def project() -> Project:
    return trees.PROJECT


@pytest.fixture(autouse=True, scope="session")
def _interruptible() -> None:
    """A run that a shell put into the background ignores SIGINT, and so would every process it starts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _no_project_variable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("PATCHCTL_ROOT", raising=False)
    yield


@pytest.fixture(scope="session")
def shared_mini(tmp_path_factory: pytest.TempPathFactory) -> Mini:
    """A small synthetic project; shared, so not to be written to."""
    return mini_project.build(tmp_path_factory.mktemp("mini") / "project", mini_project.standard())


@pytest.fixture
def mini(shared_mini: Mini, tmp_path: Path) -> Mini:
    """A small synthetic project of the test's own; its upstream repositories are shared."""
    root = tmp_path / "project"
    shutil.copytree(shared_mini.root, root)
    return Mini(root, shared_mini.specs, shared_mini.repositories)


@pytest.fixture
def own_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Upstreams come from where a project's own pins say, and an empty cache is used; gives the cache's folder."""
    for variable in mini_project.URL_VARIABLES.values():
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATCHCTL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
