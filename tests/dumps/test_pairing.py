"""Pairing, case by case, on trees that are written for the case."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from dump_files import Tree, embedding_only, request, tensor, write_dump
from hypothesis import given, settings
from hypothesis import strategies as st

A, B = "a" * 32, "b" * 32


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def full(request_id: str, tokens: int, **fields: Any) -> dict[str, Any]:
    """A whole prompt in one step, as the dispatch logger of the patches writes it."""
    return request(
        request_id,
        tokens,
        num_computed_tokens=0,
        num_prompt_tokens=tokens,
        phase="prefill",
        prefill_complete=True,
        resumed=False,
        **fields,
    )


def test_two_equal_candidates_are_reported_and_none_is_chosen(tree: Tree) -> None:
    tree.infer(0, [request(f"{A}-00000001", 10)])
    tree.infer(1, [request(f"{A}-00000002", 10)])
    tree.train(0, [A], 10)
    found, _ = tree.pair()
    assert found[A]["status"] == "AMBIGUOUS"
    assert found[A]["infer"] is None
    assert [place["step"] for place in found[A]["infer_other"]] == [0, 1]
    assert "step 0" in found[A]["why"] and "step 1" in found[A]["why"]


def test_a_dump_decides_between_candidates_that_the_logs_cannot_tell_apart(tree: Tree) -> None:
    tree.infer(0, [request(f"{A}-00000001", 10)])
    tree.infer(1, [request(f"{A}-00000002", 10)], dump=None)
    tree.train(0, [A], 10)
    found, _ = tree.pair()
    assert (found[A]["status"], found[A]["infer"]["step"]) == ("PAIR", 0)


def test_the_whole_id_counts_before_the_cut_one(tree: Tree) -> None:
    inner = f"{A}-00000001"
    tree.infer(0, [request(inner, 10)])
    tree.infer(1, [request(f"{inner}-00000002", 12)])
    tree.train(0, [A], 10)
    tree.train(1, [inner], 12)
    found, _ = tree.pair()
    # The id in the log is known as a whole, so that it is not cut: A itself was never seen.
    assert found[A]["status"] == "NO_INFER"
    assert found[inner]["infer"]["step"] == 1


def test_only_one_suffix_is_cut(tree: Tree) -> None:
    tree.infer(0, [request(f"{A}-00000001-00000002", 10)])
    tree.train(0, [A], 10)
    found, _ = tree.pair()
    assert found[A]["status"] == "NO_INFER"
    assert found[f"{A}-00000001"]["status"] == "NO_TRAIN"


def test_a_prefix_hit_of_our_log_says_how_much_was_cached(tree: Tree) -> None:
    tree.infer(
        0,
        [
            request(
                A,
                16,
                num_computed_tokens=80,
                num_prompt_tokens=96,
                phase="prefill",
                prefill_complete=True,
                resumed=False,
            )
        ],
    )
    tree.train(0, [A], 96)
    found, _ = tree.pair()
    assert found[A]["status"] == "PARTIAL"
    assert "16 of 96" in found[A]["why"] and "80" in found[A]["why"]


def test_a_last_chunk_of_one_token_is_a_chunk(tree: Tree) -> None:
    """Our log says so; the plain log hides the token among the decodes, and the sum gives it away."""
    tree.infer(
        0,
        [
            request(
                A,
                64,
                num_computed_tokens=0,
                num_prompt_tokens=65,
                phase="prefill",
                prefill_complete=False,
                resumed=False,
            )
        ],
    )
    tree.infer(
        1,
        [
            request(
                A,
                1,
                "cached",
                num_computed_tokens=64,
                num_prompt_tokens=65,
                phase="prefill",
                prefill_complete=True,
                resumed=False,
            )
        ],
        phase="decode",
    )
    tree.infer(2, [request(B, 64)])
    tree.infer(3, [request(B, 1, "cached")])
    tree.train(0, [A], 65)
    tree.train(1, [B], 65)
    found, _ = tree.pair()
    assert (found[A]["status"], found[A]["infer"]["steps"]) == ("CHUNKED", [0, 1])
    assert (found[B]["status"], found[B]["infer"]["steps"]) == ("CHUNKED", [2])


def test_training_on_the_response_is_told_from_a_prefix_hit(tree: Tree) -> None:
    tree.infer(0, [full(A, 30)])
    tree.train(0, [A], 50, prompt_lens=[30], seq_lens=[50])
    found, _ = tree.pair()
    assert found[A]["status"] == "LENGTH"
    assert "PROMPTS_ONLY" in found[A]["why"]


def test_a_restarted_process_with_the_same_pid_hides_the_older_steps(tree: Tree) -> None:
    tree.infer(0, [request(A, 10)])
    tree.infer(1, [request("c" * 32, 10)])
    tree.infer(0, [request(B, 12)])
    tree.train(0, [A], 10)
    tree.train(1, [B], 12)
    found, warnings = tree.pair()
    assert found[A]["status"] == "NO_INFER_DUMP"
    assert "overwritten" in found[A]["why"]
    assert found[B]["status"] == "PAIR"
    assert any("start over" in warning for warning in warnings)


def test_a_later_trainer_in_the_same_folder_hides_the_older_steps(tree: Tree) -> None:
    tree.infer(0, [request(A, 10)])
    tree.infer(1, [request(B, 12)])
    tree.train(0, [A], 10, pid=8, time="2026-05-12T08:00:00")
    tree.train(0, [B], 12, pid=9, time="2026-05-13T08:00:00")
    found, _ = tree.pair()
    assert found[A]["status"] == "NO_TRAIN_DUMP"
    assert "overwritten" in found[A]["why"]
    assert found[B]["status"] == "PAIR"


def test_the_actor_counts_and_not_the_critic(tree: Tree) -> None:
    tree.infer(0, [full(A, 10)])
    tree.train(0, [A], 10, role="critic", phase="log_prob")
    tree.train(1, [A], 10, role="actor", phase="log_prob")
    found, _ = tree.pair()
    assert found[A]["train"] == {"step": 1, "rank": 0}


def test_an_aborted_request_is_named_by_the_sample_it_became(tree: Tree) -> None:
    tree.infer(0, [full(A, 10)])
    tree.infer(1, [full(B, 14)])
    chain = [{"request_id": A, "prompt_len": 10, "num_tokens": 4}, {"request_id": B, "prompt_len": 14, "num_tokens": 2}]
    tree.train(0, [A], 10, prompt_lens=[10], seq_lens=[10], request_chains=[chain])
    found, _ = tree.pair()
    assert found[A]["status"] == "PAIR"
    assert found[B]["status"] == "NO_TRAIN"
    assert A in found[B]["why"]


@pytest.mark.parametrize("lost", [None, "None", "", 7])
def test_a_lost_id_is_counted(tree: Tree, lost: Any) -> None:
    tree.infer(0, [request(A, 10)])
    tree.train(0, [lost], 10)
    found, warnings = tree.pair()
    assert found[A]["status"] == "NO_TRAIN"
    assert any("1 training line with no request id (step 0)" in warning for warning in warnings)
    assert any("patch" in warning for warning in warnings)


def test_pipeline_stages_and_chunks_are_parts_of_one_training_place(tree: Tree) -> None:
    tree.infer(0, [full(A, 10)])
    for rank in (0, 1):
        for chunk in (0, 1):
            shape = {
                "pp_rank": rank,
                "pp_size": 2,
                "tp_rank": 0,
                "tp_size": 1,
                "vpp_rank": chunk,
                "vpp_size": 2,
                "layer_offset": 2 * chunk + rank,
                "num_layers": 1,
                "seq_padding": 1,
            }
            for phase, step in (("log_prob", chunk), ("update_actor", chunk + 2)):
                tree.train(step, [A], 10, pid=90 + rank, rank=rank, megatron=shape, phase=phase)
    found, _ = tree.pair()
    assert found[A]["status"] == "PAIR"
    assert found[A]["train"] == {"step": 0, "rank": 0}
    parts = [(dump["rank"], dump["step"], dump["layer_offset"]) for dump in found[A]["train_dumps"]]
    assert parts == [(0, 0, 0), (0, 1, 2), (1, 0, 1), (1, 1, 3)]


@pytest.mark.parametrize(("padding", "tokens", "status"), [(4, 12, "PAIR"), (4, 14, "PARTIAL"), (1, 12, "PARTIAL")])
def test_padding_is_allowed_as_far_as_the_log_says(tree: Tree, padding: int, tokens: int, status: str) -> None:
    shape = {
        "pp_rank": 0,
        "pp_size": 1,
        "tp_rank": 0,
        "tp_size": padding,
        "vpp_rank": None,
        "vpp_size": None,
        "layer_offset": 0,
        "num_layers": 2,
        "seq_padding": padding,
    }
    tree.infer(0, [request(A, 10)])
    tree.train(0, [A], tokens, megatron=shape)
    found, _ = tree.pair()
    assert found[A]["status"] == status


def test_other_input_ids_at_the_logged_step_are_a_drift(tree: Tree) -> None:
    tree.infer(0, [request(A, 10)])
    tree.train(0, [A], 10)
    write_dump(tree.generate / "1" / "step0" / "rank0" / "dump.json", embedding_only("infer", 10, low=4))
    found, _ = tree.pair()
    assert found[A]["status"] == "DRIFT"
    assert "another prompt" in found[A]["why"]


@pytest.mark.parametrize("modules", [0, 200])
def test_a_cut_dump_is_no_dump_and_says_so(tree: Tree, modules: int) -> None:
    """Also where its head, which is all that pairing reads, is whole."""
    tree.infer(0, [request(A, 10)])
    tree.train(0, [A], 10)
    more = {f"Module.x{number}.Linear.forward.0": {"output": [tensor([1, 10, 8])]} for number in range(modules)}
    dump = write_dump(tree.actor / "step0" / "rank0" / "dump.json", {**embedding_only("train", 10), **more})
    assert tree.pair()[0][A]["status"] == "PAIR"
    dump.write_text(dump.read_text()[:-20])
    found, _ = tree.pair()
    assert found[A]["status"] == "NO_TRAIN_DUMP"
    assert "cut after" in found[A]["why"]


@pytest.mark.parametrize(("versions", "says"), [((3, 3, 3), "same"), ((2, 2, 3), "version 2"), ((2, 3, 3), "mixed")])
def test_weight_versions_are_compared(tree: Tree, versions: tuple[int, int, int], says: str) -> None:
    low, high, trainer = versions
    tree.infer(0, [full(A, 10)])
    tree.train(0, [A], 10, min_global_steps=[low], max_global_steps=[high], global_steps=trainer)
    found, _ = tree.pair()
    assert found[A]["status"] == "PAIR"
    assert says in found[A]["checks"]["weights"]


def test_a_process_folder_that_msprobe_named_by_the_pid_is_found(tree: Tree) -> None:
    tree.infer(0, [request(A, 10)], pid=77, dump=None)
    tree.train(0, [A], 10)
    write_dump(tree.generate / "77" / "step0" / "proc77" / "dump.json", embedding_only("infer", 10))
    found, _ = tree.pair()
    assert found[A]["status"] == "PAIR"


def test_a_moved_process_folder_is_found_and_named(tree: Tree) -> None:
    tree.infer(0, [request(A, 10)], pid=1, folder="22")
    tree.train(0, [A], 10)
    found, warnings = tree.pair()
    assert found[A]["status"] == "PAIR"
    assert any("pid 22" in warning and "pid 1" in warning for warning in warnings)


requests_of_a_run = st.lists(
    st.tuples(st.integers(2, 40), st.booleans(), st.booleans(), st.sampled_from(["", "-0badcafe"])),
    min_size=1,
    max_size=6,
)


@settings(max_examples=40, deadline=None)
@given(
    plan=requests_of_a_run, extended=st.booleans(), older=st.booleans(), tail=st.sampled_from([b"", b"\0" * 40, b'{"a'])
)
def test_every_lone_prompt_pairs_whatever_lies_around(
    tmp_path_factory: pytest.TempPathFactory,
    plan: list[tuple[int, bool, bool, str]],
    extended: bool,
    older: bool,
    tail: bytes,
) -> None:
    """Decodes, leftovers of an older run and damaged tails never change what a lone prompt in one step is: a pair."""
    tree = Tree(tmp_path_factory.mktemp("run"))
    if older:
        tree.infer(0, [request("e" * 32 + "-00000000", 9)], pid=5)
        tree.train(0, ["f" * 32], 9, pid=4, rank=3, time="2026-05-01T00:00:00")
    step, expected = 0, {}
    for index, (tokens, decode_before, alone, suffix) in enumerate(plan):
        name = f"{index:032x}"
        if decode_before and index:
            tree.infer(step, [request(f"{index - 1:032x}{plan[index - 1][3]}", 1, "cached")], dump=1)
            step += 1
        entry = full(name + suffix, tokens) if extended else request(name + suffix, tokens)
        others = [] if alone else [request("d" * 32, 1, "cached")]
        tree.infer(step, [entry, *others])
        tree.train(index, [name], tokens)
        expected[name] = ("PAIR", {"pid": 1, "step": step, "rank": 0}) if alone else ("MIXED", None)
        step += 1
    tree.write([(path, tail) for path in tree.lines])
    from patchctl.dumps.join import open_trees, pair_trees

    with pair_trees(open_trees(tree.generate, tree.actor)) as run:
        found = {name: json.loads(text) for name, _, text in run.results}
        assert bool(tail) == any("unreadable" in warning for warning in run.warnings)
    for name, (status, place) in expected.items():
        assert found[name]["status"] == status
        if place:
            assert found[name]["infer"] == place
    if older:
        assert found["e" * 32]["status"] == "NO_TRAIN" and found["f" * 32]["status"] == "NO_INFER"
