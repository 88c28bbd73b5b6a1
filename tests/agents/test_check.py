"""The check of a trial sees each thing that can be wrong with it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from check import check
from client import Sampled
from policy import MAIN, tools_in

Change = Callable[[dict[str, Any], dict[str, Any], list[Sampled]], object]


def call(prompt: list[int], ids: list[int], conversation: str = "main", state: Any = "whole") -> Sampled:
    values = [-token / 512 for token in ids]
    return Sampled("s", prompt, conversation, 1, ids, values, {"temperature": 1.0}, state)


def turn(name: str, parent: str | None, spans: list[Any], ids: list[int], **fields: Any) -> dict[str, Any]:
    known = {"number": 0, "kind": "append", "state": "finished", "delivered": True, "proved": True}
    known |= {"id": name, "parent": parent, "spans": spans, "sampled": ids, "log_probs": [-t / 512 for t in ids]}
    return known | fields


def trial() -> tuple[dict[str, Any], dict[str, Any], list[Sampled]]:
    """Two turns of the agent, one of its sub-agent, one that failed."""
    calls = [
        call([1, 2], [3, 4]),
        call([9], [8], "sub"),
        call([1, 2, 3, 4, 5], [6]),
        call([1, 2, 3, 4, 5], [7], state="failed"),
    ]
    turns = [
        turn("a", None, [{"ids": [1, 2]}], [3, 4]),
        turn("b", None, [{"ids": [9]}], [8], number=1),
        turn("c", "a", [{"ids": [5]}], [6], number=2),
        turn("d", "a", [{"ids": [5]}], [], number=3, state="aborted", delivered=False),
    ]
    main = {
        "label": "main",
        "primary": True,
        "turns": ["a", "c"],
        "traj_acc_ids": [1, 2, 3, 4, 5, 6],
        "traj_response_mask": [1, 1, 0, 1],
        "traj_response_logprobs": [-3 / 512, -4 / 512, 0.0, -6 / 512],
    }
    sub = {
        "label": "subagent",
        "primary": False,
        "turns": ["b"],
        "traj_acc_ids": [9, 8],
        "traj_response_mask": [1],
        "traj_response_logprobs": [-8 / 512],
    }
    archive = {"turns": turns, "branches": [main, sub], "events": [], "errors": []}
    row = {"prompt": [1], "response": [2, 3, 4, 5, 6], "mask": [0, 1, 1, 0, 1], "replays": 0}
    row["log_probs"] = [-3 / 512, -4 / 512, -6 / 512]
    return archive, row, calls


def faults(folder: Path, change: Change) -> list[str]:
    archive, row, calls = copy.deepcopy(trial())
    change(archive, row, calls)
    (folder / "proxy_trajectory.json").write_text(json.dumps(archive))
    ended = {"termination": "completed", "exit_code": 0, "reward": 1.0, "agent_seconds": 1.0}
    (folder / "trial.json").write_text(json.dumps(ended))
    return check(calls, row, folder).faults


def test_a_trial_that_holds(tmp_path: Path) -> None:
    assert faults(tmp_path, lambda *_: None) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda a, r, c: (a["turns"].pop(1), a["branches"].pop(1)), "turns with its ids"),
        (lambda a, r, c: c.pop(1), "the engine never sampled"),
        (lambda a, r, c: a["turns"][2]["log_probs"].__setitem__(0, -1.0), "none with its log-probabilities"),
        (lambda a, r, c: a["turns"][2]["spans"][0].update(ids=[55]), "turns with its ids"),
        (lambda a, r, c: a["turns"][2]["sampled"].append(6), "turns with its ids"),
        (lambda a, r, c: a["turns"].pop(3), "0 aborted turns for 1"),
        (lambda a, r, c: a["branches"][0]["traj_acc_ids"].__setitem__(4, 0), "other ids than its path's"),
        (lambda a, r, c: a["branches"][0]["traj_response_mask"].__setitem__(2, 1), "a wrong mask"),
        (lambda a, r, c: a["branches"][0]["traj_response_logprobs"].__setitem__(0, 0.0), "wrong log-probabilities"),
        (lambda a, r, c: a["branches"][1].update(label="main"), "called main, but it is subagent"),
        (lambda a, r, c: a["branches"].pop(1), "in no branch"),
        (lambda a, r, c: a["branches"][0].update(primary=False), "0 primary branches"),
        (lambda a, r, c: a["branches"][0].update(turns=["a"]), "does not end with the agent's last answer"),
        (lambda a, r, c: r["response"].pop(), "the row's ids"),
        (lambda a, r, c: r["mask"].__setitem__(0, 1), "the row's mask"),
        (lambda a, r, c: r["log_probs"].__setitem__(0, -1.0), "the row's log-probabilities"),
        (lambda a, r, c: a["events"].append({"name": "drift", "labels": {"kind": "x"}, "count": 2}), "2 drift events"),
        (lambda a, r, c: c[0].params.update(temperature=0.5), "another temperature"),
        (lambda a, r, c: a["turns"][0].update(proved=False), "1 turns are not proved"),
    ],
)
def test_what_is_seen(change: Change, fault: str, tmp_path: Path) -> None:
    found = faults(tmp_path, change)
    assert any(fault in told for told in found), found


def test_tools_of_a_prompt() -> None:
    function = {"name": "Bash", "parameters": {"properties": {"command": {}}, "required": ["command"]}}
    listed = json.dumps({"type": "function", "function": function}, indent=4)
    found = tools_in(f'{MAIN} {{"type": "function", broken\n{listed}\n<tool_call>{{"name": "Bash"}}</tool_call>')
    assert list(found) == ["Bash"] and found["Bash"].required == ("command",)
