"""`patchctl pair` on the synthetic tree that has every awkward case of a real run, in both spellings of its folders."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dump_files import run_cli

from patchctl.dumps import join

MAKE_TREE = Path(__file__).with_name("make_dump_tree.py")


@pytest.fixture(scope="module", params=["real", "doc"])
def tree(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp(request.param)
    subprocess.run([sys.executable, str(MAKE_TREE), str(root), "--style", request.param], check=True)
    return root


def run_pair(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_cli("pair", root / "generate_sequence", root / "update_actor", *arguments)


def test_every_status_place_and_alternative_is_as_expected(tree: Path) -> None:
    expected = json.loads((tree / "expected.json").read_text())
    done = run_pair(tree, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["requests"]
    assert set(found) == set(expected["requests"])
    for name, entry in expected["requests"].items():
        keys = {"status", "infer", "train", "infer_other"} & set(entry)
        assert {key: found[name].get(key) for key in keys} == {key: entry[key] for key in keys}, entry["case"]
        assert found[name]["status"] == "PAIR" or found[name]["why"], f"no reason: {entry['case']}"


def test_damage_is_named_as_expected(tree: Path) -> None:
    expected = json.loads((tree / "expected.json").read_text())["warnings"]
    warnings = json.loads(run_pair(tree, "--json").stdout)["warnings"]
    assert set(expected) <= set(warnings)
    assert any("pid 3900" in warning and "older run" in warning for warning in warnings)
    assert len(warnings) == len(expected) + 1


def test_the_cheap_checks_of_every_pair_agree(tree: Path) -> None:
    found = json.loads(run_pair(tree, "--json").stdout)["requests"]
    pairs = [entry for entry in found.values() if entry["status"] == "PAIR"]
    assert pairs
    for entry in pairs:
        assert entry["checks"]["input_ids"] == entry["checks"]["embedding_output"] == "same"
        assert entry["tokens"]["infer"] == entry["tokens"]["train"]


def test_csv_and_text_say_the_same(tree: Path) -> None:
    lines = run_pair(tree, "--csv").stdout.splitlines()
    assert lines[0].startswith("request_id,status,")
    assert len(lines) == 31
    text = run_pair(tree).stdout
    assert "11 of 30 requests can be compared" in text


def test_swapped_folders_are_said_to_be(tree: Path) -> None:
    done = run_cli("pair", tree / "update_actor", tree / "generate_sequence")
    assert done.returncode == 1
    assert "swapped" in done.stderr and "Traceback" not in done.stderr


def test_partitions_and_processes_change_nothing(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def results() -> list[tuple[str, str, str]]:
        trees = join.open_trees(tree / "generate_sequence", tree / "update_actor")
        with join.pair_trees(trees, jobs=2) as run:
            return [*run.results, *(("warning", warning, "") for warning in run.warnings)]

    whole = results()
    monkeypatch.setattr(join, "PARTITION_BYTES", 500)
    monkeypatch.setattr(join, "SMALL_BYTES", 0)
    monkeypatch.setattr(join.logs, "RANGE_BYTES", 300)
    monkeypatch.setattr(join.logs.byte_ranges, "__defaults__", (300,))
    monkeypatch.setattr(join, "SPILL_RECORDS", 2)
    assert results() == whole


def test_logs_alone_are_joined_without_dumps(tree: Path) -> None:
    document: dict[str, Any] = json.loads(run_pair(tree, "--json", "--logs-only").stdout)
    assert document["counts"]["PAIR"] > 11
    assert not any("infer_dumps" in entry for entry in document["requests"].values())
