"""verl's LLM clients stream through a real Ray: pieces are the whole output, and nothing stays behind when they end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("stream_through_ray.py")
TOKENS = list(range(20, 50))
PROMPT = [5, 6, 7]
Found = dict[str, Any]


@pytest.fixture(scope="module")
def found(verl_tree: Path) -> Found:
    """What came of every case, each by its name; all of them run in one Ray."""
    if subprocess.run([sys.executable, "-c", "import ray, torch, tensordict"], capture_output=True).returncode:
        pytest.skip("verl's clients need ray, torch and tensordict")
    environment = {**os.environ, "PYTHONPATH": str(verl_tree), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    return dict(json.loads(line.removeprefix("RESULT ")))


def log_probs(tokens: list[int]) -> list[float]:
    return [-token / 512 for token in tokens]


def chained(pieces: list[list[int]]) -> list[int]:
    return [token for piece in pieces for token in piece]


def joined(pieces: list[Found]) -> Found:
    """The output that pieces concatenated are."""
    values = [piece["log_probs"] for piece in pieces if piece["token_ids"]]
    return {
        "token_ids": [token for piece in pieces for token in piece["token_ids"]],
        "log_probs": None if None in values else [value for piece in values for value in piece],
        **{name: pieces[-1][name] for name in ("routed_experts", "stop_reason")},
    }


def same(pieces: list[Found], output: Found) -> None:
    whole = joined(pieces)
    assert whole["token_ids"] == output["token_ids"]
    assert whole["log_probs"] == output["log_probs"]
    assert whole["stop_reason"] == output["stop_reason"]
    experts = [piece["routed_experts"] for piece in pieces if piece["routed_experts"] is not None]
    rows = experts[0]
    for later in experts[1:]:  # each covers the whole sequence; the first sampled a token's row
        rows = rows + later[len(rows) :]
    assert rows == output["routed_experts"]


def bare(fields: Found, *more: str) -> Found:
    """Extra fields without what differs from request to request, and without what only pieces have."""
    return {
        name: value
        for name, value in fields.items()
        if name not in ("request_id", "finish_reason", "matched_stop", *more)
    }


def sent(state: Found) -> list[tuple[str, list[int], int]]:
    return [(request_id, prompt, limit) for request_id, prompt, limit, _ in state["seen"]]


def test_pieces_are_what_generate_gives(found: Found) -> None:
    case = found["plain"]
    same(case["pieces"], case["output"])
    assert case["output"]["token_ids"] == TOKENS and case["output"]["log_probs"] == log_probs(TOKENS)
    assert bare(case["pieces"][-1]["extra_fields"]) == bare(case["output"]["extra_fields"])
    assert len(case["output"]["routed_experts"]) == len(PROMPT) + len(TOKENS) - 1
    assert joined(case["bare"])["log_probs"] is None and joined(case["bare"])["token_ids"] == TOKENS
    assert joined(case["short"])["token_ids"] == TOKENS[:7]
    assert case["inflight"] == case["running"] == 0 and case["stopped"] == []


def test_only_the_last_piece_says_how_it_ended(found: Found) -> None:
    for pieces in (found["plain"][name] for name in ("pieces", "bare", "short")):
        assert len(pieces) > 1
        for piece in pieces[:-1]:
            assert piece["token_ids"]
            assert piece["stop_reason"] is piece["routed_experts"] is None and piece["extra_fields"] == {}
        assert pieces[-1]["stop_reason"] == "completed"
        assert pieces[-1]["extra_fields"]["finish_reason"] == "stop"
        assert pieces[-1]["extra_fields"]["matched_stop"] == "x"


def test_the_id_sent_is_the_id_of_the_last_piece(found: Found) -> None:
    case = found["plain"]
    ends = [case["output"], *(case[name][-1] for name in ("pieces", "bare", "short"))]
    assert [end["extra_fields"]["request_id"] for end in ends] == [request_id for request_id, _, _ in sent(case)]
    assert len({request_id for request_id, _, _ in sent(case)}) == 4


def test_the_first_token_comes_at_once_and_later_ones_are_merged(found: Found) -> None:
    case = found["first_at_once"]
    assert case["pieces"][0] == TOKENS[:1] and case["running"][0] == 1
    assert chained(case["pieces"]) == TOKENS and len(case["pieces"]) < len(TOKENS)
    assert found["in_process"]["merged"] == [[20], list(range(21, 45))]
    stepwise = found["in_process"]["stepwise"]
    assert len(stepwise) > 3 and chained(stepwise) == list(range(20, 45))


def test_a_slow_reader_loses_nothing(found: Found) -> None:
    pieces = found["slow_reader"]["pieces"]
    assert chained(pieces) == TOKENS and len(pieces) < len(TOKENS)
    assert found["slow_reader"]["inflight"] == 0


@pytest.mark.parametrize("name", ["closed_early", "cancelled_before", "cancelled_amid"])
def test_leaving_frees_the_place_in_the_engine(found: Found, name: str) -> None:
    case = found[name]
    assert case["inflight"] == case["running"] == 0
    assert case["stopped"] == [request_id for request_id, _, _ in sent(case)] and len(case["stopped"]) == 1
    assert case.get("first", TOKENS[:1]) == TOKENS[:1]
    assert case.get("ended", "CancelledError") == "CancelledError"


def test_closing_waits_for_the_abort_and_says_if_it_failed(found: Found) -> None:
    case = found["in_process"]
    assert case["held"] == TOKENS[:2] and case["held_ended"] == ["aborted"]
    assert case["failed_abort"] == TOKENS[:1]
    assert case["logged"] == ["a generation failed while its stream was being closed: the abort failed"]
    assert case["complaints"] == []


def test_faults_of_a_generation_reach_the_reader(found: Found) -> None:
    case = found["in_process"]
    assert case["broken"].startswith("ValueError: zip()") and case["broken_ended"][-1] == "broken"
    assert case["fails"] == "ValueError: no such thing"
    assert case["loses_rest"] == [TOKENS[:4], []]


def test_a_server_that_does_not_stream_gives_one_piece(found: Found) -> None:
    case = found["without_streams"]
    for (request_id, prompt, _), pieces in zip(sent(case), (case["pieces"], case["resuming"]), strict=True):
        [piece] = pieces
        assert prompt == PROMPT and piece["token_ids"] == TOKENS and piece["log_probs"] == log_probs(TOKENS)
        assert piece["stop_reason"] == "completed" and piece["extra_fields"]["request_id"] == request_id
    [link] = json.loads(case["resuming"][0]["extra_fields"]["request_chain"])
    assert link == {"request_id": sent(case)[1][0], "prompt_len": 3, "num_tokens": 30}
    assert case["inflight"] == case["running"] == 0


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("error_before", "ValueError", "no such thing"),
        ("error_amid", "ValueError", "no such thing"),
        ("too_long", "ValueError", "Prompt length (5000)"),
        ("cancelled_inside", "TaskCancelledError", "was cancelled"),
    ],
)
def test_an_error_of_the_server_reaches_the_caller_as_from_generate(
    found: Found, name: str, kind: str, said: str
) -> None:
    case = found[name]
    assert len(case["errors"]) == 2
    for bases, message in case["errors"]:
        assert kind in bases and said in message
    assert case["got"] == [] if name in ("error_before", "too_long") else case["got"][0] == TOKENS[0]
    assert case["inflight"] == 0


def test_a_server_that_dies_is_told_and_let_go(found: Found) -> None:
    assert found["dead_server"] == {"ended": "ActorDiedError", "inflight": 0}


@pytest.mark.parametrize(
    ("name", "lengths", "stop_reason"),
    [
        ("resumed", [12, 18], "completed"),
        ("resumed_early", [0, 12, 18], "completed"),
        ("resumed_nearly_full", [12, 1], "length"),
        ("resumed_full", [12], "length"),
        ("unlimited", [12, 18], "completed"),
        ("dropped", [12], "aborted"),
    ],
)
def test_the_fully_async_client_goes_on_behind_an_abort(
    found: Found, name: str, lengths: list[int], stop_reason: str
) -> None:
    case = found[name]
    pieces, output = case["pieces"], case["output"]
    same(pieces, output)
    assert output["token_ids"] == TOKENS[: sum(lengths)] and output["stop_reason"] == stop_reason
    assert bare(pieces[-1]["extra_fields"], "request_chain") == bare(output["extra_fields"], "request_chain")
    assert all(piece["stop_reason"] is None for piece in pieces[:-1])
    # A request that was aborted before its first token has no part in the answer, nor have its weights.
    assert sum(bool(piece["extra_fields"]) for piece in pieces) == sum(count > 0 for count in lengths)
    for end, state in ((pieces[-1], case["pieces_state"]), (output, case["output_state"])):
        asked = sent(state)
        limit = {"resumed_nearly_full": 13, "resumed_full": 12}.get(name, 40)
        done = [sum(lengths[:index]) for index in range(len(lengths))]
        limits = [64] * len(lengths) if name == "unlimited" else [limit - tokens for tokens in done]
        assert [(prompt, most) for _, prompt, most in asked] == [
            (PROMPT + TOKENS[:tokens], most) for tokens, most in zip(done, limits, strict=True)
        ]
        assert json.loads(end["extra_fields"]["request_chain"]) == [
            {"request_id": request_id, "prompt_len": len(prompt), "num_tokens": count}
            for (request_id, prompt, _), count in zip(asked, lengths, strict=True)
        ]
        first = next(index for index, count in enumerate(lengths) if count)
        assert end["extra_fields"]["request_id"] == asked[first][0]
        assert end["extra_fields"]["min_global_steps"] == (3 if first == 0 else 9)
        assert end["extra_fields"]["max_global_steps"] == end["extra_fields"]["global_steps"]
        assert end["extra_fields"]["max_global_steps"] == (3 if len(lengths) == 1 else 7 + len(lengths))
    assert case["inflight"] == 0


def test_the_plain_client_hands_an_abort_on(found: Found) -> None:
    case = found["aborted"]
    same(case["pieces"], case["output"])
    assert case["pieces"][-1]["stop_reason"] == "aborted"
    assert case["pieces"][-1]["extra_fields"]["finish_reason"] == "abort"


def test_an_abort_that_leaves_no_output_keeps_what_was_sent(found: Found) -> None:
    pieces = found["nothing_left"]["pieces"]
    tokens = joined(pieces)["token_ids"]
    assert tokens == TOKENS[: len(tokens)]
    assert pieces[-1]["stop_reason"] == "aborted"
    [link] = json.loads(pieces[-1]["extra_fields"]["request_chain"])
    assert link["num_tokens"] == len(tokens)


def test_the_proxy_streams_what_the_engine_samples(found: Found) -> None:
    case = found["proxy_deltas"]
    assert case["turn"]["streams"]
    assert "first".startswith(case["early"].strip()) and case["early_state"] == [1, "open"]
    assert case["text"] == "first and the rest"
    assert case["turn"]["state"] == "finished"
    assert case["turn"]["sampled"] == case["tokens"] and case["turn"]["log_probs"] == log_probs(case["tokens"])
    [(request_id, _, _)] = sent(case)
    assert case["turn"]["extra"]["request_id"] == request_id
    assert case["inflight"] == case["running"] == 0 and case["stopped"] == []


def test_a_client_that_leaves_the_proxy_frees_the_engine(found: Found) -> None:
    case = found["proxy_disconnect"]
    assert case["turn_state"] == "aborted"
    assert case["inflight"] == case["running"] == 0
    assert case["stopped"] == [request_id for request_id, _, _ in sent(case)] and len(case["stopped"]) == 1


def test_an_abort_amid_a_turn_is_not_seen_by_the_proxys_client(found: Found) -> None:
    case = found["proxy_resumed"]
    assert case["text"] == "first and the rest"
    assert case["turn"]["sampled"] == case["tokens"] and case["turn"]["log_probs"] == log_probs(case["tokens"])
    assert case["turn"]["steps"] == [3, 9]
    chain = json.loads(case["turn"]["extra"]["request_chain"])
    assert [link["request_id"] for link in chain] == [request_id for request_id, _, _ in sent(case)]
    assert case["turn"]["extra"]["request_id"] == chain[0]["request_id"]
    assert case["inflight"] == case["running"] == 0


def test_an_error_of_the_engine_ends_the_proxys_stream(found: Found) -> None:
    case = found["proxy_fails"]
    assert case["last"]["error"]["type"] == "server_error" and "secret" not in json.dumps(case["last"])
    assert case["turn_state"] == "aborted" and case["inflight"] == 0
