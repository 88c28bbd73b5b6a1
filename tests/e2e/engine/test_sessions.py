"""The chat proxy on verl's own server, balancer and clients, on a real vLLM: it keeps what the engine returned."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engine_runs
import pytest
import setup_engine
from engine_runs import Matched, match, turns

Result = dict[str, Any]
NOISE = 2e-5
"""Log-probabilities of one sequence differ by so much between float32 batches of different shapes (measured: 5e-6)."""
SUMMARIES: dict[str, str] = {}
PROXIED = ("conversations", "rewrites", "weight_syncs", "departures")


@pytest.fixture(scope="module")
def result(verl_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """One run of all scenarios."""
    import real_tokenizers

    try:
        python = setup_engine.ensure()
        real_tokenizers.vocabulary("qwen3")
        real_tokenizers.trl_templates()
    except (setup_engine.Unsupported, real_tokenizers.Unavailable) as reason:
        pytest.skip(str(reason))
    try:
        found = engine_runs.run(python, verl_tree, tmp_path_factory.mktemp(f"engine-{verl_tree.name}"))
    except engine_runs.Failed as reason:
        pytest.fail(str(reason), pytrace=False)
    SUMMARIES[verl_tree.name] = engine_runs.summary(found)
    return found


def matched(result: Result, name: str) -> list[Matched]:
    return match(result[name]["sessions"], result[name]["records"])[0]


# -- what is kept -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROXIED)
def test_every_token_and_log_probability_is_what_the_engine_returned(result: Result, name: str) -> None:
    found = matched(result, name)
    assert len(found) >= {"conversations": 48, "rewrites": 16, "weight_syncs": 48, "departures": 0}[name]
    for each in found:
        assert each.turn["sampled"] == [token for part in each.parts for token in part["tokens"]]
        assert each.turn["log_probs"] == [value for part in each.parts for value in part["log_probs"]]
        assert all(part["temperature"] == 1.0 for part in each.parts)
        assert each.session["complete"] and each.session["lost"] == 0


@pytest.mark.parametrize("name", PROXIED)
def test_nothing_else_that_the_engine_sampled_is_kept(result: Result, name: str) -> None:
    """What is left over of the engine's requests belongs to turns without an answer, which are no actions."""
    sessions = result[name]["sessions"]
    _, left = match(sessions, result[name]["records"])
    unanswered = [turn for _, turn in turns(sessions) if turn["state"] != "finished"]
    for record in left:
        # An abort before the first token leaves a request of its own; it is resumed by one with the same prompt.
        barren = record["finish_reason"] in ("abort", None) and not record["tokens"]
        assert (
            record["scores"]
            or barren
            or any(turn["prompt"] == record["prompt"][: len(turn["prompt"])] for turn in unanswered)
        )
    for turn in unanswered:
        assert turn["sampled"] == [] and not turn["delivered"]


@pytest.mark.parametrize("name", PROXIED)
def test_each_sampled_token_is_trained_on_once_with_its_own_log_probability(result: Result, name: str) -> None:
    for session in result[name]["sessions"]:
        by_id = {turn["id"]: turn for turn in session["turns"]}
        trained: Counter[str] = Counter()
        for sample in session["samples"]:
            for span in sample["spans"]:
                at = slice(span["start"], span["end"])
                inside = slice(span["start"] - sample["prompt_length"], span["end"] - sample["prompt_length"])
                if span["start"] < sample["prompt_length"]:
                    continue
                mask = set(sample["mask"][inside])
                if span["kind"] != "sampled":
                    assert mask == {0}
                    continue
                turn = by_id[span["turn"]]
                assert sample["ids"][at] == turn["sampled"] and len(mask) == 1
                if mask == {1}:
                    trained[turn["id"]] += 1
                    assert sample["log_probs"][inside] == turn["log_probs"]
                    assert set(sample["source"][inside]) == {"sampled"}
        answered = [turn["id"] for turn in session["turns"] if turn["state"] == "finished" and turn["delivered"]]
        assert trained == Counter(answered)


def test_conversations_are_one_branch_and_proved(result: Result) -> None:
    for session in result["conversations"]["sessions"]:
        assert [turn["kind"] for turn in session["turns"]] == ["root"] + ["append"] * 5, session["agent"]
        assert all(turn["delivered"] and turn["proved"] for turn in session["turns"])
        (sample,) = session["samples"]
        last = session["turns"][-1]
        assert sample["ids"] == last["prompt"] + last["sampled"]
        assert session["errors"] == []


def test_the_clients_got_each_kind_of_answer(result: Result) -> None:
    kinds = Counter(session["agent"] for session in result["conversations"]["sessions"])
    assert kinds == {f"{api} {mode}": 2 for api in ("openai", "anthropic") for mode in ("streamed", "whole")}
    for session in result["conversations"]["sessions"]:
        number = session["id"].rpartition("-")[2]
        names = ("length", "tool_calls", "stop", "stop")
        if session["agent"].startswith("anthropic"):
            names = ("max_tokens", "tool_use", "stop_sequence", "end_turn")
        cut, call, stopped, ended = names
        free, called, free_too, halted, short, counted = session["said"]
        assert [tuple(one[1:]) for one in called["calls"]] == [("run", {"command": f"ls {number}"})]
        assert (called["finish"], called["text"].strip()) == (call, "I will look.")
        assert (halted["finish"], halted["text"]) == (stopped, "one two ")
        assert (short["finish"], short["text"].strip(), short["reasoning"].strip()) == (ended, "short", f"why {number}")
        for said, turn, limit in ((free, 0, 24), (free_too, 2, 16), (counted, 5, 5)):
            told = session["turns"][turn]
            # A free answer may also end by itself, though a random model hardly ever does.
            assert (said["finish"], len(told["sampled"])) == (cut, limit) or told["finish_reason"] != "length"
        assert [turn["finish_reason"] for turn in session["turns"]][3:5] == ["stop", "stop"]


# -- rewritten history ------------------------------------------------------------------------------------------------


def differences(one: list[float], other: list[float]) -> float:
    assert len(one) == len(other)
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def test_recomputed_log_probabilities_are_those_of_a_fresh_forward_pass(result: Result) -> None:
    rewrites = result["rewrites"]
    recomputed = [turn for _, turn in turns(rewrites["sessions"]) if turn["recomputed"]]
    assert len(recomputed) == 4 and [turn["prompt"] for turn in recomputed] == rewrites["contexts"]
    crowd = [rewrites["crowd"][at :: len(recomputed)] for at in range(len(recomputed))]
    noise = max(
        differences(one, again) for one, others in zip(rewrites["alone"], crowd, strict=True) for again in others
    )
    assert noise < NOISE
    for turn, alone, reference in zip(recomputed, rewrites["alone"], rewrites["transformers"], strict=True):
        values = turn["recomputed"]
        if turn["start"] == 0:
            assert math.isnan(values[0])
            values = values[1:]
        behind = max(0, turn["start"] - 1)
        assert differences(values, alone[behind:]) < NOISE
        assert differences(values, reference[behind:]) < 50 * NOISE  # another library's kernels
        assert differences(values[1:], alone[behind:][:-1]) > 1  # a shift by one would be seen
        assert turn["recomputed_steps"] == 0


def test_what_was_recomputed_is_marked_and_not_trained_on(result: Result) -> None:
    for session in result["rewrites"]["sessions"]:
        assert [turn["kind"] for turn in session["turns"]][:3] == ["root", "append", "append"]
        rewritten = next(sample for sample in session["samples"] if "recomputed" in sample["source"])
        by_source = {
            source: {mask for mask, own in zip(rewritten["mask"], rewritten["source"], strict=True) if own == source}
            for source in ("recomputed", "sampled")
        }
        assert by_source == {"recomputed": {0}, "sampled": {1}}


# -- streams ----------------------------------------------------------------------------------------------------------


def test_a_stream_is_what_generate_returns(result: Result) -> None:
    assert len(result["streams"]) == 12
    for name, told in result["streams"].items():
        whole, streamed = told["whole"], told["streamed"]
        assert streamed["tokens"] == whole["tokens"] and whole["tokens"], name
        assert len(streamed["log_probs"]) == len(whole["log_probs"])
        assert not whole["log_probs"] or differences(streamed["log_probs"], whole["log_probs"]) < NOISE
        assert (streamed["stop_reason"], streamed["steps"]) == (whole["stop_reason"], whole["steps"])
        assert set(streamed["ended"]) <= {None}
        assert streamed["pieces"] <= len(streamed["tokens"]) + 1
    for client in ("plain", "resuming"):
        ends = {
            name: result["streams"][f"{client}, {name}"]["streamed"] for name in ("seeded", "stop string", "stop token")
        }
        assert {name: end["finish_reason"] for name, end in ends.items()} == {
            "seeded": "length",
            "stop string": "stop",
            "stop token": "stop",
        }
        assert ends["stop string"]["matched_stop"] == "HALT"
        assert ends["seeded"]["pieces"] > 2


# -- weights that change within answers -------------------------------------------------------------------------------


def by_client(found: list[Matched]) -> Iterator[tuple[str, list[Matched]]]:
    """Sessions come in the order of the clients, four each."""
    names = list(dict.fromkeys(each.session["folder"] for each in found))
    for name in names:
        yield name, [each for each in found if each.session["folder"] == name]


def test_answers_were_cut_by_weight_syncs(result: Result) -> None:
    """On every client, streamed and not; else the tests below prove nothing."""
    assert sum(result["weight_syncs"]["aborted"]) >= 40
    for client, found in by_client(matched(result, "weight_syncs")):
        resumed = [each for each in found if len(each.parts) > 1]
        assert {each.session["agent"].split()[1] for each in resumed} == {"streamed", "whole"}, client
        assert any(len(set(each.versions)) > 1 for each in resumed), client
        assert any(each.turn["text"].endswith("</tool_call>") for each in resumed), client


def test_version_spans_are_those_of_the_tokens(result: Result) -> None:
    for each in matched(result, "weight_syncs"):
        assert each.turn["steps"] == [min(each.versions), max(each.versions)]
        assert each.versions == sorted(each.versions)
    for session in result["weight_syncs"]["sessions"]:
        for sample in session["samples"]:
            spans = [span for span in sample["spans"] if span["kind"] == "sampled"]
            assert sample["steps"][0] == min(span["min_global_steps"] for span in spans)
            assert sample["steps"][1] == max(span["max_global_steps"] for span in spans)


def test_some_requests_were_aborted_before_their_first_token(result: Result) -> None:
    """Their versions are no part of any span, as the test above shows."""
    _, left = match(result["weight_syncs"]["sessions"], result["weight_syncs"]["records"])
    assert sum(not record["tokens"] for record in left) >= 4


def test_log_probabilities_are_those_of_the_weights_that_sampled(result: Result) -> None:
    """An independent forward pass with each token's own weights gives the same; other weights don't."""
    checked = result["weight_syncs"]["checked"]
    assert {each["client"] for each in checked} == {"resuming", "whole", "plain"}
    assert sum(len(set(each["versions"])) > 1 for each in checked) >= 6
    tokens = others = 0
    for each in checked:
        assert differences(each["log_probs"], each["own"]) < 50 * NOISE
        tokens += len(each["own"])
        others += sum(abs(own - other) > 0.01 for own, other in zip(each["own"], each["other"], strict=True))
    assert tokens > 500 and others > tokens / 2


def test_ids_of_requests_survive_resumes(result: Result) -> None:
    """The id is that of the request which prefilled the prompt alone; the chain has every request in order."""
    for each in matched(result, "weight_syncs"):
        told = each.turn["engine"]
        assert told["request_id"] == each.parts[0]["request_id"]
        assert ("request_chain" in told) == (each.session["folder"] != "plain")  # verl's own client tells none
        if "request_chain" in told:
            chain = [one for one in json.loads(told["request_chain"]) if one["num_tokens"]]
            assert [(one["request_id"], one["prompt_len"], one["num_tokens"]) for one in chain] == [
                (part["request_id"], len(part["prompt"]), len(part["tokens"])) for part in each.parts
            ]


def test_no_answer_ends_by_an_abort(result: Result) -> None:
    for each in matched(result, "weight_syncs"):
        assert [part["finish_reason"] for part in each.parts[:-1]] == ["abort"] * (len(each.parts) - 1)
        full = len(each.turn["sampled"]) >= each.turn["max_tokens"]
        assert each.parts[-1]["finish_reason"] in ("stop", "length") or full
        reasons = {"length"} if full else {"stop", "tool_calls"}
        assert each.turn["finish_reason"] in reasons
    for session in result["weight_syncs"]["sessions"]:
        number = session["id"].rpartition("-")[2]
        assert [tuple(one[1:]) for one in session["said"][1]["calls"]] == [("run", {"command": f"ls {number}"})]
        assert session["errors"] == []
        assert [turn["kind"] for turn in session["turns"]] == ["root", "append", "append", "append"]


# -- who leaves -------------------------------------------------------------------------------------------------------


def test_who_leaves_frees_the_engine_and_leaves_no_action(result: Result) -> None:
    departures = result["departures"]
    assert departures["idle"]
    assert departures["told"]
    for session in departures["sessions"]:
        (turn,) = session["turns"]
        assert (turn["state"], turn["sampled"], turn["delivered"]) == ("aborted", [], False)
        assert session["samples"] == []
    assert all(len(record["tokens"]) < 3000 for record in departures["records"])


# -- through the agent loop -------------------------------------------------------------------------------------------


def test_rows_of_the_agent_loop_are_what_the_engine_returned(result: Result) -> None:
    rows, records = result["agent_loop"]["rows"], result["agent_loop"]["records"]
    assert [row["termination_reason"] for row in rows] == ["completed", "completed"]
    assert [row["num_turns"] for row in rows] == [6, 4]
    for row, calls in zip(rows, (3, 2), strict=True):
        whole = row["prompt"] + row["response"]
        own = [r for r in records if whole[: len(r["prompt"] + r["tokens"])] == r["prompt"] + r["tokens"]]
        own.sort(key=lambda record: len(record["prompt"]))
        assert len(own) == calls
        assert row["trained_ids"] == list(itertools.chain(*(record["tokens"] for record in own)))
        sampled = list(itertools.chain(*(record["log_probs"] for record in own)))
        assert row["log_probs"] == pytest.approx(sampled, abs=1e-5)  # a batch has float32
        assert whole == own[-1]["prompt"] + own[-1]["tokens"]
        assert (row["min_global_steps"], row["max_global_steps"]) == (0, 0)
        assert row["request_id"] == own[0]["request_id"]
