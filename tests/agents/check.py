"""What a trial must have left, held against what the engine sampled. Reads the archive's JSON by itself."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from client import Sampled


@dataclass(frozen=True)
class Archived:
    """A turn of the archive with its whole path put together.

    Attributes:
        prompt, sampled: ids.
        actions: 1 for each id of prompt and answer that some turn of the path sampled there.
        values: log-probabilities of the actions, in order.
    """

    turn: dict[str, Any]
    prompt: list[int]
    sampled: list[int]
    actions: list[int]
    values: list[float]


def put_together(archive: dict[str, Any]) -> dict[str, Archived]:
    """The turns of an archive by id."""
    found: dict[str, Archived] = {}
    for turn in archive["turns"]:
        before = found.get(turn["parent"]) if turn["parent"] is not None else None
        context: list[int] = []
        for span in turn["spans"]:
            context += span["ids"] if "ids" in span else found[span["echo"]].sampled
        whole = (before.prompt + before.sampled if before else []) + context
        actions = (before.actions if before else []) + [0] * len(context) + [1] * len(turn["sampled"])
        values = (before.values if before else []) + turn["log_probs"]
        found[turn["id"]] = Archived(turn, whole, turn["sampled"], actions, values)
    return found


@dataclass
class Report:
    """
    Attributes:
        figures: for the table. "resumed": answers whose client was gone, that it got later or that were sampled anew.
        faults: what does not hold.
    """

    figures: dict[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def hold(self, condition: bool, otherwise: str) -> None:
        """Notes ``otherwise`` unless the condition is true."""
        if not condition:
            self.faults.append(otherwise)


def events(archive: dict[str, Any], name: str, **labels: str) -> int:
    """The count of an event."""
    wanted = labels.items()
    return sum(e["count"] for e in archive["events"] if e["name"] == name and wanted <= e["labels"].items())


def check(calls: list[Sampled], row: dict[str, Any], folder: Path) -> Report:
    """Compares the engine's calls with the archive and with the row that training got.

    Args:
        row: ids and mask as the agent loop worker padded them, unpadded again.
        folder: of the trial.
    """
    report = Report()
    archive = json.loads((folder / "proxy_trajectory.json").read_text())
    turns = put_together(archive)
    owner = _every_call_once(report, calls, turns)
    _branches(report, archive, turns, owner)
    _row(report, archive, row)
    summary = json.loads((folder / "trial.json").read_text())
    whole = [call for call in calls if call.state == "whole"]
    labels = Counter(branch["label"] for branch in archive["branches"])
    report.hold(events(archive, "drift") == 0, f"{events(archive, 'drift')} drift events")
    report.hold({call.params["temperature"] for call in calls} <= {1.0}, "another temperature than the rollout's")
    unproved = sum(turn["state"] == "finished" and turn.get("proved") is not True for turn in archive["turns"])
    report.hold(not unproved, f"{unproved} turns are not proved")
    report.figures |= {
        "calls": len(calls),
        "turns": len(whole),
        "main": labels["main"],
        "subagent": labels["subagent"],
        "side": labels["side"],
        "sampled": sum(len(call.ids) for call in whole),
        "trained": sum(row["mask"]),
        "longest": max((len(call.prompt_ids) + len(call.ids) for call in whole), default=0),
        "drift": events(archive, "drift"),
        "unproved": unproved,
        "segments": events(archive, "segment"),
        "segment_reasons": sorted(e["labels"]["reason"] for e in archive["events"] if e["name"] == "segment"),
        "kinds": dict(Counter(turn["kind"] for turn in archive["turns"])),
        "replays": row["replays"],
        "overflows": sum(error["kind"] == "context_overflow" for error in archive["errors"]),
        "failed": sum(call.state == "failed" for call in calls),
        "closed": sum(call.state == "closed" for call in calls),
        "resumed": row["replays"] + sum(call.state == "closed" for call in calls),
        "termination": summary["termination"],
        "exit_code": summary["exit_code"],
        "reward": summary["reward"],
        "seconds": round(summary["agent_seconds"], 1),
        "errors": [error["kind"] for error in archive["errors"]],
    }
    return report


def _every_call_once(report: Report, calls: list[Sampled], turns: dict[str, Archived]) -> dict[str, Sampled]:
    """Every call that ended is one finished turn, with its prompt, its ids and its log-probabilities."""
    left = [each for each in turns.values() if each.turn["state"] == "finished"]
    owner: dict[str, Sampled] = {}
    for number, call in enumerate(calls):
        if call.state != "whole":
            continue
        same = [each for each in left if each.sampled == call.ids and each.prompt == call.prompt_ids]
        exact = [each for each in same if each.turn["log_probs"] == call.log_probs]
        report.hold(bool(exact), f"call {number}: {len(same)} turns with its ids, none with its log-probabilities")
        if exact:
            owner[exact[0].turn["id"]] = call
            left.remove(exact[0])
    report.hold(not left, f"{len(left)} finished turns that the engine never sampled")
    broken = Counter(turn.turn["state"] for turn in turns.values())["aborted"]
    ended = sum(call.state in ("failed", "closed") for call in calls)
    report.hold(broken == ended, f"{broken} aborted turns for {ended} calls that were not whole")
    return owner


def _branches(report: Report, archive: dict[str, Any], turns: dict[str, Archived], owner: dict[str, Sampled]) -> None:
    """Each branch is the path to its leaf; together they have every delivered answer; labels are as it was."""
    reached: set[str] = set()
    for number, branch in enumerate(archive["branches"]):
        leaf = turns[branch["turns"][-1]]
        reached.update(branch["turns"])
        ids = leaf.prompt + leaf.sampled
        begin = len(ids) - len(branch["traj_response_mask"])
        report.hold(branch["traj_acc_ids"] == ids, f"branch {number}: other ids than its path's")
        report.hold(branch["traj_response_mask"] == leaf.actions[begin:], f"branch {number}: a wrong mask")
        report.hold(sum(leaf.actions[:begin]) == 0, f"branch {number}: actions in the first prompt")
        pairs = zip(branch["traj_response_mask"], branch["traj_response_logprobs"], strict=True)
        values = [value for action, value in pairs if action]
        report.hold(values == leaf.values, f"branch {number}: wrong log-probabilities")
        if leaf.turn["id"] in owner:
            was = {"main": "main", "sub": "subagent", "side": "side"}[owner[leaf.turn["id"]].conversation]
            report.hold(branch["label"] == was, f"branch {number} is called {branch['label']}, but it is {was}")
    delivered = {each.turn["id"] for each in turns.values() if each.turn["delivered"]}
    report.hold(delivered <= reached, f"{len(delivered - reached)} delivered answers are in no branch")
    undelivered = {each.turn["id"] for each in turns.values() if each.turn["state"] == "finished"} - delivered
    report.figures["undelivered"] = len(undelivered)
    main = [each for each, call in owner.items() if call.conversation == "main" and each in delivered]
    primary = [branch for branch in archive["branches"] if branch["primary"]]
    of_agents = any(owner[each].conversation != "side" for each in delivered & owner.keys())
    report.hold(len(primary) == of_agents, f"{len(primary)} primary branches")
    if primary and main:
        last = max(main, key=lambda each: int(turns[each].turn["number"]))
        report.hold(primary[0]["turns"][-1] == last, "the primary branch does not end with the agent's last answer")


def _row(report: Report, archive: dict[str, Any], row: dict[str, Any]) -> None:
    """The row is the primary branch: nothing cut, nothing added."""
    branch = next((b for b in archive["branches"] if b["primary"]), None)
    if branch is None:
        report.hold(sum(row["mask"]) == 0, "actions without a branch")
        return
    report.hold(row["prompt"] + row["response"] == branch["traj_acc_ids"], "the row's ids are not the branch's")
    moved = len(row["response"]) - len(branch["traj_response_mask"])
    report.hold(row["mask"] == [0] * moved + branch["traj_response_mask"], "the row's mask is not the branch's")
    wanted = [v for a, v in zip(branch["traj_response_mask"], branch["traj_response_logprobs"], strict=True) if a]
    report.hold(row["log_probs"] == wanted, "the row's log-probabilities are not the branch's")


def left_behind(folder: Path) -> list[int]:
    """Processes that still work in a trial's folder or have it in their environment."""
    found = []
    mark = str(folder).encode()
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            here = (process / "cwd").readlink().is_relative_to(folder)
            if here or mark in (process / "environ").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue
    return found
