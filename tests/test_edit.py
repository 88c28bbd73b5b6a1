"""Edit: the series as commits in a repository of the project's own, and back without a byte of difference."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import mini_project
import trees
from mini_project import Mini, git, snapshot, tree_files
from patchctl import cli
from patchctl.errors import InTheWayError, PatchctlError, UsageError
from patchctl.maintain import editing, worktrees
from patchctl.maintain.editing import Edited
from patchctl.project import Project
from test_maintain import commit
from test_sources import with_wheel

pytestmark = pytest.mark.usefixtures("own_sources")


def quiet(message: str) -> None: ...


def edit(mini: Mini, pin: int = 0, into: Path | None = None, source: str = "auto", upstream: str = "verl") -> Edited:
    return editing.edit(mini.project, mini.pin(upstream, pin), into, source, quiet)


def patchctl(mini: Mini, *arguments: object) -> Result:
    return CliRunner().invoke(cli.cli, ["--root", str(mini.root), *map(str, arguments)])


def refresh(mini: Mini, *arguments: object) -> Result:
    result = patchctl(mini, "refresh", *arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def series(mini: Mini) -> dict[str, tuple[object, ...]]:
    """The project without the worktrees in it."""
    return {name: value for name, value in snapshot(mini.root).items() if name.partition("/")[0] != worktrees.EDIT}


@pytest.fixture
def refreshed(mini: Mini) -> Mini:
    """The small project in the form that refresh gives it."""
    for pin in (0, 1):
        edit(mini, pin)
    folders = worktrees.made(mini.project)
    assert refresh(mini, *(word for folder in folders for word in ("--from", folder))).exit_code == 0
    shutil.rmtree(mini.root / worktrees.EDIT)
    return mini


@pytest.mark.parametrize("number", [0, 1])
def test_the_worktree_has_the_series_as_commits_of_its_author(mini: Mini, number: int) -> None:
    folder = edit(mini, number).worktree.folder
    name = f"p{number + 1}"
    assert folder == mini.root / f"edit/verl-{name}"
    spec = mini.spec(mini.pin(number=number))
    final = dict(spec.base)
    for step in spec.steps:
        final.update(step)
    assert tree_files(folder) == {path: file for path, file in final.items() if file is not None}
    log = git(folder, "log", "--reverse", "--format=%s|%an <%ae>|%at", f"pin-{name}..").decode().splitlines()
    who = "patchctl maintainers <maintainers@patchctl.invalid>|1700000000"
    assert log == [f"[verl] area: step {step}|{who}" for step in (1, 2, 3, 4)]
    assert git(folder, "symbolic-ref", "--short", "HEAD").decode() == f"series-{name}\n"
    assert git(folder, "status", "--porcelain") == b""
    assert git(folder, "rev-list", "--count", "HEAD").strip() == b"5"  # upstream's own history is there


def test_neither_the_users_clone_nor_the_projects_git_sees_anything(mini: Mini) -> None:
    git(mini.root, "init", "--quiet")
    git(mini.root, "add", "--all")
    git(mini.root, "commit", "--quiet", "-m", "x")
    repository = mini.repositories["verl"]
    before = snapshot(repository)
    edit(mini)
    assert snapshot(repository) == before
    assert git(mini.root, "status", "--porcelain") == b""


def test_import_export_import_changes_nothing(refreshed: Mini) -> None:
    before = series(refreshed)
    for _ in range(2):
        for pin in (0, 1):
            edit(refreshed, pin)
        folders = worktrees.made(refreshed.project)
        result = refresh(refreshed, *(word for folder in folders for word in ("--from", folder)))
        assert (result.exit_code, result.stdout) == (0, "nothing to refresh\n")
        assert series(refreshed) == before
        shutil.rmtree(refreshed.root / worktrees.EDIT)


def test_one_changed_line_changes_one_patch_and_the_lock(refreshed: Mini) -> None:
    before = series(refreshed)
    folder = edit(refreshed).worktree.folder
    place = folder / "verl/late.py"
    commit(folder, "[verl] late: x", {"verl/late.py": b"a = 1\n"})
    assert refresh(refreshed).exit_code == 0
    middle = series(refreshed)
    assert {name for name in middle if middle[name] != before.get(name)} == {
        "patches/verl/0005-late-x.patch",
        "series",
        "series.lock",
    }
    place.write_text("a = 2\n")
    git(folder, "commit", "--quiet", "--all", "--amend", "--no-edit")
    assert refresh(refreshed).exit_code == 0
    after = series(refreshed)
    changed = {name for name in after if after[name] != middle[name]}
    assert changed == {"patches/verl/0005-late-x.patch", "series.lock"}
    old, new = (state["patches/verl/0005-late-x.patch"][1] for state in (middle, after))
    assert isinstance(old, bytes) and isinstance(new, bytes)
    differing = [pair for pair in zip(old.split(b"\n"), new.split(b"\n"), strict=True) if pair[0] != pair[1]]
    assert [pair[1][:6] for pair in differing] == [b"index ", b"+a = 2"]


def test_the_same_edit_gives_the_same_commits(mini: Mini) -> None:
    tips = set()
    for _ in range(2):
        tips.add(git(edit(mini).worktree.folder, "rev-parse", "HEAD"))
        shutil.rmtree(mini.root / worktrees.EDIT)
    assert len(tips) == 1


# -- without git, and without upstream


def wheel_project(mini: Mini, cache: Path, tmp_path: Path) -> Mini:
    """The project with upstream out of git's reach, and its first pin a release in the cache."""
    base = {path: mini_project.content(file) or b"" for path, file in mini.spec(mini.pin()).base.items()}
    wheel = with_wheel(mini.pin(), cache, base).wheel
    assert wheel is not None
    path = mini.root / "configs/pins.toml"
    text = path.read_text().replace(str(mini.repositories["verl"]), str(tmp_path / "nowhere"))
    head, first, rest = text.partition('vllm-ascend = "a1"\n')
    release = f'[pins.wheel]\nrequirement = "{wheel.requirement}"\nsha256 = "{wheel.sha256}"\n'
    path.write_text(head + first + release + rest)
    return mini


def test_a_release_is_edited_without_git(refreshed: Mini, own_sources: Path, tmp_path: Path) -> None:
    mini = wheel_project(refreshed, own_sources, tmp_path)
    before = series(mini)
    made = edit(mini)
    assert made.worktree.record is not None and made.worktree.record.source == "pypi"
    folder = made.worktree.folder
    assert git(folder, "log", "--format=%s").decode().splitlines()[-1].endswith(mini.pin().commit)
    result = refresh(mini, "--from", folder)
    assert result.stdout == "nothing to refresh\n"
    assert series(mini) == before


def test_patches_that_only_add_files_are_edited_without_upstream(refreshed: Mini, tmp_path: Path) -> None:
    mini = refreshed
    path = mini.root / "configs/pins.toml"
    original = path.read_text()
    path.write_text(original.replace(str(mini.repositories["verl"]), str(tmp_path / "nowhere")))
    made = edit(mini)
    assert (made.patches, made.left_out) == (1, 3)
    folder = made.worktree.folder
    assert set(tree_files(folder)) == {"verl/new/__init__.py", "verl/new/mod.py"}
    before = series(mini)
    (folder / "verl/new/mod.py").write_text("def f():\n    return 1  # one\n")
    git(folder, "commit", "--quiet", "--all", "--amend", "--no-edit")
    result = patchctl(mini, "refresh")  # the rules need upstream's files
    assert isinstance(result.exception, PatchctlError) and "PATCHCTL_VERL_URL" in str(result.exception)
    assert series(mini) == before
    path.write_text(original)
    # A later patch changes the same line.
    result = patchctl(mini, "refresh")
    assert isinstance(result.exception, PatchctlError)
    assert "0003-step.patch: verl/new/mod.py: hunk 1" in str(result.exception)
    (folder / "verl/new/mod.py").write_text("def f():\n    return 1\n")
    (folder / "verl/new/more.py").write_text("more = 1\n")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--amend", "--no-edit")
    assert refresh(mini).exit_code == 0
    assert b"+more = 1\n" in (mini.root / "patches/verl/0002-step.patch").read_bytes()
    assert len(mini.project.series.for_pin(mini.pin())) == 4


# -- what is there already


def test_an_edit_that_is_there_is_left_alone_brought_up_to_date_or_refused(refreshed: Mini) -> None:
    mini = refreshed
    folder = edit(mini).worktree.folder
    before = snapshot(folder, mtimes=True)
    assert edit(mini).news == "up to date"
    assert snapshot(folder, mtimes=True) == before
    (folder / "verl/a.py").write_text("x\n")
    with pytest.raises(InTheWayError, match=r"verl/a.py is not committed: commit, stash or remove it"):
        edit(mini)
    assert "verl/a.py is not committed" in str(patchctl(mini, "refresh").exception)
    git(folder, "checkout", "--", ".")
    commit(folder, "[verl] late: x", {"verl/late.py": b"a = 1\n"})
    with pytest.raises(InTheWayError, match="has commits that no refresh has taken in: run `patchctl refresh`"):
        edit(mini)
    assert refresh(mini).exit_code == 0
    assert edit(mini).news == "up to date"


def test_a_worktree_whose_patches_changed_elsewhere(refreshed: Mini) -> None:
    mini = refreshed
    folder = edit(mini).worktree.folder
    other = mini.root.with_name("other")
    shutil.copytree(mini.root, other, ignore=shutil.ignore_patterns("edit"))
    elsewhere = Mini(other, mini.specs, mini.repositories)
    commit(edit(elsewhere).worktree.folder, "[verl] late: x", {"verl/late.py": b"a = 1\n"})
    assert refresh(elsewhere).exit_code == 0

    def pull() -> None:
        shutil.copytree(other, mini.root, ignore=shutil.ignore_patterns("edit"), dirs_exist_ok=True)

    pull()
    assert edit(mini).news == "brought up to date"
    assert (folder / "verl/late.py").read_text() == "a = 1\n"

    (elsewhere.root / "edit/verl-p1/verl/late.py").write_text("a = 2\n")
    git(elsewhere.root / "edit/verl-p1", "commit", "--quiet", "--all", "--amend", "--no-edit")
    assert refresh(elsewhere).exit_code == 0
    commit(folder, "[verl] mine: y", {"verl/mine.py": b"m = 1\n"})
    pull()
    before = series(mini)
    result = patchctl(mini, "refresh")
    assert isinstance(result.exception, InTheWayError) and "`patchctl edit verl --pin p1`" in str(result.exception)
    assert series(mini) == before
    with pytest.raises(InTheWayError, match=r"git rebase --onto series-p1-new ([0-9a-f]{12})") as caught:
        edit(mini)
    git(folder, *str(caught.value).partition("git ")[2].partition(",")[0].split())
    assert edit(mini).news == "brought up to date"
    assert refresh(mini).exit_code == 0
    assert (folder / "verl/late.py").read_text() == "a = 2\n"
    assert [name for name in series(mini) if "mine" in name] == ["patches/verl/0006-mine-y.patch"]
    assert b"+a = 2" in (mini.root / "patches/verl/0005-late-x.patch").read_bytes()


def test_another_place_is_found_again_and_may_be_moved_or_removed(refreshed: Mini, tmp_path: Path) -> None:
    folder = edit(refreshed, into=tmp_path / "here").worktree.folder
    assert folder == tmp_path / "here"
    with pytest.raises(InTheWayError, match="is the worktree for verl p1 already"):
        edit(refreshed, into=tmp_path / "there")
    commit(folder, "[verl] late: x", {"verl/late.py": b"a = 1\n"})
    assert refresh(refreshed).exit_code == 0
    assert (refreshed.root / "patches/verl/0005-late-x.patch").exists()
    folder.rename(tmp_path / "moved")
    assert refresh(refreshed, "--from", tmp_path / "moved").exit_code == 0
    assert edit(refreshed, into=tmp_path / "again").news == "made"


def full(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "file").write_text("x")


def a_file(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.write_text("x")


@pytest.mark.parametrize("make", [full, a_file])
def test_a_place_that_is_not_empty_is_refused(mini: Mini, tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "here")
    before = snapshot(tmp_path / "here") if (tmp_path / "here").is_dir() else {}
    with pytest.raises(InTheWayError, match="here: not an empty folder; give another place"):
        edit(mini, into=tmp_path / "here")
    assert (snapshot(tmp_path / "here") if (tmp_path / "here").is_dir() else {}) == before
    make(mini.root / "edit/verl-p1")
    with pytest.raises(InTheWayError, match="not an empty folder"):
        edit(mini)


def test_a_failed_edit_leaves_nothing(mini: Mini, tmp_path: Path) -> None:
    path = mini.root / "configs/pins.toml"
    path.write_text(path.read_text().replace(str(mini.repositories["verl"]), str(tmp_path / "nowhere")))
    with pytest.raises(PatchctlError, match="PATCHCTL_VERL_URL to a mirror or a local clone"):
        edit(mini, source="git")
    with pytest.raises(UsageError, match="no PyPI release has its files"):
        edit(mini, source="pypi")
    assert [place.name for place in (mini.root / "edit").iterdir()] == [".gitignore"]


def test_a_patch_that_the_lock_was_not_made_from_is_refused(mini: Mini) -> None:
    place = mini.root / "patches/verl/0002-step.patch"
    place.write_bytes(place.read_bytes().replace(b"+    return 1\n", b"+    return 7\n"))
    (mini.root / "patches/verl/0003-step.patch").write_bytes(
        (mini.root / "patches/verl/0003-step.patch").read_bytes().replace(b"-    return 1\n", b"-    return 7\n")
    )
    with pytest.raises(
        PatchctlError, match=r"0002-step.patch: makes of verl/new/mod.py something else than series.lock"
    ):
        edit(mini)
    assert not (mini.root / "edit/verl-p1").exists()


def test_a_fixup_is_not_taken_for_a_patch(refreshed: Mini) -> None:
    folder = edit(refreshed).worktree.folder
    commit(folder, "fixup! [verl] area: step 2", {"verl/new/mod.py": b"def f():\n    return 3\n"})
    result = patchctl(refreshed, "refresh")
    assert f"is to be melted into its commit: git -C {folder} rebase -i --autosquash" in str(result.exception)


def test_nothing_new_asks_no_source(refreshed: Mini, tmp_path: Path) -> None:
    folder = edit(refreshed, 1).worktree.folder
    path = refreshed.root / "configs/pins.toml"
    text = path.read_text()
    for repository in refreshed.repositories.values():
        text = text.replace(str(repository), str(tmp_path / "nowhere"))
    path.write_text(text)
    for arguments in ((), ("--from", folder)):
        result = refresh(refreshed, *arguments)
        assert (result.exit_code, result.stdout) == (0, "nothing to refresh\n")
    result = patchctl(refreshed, "refresh", "--check")  # which proves all of it
    assert "comes from git only" in str(result.exception)
    (refreshed.root / "series.lock").write_text((refreshed.root / "series.lock").read_text() + "\n")
    assert refresh(refreshed).stdout == f"written: {refreshed.root / 'series.lock'}\n"


def test_a_message_without_its_trailers_is_not_written(refreshed: Mini) -> None:
    folder = edit(refreshed).worktree.folder
    (folder / "verl/late.py").write_text("x = 1\n")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "[verl] late: x\n\nThis is the reason for it all.\n")
    before = series(refreshed)
    result = patchctl(refreshed, "refresh")
    assert "the series would break a rule: " in str(result.exception)
    assert series(refreshed) == before


def test_commits_that_left_their_pin_are_not_taken_for_patches(refreshed: Mini) -> None:
    folder = edit(refreshed).worktree.folder
    git(folder, "reset", "--quiet", "--hard", "pin-p1")
    git(folder, "fetch", "--quiet", str(refreshed.repositories["verl"]), "series-p2")
    git(folder, "reset", "--quiet", "--hard", "FETCH_HEAD")
    before = series(refreshed)
    result = patchctl(refreshed, "refresh")
    assert "HEAD does not stand on " in str(result.exception) and "`patchctl port`" in str(result.exception)
    assert series(refreshed) == before


def test_a_rebase_that_is_under_way_is_refused(refreshed: Mini) -> None:
    folder = edit(refreshed).worktree.folder
    git(folder, "rebase", "-i", "HEAD~2", env={"GIT_SEQUENCE_EDITOR": "sed -i 1s/pick/edit/"})
    result = patchctl(refreshed, "refresh")
    assert isinstance(result.exception, InTheWayError)
    assert "a rebase is under way: finish or abort it" in str(result.exception)


def test_the_settings_of_the_user_do_not_matter(
    refreshed: Mini, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A home full of hostile settings, hooks and attributes."""
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    for name in ("post-checkout", "reference-transaction", "applypatch-msg", "pre-applypatch"):
        (hooks / name).write_text(f"#!/bin/sh\necho {name} >> {tmp_path}/ran\n")
        (hooks / name).chmod(0o755)
    (tmp_path / "attributes").write_text("* text eol=crlf ident diff=hostile\n")
    (tmp_path / ".gitconfig").write_text(
        f"[core]\nautocrlf = true\nhooksPath = {hooks}\nattributesFile = {tmp_path}/attributes\nabbrev = 5\n"
        "[diff]\nnoprefix = true\nexternal = false\nrenames = copies\n[apply]\nwhitespace = fix\n"
        "[commit]\ngpgSign = true\n[user]\nuseConfigOnly = true\n[i18n]\ncommitEncoding = latin1\n"
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("GIT_CONFIG_GLOBAL", raising=False)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "nowhere"))
    before = series(refreshed)
    folder = edit(refreshed).worktree.folder
    assert not (tmp_path / "ran").exists()
    (folder / "verl/a.py").unlink()
    user = {"GIT_CONFIG_GLOBAL": str(tmp_path / ".gitconfig")}
    git(folder, "-c", "core.hooksPath=/dev/null", "checkout", "--", "verl/a.py", env=user)
    assert b"\r" not in (folder / "verl/a.py").read_bytes()
    assert git(folder, "status", "--porcelain", env=user) == b""
    result = refresh(refreshed, "--from", folder)
    assert (result.exit_code, result.stdout) == (0, "nothing to refresh\n")
    assert series(refreshed) == before


def test_the_installed_copy_of_the_series_is_not_edited(mini: Mini, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("patchctl.maintain.files.PACKAGED", mini.root)
    for arguments in (("edit", "verl"), ("refresh",), ("port", "verl", "--to", "v1")):
        result = patchctl(mini, *arguments)
        assert isinstance(result.exception, UsageError), result
        assert f"name the clone: patchctl --root DIR {arguments[0]}" in str(result.exception)


# -- the real series


def test_the_real_series_goes_through_commits_without_a_byte_of_difference(tmp_path: Path) -> None:
    """From PyPI's wheels: what a maintainer without GitHub has."""
    root = tmp_path / "project"
    root.mkdir()
    for name in ("configs", "patches"):
        shutil.copytree(trees.ROOT / name, root / name)
    for name in ("series", "series.lock"):
        shutil.copy(trees.ROOT / name, root / name)
    mini = Mini(root, {}, {})
    before = series(mini)
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("PATCHCTL_CACHE")  # the machine's own, which has the wheels
        project = Project(root)
        for pin in project.pins.pins:
            if pin.wheel is not None:
                editing.edit(project, pin, None, "pypi", quiet)
        folders = worktrees.made(project)
        assert folders
        result = refresh(mini, *(word for folder in folders for word in ("--from", folder)))
        assert (result.exit_code, result.stdout) == (0, "nothing to refresh\n")
    assert series(mini) == before
