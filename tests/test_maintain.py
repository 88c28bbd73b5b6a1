"""Refresh: the same commits give the same bytes, whatever the machine; nothing is lost where it fails."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import mini_project
from mini_project import PY, Exe, Mini, PinSpec, edit, git, snapshot
from patchctl import maintain
from patchctl.errors import InTheWayError, PatchctlError, UsageError
from patchctl.git import Git
from patchctl.maintain import commits
from patchctl.maintain import worktrees as worktrees_of
from patchctl.maintain.base import Base
from patchctl.maintain.files import Refreshed, interrupted, prove, recover
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
    "status.showUntrackedFiles": "no",
    "core.fileMode": "false",
    "core.ignoreCase": "true",
    "core.precomposeUnicode": "true",
    "diff.noPrefix": "true",
    "format.mboxrd": "true",
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
            (place / ".git/info/exclude").write_text("mailmap\n")
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


@pytest.mark.parametrize("key", HOSTILE)
def test_no_single_setting_changes_a_byte_of_an_export(
    exported: tuple[Mini, list[Path], dict[str, tuple[object, ...]]], key: str
) -> None:
    mini, folders, before = exported
    pin, folder = mini.pin(), folders[0]
    original = (folder / ".git/config").read_bytes()
    configure(folder, [key])
    try:
        worktree = worktrees_of.open_worktree(folder, mini.project.pins)
        worktree.check_clean()
        changes = commits.read_commits(worktree.git, worktree.base)
    finally:
        (folder / ".git/config").write_bytes(original)
    base = Base(pin, quiet, worktree.git).states({path for change in changes for path in change.files})
    texts = [found.text for found in commits.export(changes, base)]
    assert texts == [before[f"patches/{name}"][1] for name in mini.project.series.for_pin(pin)]


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


@pytest.mark.parametrize("lines", [0, 3])
def test_a_series_that_lost_lines_costs_no_patch(mini: Mini, lines: int) -> None:
    before = {path: path.read_bytes() for path in (mini.root / "patches").rglob("*.patch")}
    series = mini.root / "series"
    series.write_text("".join(series.read_text().splitlines(keepends=True)[:lines]))
    with pytest.raises(PatchctlError, match=r"^patches/\S+: not listed in series; list it, or remove the file$"):
        maintain.refresh(mini.project, [], print)
    assert {path: path.read_bytes() for path in (mini.root / "patches").rglob("*.patch")} == before


def test_a_damaged_patch_is_repaired_by_a_refresh(mini: Mini, tmp_path: Path) -> None:
    folders = worktrees(mini, tmp_path)
    refresh(mini, folders)
    before = files(mini)
    name = Project(mini.root).series.entries[1].patch
    place = mini.root / "patches" / name
    place.write_bytes(place.read_bytes()[:-40] + b"rubbish")
    refresh(mini, folders)
    assert files(mini) == before


# -- a worktree for one pin of several


@pytest.mark.parametrize("number", [0, 1])
def test_a_change_in_one_pins_worktree_is_shared_where_it_applies(mini: Mini, tmp_path: Path, number: int) -> None:
    """And whichever worktree it was made in, the files are the same: a text is made from the first pin."""
    folders = worktrees(mini, tmp_path)
    refresh(mini, folders)
    folder = folders[number]
    for subject in ("[verl] late: x", "[verl] later: y"):
        changed = edit((folder / "verl/a.py").read_bytes(), 15, f"{subject}\n".encode())
        commit(folder, subject, {"verl/a.py": changed})
    refreshed = refresh(mini, [folder])
    other = f"p{2 - number}"
    assert f"verl {other}: takes over '[verl] late: x' as it is on p{number + 1}" in refreshed.notes
    project = Project(mini.root)
    assert check_series(project).findings == ()
    assert {"verl/0005-late-x.patch", "verl/0006-later-y.patch"} <= set(project.series.for_pin(mini.pin(number=0)))
    assert {"verl/0005-late-x.patch", "verl/0006-later-y.patch"} <= set(project.series.for_pin(mini.pin(number=1)))
    before = files(mini)
    assert maintain.refresh(project, (), quiet).differing(mini.root) == []
    assert refresh(mini, [folder]).differing(mini.root) == []
    again = tmp_path / "again"
    again.mkdir()
    for pin in project.pins.of("verl"):
        place = mini.checkout(again / pin.name, pin).root
        mails = [str(mini.root / "patches" / name) for name in project.series.for_pin(pin)]
        git(place, "am", "--quiet", "--keep-non-patch", *mails)
    for places in ([again / "p1"], [again / "p2"], [again / "p1", again / "p2"]):
        refresh(mini, places)
        assert files(mini) == before, places


def test_a_patch_that_one_pins_worktree_drops_is_kept_for_the_others(mini: Mini, tmp_path: Path) -> None:
    folders = worktrees(mini, tmp_path)
    refresh(mini, folders)
    text = files(mini)["patches/verl/0003-step.patch"]
    git(folders[0], "rebase", "--quiet", "--onto", "HEAD~2", "HEAD~1")
    refreshed = refresh(mini, folders[:1])
    assert refreshed.notes == ("verl p1: drops '[verl] area: step 3'; kept for p2",)
    assert "verl/0003-step.patch     #+p2" in (mini.root / "series").read_text()
    assert files(mini)["patches/verl/0003-step.patch"] != text
    assert check_series(Project(mini.root)).findings == ()
    # The text is made from the pin that it is for now.
    before = files(mini)
    assert maintain.refresh(Project(mini.root), (), quiet).differing(mini.root) == []
    assert refresh(mini, folders).notes == ()
    assert files(mini) == before


def test_commits_that_differ_in_their_date_alone_are_one_patch(mini: Mini, tmp_path: Path) -> None:
    folders = worktrees(mini, tmp_path)
    for folder, seconds in zip(folders, (1700000100, 1700000200), strict=True):
        commit(folder, "[verl] late: x", {"verl/late.py": b"x = 1\n"})
        git(folder, "commit", "--quiet", "--amend", "--no-edit", "--date", f"{seconds} +0000")
    refresh(mini, folders)
    assert (mini.root / "series").read_text().count("late-x") == 1
    before = files(mini)
    assert b"Date: Tue, 14 Nov 2023 22:15:00" in (mini.root / "patches/verl/0005-late-x.patch").read_bytes()
    for given in ([folders[1]], [folders[0]]):
        assert refresh(mini, given).notes == ()
        assert files(mini) == before


def test_a_variant_is_changed_for_its_own_pin_alone(mini: Mini, tmp_path: Path) -> None:
    folders = worktrees(mini, tmp_path)
    refresh(mini, folders)
    before = files(mini)
    git(folders[1], "commit", "--quiet", "--amend", "--no-edit", "--date", "1700000009 +0000")
    git(folders[1], "reset", "--quiet", "--soft", "HEAD~4")
    commit(folders[1], "[verl] area: step 1", {})
    after_one = {name for name, value in files(mini).items() if value != before[name]}
    assert after_one == set()
    refresh(mini, folders[1:])
    text = (mini.root / "series").read_text()
    assert "verl/0002-step.patch     #+p1" in text  # the one commit holds all of it now
    assert files(mini)["patches/verl/0001-step.patch"] == before["patches/verl/0001-step.patch"]


def test_pins_whose_patches_stay_need_no_source(mini: Mini, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = mini.root / "configs/pins.toml"
    path.write_text(path.read_text().replace(str(mini.repositories["verl"]), str(tmp_path / "nowhere")))
    folders = worktrees(mini, tmp_path, "vllm-ascend")
    commit(folders[0], "[vllm-ascend] late: x", {"vllm_ascend/late.py": b"x = 1\n"})
    before = Project(mini.root).lock.chains["verl/p1"]
    refresh(mini, folders[:1])
    assert Project(mini.root).lock.chains["verl/p1"] == before
    with pytest.raises(PatchctlError, match="comes from git only"):  # all of them are proved
        maintain.refresh(Project(mini.root), folders[:1], quiet, complete=True)


# -- what is refused


def refused(mini: Mini, folders: Sequence[Path], words: str, kind: type[PatchctlError] = PatchctlError) -> None:
    before = snapshot(mini.root, mtimes=True)
    with pytest.raises(kind, match=words) as caught:
        refresh(mini, folders)
    assert "\n" not in str(caught.value)
    assert snapshot(mini.root, mtimes=True) == before


def test_a_change_that_a_pin_without_a_worktree_can_not_take_names_that_pin(mini: Mini, tmp_path: Path) -> None:
    folders = worktrees(mini, tmp_path)
    refresh(mini, folders)
    # Line 30 is another one in p2.
    commit(folders[0], "[verl] late: x", {"verl/a.py": edit((folders[0] / "verl/a.py").read_bytes(), 32, b"x\n")})
    refused(
        mini,
        folders[:1],
        r"verl p2: '\[verl\] late: x': verl/a.py: hunk 1, line \d+: expected .*; make the change there too, "
        r"in a worktree of its own \(`patchctl edit verl --pin p2`\), then refresh again; nothing was written",
    )
    commit(folders[1], "[verl] late: x", {"verl/a.py": edit((folders[1] / "verl/a.py").read_bytes(), 33, b"x\n")})
    refresh(mini, folders)
    assert "verl/0005-late-x.p2.patch" in (mini.root / "series").read_text()


def test_two_worktrees_for_one_pin_are_refused(mini: Mini, tmp_path: Path) -> None:
    folders = worktrees(mini, tmp_path)
    git(tmp_path, "clone", "--quiet", "--branch", "series-p1", str(folders[0]), str(tmp_path / "twice"))
    refused(mini, [folders[0], tmp_path / "twice"], "are both for verl p1; give one of them", UsageError)


def test_what_is_not_committed_is_refused(mini: Mini, tmp_path: Path) -> None:
    folders = worktrees(mini, tmp_path)
    (folders[1] / "verl/fresh.py").write_text("x\n")
    refused(mini, folders, r"verl/fresh.py is not committed: commit, stash or remove it", InTheWayError)
    git(folders[1], "config", "status.showUntrackedFiles", "no")
    refused(mini, folders, r"verl/fresh.py is not committed", InTheWayError)
    git(folders[1], "add", "--all")
    refused(mini, folders, r"verl/fresh.py is not committed", InTheWayError)


def test_a_change_outside_the_package_is_refused(mini: Mini, tmp_path: Path) -> None:
    folders = worktrees(mini, tmp_path)
    commit(folders[0], "[verl] readme: x", {"README.md": b"x\n"})
    refused(mini, folders, r"commit [0-9a-f]{12}: README.md: the series changes files below verl/ only")


def test_a_message_that_a_mail_can_not_carry_is_refused(mini: Mini, tmp_path: Path) -> None:
    folders = worktrees(mini, tmp_path)
    for folder in folders:
        (folder / "verl/x.py").write_text("1\n")
        git(folder, "add", "--all")
        git(folder, "commit", "--quiet", "--message", "[verl] x: y\n\nFrom: A B <a@b.invalid>\n\nThe reason is this.\n")
    refused(mini, folders, r"commit [0-9a-f]{12}: its \w+ would not come back from the patch; reword it")


def test_an_accent_in_a_name_and_a_long_subject_survive(mini: Mini, tmp_path: Path) -> None:
    folders = worktrees(mini, tmp_path)
    subject = "[verl] late: " + "words and 词 and wörds " * 6 + "end"
    for folder in folders:
        commit(folder, subject, {"verl/late.py": b"x = 1\n"})
        git(folder, "commit", "--quiet", "--amend", "--no-edit", "--author", "Zoë 王 <zoe@x.invalid>")
    refresh(mini, folders)
    before = files(mini)
    assert maintain.refresh(Project(mini.root), (), quiet).differing(mini.root) == []
    assert refresh(mini, folders).differing(mini.root) == []
    assert files(mini) == before


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
    for variant in (mini.root / "patches").rglob("*.p2.patch"):
        variant.unlink()
    refused(
        mini,
        (),
        r"verl p2: patches/verl/0001-step.patch: verl/b.py: hunk 1, line \d+: expected 'row \d+', found 'near'",
    )


# -- writing


NEW = Refreshed({"patches/verl/0001-new.patch": b"new\n", "series": b"s\n", "series.lock": b"l\n"})


def written(mini: Mini) -> dict[str, tuple[object, ...]]:
    """The project once NEW is written."""
    NEW.write(mini.root)
    return files(mini)


@pytest.fixture
def twin(mini: Mini, tmp_path: Path) -> Mini:
    shutil.copytree(mini.root, tmp_path / "twin")
    return Mini(tmp_path / "twin", mini.specs, mini.repositories)


def test_a_write_that_fails_half_way_is_finished_by_the_next_refresh(
    mini: Mini, twin: Mini, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Path.replace

    def replace(self: Path, to: Path) -> Path:
        if self.name == "series":
            raise OSError(28, "No space left on device", str(self))
        return original(self, to)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", replace)
        with pytest.raises(
            PatchctlError, match=r"series: can't be written: No space left on device; .*`patchctl refresh`"
        ):
            NEW.write(mini.root)
    said: list[str] = []
    recover(mini.root, said.append)
    assert said == ["an earlier refresh was interrupted: its files are put in place now"]
    assert files(mini) == written(twin)


def test_a_write_that_can_not_begin_changes_nothing(mini: Mini, monkeypatch: pytest.MonkeyPatch) -> None:
    before = snapshot(mini.root, mtimes=True)

    def fail(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device", str(self))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", fail)
        with pytest.raises(PatchctlError, match="No space left on device; nothing was changed"):
            NEW.write(mini.root)
    assert snapshot(mini.root, mtimes=True) == before


def test_a_write_that_is_killed_at_any_step_is_undone_or_finished(mini: Mini, twin: Mini) -> None:
    before, after = files(mini), written(twin)
    found = []
    for step in range(1, 40):
        place = mini.root.with_name(f"killed-{step}")
        shutil.copytree(mini.root, place)
        if not killed_at(step, place):
            break
        there = {name: value for name, value in snapshot(place).items() if not name.startswith(".refresh")}
        found.append("before" if there == before else "after" if there == after else "between")
        if found[-1] == "between":  # which no command takes for a whole one
            assert check_series(Project(place)).findings
        decided = interrupted(place)
        recover(place, quiet)
        left = {name: value for name, value in snapshot(place).items() if not name.startswith(".refresh.staging")}
        assert left == (after if decided or found[-1] == "after" else before)
        NEW.write(place)
        assert snapshot(place) == after
    assert "before" in found and "between" in found


def killed_at(step: int, root: Path) -> bool:
    """Write NEW in a process that is killed before its file operation of that number; False where it had fewer."""
    pid = os.fork()
    if pid == 0:
        count = 0

        def counted(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                nonlocal count
                count += 1
                if count == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*arguments, **options)

            return call

        for name in ("replace", "rename", "unlink", "write_bytes", "write_text"):
            setattr(Path, name, counted(getattr(Path, name)))
        try:
            NEW.write(root)
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status)


def test_an_interrupted_write_is_dropped_where_its_files_were_changed_since(mini: Mini) -> None:
    place = mini.root.with_name("killed")
    shutil.copytree(mini.root, place)
    step = next(step for step in range(1, 40) if killed_at(step, place) and (place / ".refresh").exists())
    assert step
    (place / "series").write_text("mine\n")
    said: list[str] = []
    recover(place, said.append)
    assert said == ["an earlier refresh was interrupted, and series was changed since: what it meant is dropped"]
    assert (place / "series").read_text() == "mine\n"
    assert not (place / ".refresh").exists()


def test_a_series_that_breaks_a_rule_of_messages_is_not_written(mini: Mini, tmp_path: Path) -> None:
    folders = worktrees(mini, tmp_path)
    for folder in folders:
        (folder / "verl/x.py").write_text("1\n")
        git(folder, "add", "--all")
        git(folder, "commit", "--quiet", "--message", "[verl] x: y\n\nThis is the reason for it all.\n")
    before = files(mini)
    refreshed = maintain.refresh(Project(mini.root), folders, quiet)
    with pytest.raises(PatchctlError, match=r"the series would break a rule: .*Upstream-Status.*nothing was written"):
        prove(mini.root, refreshed)
    assert files(mini) == before


def test_patches_that_undo_each_other_are_locked_with_both_steps(tmp_path: Path) -> None:
    base = {"verl/__init__.py": b"", "verl/a.py": PY}
    spec = PinSpec("p1", base, [{"verl/a.py": edit(PY, 3, b"x\n")}, {"verl/a.py": PY}])
    mini = mini_project.build(tmp_path / "p", {"verl": [spec]})
    assert maintain.refresh(mini.project, (), quiet).differing(mini.root) == []


def test_a_file_that_may_be_executed_stays_so_in_the_text(tmp_path: Path) -> None:
    base = {"verl/__init__.py": b"", "verl/run.sh": Exe(b"#!/bin/sh\necho 1\n")}
    spec = PinSpec("p1", base, [{"verl/run.sh": Exe(b"#!/bin/sh\necho 2\n")}])
    mini = mini_project.build(tmp_path / "p", {"verl": [spec]})
    before = files(mini)
    assert b" 100755\n" in (mini.root / "patches/verl/0001-step.patch").read_bytes()
    assert maintain.refresh(mini.project, (), quiet).differing(mini.root) == []
    refresh(mini, worktrees(mini, tmp_path))
    assert files(mini) == before


@pytest.mark.parametrize("lent", [True, False])
def test_what_upstreams_attributes_would_do_to_an_archive_does_not_happen(tmp_path: Path, lent: bool) -> None:
    base = {
        "verl/__init__.py": b"",
        "verl/.gitattributes": b"hidden.py export-ignore\nversion.py export-subst text eol=crlf\n",
        "verl/hidden.py": b"x = 1\n",
        "verl/version.py": b"commit = '$Format:%H$'\n",
    }
    mini = mini_project.build(tmp_path / "p", {"verl": [PinSpec("p1", base, [])]})
    found = Base(mini.pin(), quiet, Git(mini.repositories["verl"]) if lent else None)
    assert {path: found.state(path).content for path in base} == base


def test_a_pin_held_to_the_rules_is_not_locked_while_one_is_broken(mini: Mini) -> None:
    pins = mini.root / "configs" / "pins.toml"
    pins.write_text(pins.read_text().replace("[[pins]]\n", "[[pins]]\ndebugger_stops = 1\n", 1))
    before = files(mini)
    with pytest.raises(PatchctlError, match=r"the patched tree breaks a rule: .*\[[a-z-]+\]"):
        refresh(mini)
    assert files(mini) == before
