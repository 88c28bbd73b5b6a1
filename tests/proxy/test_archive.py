"""The archive: written while the trial goes, read back after a crash at any byte."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_render import Chat

QWEN = pytest.mark.parametrize("renderer", ["qwen3"], indirect=True)


def chat_with(renderer: Any, folder: Path) -> Chat:
    from verl.experimental.agent_loop.chat_proxy.archive import Archive

    chat = Chat(renderer)
    chat.session = chat.store.open("archived", Archive(folder))
    chat.tools = (chat.tool,)
    chat.engine.moe = True
    return chat


async def a_trial(chat: Chat) -> None:
    """Two turns, an aborted one, a rewrite with recomputed values, an answer that is not delivered."""
    chat.add("system", "You are the agent. \ud800")  # a lone surrogate is text that clients do send
    chat.add("user", "hi 世界")
    _, answer = await chat.turn("", 1)
    chat.add("tool", "result", tool_call_id=answer.message.tool_calls[0].id)
    await chat.turn("done")
    chat.add("user", "more")
    prompt = await chat.open()
    chat.session.abort_turn(prompt.turn, "disconnected")
    chat.messages[1] = replace(chat.messages[1], parts=())
    await chat.turn("after the rewrite")
    await chat.session.settle()
    chat.add("user", "last")
    await chat.turn("nobody reads this")
    chat.session.turns[-1].delivered = False
    chat.session.note_error("context_overflow", "too long")


def same(mine: list[Any], theirs: list[Any]) -> None:
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        left, right = asdict(a), asdict(b)
        for values in (left, right):
            values["source"] = values["source"].tolist()
            routing = values.pop("routing")
            values["experts"] = None if routing is None else routing["experts"].tolist()
            values["valid"] = None if routing is None else routing["valid"].tolist()
        assert left == right


@QWEN
def test_a_closed_trial_reads_back_as_it_was(renderer: Any, tmp_path: Path) -> None:
    from verl.experimental.agent_loop.chat_proxy.archive import read_archive
    from verl.experimental.agent_loop.chat_proxy.export import export_all

    async def go() -> None:
        chat = chat_with(renderer, tmp_path / "trial")
        await a_trial(chat)
        session = await chat.store.close("archived")
        assert sorted(path.name for path in (tmp_path / "trial").iterdir()) == [
            "proxy_trajectory.json",
            "proxy_trajectory.routes",
        ]
        again = read_archive(tmp_path / "trial")
        assert again.complete and again.lost == 0 and again.id == "archived"
        # The journal says that the last turn was delivered before the test took that back.
        again.turns[-1].delivered = False
        same(export_all(session), again.accumulators())
        for turn, read in zip(session.turns, again.turns, strict=True):
            assert (turn.id, turn.kind, turn.state, turn.stop, turn.error) == (
                read.id,
                read.kind,
                read.state,
                read.stop,
                read.error,
            )
            assert turn.proved == read.proved or turn.state == "aborted"
            if turn.recomputed is not None:
                np.testing.assert_array_equal(turn.recomputed, read.recomputed)
        assert [turn.state for turn in again.turns].count("aborted") == 1
        assert any(turn.recomputed is not None for turn in again.turns)
        assert [error["kind"] for error in again.errors] == ["context_overflow"]

    asyncio.run(go())


@QWEN
def test_the_document_tells_a_person_what_happened(renderer: Any, tmp_path: Path) -> None:
    async def go() -> dict[str, Any]:
        chat = chat_with(renderer, tmp_path)
        await a_trial(chat)
        await chat.store.close("archived")
        return dict(json.loads((tmp_path / "proxy_trajectory.json").read_text(encoding="utf-8")))

    whole = asyncio.run(go())
    assert whole["version"] == 1 and whole["session_id"] == "archived"
    (setting,) = whole["settings"]
    assert setting["tools"][0]["function"]["name"] == "read"
    turn = whole["turns"][0]
    assert turn["messages"][1]["content"] == "hi 世界" and turn["answer"]["tool_calls"][0]["name"] == "read"
    assert len(turn["sampled"]) == len(turn["log_probs"]) and turn["finish_reason"] == "tool_calls"
    assert turn["times"]["opened"] <= turn["times"]["prompt"] <= turn["times"]["finished"]
    branch = whole["branches"][0]
    assert branch["primary"] and branch["label"] == "main"
    n = len(branch["traj_acc_ids"]) - branch["prompt_length"]
    assert n == len(branch["traj_response_mask"]) == len(branch["traj_response_logprobs"])
    assert set(branch["traj_response_source"]) <= {"sampled", "recomputed", "none"}
    counts = {event["name"] for event in whole["events"]}
    assert {"turn_opened", "turn_finished", "turn_aborted", "proof", "recompute"} <= counts


@QWEN
def test_a_crash_loses_the_turn_in_flight_and_no_more(renderer: Any, tmp_path: Path) -> None:
    """The journal cut at every line, and inside of lines: all turns whose line is whole come back exact."""
    from verl.experimental.agent_loop.chat_proxy.archive import read_archive

    async def go() -> tuple[bytes, list[Any]]:
        chat = chat_with(renderer, tmp_path / "live")
        await a_trial(chat)
        await chat.open()  # in flight when the process dies
        chat.session.writer.submit(lambda: None).result()
        return (tmp_path / "live" / "proxy_trajectory.jsonl").read_bytes(), list(chat.session.turns)

    journal, turns = asyncio.run(go())
    truth = {turn.id: turn for turn in turns}
    lines = set(journal.split(b"\n"))
    ends = [at + 1 for at, byte in enumerate(journal) if byte == 10]
    cuts = sorted({cut for end in ends for cut in (end, end - 1, end - 7, end + 5) if 0 < cut <= len(journal)})
    (tmp_path / "live" / "proxy_trajectory.jsonl").unlink()
    for cut in cuts:
        (tmp_path / "live" / "proxy_trajectory.jsonl").write_bytes(journal[:cut])
        again = read_archive(tmp_path / "live")
        # A line is whole without its line break too; splitlines() would also cut at other breaks than \n.
        whole = [json.loads(line) for line in journal[:cut].split(b"\n") if line.endswith(b"}") and line in lines]
        assert [turn.id for turn in again.turns] == [item["id"] for item in whole if item["type"] == "turn"]
        assert again.lost == (journal[:cut].split(b"\n")[-1] not in {b"", *lines})
        for turn in again.turns:
            assert turn.sampled.tolist() == truth[turn.id].sampled.tolist()
            assert turn.log_probs.tolist() == truth[turn.id].log_probs.tolist()
            assert turn.context_ids.tolist() == truth[turn.id].context_ids.tolist()
            if turn.routes is not None:
                np.testing.assert_array_equal(turn.routes.experts, truth[turn.id].routes.experts)
        for acc in again.accumulators():
            assert len(acc.traj_response_mask) == len(acc.response_ids)
    assert len(read_archive(tmp_path / "live").turns) == len(turns) - 1


@QWEN
def test_a_disk_that_cannot_be_written_ends_the_archive_and_not_the_trial(renderer: Any, tmp_path: Path) -> None:
    async def go() -> None:
        (tmp_path / "file").write_text("")
        chat = chat_with(renderer, tmp_path / "file" / "trial")
        await a_trial(chat)
        chat.session.writer.submit(lambda: None).result()
        assert chat.session.events.total("archive", result="failed") == 1
        session = await chat.store.close("archived")
        assert session.events.total("archive", result="failed") == 1
        assert len(session.branches()) > 0

    asyncio.run(go())


@QWEN
def test_one_thread_writes_for_all_trials(renderer: Any, tmp_path: Path) -> None:
    """Trials end together; a thread for each of them would keep the event loop from the interpreter."""
    from verl.experimental.agent_loop.chat_proxy.archive import Archive, read_archive

    async def go() -> list[str]:
        before = set(threading.enumerate())
        chat = Chat(renderer)
        sessions = [chat.store.open(f"trial {number}", Archive(tmp_path / str(number))) for number in range(5)]
        for chat.session in sessions:
            chat.messages.clear()
            chat.add("user", "hi")
            await chat.turn("yes")
        writers = [thread.name for thread in threading.enumerate() if thread not in before and "archive" in thread.name]
        await asyncio.gather(*(chat.store.close(session.id) for session in sessions))
        return writers

    assert len(asyncio.run(go())) == 1
    assert [len(read_archive(tmp_path / str(number)).turns) for number in range(5)] == [1] * 5


def test_large_lists_are_written_in_pieces() -> None:
    from verl.experimental.agent_loop.chat_proxy.archive import _pieces

    value = {"a": list(range(10000)), "b": [{"c": []}, [1, [2.5, None]]], "d": {}, "e": "x\ud800", "f": [None] * 5000}
    pieces = list(_pieces(value))
    assert json.loads("".join(pieces)) == value
    assert max(map(len, pieces)) < 40000


def test_an_archive_of_another_version_is_refused(tmp_path: Path) -> None:
    from verl.experimental.agent_loop.chat_proxy.archive import read_archive

    with pytest.raises(FileNotFoundError):
        read_archive(tmp_path)
    (tmp_path / "proxy_trajectory.jsonl").write_text('{"type":"session","version":99,"id":"x"}\n')
    with pytest.raises(ValueError, match="version 99"):
        read_archive(tmp_path)
