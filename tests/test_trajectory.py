"""`patchctl trajectory`: what it reads of an archive, what it refuses, what the page holds, what a browser shows."""

from __future__ import annotations

import base64
import contextlib
import copy
import hashlib
import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patchctl import cli
from patchctl.errors import PatchctlError
from patchctl.trajectory.page import lanes, write_page
from patchctl.trajectory.summary import summary, summary_lines
from patchctl.trajectory.trial import read_trial
from patchctl.trajectory.vocabulary import byte_letters, find_tokenizer, token_texts

EVIL = "</script><img src=x onerror=\"document.title='taken over'\"><b id='slipped'>&amp;"
ROOT, NEXT, LOST, SIDE, AGAIN = ("a" * 32, "b" * 32, "c" * 32, "d" * 32, "e" * 32)


def message(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def turn(
    turn_id: str, number: int, parent: str | None, start: int, spans: list[Any], sampled: list[int], **more: Any
) -> dict[str, Any]:
    """A line of a journal, as the archive writes it."""
    return {
        "type": "turn",
        "id": turn_id,
        "number": number,
        "parent": parent,
        "kind": "root" if parent is None else "append",
        "state": "finished",
        "error": None,
        "delivered": True,
        "digest": "",
        "setting": "s",
        "lineage": {"agent_id": None, "parent_id": None, "thread_id": None, "kind": None},
        "sampling": {"temperature": 1.0},
        "max_tokens": 100,
        "start": start,
        "messages": [message("user", "hi")],
        "spans": spans,
        "generation_prompt": "",
        "sampled": sampled,
        "log_probs": [-0.5] * len(sampled),
        "stop": None,
        "finish_reason": "stop",
        "answer": message("assistant", "yes"),
        "text": "yes",
        "min_global_steps": 3,
        "max_global_steps": 3,
        "num_preempted": 0,
        "engine": {},
        "times": {"opened": 1000.0, "prompt": 1000.1, "finished": 1001.0},
        "routes": None,
        "proved": True,
        **more,
    }


def turns() -> list[dict[str, Any]]:
    """A conversation of two turns, a sample that failed beside the second, a call of another agent, and a rewrite."""
    return [
        turn(ROOT, 0, None, 0, [{"ids": [1, 2, 3]}], [10, 11]),
        turn(
            NEXT,
            1,
            ROOT,
            5,
            [{"ids": [4]}],
            [12, 13, 14],
            log_probs=[-0.1, None, -6.25],
            max_global_steps=4,
            messages=[message("tool", EVIL, tool_call_id="c1", is_error=True)],
        ),
        turn(LOST, 2, ROOT, 5, [{"ids": [4]}], [15], state="finished", delivered=False, proved=None),
        turn(
            SIDE,
            3,
            None,
            0,
            [{"ids": [7, 8]}],
            [16],
            finish_reason="length",
            answer=message("assistant", "", tool_calls=[{"id": "c", "name": "f", "arguments": "{}", "model_id": None}]),
        ),
        turn(
            AGAIN,
            4,
            None,
            0,
            [{"ids": [1, 2]}, {"echo": ROOT}, {"ids": [9]}],
            [17],
            kind="rewrite",
            proved=False,
            recomputed=[None, None, -0.75, -0.25, None],
            recomputed_steps=5,
        ),
    ]


def document(**more: Any) -> dict[str, Any]:
    return {
        "version": 1,
        "session_id": "trial-1",
        "created": 999.0,
        "settings": [{"key": "s", "tools": [{"type": "function", "function": {"name": "f"}}], "template_kwargs": {}}],
        "turns": turns(),
        "branches": [
            {"label": "main", "primary": True, "turns": [ROOT, NEXT]},
            {"label": "main", "primary": False, "turns": [AGAIN]},
            {"label": "side", "primary": False, "turns": [SIDE]},
        ],
        "errors": [{"time": 1001.5, "kind": "drift", "message": f"turn {AGAIN}: texts differ"}],
        "events": [
            {"name": "drift", "labels": {"kind": "text"}, "count": 1},
            {"name": "replay", "labels": {"how": "joined"}, "count": 2},
            {"name": "turn_opened", "labels": {"kind": "rewrite"}, "count": 1},
        ],
        **more,
    }


def journal() -> list[str]:
    lines: list[dict[str, Any]] = [{"type": "session", "version": 1, "id": "trial-1", "created": 999.0}]
    for line in turns():
        delivered, again, steps = line["delivered"], line.pop("recomputed", None), line.pop("recomputed_steps", None)
        del line["proved"]
        lines.append(line | {"delivered": False})
        if delivered:
            lines.append({"type": "delivered", "turn": line["id"], "time": 1002.0})
        if again is not None:
            lines.append({"type": "recomputed", "turn": line["id"], "global_steps": steps, "log_probs": again})
    lines.append({"type": "error", "time": 1001.5, "kind": "drift", "message": f"turn {AGAIN}: texts differ"})
    return [json.dumps(line) for line in lines]


def archive(folder: Path, **more: Any) -> Path:
    path = folder / "proxy_trajectory.json"
    path.write_text(json.dumps(document(**more)))
    return path


Run = Callable[..., tuple[object, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: object) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["patchctl", "trajectory", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return ended.value.code or 0, out, err

    return call


# Reading


def test_the_numbers_of_a_trial(tmp_path: Path) -> None:
    found = summary(read_trial(archive(tmp_path)))
    assert found == {
        "session": "trial-1",
        "whole": True,
        "lost_lines": 0,
        "turns": 5,
        "states": {"finished": 5},
        "undelivered": 1,
        "branches": {"main": 2, "side": 1},
        "longest": 9,
        "sampled": 8,
        "trained": 7,
        "recomputed": 2,
        "without_log_prob": 1,
        "mean_log_prob": round((-0.5 * 4 - 0.1 - 6.25) / 6, 4),
        "lowest_log_prob": {"value": -6.25, "turn": 1},
        "policy_versions": [3, 4],
        "turns_over_an_update": 1,
        "finish": {"stop": 4, "length": 1},
        "proved": 3,
        "drifted": 1,
        "errors": 1,
        "events": {"drift": 1, "replay": 2, "rewrite": 1},
    }


def test_a_journal_tells_the_same_as_the_document_of_it(tmp_path: Path) -> None:
    whole = read_trial(archive(tmp_path))
    path = tmp_path / "proxy_trajectory.jsonl"
    path.write_text("\n".join(journal()) + "\n")
    cut = read_trial(path)
    assert not cut.whole and cut.lost == 0
    same = ("id", "number", "parent", "delivered", "start", "sampled", "log_probs", "recomputed", "spans", "steps")
    assert [[getattr(one, name) for name in same] for one in cut.turns] == [
        [getattr(one, name) for name in same] for one in whole.turns
    ]
    assert [branch.turns for branch in cut.branches] == [(ROOT, NEXT), (SIDE,), (AGAIN,)]
    assert summary(cut)["events"]["rewrite"] == 1
    with_end = [*journal(), json.dumps({"type": "end", "time": 1.0, "proved": {ROOT: True, AGAIN: False}})]
    path.write_text("\n".join(with_end))
    assert [one.proved for one in read_trial(path).turns] == [True, None, None, None, False]


def test_a_journal_that_a_crash_cut_loses_its_last_line_and_no_more(tmp_path: Path) -> None:
    path = tmp_path / "proxy_trajectory.jsonl"
    whole = "\n".join(journal()) + "\n"
    turn_lines = [line for line in journal() if '"type": "turn"' in line]
    for at in range(len(journal()[0]) + 1, len(whole), 97):
        path.write_text(whole[:at])
        trial = read_trial(path)
        lines = whole[:at].splitlines()
        torn = bool(lines[-1]) and lines[-1] not in journal()
        assert trial.lost == torn
        assert len(trial.turns) == sum(line in turn_lines for line in lines)
    # A line in the middle that is gone takes the turns with it that lean on it.
    path.write_text("\n".join(line for line in journal() if f'"id": "{ROOT}"' not in line))
    trial = read_trial(path)
    assert [one.number for one in trial.turns] == [3] and trial.lost == 3


def test_a_folder_is_read_by_its_document_then_by_its_journal(tmp_path: Path) -> None:
    (tmp_path / "proxy_trajectory.jsonl").write_text("\n".join(journal()))
    assert not read_trial(tmp_path).whole
    archive(tmp_path)
    assert read_trial(tmp_path).whole


def change(path: str, value: Any) -> dict[str, Any]:
    """The document with the value at ``path`` (dots between keys) changed."""
    changed = copy.deepcopy(document())
    *way, last = path.split(".")
    holder: Any = changed
    for key in way:
        holder = holder[int(key) if key.isdigit() else key]
    holder[int(last) if last.isdigit() else last] = value
    return changed


RUBBISH: list[tuple[Any, str]] = [
    (b"", "it is empty"),
    (b"\n \n", "it is empty"),
    (b"hello", "neither one whole JSON document nor a journal"),
    (b"\x89PNG\r\n\x1a\n\x00", "neither one whole JSON document nor a journal"),
    (b"[1, 2]", "it holds list and no object"),
    (b"{}", "it has no session_id and no turns"),
    (b"[" * 100_000, "neither one whole JSON document nor a journal"),
    (change("version", 2), "it is of version 2, and this reads version 1"),
    (change("turns", {"a": 1}), "its turns are no list of objects"),
    (change("turns.0.id", None), "a turn has no id or no number"),
    (change("turns.1.parent", "f" * 32), "turn 1 follows a turn that is not there"),
    (change("turns.4.spans.1.echo", "f" * 32), "turn 4 repeats a turn that is not there"),
    (change("turns.0.sampled", ["x"]), "turn 0 has sampled that are no token ids"),
    (change("turns.0.spans.0.ids", 3), "turn 0 has ids that are no token ids"),
    (change("turns.0.log_probs", [-1.0]), "turn 0 has 2 sampled tokens and not as many log-probabilities"),
    (change("turns.0.log_probs", [-1.0, "x"]), "turn 0 has a log-probability that is no number"),
    (change("turns.0.log_probs", [-1.0, -(10**400)]), "turn 0 has a log-probability that is no number"),
    (change("turns.1.id", ROOT), "turn 1 has the id of an earlier one"),
    (change("turns.4.recomputed", [1.0]), "turn 4 has 5 tokens of context and not as many recomputed values"),
    (change("turns.1.start", 4), "turn 1 does not begin where the turn before it ends"),
    (change("branches.0.turns", None), "a branch has no turns"),
]


@pytest.mark.parametrize(("content", "why"), RUBBISH, ids=[why[:40] for _, why in RUBBISH])
def test_rubbish_is_refused_in_one_line_and_nothing_is_written(
    content: Any, why: str, tmp_path: Path, run: Run
) -> None:
    path = tmp_path / "proxy_trajectory.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    code, out, err = run(path)
    assert code == 1 and out == "" and err.count("\n") == 1
    assert str(path) in err and why in err
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


def test_a_document_that_is_torn_points_at_the_journal_beside_it(tmp_path: Path, run: Run) -> None:
    path = archive(tmp_path)
    path.write_bytes(path.read_bytes()[:-40])
    assert "journal beside it" not in run(path)[2]
    (tmp_path / "proxy_trajectory.jsonl").write_text("\n".join(journal()))
    assert f"try the journal beside it, `{tmp_path / 'proxy_trajectory.jsonl'}`" in run(path)[2]


@pytest.mark.parametrize("name", ["nothing.json", "folder"])
def test_a_file_that_is_not_there_is_named(name: str, tmp_path: Path, run: Run) -> None:
    (tmp_path / "folder").mkdir()
    code, _, err = run(tmp_path / name)
    assert code == 1 and str(tmp_path / name) in err and err.count("\n") == 1


ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        found += places(item, (*path, key))
    return found


PLACES = places(document())


@settings(max_examples=120, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(PLACES), ODD, st.booleans()), min_size=1, max_size=3))
def test_whatever_is_changed_is_read_or_refused(changes: list[tuple[tuple[Any, ...], Any, bool]]) -> None:
    changed = document()
    for (*way, last), value, lost in changes:
        holder: Any = changed
        with contextlib.suppress(KeyError, IndexError, TypeError):  # an earlier change took the place away
            for key in way:
                holder = holder[key]
            if lost:
                del holder[last]
            else:
                holder[last] = value
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "proxy_trajectory.json"
        path.write_text(json.dumps(changed))
        try:
            trial = read_trial(path)
        except PatchctlError as error:
            assert "\n" not in str(error)
            return
        assert list(summary_lines(trial))
        write_page(trial, {}, Path(folder) / "page.html", "today")
        assert embedded((Path(folder) / "page.html").read_text())["turns"] is not None


# The command


def test_the_command_writes_the_page_and_a_summary(tmp_path: Path, run: Run) -> None:
    path = archive(tmp_path)
    code, out, err = run(path)
    assert code == 0 and err == f"wrote {tmp_path / 'trajectory.html'}\n"
    assert out.splitlines() == list(summary_lines(read_trial(path)))
    assert "turns: 5 (5 finished, 1 of them undelivered); branches: 2 main, 1 side" in out
    assert "lowest -6.25 in turn 1; 1 tokens have none" in out and "policy versions: 3 to 4" in out
    code, out, _ = run(tmp_path, "-o", tmp_path / "other.html", "--json")
    told = json.loads(out)
    assert code == 0 and told["command"] == "trajectory" and told["trained"] == 7
    assert (tmp_path / "other.html").read_bytes().startswith(b"<!doctype html>")


def test_a_place_that_cant_be_written_is_named(tmp_path: Path, run: Run) -> None:
    code, _, err = run(archive(tmp_path), "-o", tmp_path / "no" / "page.html")
    assert code == 1 and str(tmp_path / "no" / "page.html") in err and err.count("\n") == 1


# The page


def embedded(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found.group(1))


def test_the_page_has_every_token_once_and_needs_no_network(tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    write_page(read_trial(archive(tmp_path)), {1: "one"}, target, "today")
    page = target.read_text()
    data = embedded(page)
    assert [one["ids"] for one in data["turns"]] == [one["sampled"] for one in turns()]
    assert data["turns"][1]["lp"] == [-1000, None, -62500] and data["scale"] == 10_000
    assert data["turns"][4]["spans"] == [{"ids": [1, 2]}, {"echo": 0}, {"ids": [9]}]
    assert data["turns"][4]["again"] == [None, None, -7500, -2500, None] and data["turns"][4]["again_steps"] == 5
    assert [one["trained"] for one in data["turns"]] == [True, True, False, True, True]
    assert data["errors"][0]["turn"] == 4 and data["branches"][0] == {"label": "main", "primary": True, "turns": [0, 1]}
    assert data["tools"] == [["f"]] and data["texts"] == {"1": "one"}
    own = re.sub(r'id="data">.*?</script>', "", page, flags=re.DOTALL)
    assert not re.search(r"(?:src|href)\s*=|url\(|@import|fetch\(|https?://", own)


def test_only_the_pages_own_script_may_run(tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    write_page(read_trial(archive(tmp_path)), {}, target, "today")
    page = target.read_text()
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    script = re.search(r"<script>(.*?)</script>", page, re.DOTALL)
    assert policy is not None and script is not None
    digest = base64.b64encode(hashlib.sha256(script.group(1).encode()).digest()).decode()
    assert policy.group(1).startswith(f"default-src 'none'; script-src 'sha256-{digest}';")
    assert page.count("<script") == 2 and page.count("</script>") == 2 and "<img" not in page
    assert embedded(page)["turns"][1]["messages"][0]["content"] == EVIL


def test_odd_values_do_not_break_the_page(tmp_path: Path) -> None:
    odd = document()
    odd["turns"][0]["log_probs"] = [-math.inf, math.nan]
    image = {"type": "image", "source": "data:image/png;base64," + "A" * 5000, "media_type": "image/png"}
    odd["turns"][0]["messages"] = [message("user", "look \ud800", parts=[{"type": "text", "text": "look"}, image])]
    odd["turns"][0]["lineage"], odd["turns"][0]["times"], odd["turns"][0]["answer"] = None, {}, None
    odd["session_id"], odd["created"], odd["errors"] = "\udfff", math.inf, [{}]
    odd["turns"][0]["sampling"] = {"temperature": math.nan}
    path = tmp_path / "proxy_trajectory.json"
    path.write_text(json.dumps(odd).replace('"max_tokens": 100', '"max_tokens": 1e999'))
    trial = read_trial(path)
    assert summary(trial)["without_log_prob"] == 3
    write_page(trial, {}, tmp_path / "page.html", "today")
    data = embedded((tmp_path / "page.html").read_text())
    assert data["turns"][0]["lp"] == [None, None]
    assert data["turns"][0]["messages"][0]["media"] == ["image, 5022 characters"]
    assert "AAAA" not in json.dumps(data)


def test_a_turn_stays_in_its_parents_column_if_it_has_the_longest_way_to_go(tmp_path: Path) -> None:
    assert lanes(read_trial(archive(tmp_path))) == [0, 0, 1, 0, 0]
    depth = {"": 0}
    made = []
    for number, (name, parent) in enumerate(
        [("a", ""), ("b", "a"), ("c", "a"), ("d", "c"), ("e", "b"), ("f", "d"), ("g", "")]
    ):
        depth[name] = depth[parent] + 2
        made.append(turn(name, number, parent or None, depth[parent], [{"ids": [1]}], [2]))
    # a - c - d - f stay in the first column, b - e move out, and g begins when both are over.
    assert lanes(read_trial(archive(tmp_path, turns=made, branches=[]))) == [0, 1, 0, 0, 1, 0, 0]


def test_a_long_trial_makes_a_page_of_its_own_size(tmp_path: Path) -> None:
    made, parent, start = [], None, 0
    for number in range(40):
        made.append(turn(f"{number:032x}", number, parent, start, [{"ids": [7] * 1600}], [number] * 1600))
        parent, start = made[-1]["id"], start + 3200
    path = archive(
        tmp_path, turns=made, branches=[{"label": "main", "primary": True, "turns": [t["id"] for t in made]}]
    )
    trial = read_trial(path)
    assert summary(trial)["longest"] == 128_000
    write_page(trial, {}, tmp_path / "page.html", "today")
    assert (tmp_path / "page.html").stat().st_size < 1.5 * path.stat().st_size


# What tokens say


def tokenizer(folder: Path, model: Any, **more: Any) -> Path:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({"model": model, "added_tokens": [{"id": 9, "content": "<|end|>"}], **more}))
    return path


def test_byte_level_words_are_read_as_text(tmp_path: Path) -> None:
    letters = {byte: letter for letter, byte in byte_letters().items()}
    assert len(letters) == 256

    def word(raw: bytes) -> str:
        return "".join(letters[byte] for byte in raw)

    fox = "🦊".encode()
    vocab = {word(b" hello"): 1, word("é".encode()): 2, word(fox[:2]): 3, word(fox[2:]): 4, word(b"\n"): 5, "plain": 6}
    path = tokenizer(tmp_path, {"type": "BPE", "vocab": vocab}, decoder={"type": "ByteLevel"})
    found = token_texts(path, [1, 2, 3, 4, 5, 9, 777])
    assert found == {1: " hello", 2: "é", 3: "⟨f0 9f⟩", 4: "⟨a6 8a⟩", 5: "\n", 9: "<|end|>"}
    nested = {"type": "Sequence", "pretokenizers": [{"type": "Split"}, {"type": "ByteLevel"}]}
    path = tokenizer(tmp_path, {"type": "BPE", "vocab": vocab}, pre_tokenizer=nested)
    assert token_texts(path, [1]) == {1: " hello"}


def test_sentencepiece_words_are_read_as_text(tmp_path: Path) -> None:
    path = tokenizer(tmp_path, {"type": "Unigram", "vocab": [["<unk>", 0.0], ["▁hello", -1.0], ["<0x41>", -2.0]]})
    assert token_texts(path, [0, 1, 2]) == {0: "<unk>", 1: " hello", 2: "A"}


@pytest.mark.parametrize("content", ["", "[]", '{"model": {}}', '{"model": {"vocab": [3]}}', '{"model": null}'])
def test_what_is_no_tokenizer_is_refused(content: str, tmp_path: Path, run: Run) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    code, _, err = run(archive(tmp_path), "--tokenizer", path)
    assert code == 1 and f"`{path}` is no tokenizer.json" in err and err.count("\n") == 1
    assert not (tmp_path / "trajectory.html").exists()


def test_the_tokenizer_is_the_given_one_or_that_of_the_recorded_model(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    with pytest.raises(PatchctlError, match=r"no tokenizer\.json at"):
        find_tokenizer(model, None)
    assert (
        find_tokenizer(None, None) is find_tokenizer(None, str(model)) is find_tokenizer(None, "org/hub-name") is None
    )
    path = tokenizer(model, {"vocab": {"a": 1}})
    assert find_tokenizer(model, None) == find_tokenizer(path, "elsewhere") == find_tokenizer(None, str(model)) == path
    assert read_trial(archive(tmp_path, tokenizer=str(model))).tokenizer == str(model)


# In a browser

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def shown(page: Path, profile: Path) -> str:
    """The page's document after its script has run."""
    assert CHROMIUM is not None
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    flags += " --disable-component-update --disable-sync --virtual-time-budget=3000 --dump-dom"
    command = [CHROMIUM, *flags.split(), f"--user-data-dir={profile}", page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, which is not on this machine")
def test_a_browser_shows_the_turns_and_runs_nothing_else(tmp_path: Path) -> None:
    texts = {10: "yes", 11: EVIL, 12: "A", 13: "B", 14: "C"}
    write_page(read_trial(archive(tmp_path)), texts, tmp_path / "page.html", "today")
    dom = shown(tmp_path / "page.html", tmp_path / "profile")
    head, _, rest = dom.partition('<script type="application/json"')
    assert "<title>Trajectory trial-1</title>" in dom  # and not what the message would have made of it
    assert (
        head.count('class="turn') == 5 and "<b id=" not in head.replace('<b id="pathname">', "") and "<img" not in head
    )
    assert "Path to turn 1" in head and "branch: main (primary)" in head
    tokens = re.findall(r'<i class="([^"]*)"[^>]*>([^<]*)</i>', head[head.index('id="blocks"') :])
    assert [text for _, text in tokens][:2] == [
        "yes",
        EVIL.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"),
    ]
    assert [(kind.strip(), text) for kind, text in tokens[2:]] == [("", "A"), ("", "B"), ("low", "C")]
    assert rest


def odd_document() -> dict[str, Any]:
    odd = document()
    odd["turns"][0] |= {"times": [], "lineage": None, "sampling": "x", "answer": None, "text": None, "messages": None}
    odd["turns"][0] |= {"num_preempted": "many", "max_tokens": None}
    odd["turns"][1] |= {"times": {"opened": None}, "lineage": ["a"], "sampling": None, "error": "bad <b>"}
    odd["turns"][2] |= {"state": "open", "sampled": [], "log_probs": []}
    return odd | {"errors": [{}, {"time": "x", "kind": 3, "message": None}, {"time": 1e300}], "created": None}


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, which is not on this machine")
@pytest.mark.parametrize("kind", ["odd", "empty", "journal"])
def test_a_browser_gets_to_the_end_of_an_odd_trial(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "proxy_trajectory.jsonl"
    nothing = document(turns=[], branches=[], errors=[], events=[])
    path.write_text(
        "\n".join(journal()) if kind == "journal" else json.dumps(odd_document() if kind == "odd" else nothing)
    )
    write_page(read_trial(path), {}, tmp_path / "page.html", "today")
    head = shown(tmp_path / "page.html", tmp_path / "profile").partition('<script type="application/json"')[0]
    assert re.search(r'id="events">.+?</div>', head)  # the last that the script writes
    assert head.count('class="turn') == (0 if kind == "empty" else 5)
    assert ('class="block sel"' in head) == (kind != "empty")
    assert "undefined" not in head and "NaN" not in head


@pytest.mark.parametrize("created", ["1e308", "-1e308", "1e999", "NaN", "1" + "0" * 400, '"x"', "null"])
def test_a_time_that_is_none_is_no_reason_to_fail(tmp_path: Path, run: Run, created: str) -> None:
    text = json.dumps(document(created="@")).replace('"@"', created)
    (tmp_path / "proxy_trajectory.json").write_text(text)
    assert run(tmp_path)[0] == 0


def test_a_log_probability_out_of_all_bounds_is_none(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "proxy_trajectory.json"
    path.write_text(json.dumps(change("turns.0.log_probs", ["@", "@"])).replace('"@"', "-1e308"))
    assert read_trial(path).turns[0].log_probs == [None, None]
    assert run(tmp_path)[0] == 0


@pytest.mark.parametrize("place", ["session_id", "turns.0.state", "turns.0.finish_reason", "branches.0.label"])
def test_what_an_archive_says_does_nothing_to_the_terminal(tmp_path: Path, run: Run, place: str) -> None:
    evil = "\x1b]0;taken over\x07\r\nok\u202e\ud800"
    (tmp_path / "proxy_trajectory.json").write_text(json.dumps(change(place, evil)))
    code, out, _ = run(tmp_path)
    assert code == 0
    assert "\\x1b]0;taken over\\x07\\r\\nok\\u202e\\ud800" in out
    assert all(line.isprintable() for line in out.split("\n"))


@pytest.mark.parametrize("name", ["proxy_trajectory.json", "proxy_trajectory.jsonl", "link.html"])
def test_the_page_never_takes_the_place_of_an_archive(tmp_path: Path, run: Run, name: str) -> None:
    path = archive(tmp_path)
    (tmp_path / "link.html").symlink_to(path)
    before = path.read_bytes()
    code, _, err = run(path, "-o", tmp_path / name)
    assert code == 2
    assert err.count("\n") == 1
    assert "is an archive" in err
    assert path.read_bytes() == before
