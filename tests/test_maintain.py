"""Refresh: the same commits give the same bytes, whatever the machine; nothing is lost where it fails."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

import mini_project
from mini_project import PY, Mini, PinSpec, edit, git, snapshot
from patchctl import maintain
from patchctl.errors import PatchctlError, UsageError
from patchctl.maintain import Refreshed
from patchctl.project import Project
from patchctl.verify.series import check_series

pytestmark = pytest.mark.usefixtures("own_sources")


def quiet(message: str) -> None: ...


def worktrees(mini: Mini, folder: Path, upstream: str = "verl") -> list[Path]:
    """A clone for each pin of the upstream, its series branch checked out."""
    folders = []
    for pin in mini.project.pins.of(upstream):
        place = folder / f"{upstream}-{pin.name}"
        git(folder, "clone", "--quiet", "--branch", f"series-{pin.name}", str(mini.repositories[upstream]), str(place))
        folders.append(place)
    return folders


def refresh(mini: Mini, folders: Sequence[Path] = ()) -> Refreshed:
    project = Project(mini.root)
    refreshed = maintain.refresh(project, folders, quiet)
    refreshed.write(mini.root)
    return refreshed


def files(mini: Mini) -> dict[str, tuple[object, ...]]:
    return snapshot(mini.root)


def commit(folder: Path, subject: str, changes: dict[str, bytes]) -> None:
    for path, data in changes.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    git(folder, "add", "--all")
    message = (
        f"{subject}\n\nThis is why the patch is there.\n\nUpstream-Status: Not submitted (a test)\nDrop-when: never\n"
    )
    git(folder, "commit", "--quiet", "--message", message)


def test_the_lock_worked_out_by_hand_is_the_lock_that_refresh_writes(mini: Mini) -> None:
    before = (mini.root / "series.lock").read_bytes()
    assert maintain.refresh(mini.project, (), quiet).differing(mini.root) == []
    (mini.root / "series.lock").write_text('{"version": 1, "patches": {}, "pins": {}}')
    assert maintain.refresh(Project(mini.root), (), quiet).differing(mini.root) == ["series.lock"]
    refresh(mini)
    assert (mini.root / "series.lock").read_bytes() == before


def test_the_same_commits_give_the_same_series_and_a_second_refresh_touches_no_file(mini: Mini, tmp_path: Path) -> None:
    folders = worktrees(mini, tmp_path)
    refresh(mini, folders)
    assert check_series(Project(mini.root)).findings == ()
    before = snapshot(mini.root, mtimes=True)
    assert refresh(mini, folders).differing(mini.root) == []
    assert snapshot(mini.root, mtimes=True) == before


def test_a_variant_is_written_only_where_one_text_does_not_serve_both_pins(mini: Mini, tmp_path: Path) -> None:
    folders = worktrees(mini, tmp_path)
    refresh(mini, folders)
    # Only b.py differs between the pins in what a patch needs to see.
    guards = {"verl/0001-step.p2.patch": ["#+p2"], "verl/0001-step.patch": ["#+p1"]}
    for _ in range(2):
        listing = [line.split() for line in (mini.root / "series").read_text().splitlines()]
        found = {words[0]: words[1:] for words in listing if words and words[0].startswith("verl/")}
        assert found == {**guards, **{f"verl/000{number}-step.patch": [] for number in (2, 3, 4)}}
        refresh(mini, folders)


def test_patches_applied_by_git_am_and_exported_again_are_the_same_bytes(mini: Mini, tmp_path: Path) -> None:
    refresh(mini, worktrees(mini, tmp_path))
    before = files(mini)
    again = tmp_path / "again"
    again.mkdir()
    folders = []
    project = Project(mini.root)
    for pin in project.pins.of("verl"):
        place = mini.checkout(again / pin.name, pin).root
        mails = [str(mini.root / "patches" / name) for name in project.series.for_pin(pin)]
        git(place, "am", "--quiet", "--keep-non-patch", "--committer-date-is-author-date", *mails)
        folders.append(place)
    refresh(mini, folders)
    assert files(mini) == before


HOSTILE = {
    "color.ui": "always",
    "commit.gpgSign": "true",
    "core.abbrev": "5",
    "core.autocrlf": "true",
    "core.commentChar": "#",
    "core.hooksPath": "hooks",
    "core.pager": "false",
    "core.quotePath": "true",
    "core.whitespace": "cr-at-eol",
    "diff.algorithm": "patience",
    "diff.colorMoved": "zebra",
    "diff.context": "0",
    "diff.dstPrefix": "y/",
    "diff.external": "false",
    "diff.indentHeuristic": "false",
    "diff.interHunkContext": "9",
    "diff.mnemonicPrefix": "true",
    "diff.noprefix": "true",
    "diff.orderFile": "/nonexistent",
    "diff.relative": "true",
    "diff.renames": "copies",
    "diff.srcPrefix": "x/",
    "diff.statGraphWidth": "3",
    "diff.submodule": "log",
    "diff.suppressBlankEmpty": "true",
    "diff.wordRegex": ".",
    "diff.wsErrorHighlight": "all",
    "format.attach": "true",
    "format.cc": "a@b.invalid",
    "format.coverFromDescription": "subject",
    "format.coverLetter": "true",
    "format.encodeEmailHeaders": "true",
    "format.forceInBodyFrom": "true",
    "format.from": "true",
    "format.headers": "X-Hostile: 1",
    "format.notes": "true",
    "format.numbered": "true",
    "format.outputDirectory": "/nonexistent",
    "format.pretty": "raw",
    "format.signOff": "true",
    "format.signature": "hostile",
    "format.subjectPrefix": "HOSTILE",
    "format.suffix": ".txt",
    "format.thread": "deep",
    "format.to": "a@b.invalid",
    "format.useAutoBase": "true",
    "gc.auto": "1",
    "i18n.logOutputEncoding": "latin1",
    "log.date": "iso",
    "log.decorate": "full",
    "log.diffMerges": "on",
    "log.follow": "true",
    "log.mailmap": "true",
    "log.showSignature": "true",
    "mailmap.file": "mailmap",
    "notes.displayRef": "refs/notes/*",
}


def configure(folder: Path, keys: Sequence[str]) -> None:
    with (folder / ".git/config").open("a") as file:
        for key in keys:
            section, name = key.rsplit(".", 1)
            file.write(f'[{section}]\n{name} = "{HOSTILE[key]}"\n')


@pytest.fixture(scope="module")
def exported(
    shared_mini: Mini, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Mini, list[Path], dict[str, tuple[object, ...]]]:
    """A project whose patches were written from worktrees that have no configuration of their own."""
    folder = tmp_path_factory.mktemp("hostile")
    with pytest.MonkeyPatch.context() as patched:
        for variable in mini_project.URL_VARIABLES.values():
            patched.delenv(variable, raising=False)
        patched.setenv("PATCHCTL_CACHE", str(folder / "cache"))
        mini = Mini(folder / "project", shared_mini.specs, shared_mini.repositories)
        shutil.copytree(shared_mini.root, mini.root)
        folders = worktrees(mini, folder)
        for place in folders:
            git(place, "notes", "add", "-m", "a note")
            (place / "mailmap").write_text("Hostile <h@h.invalid> <maintainers@patchctl.invalid>\n")
        refresh(mini, folders)
    return mini, folders, files(mini)


@pytest.mark.parametrize("start", [None, *range(8)])
def test_no_setting_of_the_worktrees_repository_changes_a_byte(
    exported: tuple[Mini, list[Path], dict[str, tuple[object, ...]]], start: int | None
) -> None:
    """All of them at once, and an eighth of them at a time, as some hide others."""
    mini, folders, before = exported
    originals = [(folder / ".git/config").read_bytes() for folder in folders]
    for folder in folders:
        configure(folder, list(HOSTILE) if start is None else list(HOSTILE)[start::8])
    try:
        assert maintain.refresh(Project(mini.root), folders, quiet).differing(mini.root) == []
    finally:
        for folder, original in zip(folders, originals, strict=True):
            (folder / ".git/config").write_bytes(original)
    assert files(mini) == before


def test_a_new_commit_gets_the_next_number_and_a_changed_one_keeps_its_name(mini: Mini, tmp_path: Path) -> None:
    folders = worktrees(mini, tmp_path)
    refresh(mini, folders)
    names = {entry.patch for entry in Project(mini.root).series.entries}
    for folder in folders:
        commit(folder, "[verl] Fancy: Words, and (more)!", {"verl/late.py": b"late = 1\n"})
    refresh(mini, folders)
    assert {entry.patch for entry in Project(mini.root).series.entries} == names | {
        "verl/0005-fancy-words-and-more.patch"
    }
    assert check_series(Project(mini.root)).findings == ()
    for folder in folders:
        git(folder, "reset", "--quiet", "--hard", "HEAD~1")
    refresh(mini, folders)
    assert {entry.patch for entry in Project(mini.root).series.entries} == names
    assert not (mini.root / "patches/verl/0005-fancy-words-and-more.patch").exists()


def test_the_comment_above_the_series_and_the_other_upstreams_patches_stay(mini: Mini, tmp_path: Path) -> None:
    other = {name: data for name, data in files(mini).items() if name.startswith("patches/vllm-ascend/")}
    refresh(mini, worktrees(mini, tmp_path))
    assert (mini.root / "series").read_text().startswith("# a series for tests\n\nverl/0001")
    assert {name: data for name, data in files(mini).items() if name.startswith("patches/vllm-ascend/")} == other


def test_a_damaged_patch_is_repaired_by_a_refresh(mini: Mini, tmp_path: Path) -> None:
    folders = worktrees(mini, tmp_path)
    refresh(mini, folders)
    before = files(mini)
    name = Project(mini.root).series.entries[1].patch
    place = mini.root / "patches" / name
    place.write_bytes(place.read_bytes()[:-40] + b"rubbish")
    refresh(mini, folders)
    assert files(mini) == before


# -- what is refused


def refused(mini: Mini, folders: Sequence[Path], words: str, kind: type[PatchctlError] = PatchctlError) -> None:
    before = snapshot(mini.root, mtimes=True)
    with pytest.raises(kind, match=words) as caught:
        refresh(mini, folders)
    assert "\n" not in str(caught.value)
    assert snapshot(mini.root, mtimes=True) == before


def test_a_worktree_for_every_pin_is_asked_for(mini: Mini, tmp_path: Path) -> None:
    refused(mini, worktrees(mini, tmp_path)[:1], "none is given for p2", UsageError)


def test_a_folder_that_is_no_worktree_on_a_pin(mini: Mini, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    refused(mini, [tmp_path / "plain"], "plain: no git worktree on top of a pin", UsageError)
    git(tmp_path, "init", "--quiet", str(tmp_path / "empty"))
    refused(mini, [tmp_path / "empty"], "empty: no git worktree on top of a pin", UsageError)


def test_a_merge_is_refused(mini: Mini, tmp_path: Path) -> None:
    folders = worktrees(mini, tmp_path)
    git(folders[0], "checkout", "--quiet", "-b", "side", "HEAD~1")
    commit(folders[0], "[verl] side: x", {"verl/side.py": b"1\n"})
    git(folders[0], "checkout", "--quiet", "-")
    git(folders[0], "merge", "--quiet", "--no-edit", "side")
    refused(mini, folders, "is a merge; the series is a line of commits: rebase")


def test_two_commits_of_one_subject_are_refused(mini: Mini, tmp_path: Path) -> None:
    folders = worktrees(mini, tmp_path)
    commit(folders[0], "[verl] area: step 1", {"verl/again.py": b"1\n"})
    refused(mini, folders, r"two commits are called '\[verl\] area: step 1'")


def test_another_order_in_another_worktree_is_refused(mini: Mini, tmp_path: Path) -> None:
    folders = worktrees(mini, tmp_path)
    for folder, numbers in zip(folders, ((1, 2), (2, 1)), strict=True):
        for number in numbers:
            commit(folder, f"[verl] new: {number}", {f"verl/new{number}.py": b"1\n"})
    refused(mini, folders, "stands in another order in another worktree")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"verl/logo.png": b"\x89PNG\0\0\0"}, "binary"),
        ({"verl/crlf.py": b"a\r\n"}, None),
        ({"verl/latin.py": b"caf\xe9\n"}, None),
    ],
)
def test_what_a_patch_can_not_carry_is_refused_by_the_commits_name(
    mini: Mini, tmp_path: Path, changes: dict[str, bytes], words: str | None
) -> None:
    folders = worktrees(mini, tmp_path)
    for folder in folders:
        commit(folder, "[verl] odd: contents", changes)
    if words is None:
        refresh(mini, folders)
        assert check_series(Project(mini.root)).findings == ()
    else:
        refused(mini, folders, f"commit [0-9a-f]{{12}}:.*{words}")


def test_a_message_that_looks_like_a_diff_is_refused(mini: Mini, tmp_path: Path) -> None:
    folders = worktrees(mini, tmp_path)
    (folders[0] / "verl/x.py").write_text("1\n")
    git(folders[0], "add", "--all")
    git(folders[0], "commit", "--quiet", "--message", "[verl] x: y\n\ndiff --git a/x b/x\n")
    refused(mini, folders, "commit [0-9a-f]{12}:")


def test_a_symbolic_link_and_a_submodule_are_refused(mini: Mini, tmp_path: Path) -> None:
    folders = worktrees(mini, tmp_path)
    (folders[0] / "verl/link.py").symlink_to("a.py")
    commit(folders[0], "[verl] link: x", {})
    refused(mini, folders, "a symbolic link; the series carries regular files only")


def test_a_patch_that_does_not_apply_to_a_pin_it_serves_is_named(mini: Mini) -> None:
    listing = mini.root / "series"
    lines = [line for line in listing.read_text().splitlines() if ".p2.patch" not in line]
    listing.write_text("\n".join(lines).replace("#+p1", "") + "\n")
    refused(
        mini,
        (),
        r"verl p2: patches/verl/0001-step.patch: verl/b.py: hunk 1, line \d+: expected 'row \d+', found 'near'",
    )


# -- writing


def test_a_failed_write_deletes_no_patch(mini: Mini, monkeypatch: pytest.MonkeyPatch) -> None:
    refreshed = Refreshed({"patches/verl/0001-new.patch": b"new\n", "series": b"s\n", "series.lock": b"l\n"})
    original = Path.replace

    def replace(self: Path, to: Path) -> Path:
        if self.name == "series":
            raise OSError(28, "No space left on device", str(self))
        return original(self, to)

    names = {path.name for path in (mini.root / "patches").rglob("*.patch")}
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", replace)
        with pytest.raises(OSError, match="No space left"):
            refreshed.write(mini.root)
    assert {path.name for path in (mini.root / "patches").rglob("*.patch")} == names | {"0001-new.patch"}
    assert not (mini.root / ".refresh").exists()
    refreshed.write(mini.root)
    assert {path.name for path in (mini.root / "patches").rglob("*.patch")} == {"0001-new.patch"}


def test_patches_that_undo_each_other_are_locked_with_both_steps(tmp_path: Path) -> None:
    base = {"verl/__init__.py": b"", "verl/a.py": PY}
    spec = PinSpec("p1", base, [{"verl/a.py": edit(PY, 3, b"x\n")}, {"verl/a.py": PY}])
    mini = mini_project.build(tmp_path / "p", {"verl": [spec]})
    assert maintain.refresh(mini.project, (), quiet).differing(mini.root) == []


def test_a_pin_held_to_the_rules_is_not_locked_while_one_is_broken(mini: Mini) -> None:
    pins = mini.root / "configs" / "pins.toml"
    pins.write_text(pins.read_text().replace("[[pins]]\n", "[[pins]]\ndebugger_stops = 1\n", 1))
    before = files(mini)
    with pytest.raises(PatchctlError, match=r"the patched tree breaks a rule: .*\[[a-z-]+\]"):
        refresh(mini)
    assert files(mini) == before
