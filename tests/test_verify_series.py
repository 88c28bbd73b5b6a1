"""Verify's proof of the series: each rule finds what it is for, everything is reported, and a good series passes."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mini_project
import trees
from mini_project import Mini
from patchctl import maintain, patchfile
from patchctl.project import Project
from patchctl.verify import series as verify_series
from patchctl.verify.findings import Finding
from patchctl.verify.series import check_series

P1, P2, P3, P4 = (f"verl/000{number}-step.patch" for number in range(1, 5))


def findings(mini: Mini) -> tuple[Finding, ...]:
    return check_series(Project(mini.root)).findings


def rules(mini: Mini) -> set[str]:
    return {finding.rule for finding in findings(mini)}


def change(mini: Mini, name: str, old: bytes, new: bytes, *, lock: bool = False) -> None:
    """Edit a patch; with `lock`, as someone does who also writes the new sha256 into the lock."""
    place = mini.root / "patches" / name
    data = place.read_bytes()
    assert old in data
    changed = data.replace(old, new, 1)
    place.write_bytes(changed)
    if lock:
        text = (mini.root / "series.lock").read_text()
        (mini.root / "series.lock").write_text(
            text.replace(hashlib.sha256(data).hexdigest(), hashlib.sha256(changed).hexdigest())
        )


def edit_lock(mini: Mini, edit: Callable[[dict[str, Any]], object]) -> None:
    place = mini.root / "series.lock"
    document = json.loads(place.read_text())
    edit(document)
    place.write_text(json.dumps(document))


def test_the_real_series_and_the_small_one_pass(mini: Mini) -> None:
    for root in (trees.ROOT, mini.root):
        report = check_series(Project(root))
        assert report.findings == ()
        assert report.skipped == ()
        assert report.patches == len(list((root / "patches").rglob("*.patch")))


def test_the_lock_of_the_real_series_is_what_the_patches_make_of_upstream() -> None:
    """Worked out anew from every pin's own files: a refresh would change no byte."""
    for pin in trees.PROJECT.pins.pins:
        if reason := trees.available(pin):
            pytest.skip(reason)
    assert maintain.refresh(Project(trees.ROOT), (), lambda message: None).differing(trees.ROOT) == []


def test_every_fault_is_reported_with_file_line_and_what_to_do(mini: Mini) -> None:
    change(mini, P1, b"+one\n", b"+one\n+more\n")
    change(mini, P2, b"Upstream-Status", b"Status")
    change(mini, P3, b"index ", b"Index ")
    (mini.root / "patches/verl/0007-extra.patch").write_bytes(b"x")
    found = findings(mini)
    assert {finding.path for finding in found} >= {f"patches/{name}" for name in (P1, P2, P3, "verl/0007-extra.patch")}
    assert {finding.rule for finding in found} >= {"patch-text", "patch-message", "series-files", "lock"}
    for finding in found:
        assert finding.fix
        assert "\n" not in str(finding)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"@@ -2,6 +2,7 @@", b"@@ -2,3 +2,4 @@"),
        (b"@@ -2,6 +2,7 @@", b"@@ -2,6 +2,6 @@"),
        (b"@@ -2,6 +2,7 @@", b"@@ -2,7 +2,8 @@"),
        (b"+one\n", b"+one\r\n@@\n"),
        (b"a/verl/a.py b/verl/a.py", b"a/verl/../a.py b/verl/../a.py"),
        (b"a/verl/a.py b/verl/a.py", b"a/verl/a.py b/verl/c.py"),
        (b"\n+++ b/verl/a.py", b"\r\n+++ b/verl/a.py"),
    ],
)
def test_a_damaged_text_is_found_although_somebody_renewed_the_locks_sum(mini: Mini, old: bytes, new: bytes) -> None:
    change(mini, P1, old, new, lock=True)
    assert "patch-text" in rules(mini)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data.replace(b"\n", b"\r\n"),
        lambda data: b"\xef\xbb\xbf" + data,
        lambda data: data[:-1],
        lambda data: data[: len(data) // 2],
        lambda data: data + b"rubbish\n",
        lambda data: data + b"\0",
        lambda data: b"",
        lambda data: bytes(reversed(data)),
    ],
)
def test_a_converted_cut_or_soiled_file_is_found(mini: Mini, damage: Callable[[bytes], bytes]) -> None:
    place = mini.root / "patches" / P2
    data = place.read_bytes()
    place.write_bytes(damage(data))
    text = (mini.root / "series.lock").read_text()
    sums = [hashlib.sha256(each).hexdigest() for each in (data, damage(data))]
    (mini.root / "series.lock").write_text(text.replace(*sums))
    found = findings(mini)
    assert any(finding.rule == "patch-text" and finding.path == f"patches/{P2}" for finding in found)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (b"From: patchctl maintainers <maintainers@patchctl.invalid>", b"From: somebody", "no author"),
        (b"Subject: [verl] area: step 1", b"Subject: step 1", "is not `[verl] area: what it does`"),
        (b"Subject: [verl] area: step 1", b"Subject: [vllm-ascend] area: step 1", "is not `[verl] area"),
        (b"This is why the patch is there: the tests want step 1.", b"", "does not say why"),
        (b"Upstream-Status: Not submitted (a test)\n", b"", "no `Upstream-Status:`"),
        (b"Upstream-Status: Not submitted (a test)", b"Upstream-Status: Pending", "no `Upstream-Status:`"),
        (b"Upstream-Status: Not submitted (a test)", b"Upstream-Status: Not submitted", "no `Upstream-Status:`"),
        (b"Drop-when: the tests end\n", b"", "no `Drop-when:`"),
    ],
)
def test_a_message_that_lacks_something_is_found(mini: Mini, old: bytes, new: bytes, words: str) -> None:
    change(mini, P1, old, new, lock=True)
    assert [words in finding.message for finding in findings(mini) if finding.rule == "patch-message"] == [True]


@pytest.mark.parametrize(
    "status",
    [b"Submitted https://example.invalid/pr/1", b"Merged in v0.9.0", b"Never (only of use here)", b"Not submitted (x)"],
)
def test_every_upstream_status_that_is_documented_passes(mini: Mini, status: bytes) -> None:
    change(mini, P1, b"Upstream-Status: Not submitted (a test)", b"Upstream-Status: " + status, lock=True)
    assert findings(mini) == ()


def test_the_series_order_and_files_are_checked(mini: Mini) -> None:
    listing = mini.root / "series"
    listing.write_text(listing.read_text().replace(f"{P2}\n", f"{P2} #+nope\n{P2}\nverl/0009-gone.patch\n"))
    messages = "\n".join(str(finding) for finding in findings(mini))
    assert "series:6: [series-order] verl/0002-step.patch is listed twice (first in line 5)" in messages
    assert "names no pin of verl" in messages
    assert "patches/verl/0009-gone.patch: [series-files] listed in series, but there is no such file" in messages


# -- the lock


def test_a_changed_patch_is_found_by_its_sum(mini: Mini) -> None:
    change(mini, P1, b"the tests want step 1", b"the tests need step 1")
    assert [(finding.rule, finding.path) for finding in findings(mini)] == [("lock", f"patches/{P1}")]


def test_a_dropped_patch_is_found_without_any_tree(mini: Mini) -> None:
    listing = mini.root / "series"
    listing.write_text(listing.read_text().replace(f"{P2}\n", ""))
    (mini.root / "patches" / P2).unlink()
    edit_lock(mini, lambda lock: lock["patches"].pop(P2))
    messages = "\n".join(map(str, findings(mini)))
    for pin in ("p1", "p2"):
        assert f"verl {pin}: verl/new/mod.py is touched by" in messages


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda lock: lock["patches"].pop(P2), f"does not know patches/{P2}"),
        (lambda lock: lock["patches"].update(ghost="0" * 64), "names ghost, which the series does not list"),
        (lambda lock: lock["pins"].pop("verl/p2"), "lacks pin verl/p2"),
        (lambda lock: lock["pins"].update({"verl/p9": {}}), "has an unknown pin verl/p9"),
        (lambda lock: lock["pins"]["verl/p1"].pop("verl/b.py"), "verl/b.py is touched by"),
        (lambda lock: lock["pins"]["verl/p1"]["verl/a.py"].reverse(), "verl/a.py is touched by"),
        (lambda lock: lock["pins"]["verl/p1"]["verl/a.py"][0].update(post="1" * 40), "is not what verl/0003-step"),
        (lambda lock: lock["pins"]["verl/p1"]["verl/a.py"][1].update(pre="1" * 40), "is not what verl/0003-step"),
        (lambda lock: lock["pins"]["verl/p1"]["verl/run.sh"][0].update(post="1" * 40), "creates other contents"),
        (lambda lock: lock["pins"]["verl/p1"]["verl/run.sh"][0].update(pre="1" * 40), "whether the file exists"),
        (lambda lock: lock["pins"]["verl/p1"]["verl/old.py"][0].update(post="1" * 40), "whether the file exists"),
        (lambda lock: lock["pins"]["verl/p1"]["verl/run.sh"][0].pop("executable"), "whether it may be executed"),
        (lambda lock: lock["pins"]["verl/p1"]["verl/tool.sh"][0].update(executable=False), "whether it may be exec"),
        (lambda lock: lock["pins"]["verl/p1"]["verl/a.py"][1].update(post="1" * 40), "name other contents than"),
        (lambda lock: lock["pins"]["verl/p1"]["verl/a.py"][0].update(pre="1" * 40), "name other contents than"),
        (lambda lock: lock.update(version=7), "version 7 is not known"),
        (lambda lock: lock.pop("pins"), "damaged"),
    ],
)  # fmt: skip
def test_every_lie_of_the_lock_is_found(mini: Mini, edit: Callable[[dict[str, Any]], object], words: str) -> None:
    edit_lock(mini, edit)
    found = findings(mini)
    assert any(finding.rule == "lock" and words in finding.message for finding in found), found


def test_a_line_of_a_hunk_that_was_changed_along_with_the_locks_sum_is_found(mini: Mini) -> None:
    """An edited context or removed line; an edited line of a new file."""
    change(mini, P2, b"+    return 1\n", b"+    return 7\n", lock=True)
    assert "creates other contents than the lock says" in "\n".join(map(str, findings(mini)))


@pytest.mark.parametrize("number", range(4))
def test_every_mutation_of_a_real_patch_is_caught_by_its_lock(tmp_path: Path, number: int) -> None:
    """One byte of every line of the diff is changed: verify says so, and names the patch."""
    project = tmp_path / "project"
    for name in ("patches", "configs"):
        shutil.copytree(trees.ROOT / name, project / name)
    for name in ("series", "series.lock"):
        shutil.copy(trees.ROOT / name, project / name)
    names = [entry.patch for entry in trees.PROJECT.series.entries]
    name = sorted(names, key=lambda name: (trees.ROOT / "patches" / name).stat().st_size)[number]
    place = project / "patches" / name
    data = place.read_bytes()
    start = data.index(b"\ndiff --git")
    ends = [at for at in range(start + 1, len(data)) if data[at : at + 1] == b"\n"]
    for at in ends[:: max(1, len(ends) // 12)]:
        mutant = bytearray(data)
        mutant[at - 1] ^= 0x15
        place.write_bytes(bytes(mutant))
        found = check_series(Project(project)).findings
        assert any(finding.path == f"patches/{name}" for finding in found)
    place.write_bytes(data)
    assert check_series(Project(project)).findings == ()


# -- the other readers


def test_a_line_that_our_own_reading_drops_is_found_by_the_others(mini: Mini, monkeypatch: pytest.MonkeyPatch) -> None:
    original = patchfile.numstat

    def numstat(files: Any) -> list[tuple[int, int, str]]:
        return [(added - (path == "verl/b.py"), removed, path) for added, removed, path in original(files)]

    monkeypatch.setattr(patchfile, "numstat", numstat)
    assert rules(mini) == {"unidiff-reading", "git-reading"}


def test_a_file_section_that_only_git_sees_is_found(mini: Mini, monkeypatch: pytest.MonkeyPatch) -> None:
    original = verify_series.start_numstat

    def start(folder: Path) -> Any:
        result = original(folder)
        return lambda patches: [*result(patches), (1, 0, "hidden.py")]

    monkeypatch.setattr(verify_series, "start_numstat", start)
    assert "git reads 1 more file sections" in "\n".join(map(str, findings(mini)))


def test_without_git_the_comparison_is_skipped_with_the_reason(mini: Mini, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(mini.root))
    report = check_series(Project(mini.root))
    assert report.findings == ()
    assert "git is not installed" in report.skipped[0]


def test_hostile_settings_of_the_projects_own_repository_change_nothing(mini: Mini) -> None:
    mini_project.git(mini.root, "init", "--quiet")
    for key, value in {
        "apply.whitespace": "error",
        "apply.ignoreWhitespace": "change",
        "core.autocrlf": "true",
    }.items():
        mini_project.git(mini.root, "config", key, value)
    change(mini, P2, b"+    return 1\n", b"+    return 1  \n")
    found = findings(mini)
    assert not [finding for finding in found if finding.rule == "git-reading"], found


def test_an_empty_series_has_nothing_for_git_to_read(mini: Mini) -> None:
    shutil.rmtree(mini.root / "patches")
    (mini.root / "series").write_text("# nothing\n")
    assert "git-reading" not in rules(mini)
