"""What verl's vLLM server tells of its KV cache, and what vLLM says itself: a real engine, through verl's client."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "engine"), str(HERE.parents[1] / "proxy"), str(HERE.parents[1] / "bench")]

import engine_runs  # noqa: E402
import setup_engine  # noqa: E402
from bench_admission import PrefixCache  # noqa: E402

Result = dict[str, Any]
BLOCK, BLOCKS = 32, 200


@pytest.fixture(scope="module")
def python() -> Path:
    """The interpreter of an environment with a CPU build of vLLM."""
    try:
        return Path(setup_engine.ensure())
    except setup_engine.Unsupported as reason:
        pytest.skip(str(reason))


def run(command: list[Any], verl_tree: Path, folder: Path) -> str:
    """What the command prints, as the last line of its output."""
    environment = engine_runs.environment(verl_tree, folder)
    environment["PYTHONPATH"] += os.pathsep + str(HERE)
    log = folder / "run.log"
    with log.open("w") as output:
        done = subprocess.run(command, env=environment, stdout=output, stderr=subprocess.STDOUT, timeout=1500)
    lines = log.read_text(errors="replace").splitlines()
    if done.returncode:
        pytest.fail("\n".join(lines[-40:]), pytrace=False)
    return lines[-1]


@pytest.fixture(scope="module")
def result(python: Path, verl_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """One run of all scenarios on an engine."""
    import real_tokenizers

    try:
        real_tokenizers.vocabulary("qwen3")
        real_tokenizers.trl_templates()
    except real_tokenizers.Unavailable as reason:
        pytest.skip(str(reason))
    folder = tmp_path_factory.mktemp(f"probes-{verl_tree.name}")
    run([python, HERE / "run_probes.py", folder], verl_tree, folder)
    return dict(json.loads((folder / "result.json").read_text(encoding="utf-8")))


def test_the_resident_prefix_is_the_number_of_tokens_that_vllm_then_has_cached(result: Result) -> None:
    rows = {name: (told, cached) for name, told, cached in result["residency"]["rows"]}
    assert all(told == cached for told, cached in rows.values()), rows
    # Whole blocks, and never the last token.
    assert rows["nothing cached"] == rows["32 tokens"] == rows["cache reset"] == (0, 0)
    assert rows["33 tokens"] == (32, 32)
    assert rows["1984 tokens"] == (1952, 1952)
    assert rows["one token changed"] == (768, 768)
    assert rows["answer and new text"] == (2080, 2080)


def test_an_evicted_prefix_is_shorter_as_vllm_and_the_benchmark_s_model_say(result: Result) -> None:
    rows = result["eviction"]["rows"]
    assert all(told == cached for _, told, cached in rows), rows
    assert rows[0][1] == 2976 > rows[4][1] > rows[5][1]
    assert [row[1] for row in rows] == [modelled(others) * BLOCK for others in range(len(rows))]


def modelled(others: int) -> int:
    """The scenario on the benchmark's cache: blocks of a prompt of 3000 tokens after others of 1200."""
    cache = PrefixCache(BLOCKS)

    def request(name: str, tokens: int) -> None:
        keys = [(name, index) for index in range(-(-tokens // BLOCK))]
        blocks = cache.take(keys, cache.resident(keys))
        assert blocks is not None
        cache.release(blocks, tokens // BLOCK)

    request("mine", 3000)
    for number in range(others):
        request(f"other {number}", 1200)
    return cache.resident([("mine", index) for index in range((3000 - 1) // BLOCK)])


def test_probes_leave_the_order_of_eviction_as_it_is(result: Result) -> None:
    assert result["eviction"]["rows"] == result["eviction"]["again"]  # many probes, and one


def test_the_usage_rises_with_a_request_and_falls_with_its_end(result: Result) -> None:
    found = result["usage"]
    assert found["idle"] == found["after"] == [0.0, BLOCK * BLOCKS] and found["capacity"] == BLOCK * BLOCKS
    assert max(share for share, _ in found["during"]) == pytest.approx(95 / BLOCKS)  # 3000 + 40 tokens
    assert found["resident_after"] == 2976  # what is cached is not in use


def test_probes_are_answered_beside_the_queue_and_are_no_requests(result: Result) -> None:
    found = result["queue"]
    assert found["before"] == found["after"] and sum(found["before"]) == found["tracked"] == 1
    assert not found["done"] and len(found["answers"]) == 20
    assert all(answer == [[0.0, BLOCK * BLOCKS], 0] for answer in found["answers"])
    assert found["resumed"] == 480


def test_an_engine_in_a_long_step_does_not_answer_in_time_and_does_behind_it(result: Result) -> None:
    for name in ("usage", "resident"):
        kind, reason, _ = result["busy"][name]
        assert (kind, reason) == ("TimeoutError", "no answer within 0.2 s")
    assert result["busy"]["behind"] == [[0.0, BLOCK * BLOCKS], 0]


def test_a_session_stays_on_its_server_and_another_kind_of_server_tells_nothing(result: Result) -> None:
    found = result["routing"]
    assert found["held"] == {"vllm": 4, "silent": 4}
    assert found["first"] == found["again"]
    assert found["left"] == {"vllm": 0, "silent": 0}
    assert found["silent"] == [None, None]


def test_other_kinds_of_caches_are_told_as_vllm_finds_them(python: Path, verl_tree: Path, tmp_path: Path) -> None:
    found = json.loads(run([python, HERE / "run_managers.py", verl_tree], verl_tree, tmp_path))
    for kind, result in found.items():
        assert all(told == cached for _, told, cached in result["rows"]), (kind, result["rows"])
        assert sum(told > 0 for _, told, _ in result["rows"]) >= 8
        # 32 blocks for 500 tokens, of 100; layers of two kinds take two blocks for the same tokens.
        assert result["usage"] == ([0.64, 800] if kind == "two kinds of layers" else [pytest.approx(0.32), 1600])
    assert found["adapter"]["without_lora"] == 0
    # A draft model needs the last block again.
    assert dict(row[:2] for row in found["draft model"]["rows"])["500 tokens"] == 480
