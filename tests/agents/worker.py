"""Runs trials of real agents through verl's own AgentLoopWorker, with the patched tree on PYTHONPATH.

    python worker.py JOB.json

The job names the trials; each one's result is written beside its folder as it comes. `run.py` is the command to use.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
import traceback
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
from check import Report, check, left_behind
from client import Client
from policy import MAIN, Model
from relay import Relay, relaying

from agents import AGENTS, Agent, Scenario, Where

TESTS = Path(__file__).resolve().parents[1]
PROMPT_LENGTH = 4096


def save_model(family: str, folder: Path) -> list[str]:
    """A model folder with a real tokenizer and chat template; the texts of its stop tokens."""
    import real_tokenizers
    from transformers import GenerationConfig, Qwen2Config

    if not (folder / "config.json").exists():
        tokenizer, stops = real_tokenizers.load(family)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(stops[0])
        tokenizer.save_pretrained(folder)
        GenerationConfig(eos_token_id=stops).save_pretrained(folder)
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            architectures=["Qwen2ForCausalLM"],
        ).save_pretrained(folder)
    return list(real_tokenizers.FAMILIES[family].stops)


def make_config(folder: Path, model: Path, loop: dict[str, Any], context_limit: int) -> Any:
    import verl
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    path = folder / "loop.yaml"
    OmegaConf.save(OmegaConf.create([loop]), path)
    root = "actor_rollout_ref.rollout"
    given = {
        "agent.agent_loop_config_path": path,
        "agent.default_agent_loop": loop["name"],
        "prompt_length": PROMPT_LENGTH,
        "response_length": context_limit - PROMPT_LENGTH,
        "calculate_log_probs": True,
        "name": "vllm",
    }
    with initialize_config_dir(config_dir=str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        return compose(
            config_name="ppo_trainer",
            overrides=[
                f"actor_rollout_ref.model.path={model}",
                *(f"{root}.{name}={value}" for name, value in given.items()),
            ],
        )


def batch(agent: str, instruction: str) -> Any:
    from verl.protocol import DataProto

    rows = np.empty(1, dtype=object)
    rows[:] = [[{"role": "user", "content": instruction}]]
    return DataProto(
        non_tensor_batch={
            "raw_prompt": rows,
            "agent_name": np.array([agent], dtype=object),
            "index": np.arange(1),
        },
        meta_info={"global_steps": 1},
    )


def row_of(output: Any) -> dict[str, Any]:
    """The batch's row without its padding."""
    row = output.batch[0]
    width = row["prompts"].shape[0]
    kept = row["attention_mask"].bool()
    length = int(kept[width:].sum())
    mask = row["response_mask"][:length]
    fields = output.non_tensor_batch
    return {
        "prompt": row["prompts"][kept[:width]].tolist(),
        "response": row["responses"][:length].tolist(),
        "mask": mask.tolist(),
        "log_probs": row["rollout_log_probs"][:length][mask.bool()].tolist(),
        "trial_dir": fields["trial_dir"][0],
        "termination": fields["termination_reason"][0],
    }


async def _proxy_of(client: Client) -> Any:
    from verl.experimental.agent_loop.proxy_agent import server

    for key, task in server._STARTED.get(asyncio.get_running_loop(), {}).items():
        if key[0] == id(client):  # type: ignore[index]
            return (await task).proxy
    raise RuntimeError("the trial started no proxy")


@contextlib.asynccontextmanager
async def _route(scenario: Scenario, client: Client, record: Path | None) -> AsyncIterator[Relay | None]:
    """Between agent and proxy: nothing, or a relay where connections are to break or calls to be recorded."""
    if record is None and not any(fault.kind == "cut" for fault in scenario.faults):
        yield None
        return
    proxy: list[Any] = []

    async with relaying(lambda: str(proxy[0].url)) as relay:

        async def cut() -> None:
            await relay.cut(MAIN.encode())

        async def find() -> None:
            while not proxy:
                with contextlib.suppress(RuntimeError):
                    proxy.append(await _proxy_of(client))
                await asyncio.sleep(0.05)

        finding = asyncio.create_task(find())
        client.cut = cut
        try:
            yield relay
        finally:
            finding.cancel()
            if record is not None:
                record.write_text(json.dumps([relay.seen, relay.bodies]))


async def trial(agent: Agent, scenario: Scenario, family: str, root: Path, model: Path, record: bool) -> dict[str, Any]:
    """One trial; the result says what it was and what does not hold."""
    from verl.experimental.agent_loop import AgentLoopWorker
    from verl.experimental.agent_loop.proxy_agent import server

    folder = root / f"{agent.name}-{scenario.name}-{family}"
    folder.mkdir(parents=True)
    stops = save_model(family, model)
    trials = folder / "trials"
    client = Client(
        Model(None, stops, scenario.plan, re.compile(re.escape(str(trials)) + r"[^\s\"'<>\\]*?/work")),
        scenario.faults,
    )
    async with _route(scenario, client, folder / "calls.json" if record else None) as relay:
        where = Where(None if relay is None else f"http://127.0.0.1:{relay.port}", scenario.name)
        loop = {
            "name": folder.name,  # the registry is the process's
            "_target_": "verl.experimental.agent_loop.proxy_agent_loop.ProxyAgentLoop",
            "trial": {"trials_dir": str(trials), "attempts": 1},
            "scaffold": {"keep_workdir": True, "timeout_s": scenario.timeout_s, **agent.scaffold(where)},
            "verifier": {"command": scenario.verifier, "reward": "exit_code", "failed": -1.0},
        }
        worker = AgentLoopWorker(make_config(folder, model, loop, scenario.context_limit), client)
        client.model.tokenizer = worker.tokenizer
        output = await worker.generate_sequences(batch(loop["name"], scenario.instruction))
        row = row_of(output)
        proxy = await _proxy_of(client)
        row["replays"] = proxy.service.events.total("replay")
        left = left_behind(folder)
        for key in [k for k in server._STARTED[asyncio.get_running_loop()] if k[0] == id(client)]:  # type: ignore[index]
            await (await server._STARTED[asyncio.get_running_loop()].pop(key)).proxy.stop()
    work = Path(row["trial_dir"])
    report: Report = check(client.calls, row, work)
    report.faults += client.problems
    report.hold(not left, f"{len(left)} processes were left behind")
    scenario.expect(report, client)
    return {
        "agent": agent.name,
        "scenario": scenario.name,
        "family": family,
        "folder": str(work),
        "figures": report.figures,
        "faults": report.faults,
        "http": relay.seen if relay is not None else None,
    }


async def main(job: dict[str, Any]) -> None:
    """All trials of a job, a few at a time."""
    slots = asyncio.Semaphore(job["at_once"])
    root = Path(job["root"])

    async def one(agent: str, scenario: str, family: str) -> None:
        async with slots:
            chosen = AGENTS[agent]
            try:
                result = await trial(
                    chosen, chosen.scenarios[scenario], family, root, Path(job["models"]) / family, job["record"]
                )
            except Exception as error:
                traceback.print_exc()
                result = {"agent": agent, "scenario": scenario, "family": family, "figures": {}}
                result["faults"] = [f"the trial broke off: {type(error).__name__}: {error}"]
            print("RESULT " + json.dumps(result, default=str), flush=True)

    await asyncio.gather(*(one(*each) for each in job["trials"]))


if __name__ == "__main__":
    sys.path.append(str(TESTS / "proxy"))
    asyncio.run(main(json.loads(Path(sys.argv[1]).read_text())))
