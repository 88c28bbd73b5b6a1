"""Real agents, unmodified, on the chat proxy: each solves a small task while things go wrong.

    python tests/agents/run.py [--only AGENT] [--scenario NAME] [--family NAME] [--write docs/agents.md]

Installs the agents (npm, PyPI), runs each trial through verl's AgentLoopWorker and the `proxy_agent` loop, with a
scripted model behind real tokenizers and chat templates, and holds what was kept against what the model sampled. Prints
a table. Exit code 1 if anything does not hold. All traffic is on loopback.

PATCHCTL_AGENTS_PYTHON names a Python 3.12 where none is on PATH, PATCHCTL_PROXY_PYTHON an interpreter that has what
tests/proxy/requirements.txt lists, PATCHED_VERL_TREES a patched verl.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "proxy")]

import setup_agents  # noqa: E402
import setup_env  # noqa: E402
import setup_proxy  # noqa: E402

import trees  # noqa: E402
from agents import AGENTS  # noqa: E402

FIRST, SECOND = "qwen3", "glm4_6"
FOR_SECOND = ("plain", "subagent", "overflow", "compaction")
BEGIN, END = "<!-- results -->", "<!-- end of results -->"
COLUMNS = ["agent", "scenario", "template", "calls", "turns", "branches", "sampled", "trained"]
COLUMNS += ["drift", "segments", "replays", "overflows", "ended as", "exit", "seconds"]


class WorkerEnded(Exception):
    """The process of the trials ended before they did; says where its log is."""


def chosen(options: argparse.Namespace) -> list[tuple[str, str, str]]:
    """The trials to run: agent, scenario, family of the template."""
    found = []
    for family in options.family or (FIRST, SECOND):
        for agent in options.only or AGENTS:
            for scenario in AGENTS[agent].scenarios:
                wanted = options.scenario or (FOR_SECOND if family == SECOND and not options.family else (scenario,))
                if scenario in wanted:
                    found.append((agent, scenario, family))
    return found


def tree() -> Path:
    """A patched verl; the proxy's files are the same on every pin.

    Raises:
        Unavailable: there is none.
    """
    if listed := os.environ.get("PATCHED_VERL_TREES"):
        return Path(listed.split(":")[0])
    reasons = []
    for pin in trees.PROJECT.pins.of("verl"):
        try:
            return trees.applied(pin)
        except trees.Unavailable as reason:
            reasons.append(str(reason))
    raise trees.Unavailable("; ".join(reasons))


def results(trials: list[tuple[str, str, str]], options: argparse.Namespace, python: str | Path) -> Iterator[Any]:
    """The result of each trial as it comes, from one worker process for all of them."""
    job = {
        "root": str(options.into),
        "models": str(options.into / "models"),
        "at_once": options.at_once,
        "record": options.record,
        "trials": trials,
    }
    environment = {**os.environ, "PYTHONPATH": str(tree()), "HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    options.into.mkdir(parents=True, exist_ok=True)
    (options.into / "job.json").write_text(json.dumps(job))
    log = options.into / "worker.log"
    with log.open("w") as errors:
        command = [str(python), str(HERE / "worker.py"), str(options.into / "job.json")]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("RESULT "):
                yield json.loads(line.removeprefix("RESULT "))
        if process.wait():
            raise WorkerEnded(f"the worker ended with {process.returncode}: see {log}")


def row(result: dict[str, Any]) -> list[str]:
    """One line of the table."""
    figures = result["figures"]
    if not figures:
        return [result["agent"], result["scenario"], result["family"], *[""] * (len(COLUMNS) - 3)]
    branches = [f"{figures[name]} {told}" for name, told in (("main", "main"), ("subagent", "sub"), ("side", "side"))]
    told = [
        figures["calls"],
        figures["turns"],
        ", ".join(each for each in branches if not each.startswith("0 ")),
        figures["sampled"],
        figures["trained"],
        figures["drift"],
        ", ".join(figures["segment_reasons"]) or 0,
        figures["replays"],
        figures["overflows"],
        figures["termination"],
        figures["exit_code"],
        figures["seconds"],
    ]
    return [result["agent"], result["scenario"], result["family"], *map(str, told)]


def table(found: list[dict[str, Any]]) -> str:
    """All results as a Markdown table."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *(row(result) for result in found)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=list(AGENTS), help="an agent, repeatable")
    parser.add_argument("--scenario", action="append", help="a scenario, repeatable")
    parser.add_argument("--family", action="append", help="a tokenizer and template of tests/proxy/real_tokenizers.py")
    parser.add_argument("--at-once", type=int, default=2, help="trials at a time")
    parser.add_argument("--record", action="store_true", help="keep all request bodies (calls.json of each trial)")
    parser.add_argument("--into", type=Path, help="folder of the trials; build/agents/runs/TIME")
    parser.add_argument("--write", type=Path, help="put the table between the marks of this file")
    parser.add_argument("--list", action="store_true", help="only tell what there is")
    options = parser.parse_args(arguments)
    names = {name for agent in AGENTS.values() for name in agent.scenarios}
    if unknown := set(options.scenario or ()) - names:
        parser.error(f"no scenario is called {', '.join(unknown)}; there are {', '.join(sorted(names))}")
    if options.write is not None and not (
        options.write.is_file() and BEGIN in options.write.read_text(encoding="utf-8")
    ):
        parser.error(f"{options.write} is no file with the mark {BEGIN}")
    options.into = (options.into or setup_agents.INTO / "runs" / time.strftime("%m%d-%H%M%S")).absolute()
    return options


def main(arguments: list[str] | None = None) -> int:
    """See the module's documentation."""
    options = parse(arguments)
    if options.list:
        for agent in AGENTS.values():
            print(f"{agent.name} {agent.version}: {', '.join(agent.scenarios)}")
        return 0
    trials = chosen(options)
    if not trials:
        print("no trial: the agent has no such scenario (--list tells)", file=sys.stderr)
        return 2
    skipped: dict[str, str] = {}
    for agent in dict.fromkeys(agent for agent, _, _ in trials):
        try:
            setup_agents.NEEDS[agent]()
        except setup_env.SetupError as reason:
            skipped[agent] = str(reason)
    found: list[dict[str, Any]] = []
    ended: str | None = None
    try:
        if possible := [trial for trial in trials if trial[0] not in skipped]:
            python = os.environ.get("PATCHCTL_PROXY_PYTHON") or setup_proxy.ensure(setup_proxy.INTO)
            for result in results(possible, options, python):
                found.append(result)
                print(" ".join(row(result)), flush=True)
                for fault in result["faults"]:
                    print(f"    {fault}", flush=True)
    except (setup_env.SetupError, trees.Unavailable) as error:
        print(error, file=sys.stderr)
        return 1
    except WorkerEnded as error:
        ended = str(error)
    found.sort(key=lambda result: trials.index((result["agent"], result["scenario"], result["family"])))
    print("\n" + table(found))
    for agent, reason in skipped.items():
        print(f"skipped: {agent}: {reason}")
    if options.write is not None and ended is None:
        text = options.write.read_text(encoding="utf-8")
        before, _, rest = text.partition(BEGIN)
        options.write.write_text(f"{before}{BEGIN}\n\n{table(found)}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    wrong = sum(bool(result["faults"]) for result in found)
    print(f"{len(found) - wrong} trials hold, {wrong} do not; their folders: {options.into}")
    if ended is not None:
        print(ended, file=sys.stderr)
    return 1 if wrong or not found or ended is not None else 0


if __name__ == "__main__":
    raise SystemExit(main())
