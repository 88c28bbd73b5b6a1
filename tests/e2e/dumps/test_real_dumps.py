"""From the dumps of real runs to an answer: a correct run agrees, a planted fault is named at its layer and module."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
from dump_files import run_cli
from real_runs import E2E_FOLDER, FAULTS, LAYERS, NAMED, PROMPTS, Runs, Scenario

from patchctl.dumps.compare import judge_pair
from patchctl.dumps.judge import BUILT_IN

PP2 = (("pp", 2),)
# Ten seeds over the three backends.
SCENARIOS = [
    *(Scenario("fsdp", seed) for seed in range(4)),
    *(Scenario("fsdp2", seed) for seed in range(4, 7)),
    *(Scenario("megatron", seed, parallel=PP2) for seed in range(7, 10)),
]
MORE = [
    Scenario("fsdp", 11, task="tensor"),
    Scenario("fsdp2", 14, precise=True),
    Scenario("megatron", 12, parallel=(("pp", 2), ("vpp", 2))),
    Scenario("megatron", 13, parallel=(("tp", 2),)),
]


def name(scenario: Scenario) -> str:
    return scenario.name


@pytest.mark.parametrize("scenario", [*SCENARIOS, *MORE], ids=name)
def test_every_request_of_a_correct_run_pairs_and_agrees(runs: Runs, scenario: Scenario) -> None:
    pairs = runs.pairs(scenario, "correct")
    assert [entry["status"] for entry in pairs.values()] == ["PAIR"] * PROMPTS, pairs
    for request_id, entry in pairs.items():
        assert entry["checks"]["input_ids"] in ("same", "unknown")
        judgement = judge_pair(request_id, entry, BUILT_IN)
        assert judgement.verdict == "agrees", judgement.reason
        assert judgement.layers == (LAYERS, LAYERS)
        assert len([row for row in judgement.rows if row.verdict == "same"]) >= 12 * LAYERS
        assert not any(judgement.unmatched.values()), judgement.unmatched
        assert bool(judgement.weights) == (scenario.backend != "fsdp")


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "correct"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=name)
def test_a_planted_fault_is_named_at_its_layer_and_module(runs: Runs, scenario: Scenario, fault: str) -> None:
    found = Counter()
    for request_id, entry in runs.pairs(scenario, fault).items():
        judgement = judge_pair(request_id, entry, BUILT_IN)
        assert judgement.divergence is not None, f"{request_id}: {judgement.verdict}"
        found[judgement.divergence.row.where] += 1
        if fault == "swapped":
            assert "swapped" in judgement.reason
        if fault == "stale" and scenario.backend != "fsdp":
            assert len([row for row in judgement.weights if row.verdict == "differs"]) > len(judgement.weights) / 2
    assert found == {NAMED[fault]: PROMPTS}


@pytest.mark.parametrize("fault", ["scaled", "swapped", "zeroed", "offset"])
@pytest.mark.parametrize("scenario", [MORE[0], MORE[2]], ids=name)
def test_the_same_from_tensors_and_from_virtual_stages(runs: Runs, scenario: Scenario, fault: str) -> None:
    for request_id, entry in runs.pairs(scenario, fault).items():
        judgement = judge_pair(request_id, entry, BUILT_IN)
        assert judgement.divergence is not None
        assert judgement.divergence.row.where == NAMED[fault]
        assert ("l2" in judgement.divergence.row.errors) == (scenario.task == "tensor" and fault != "offset")


def msprobe_command(version: str, folder: Path) -> Path:
    """An `msprobe` command of this environment, whatever version PYTHONPATH puts first."""
    script = folder / f"msprobe-{version}"
    lines = ["#!" + sys.executable, "import sys"]
    script.write_text("\n".join([*lines, "from msprobe.msprobe import main", "main()", ""]))
    script.chmod(0o755)
    return script


@pytest.mark.parametrize("version", ["26.2.0", "26.0.0"])
@pytest.mark.parametrize("scenario", [SCENARIOS[0], SCENARIOS[4], SCENARIOS[7], MORE[0]], ids=name)
def test_the_real_msprobe_matches_every_pair(runs: Runs, scenario: Scenario, version: str, tmp_path: Path) -> None:
    root = runs.dumps(scenario)
    pairs = tmp_path / "pairs.json"
    done = run_cli("pair", root / "generate_correct", root / "update_actor", "--json")
    pairs.write_text(done.stdout)
    command = msprobe_command(version, tmp_path)
    other = [E2E_FOLDER / f"msprobe-{version}"] if version != "26.2.0" else []
    done = run_cli("compare", pairs, "-o", tmp_path / "out", "--msprobe", command, "--json", path=other)
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[:2000]
    document = json.loads(done.stdout)
    assert document["msprobe"] == {"version": version, "pairs": PROMPTS, "nothing_matched": 0}
    assert all(pair["msprobe"]["matched"] >= 20 * LAYERS for pair in document["pairs"])


def test_without_the_rewritten_names_msprobe_matches_nothing_of_fsdp2(runs: Runs, tmp_path: Path) -> None:
    """What the copies are for; and that nothing matched is a failure here, whatever msprobe's exit code says."""
    from patchctl.dumps import msprobe_compare

    scenario = SCENARIOS[4]
    assert scenario.backend == "fsdp2"
    entry = next(iter(runs.pairs(scenario, "correct").values()))
    found = msprobe_compare.find_msprobe(str(Path(sys.prefix) / "bin" / "msprobe"))
    assert found is not None
    jobs = []
    for label, renamed in (("renamed", msprobe_compare._renamed), ("as dumped", lambda name, *_: name)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(msprobe_compare, "_renamed", renamed)
            folder = tmp_path / label.replace(" ", "_")
            jobs.append(msprobe_compare.prepare(label, entry, "fsdp", folder))
    matched = {answer["id"]: (answer["rc"], answer["matched"]) for answer in msprobe_compare.run_jobs(found, jobs, 1)}
    assert matched["as dumped"] == (0, 0)
    assert matched["renamed"][0] == 0 and matched["renamed"][1] > 20 * LAYERS


def test_a_baseline_narrows_the_noise_band(runs: Runs, tmp_path: Path) -> None:
    scenario = SCENARIOS[1]
    root = runs.dumps(scenario)
    outs = {}
    for fault in ("correct", "scaled"):
        pairs = tmp_path / f"{fault}.json"
        pairs.write_text(run_cli("pair", root / f"generate_{fault}", root / "update_actor", "--json").stdout)
        outs[fault] = pairs
    base = tmp_path / "base"
    assert run_cli("compare", outs["correct"], "-o", base, "--no-msprobe").returncode == 0
    for fault, code in (("correct", 0), ("scaled", 1)):
        done = run_cli(
            "compare", outs[fault], "-o", tmp_path / f"out-{fault}", "--no-msprobe", "--baseline", base, "--json"
        )
        assert done.returncode == code, done.stderr
        document = json.loads(done.stdout)
        assert document["bands"]["source"].endswith("compare.json")
        linear = document["bands"]["limits"]["bfloat16"]["linear"]["norm"]
        assert linear < BUILT_IN.limits["bfloat16"]["linear"]["norm"]


def test_the_report_of_a_real_run(runs: Runs, tmp_path: Path) -> None:
    root = runs.dumps(SCENARIOS[7])
    pairs = tmp_path / "pairs.json"
    pairs.write_text(run_cli("pair", root / "generate_swapped", root / "update_actor", "--json").stdout)
    assert run_cli("compare", pairs, "-o", tmp_path / "out", "--no-msprobe").returncode == 1
    done = run_cli("report", tmp_path / "out")
    assert done.returncode == 1
    assert "first to differ: layers.1.self_attn.qkv_proj in 4 of 4 pairs" in done.stdout
    html = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "http://" not in html and "https://" not in html
    assert (tmp_path / "out" / "report.html").stat().st_size < 1_000_000
