"""The series file with its guards, and series.lock."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import trees
from mini_project import Mini
from patchctl import series
from patchctl.errors import PatchctlError
from patchctl.project import Project

PINS = trees.PROJECT.pins
A, B, C = (f"verl/000{number}-a.patch" for number in (1, 2, 3))


def problems(*lines: str) -> list[tuple[int | None, str]]:
    return [(problem.line, problem.message) for problem in series.parse("\n".join(lines) + "\n", PINS)[1]]


def test_the_real_series_has_no_problem_and_serves_every_pin() -> None:
    parsed, faults = trees.PROJECT.read_series()
    assert faults == []
    for pin in PINS.pins:
        assert parsed.for_pin(pin)


def test_guards_choose_the_patches_of_a_pin() -> None:
    text = f"# comment\n\n{A}   #+b7dabd83\nverl/0001-a.v0.8.0.patch #+v0.8.0\n{B} #-v0.8.0\n{C}\n"
    parsed, faults = series.parse(text, PINS)
    assert faults == []
    first, second, *_ = PINS.of("verl")
    assert parsed.for_pin(first) == (A, B, C)
    assert parsed.for_pin(second) == ("verl/0001-a.v0.8.0.patch", C)
    assert parsed.for_pin(PINS.of("vllm-ascend")[0]) == ()


@pytest.mark.parametrize(
    ("lines", "line", "words"),
    [
        ((A, A), 2, "is listed twice (first in line 1)"),
        ((f"{A} #+b7dabd83", f"{A} #+v0.8.0"), 2, "is listed twice"),
        ((B, A), 2, "number and order disagree"),
        ((A, "verl/0001-b.patch"), 2, "number and order disagree"),
        ((f"{A} #+main",), 1, "guard '#+main' names no pin of verl; pins: b7dabd83, v0.8.0"),
        ((f"{A} #+v0.18.0",), 1, "names no pin of verl"),
        ((f"{A} b7dabd83",), 1, "'b7dabd83' is not a guard"),
        ((f"{A} # comment",), 1, "'#' is not a guard"),
        ((f"{A} #-b7dabd83 #-v0.8.0 #-v0.9.0",), 1, "serves no pin"),
        ((f"{A} #+v0.8.0 #-v0.8.0",), 1, "serves no pin"),
        (("verl/1-a.patch",), 1, "is not named"),
        (("megatron/0001-a.patch",), 1, "is not named"),
        (("verl/../0001-a.patch",), 1, "is not named"),
        (("verl/0001-ä.patch",), 1, "is not named"),
        (("/verl/0001-a.patch",), 1, "is not named"),
        (("verl/0001-a.diff",), 1, "is not named"),
        (("\ufeff# comment",), 1, "is not named"),
    ],
)
def test_a_fault_is_named_with_its_line(lines: tuple[str, ...], line: int, words: str) -> None:
    found = problems(*lines)
    assert any(at == line and words in message for at, message in found), found


def test_every_fault_is_reported_and_not_the_first_alone() -> None:
    assert len(problems("x", f"{A} #+main", "y")) == 3


def test_files_that_are_not_listed_and_listed_ones_that_are_not_there(mini: Mini) -> None:
    (mini.root / "patches/verl/0004-step.patch").unlink()
    (mini.root / "patches/verl/0009-extra.patch").write_text("x")
    (mini.root / "patches/verl/0001-step.patch~").write_text("x")
    project = mini.project
    assert series.unlisted(project.series, project.root / "patches") == [
        "verl/0001-step.patch~: not listed in series",
        "verl/0009-extra.patch: not listed in series",
        "verl/0004-step.patch: listed in series, but there is no such file",
    ]


# -- the lock


def test_the_lock_survives_a_round_trip_to_the_byte() -> None:
    text = (trees.ROOT / "series.lock").read_text(encoding="utf-8")
    assert series.parse_lock(text).dump() == text


LOCK = {"version": 1, "patches": {}, "pins": {"verl/x": {"f": [{"patch": "p", "pre": None, "post": "0" * 40}]}}}


def test_a_lock_of_the_right_shape_is_read() -> None:
    assert series.parse_lock(json.dumps(LOCK)).chains["verl/x"]["f"][0].pre is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "[" * 100_000,
        '{"version": 1}',
        json.dumps({**LOCK, "pins": []}),
        json.dumps({**LOCK, "pins": {"verl/x": []}}),
        json.dumps({**LOCK, "pins": {"verl/x": {"f": []}}}),
        json.dumps({**LOCK, "pins": {"verl/x": {"f": [{"patch": "p"}]}}}),
        json.dumps({**LOCK, "pins": {"verl/x": {"f": [{"patch": "p", "pre": 1, "post": None}]}}}),
        json.dumps({**LOCK, "pins": {"verl/x": {"f": [{"patch": 1, "pre": None, "post": None}]}}}),
        json.dumps({**LOCK, "pins": {"verl/x": {"f": [{"patch": "p", "pre": None, "post": None, "executable": "y"}]}}}),
        json.dumps({**LOCK, "pins": {"verl/x": {"../f": [{"patch": "p", "pre": None, "post": None}]}}}),
        json.dumps({**LOCK, "pins": {"verl/x": {"/f": [{"patch": "p", "pre": None, "post": None}]}}}),
        json.dumps({**LOCK, "patches": 3}),
    ],
)  # fmt: skip
def test_a_damaged_lock_gives_one_line_that_says_what_to_do(text: str) -> None:
    with pytest.raises(PatchctlError, match=re.escape("series.lock: damaged")) as caught:
        series.parse_lock(text)
    assert "patchctl refresh" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_lock_of_a_later_version_asks_for_an_update() -> None:
    with pytest.raises(PatchctlError, match="version 2 is not known; update patchctl"):
        series.parse_lock('{"version": 2}')


# -- the project


def test_patches_are_proved_by_the_lock_before_they_are_used(mini: Mini) -> None:
    pin = mini.pin()
    place = mini.root / "patches/verl/0003-step.patch"
    place.write_bytes(place.read_bytes().replace(b"three", b"there"))
    with pytest.raises(
        PatchctlError, match=r"patches/verl/0003-step.patch: not the file that series.lock was made from"
    ):
        mini.project.patches(pin)


def test_a_patch_that_is_gone_is_named(mini: Mini) -> None:
    (mini.root / "patches/verl/0002-step.patch").unlink()
    with pytest.raises(PatchctlError, match=r"0002-step.patch: can't be read: No such file or directory; restore it"):
        mini.project.patches(mini.pin())


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("verl/0004-step.patch\n", "", "does not list it, series.lock does"),
        ("vllm-ascend/0001-step.patch\n", "vllm-ascend/0001-step.patch #+a2\n", "does not list it, series.lock does"),
        ("verl/0004-step.patch\n", "verl/0004-step.patch\nverl/0005-more.patch\n", "lists it, series.lock does not"),
        ("verl/0001-step.patch     #+p1\n", "", "does not list it, series.lock does"),
    ],
)
def test_a_series_that_was_changed_without_its_lock_is_refused_even_where_nothing_is_to_do(
    mini: Mini, old: str, new: str, words: str
) -> None:
    listing = mini.root / "series"
    text = listing.read_text()
    assert old in text
    listing.write_text(text.replace(old, new))
    pin = next(pin for pin in mini.project.pins.pins if old.startswith(pin.upstream.name))
    project = Project(mini.root)
    with pytest.raises(PatchctlError, match=words):
        project.chains(pin)


def test_a_lock_without_a_file_that_a_patch_touches_is_refused(mini: Mini) -> None:
    place = mini.root / "series.lock"
    document = json.loads(place.read_text())
    del document["pins"]["verl/p1"]["verl/b.py"]
    place.write_text(json.dumps(document))
    with pytest.raises(PatchctlError, match="its files for verl p1 are not those of the patches"):
        mini.project.patches(mini.pin())


def test_a_pin_that_the_lock_does_not_know(mini: Mini) -> None:
    place = mini.root / "series.lock"
    document = json.loads(place.read_text())
    del document["pins"]["verl/p1"]
    place.write_text(json.dumps(document))
    with pytest.raises(PatchctlError, match=r"series.lock has no pin verl/p1; run `patchctl refresh`"):
        mini.project.chains(mini.pin())


def test_a_folder_that_is_no_project(tmp_path: Path) -> None:
    with pytest.raises(PatchctlError, match=r"series: no such file; is .* a patchctl project"):
        (tmp_path / "configs").mkdir()
        (tmp_path / "configs/pins.toml").write_text("pins = []\n[upstreams]\n")
        Project(tmp_path).read_series()
    (tmp_path / "series").mkdir()
    with pytest.raises(PatchctlError, match="series: can't be read: Is a directory"):
        Project(tmp_path).read_series()
    (tmp_path / "series.lock").write_bytes(b"\xff")
    with pytest.raises(PatchctlError, match=r"series.lock: not UTF-8 at byte 0"):
        _ = Project(tmp_path).lock
