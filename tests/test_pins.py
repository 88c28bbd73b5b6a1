"""pins.toml, and what a revision on the command line stands for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import trees
from patchctl import pins
from patchctl.errors import InTheWayError, PatchctlError, UsageError

UPSTREAMS = """
[upstreams.verl]
package = "verl"
url = "https://example.invalid/verl.git"
url_variable = "PATCHCTL_VERL_URL"
[upstreams.vllm-ascend]
package = "vllm_ascend"
url = "https://example.invalid/va.git"
url_variable = "PATCHCTL_VLLM_ASCEND_URL"
"""


def pin(name: str, commit: str, upstream: str = "verl", more: str = "") -> str:
    return f'[[pins]]\nupstream = "{upstream}"\nname = "{name}"\ncommit = "{commit}"\n{more}\n'


def load(folder: Path, text: str) -> pins.Pins:
    place = folder / "pins.toml"
    place.write_text(text, encoding="utf-8")
    return pins.load(place)


ONE, TWO = "abcdef0" + "1" * 33, "abcdef0" + "2" * 33


@pytest.mark.parametrize("revision", ["b7dabd83", "b7dabd8", "B7DABD83AC", "b7dabd83ac7cf3bed84b06e9e29ae67e8542ee73"])
def test_a_pin_is_named_by_its_name_or_a_prefix_of_its_commit(revision: str) -> None:
    assert trees.PROJECT.pins.resolve("verl", revision).name == "b7dabd83"


def test_a_tag_names_its_pin_and_the_pair_follows() -> None:
    found = trees.PROJECT.pins.resolve("verl", "v0.8.0")
    assert found.commit.startswith("7aed6b230")
    assert trees.PROJECT.pins.paired(found).name == "v0.18.0"
    assert trees.PROJECT.pins.paired(trees.PROJECT.pins.resolve("verl", "b7dabd83")).name == "v0.18.0"


@pytest.mark.parametrize("revision", ["deadbeef", "0" * 40, "v0.7.0", "0.18.0", "7aed6b3"])
def test_an_unknown_commit_is_refused_and_the_known_pins_are_listed(revision: str) -> None:
    with pytest.raises(InTheWayError) as caught:
        trees.PROJECT.pins.resolve("verl", revision)
    assert revision in str(caught.value)
    assert "b7dabd83 (b7dabd83ac7c), v0.8.0 (7aed6b230776)" in str(caught.value)


@pytest.mark.parametrize("revision", ["", "b7dabd", "main", "HEAD~1", "b7dabd83zz", "b" * 41, "b7dabd83\n"])
def test_what_can_name_no_commit_is_a_usage_error(revision: str) -> None:
    with pytest.raises(UsageError, match="at least 7 hex digits"):
        trees.PROJECT.pins.resolve("verl", revision)


def test_a_prefix_that_fits_two_pins_is_refused(tmp_path: Path) -> None:
    found = load(tmp_path, UPSTREAMS + pin("one", ONE) + pin("two", TWO))
    with pytest.raises(InTheWayError, match=r"'abcdef0' fits several verl pins; give more digits: one \(abcdef0"):
        found.resolve("verl", "abcdef0")
    assert found.resolve("verl", "abcdef02").name == "two"
    assert found.resolve("verl", "one").name == "one"


def test_a_pin_of_another_upstream_is_not_meant(tmp_path: Path) -> None:
    found = load(tmp_path, UPSTREAMS + pin("one", ONE) + pin("two", TWO, "vllm-ascend"))
    assert found.resolve("verl", "abcdef0").name == "one"


def test_a_verl_pin_without_a_pair_says_what_to_give(tmp_path: Path) -> None:
    found = load(tmp_path, UPSTREAMS + pin("one", ONE))
    with pytest.raises(PatchctlError, match="--vllm-ascend-commit"):
        found.paired(found.resolve("verl", "one"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[upstreams", "not readable as TOML"),
        ("pins = 3\n[upstreams]", "a field is missing or unknown"),
        (UPSTREAMS, "a field is missing or unknown: 'pins'"),
        (UPSTREAMS + '[[pins]]\nupstream = "verl"\nname = "x"\n', "'commit'"),
        (UPSTREAMS + pin("x", ONE, "nope"), "'nope'"),
        (UPSTREAMS + "speed = 3\n" + pin("x", ONE), "speed"),
        (UPSTREAMS + pin("x", ONE) + pin("x", TWO), "verl/x is defined twice"),
        (UPSTREAMS + pin("x", "abc"), "not 40 hex digits"),
        (UPSTREAMS + pin("x", ONE).replace(f'"{ONE}"', "17"), "not 40 hex digits"),
        (UPSTREAMS + pin("x", ONE, more='vllm-ascend = "gone"'), "goes with 'gone'"),
    ],
)
def test_a_damaged_pins_file_gives_one_line_that_names_it(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(PatchctlError, match=re.escape(words)) as caught:
        load(tmp_path, text)
    assert str(caught.value).startswith(str(tmp_path / "pins.toml"))
    assert "\n" not in str(caught.value)


def test_pins_that_are_not_there_or_are_no_utf8_or_a_folder(tmp_path: Path) -> None:
    with pytest.raises(PatchctlError, match="no such file; is this a patchctl project"):
        pins.load(tmp_path / "pins.toml")
    (tmp_path / "latin1").write_bytes(b"# caf\xe9\n")
    with pytest.raises(PatchctlError, match="not readable as TOML"):
        pins.load(tmp_path / "latin1")
    with pytest.raises(PatchctlError, match="can't be read: Is a directory"):
        pins.load(tmp_path)


def test_the_url_variable_names_a_mirror_and_a_folder_is_meant_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upstream = trees.PROJECT.pins.upstreams["verl"]
    monkeypatch.delenv(upstream.url_variable, raising=False)
    assert upstream.fetch_url() == "https://github.com/verl-project/verl.git"
    monkeypatch.setenv(upstream.url_variable, "git@host.invalid:verl.git")
    assert upstream.fetch_url() == "git@host.invalid:verl.git"
    (tmp_path / "mirror").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(upstream.url_variable, "mirror")
    assert upstream.fetch_url() == str(tmp_path / "mirror")
