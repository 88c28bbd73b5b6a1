"""Where trees come from: git by commit, or a release's wheel; complete, or not at all."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import zipfile
from pathlib import Path

import pytest

import mini_project
from mini_project import Mini, git, tree_files
from patchctl import sources
from patchctl.errors import PatchctlError
from patchctl.git import Git
from patchctl.pins import Pin, Wheel

pytestmark = pytest.mark.usefixtures("own_sources")


def obtain(pin: Pin, folder: Path, source: str = "git") -> str:
    return sources.obtain(pin, folder, source, lambda message: None)


def with_wheel(pin: Pin, cache: Path, files: dict[str, bytes]) -> Pin:
    """The pin with a wheel that lies in the cache already."""
    place = cache / "fresh.whl"
    place.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(place, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    digest = hashlib.sha256(place.read_bytes()).hexdigest()
    (cache / "wheels" / digest).mkdir(parents=True)
    place.rename(cache / "wheels" / digest / "verl-1-py3-none-any.whl")
    return pin._replace(wheel=Wheel(requirement="patchctl-test-no-such-package==1", sha256=digest))


def test_git_gives_the_pins_own_commit_shallow_and_detached(mini: Mini, tmp_path: Path) -> None:
    pin = mini.pin(number=1)
    assert obtain(pin, tmp_path / "src/verl") == f"git {mini.repositories['verl']}"
    folder = tmp_path / "src/verl"
    assert tree_files(folder) == mini.spec(pin).base
    assert git(folder, "rev-parse", "HEAD").decode().strip() == pin.commit
    assert git(folder, "status", "--porcelain") == b""
    assert [place.name for place in (tmp_path / "src").iterdir()] == ["verl"]


def test_a_mirror_named_by_a_relative_path_is_found(
    mini: Mini, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATCHCTL_VERL_URL", os.path.relpath(mini.repositories["verl"]))
    obtain(mini.pin(), Path("src/verl"))
    assert tree_files(tmp_path / "src/verl") == mini.spec(mini.pin()).base


def test_a_server_that_gives_no_single_commit_is_asked_for_its_branches(mini: Mini, tmp_path: Path) -> None:
    """As git servers before 2.14 are; the pin is no branch's tip."""
    old = tmp_path / "old"
    git(tmp_path, "clone", "--quiet", "--bare", str(mini.repositories["verl"]), str(old))
    git(old, "branch", "-m", "pin-p1", "kept")
    pin = mini.pin()
    for branch in git(old, "for-each-ref", "--format=%(refname:short)", "refs/heads").decode().split():
        if branch not in ("series-p1", "main"):
            git(old, "branch", "-D", branch)
    git(old, "branch", "-f", "main", "series-p1")
    url = f"file://{old}"
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PATCHCTL_VERL_URL", url)
        patched.setenv("GIT_PROTOCOL", "")
        original = Git.run

        def run(self: Git, *arguments: str, **keywords: object) -> bytes:
            if "--depth=1" in arguments:  # a new git always allows it under protocol 2
                arguments = ("-c", "protocol.version=0", *arguments)
            return original(self, *arguments, **keywords)  # type: ignore[arg-type]

        patched.setattr(Git, "run", run)
        assert obtain(pin, tmp_path / "t") == f"git {url}"
    assert tree_files(tmp_path / "t") == mini.spec(pin).base
    assert b"refs/fetched/heads/main" in git(tmp_path / "t", "for-each-ref")


def test_an_existing_folder_is_never_written_to(mini: Mini, tmp_path: Path) -> None:
    (tmp_path / "verl").mkdir()
    (tmp_path / "verl/mine").write_text("x")
    with pytest.raises(PatchctlError, match="verl: is there already; move it away"):
        obtain(mini.pin(), tmp_path / "verl")
    assert (tmp_path / "verl/mine").read_text() == "x"


@pytest.mark.parametrize("broken", ["no repository", "no such commit"])
def test_a_failed_fetch_leaves_nothing_and_names_the_variable(mini: Mini, tmp_path: Path, broken: str) -> None:
    pin = mini.pin()
    if broken == "no such commit":
        pin = pin._replace(commit="0123456789" * 4)
    else:
        pin = pin._replace(upstream=pin.upstream._replace(url=str(tmp_path / "nowhere")))
    with pytest.raises(PatchctlError, match="PATCHCTL_VERL_URL to a mirror or a local clone") as caught:
        obtain(pin, tmp_path / "src/verl")
    assert "\n" not in str(caught.value)
    assert pin.upstream.url in str(caught.value)
    assert list((tmp_path / "src").iterdir()) == []


def test_what_a_killed_fetch_left_is_replaced(mini: Mini, tmp_path: Path) -> None:
    (tmp_path / "src/.verl.fetching/.git").mkdir(parents=True)
    (tmp_path / "src/.verl.fetching/half.py").write_text("x")
    obtain(mini.pin(), tmp_path / "src/verl")
    assert tree_files(tmp_path / "src/verl") == mini.spec(mini.pin()).base
    assert [place.name for place in (tmp_path / "src").iterdir()] == ["verl"]


def test_of_two_runs_at_once_one_fetches_and_both_have_the_tree(mini: Mini, tmp_path: Path) -> None:
    pin = mini.pin()
    context = multiprocessing.get_context("fork")
    answers = context.Queue()

    def run() -> None:
        try:
            answers.put(sources.obtain(pin, tmp_path / "src/verl", "git", lambda message: None))
        except PatchctlError as error:
            answers.put(f"error: {error}")

    runs = [context.Process(target=run) for _ in range(4)]
    for each in runs:
        each.start()
    found = [answers.get(timeout=60) for _ in runs]
    for each in runs:
        each.join()
    # one that starts when the tree is there is told so; no run spoils another's
    assert sum(answer.startswith("git ") for answer in found) == 1, found
    assert all(answer.startswith(("git ", "another run", "error: ")) for answer in found)
    assert not [answer for answer in found if answer.startswith("error: ") and "is there already" not in answer], found
    assert tree_files(tmp_path / "src/verl") == mini.spec(pin).base


def test_a_place_that_can_not_be_made_is_named(mini: Mini, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(PatchctlError, match=r"file/verl: can't be made: (Not a directory|File exists)"):
        obtain(mini.pin(), tmp_path / "file/verl")


# -- a release


def test_a_wheel_is_unpacked_where_git_can_not_be_reached_and_it_is_said(
    mini: Mini, tmp_path: Path, own_sources: Path
) -> None:
    pin = with_wheel(mini.pin(), own_sources, {"verl/__init__.py": b"", "verl/a.py": b"a\r\n"})
    pin = pin._replace(upstream=pin.upstream._replace(url=str(tmp_path / "nowhere")))
    said: list[str] = []
    assert sources.obtain(pin, tmp_path / "t", "auto", said.append) == "PyPI patchctl-test-no-such-package==1"
    assert tree_files(tmp_path / "t") == {"verl/__init__.py": b"", "verl/a.py": b"a\r\n"}
    assert "not to be had from git" in said[0]
    assert "taking the PyPI release, whose files equal the pin's" in said[0]


def test_git_comes_first_and_pypi_alone_where_it_is_asked_for(mini: Mini, tmp_path: Path, own_sources: Path) -> None:
    pin = with_wheel(mini.pin(), own_sources, {"verl/__init__.py": b"of the wheel\n"})
    assert obtain(pin, tmp_path / "one", "auto").startswith("git ")
    assert obtain(pin, tmp_path / "two", "pypi").startswith("PyPI ")
    assert tree_files(tmp_path / "two") == {"verl/__init__.py": b"of the wheel\n"}


def test_a_pin_without_a_release_says_that_it_comes_from_git_only(mini: Mini, tmp_path: Path) -> None:
    pin = mini.pin()
    pin = pin._replace(upstream=pin.upstream._replace(url=str(tmp_path / "nowhere")))
    for source in ("auto", "pypi"):
        with pytest.raises(PatchctlError, match=r"verl p1: comes from git only: .*; set PATCHCTL_VERL_URL to a mirror"):
            obtain(pin, tmp_path / "t", source)
    assert not (tmp_path / "t").exists()


def test_a_wheel_that_was_damaged_in_the_cache_is_not_used(
    mini: Mini, tmp_path: Path, own_sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin = with_wheel(mini.pin(), own_sources, {"verl/__init__.py": b""})
    place = next(own_sources.rglob("*.whl"))
    place.write_bytes(place.read_bytes()[:-10])
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # the download that follows needs no network to fail
    with pytest.raises(PatchctlError, match=r"verl p1: pip can't download patchctl-test-no-such-package==1: ERROR"):
        obtain(pin, tmp_path / "t", "pypi")
    assert not (tmp_path / "t").exists()
    assert not list(own_sources.rglob("*.whl"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_cache_that_can_not_be_written_names_the_variable(
    mini: Mini, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ro").mkdir(mode=0o555)
    monkeypatch.setenv("PATCHCTL_CACHE", str(tmp_path / "ro"))
    pin = mini.pin()._replace(wheel=Wheel(requirement="x==1", sha256="0" * 64))
    with pytest.raises(PatchctlError, match="set PATCHCTL_CACHE to a folder that can"):
        obtain(pin, tmp_path / "t", "pypi")


# -- pristine contents, for the lock


@pytest.mark.parametrize("kind", ["git", "wheel"])
def test_pristine_contents_come_to_the_byte(mini: Mini, own_sources: Path, kind: str) -> None:
    pin = mini.pin()
    base = {path: mini_project.content(file) or b"" for path, file in mini.spec(pin).base.items()}
    if kind == "wheel":
        pin = with_wheel(pin, own_sources, base)
    for _ in range(2):
        with sources.pristine(pin, lambda message: None) as archive:
            found = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
        assert found == {path: data for path, data in base.items() if path.startswith("verl/") or kind == "wheel"}


def test_pristine_contents_that_can_not_be_had_name_the_variable(mini: Mini, tmp_path: Path) -> None:
    pin = mini.pin()
    pin = pin._replace(upstream=pin.upstream._replace(url=str(tmp_path / "nowhere")))
    with pytest.raises(PatchctlError, match="set PATCHCTL_VERL_URL to a mirror or a local clone"):
        sources.pristine(pin, lambda message: None)


def test_the_users_settings_do_not_change_what_is_checked_out(
    mini: Mini, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "attributes").write_text("* text eol=crlf\n")
    (home / ".config/git").mkdir(parents=True)
    (home / ".config/git/attributes").write_text("* text eol=crlf\n")
    (home / ".gitconfig").write_text(
        f"[core]\nautocrlf = true\neol = crlf\nattributesFile = {home}/attributes\nhooksPath = {home}\n"
        "[checkout]\ndefaultRemote = x\n[fetch]\nprune = true\nwriteCommitGraph = true\n[submodule]\nrecurse = true\n"
    )
    (home / "post-checkout").write_text("#!/bin/sh\ntouch verl/hook-ran\n")
    (home / "post-checkout").chmod(0o755)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.delenv("GIT_CONFIG_GLOBAL", raising=False)
    obtain(mini.pin(), tmp_path / "t")
    assert tree_files(tmp_path / "t") == mini.spec(mini.pin()).base
