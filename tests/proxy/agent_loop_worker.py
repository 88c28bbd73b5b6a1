"""verl's own AgentLoopWorker with `proxy_agent` trials on a scripted LLM client. Prints what came of it.

    python agent_loop_worker.py FOLDER [--ray]

The patched tree is on PYTHONPATH. With `--ray` the worker is an actor, as in training.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from serving import byte_tokenizer, pass_time, until

HERE = Path(__file__).parent
SAID = ["one", "two", "three"]
LAYERS, TOP_K = 2, 2
HANG_S = 600.0
FIELDS = ("termination_reason", "request_id", "min_global_steps", "max_global_steps", "trial_dir")


class Client:
    """Speaks as verl's LLM client does: says one, two, three in turn for each session, and keeps what it sampled."""

    def __init__(self, model: str, moe: bool = False) -> None:
        self.model = model
        self.moe = moe
        self.asked: dict[str, list[tuple[list[int], list[int], dict[str, Any]]]] = {}

    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        if not hasattr(self, "_loaded"):
            self._loaded = AutoTokenizer.from_pretrained(self.model)
        return self._loaded

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **media: Any
    ) -> Any:
        from verl.workers.rollout.replica import TokenOutput

        tokenizer = self._tokenizer()
        before = self.asked.setdefault(request_id, [])
        ids = [*tokenizer.encode(SAID[len(before) % 3], add_special_tokens=False), tokenizer.eos_token_id]
        before.append((list(prompt_ids), ids, dict(sampling_params)))
        ids = ids[: sampling_params["max_tokens"]]
        rows = len(prompt_ids) + len(ids) - 1
        number = len(before)
        return TokenOutput(
            token_ids=ids,
            log_probs=[-token / 512 for token in ids],
            routed_experts=np.arange(rows * LAYERS * TOP_K).reshape(rows, LAYERS, TOP_K) % 64 if self.moe else None,
            stop_reason="completed",
            extra_fields={"global_steps": 4 + number, "request_id": f"engine-{number}"},
        )


def make_model(folder: Path) -> Path:
    from transformers import Qwen2Config

    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        intermediate_size=16,
        architectures=["Qwen2ForCausalLM"],
    ).save_pretrained(folder)
    return folder


def make_config(folder: Path, model: Path, loops: list[dict[str, Any]], **rollout: Any) -> Any:
    import verl
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    path = folder / "loops.yaml"
    OmegaConf.save(OmegaConf.create(loops), path)
    root = "actor_rollout_ref.rollout"
    given = {"prompt_length": 64, "response_length": 192, "calculate_log_probs": True, "name": "vllm", **rollout}
    with initialize_config_dir(config_dir=str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        return compose(
            config_name="ppo_trainer",
            overrides=[
                f"actor_rollout_ref.model.path={model}",
                f"{root}.agent.agent_loop_config_path={path}",
                f"{root}.agent.default_agent_loop=proxy_agent",
                *(f"{root}.{name}={value}" for name, value in given.items()),
            ],
        )


def loop(name: str, folder: Path, command: str, **sections: Any) -> dict[str, Any]:
    sections.setdefault("verifier", {"command": "grep -c . {trial_dir}/agent.log > {reward_file}"})
    return {
        "name": name,
        "_target_": "verl.experimental.agent_loop.proxy_agent_loop.ProxyAgentLoop",
        "trial": {"trials_dir": str(folder / "harbor_trials"), **sections.pop("trial", {})},
        "scaffold": {"command": command, "timeout_s": HANG_S + 600.0, **sections.pop("scaffold", {})},
        **sections,
    }


def batch(names: list[str]) -> Any:
    from verl.protocol import DataProto

    rows = np.empty(len(names), dtype=object)
    rows[:] = [[{"role": "user", "content": f"task {number}"}] for number in range(len(names))]
    return DataProto(
        non_tensor_batch={
            "raw_prompt": rows,
            "agent_name": np.array(names, dtype=object),
            "index": np.arange(len(names)),
            "extra_info": np.array([{"task": number} for number in range(len(names))], dtype=object),
        },
        meta_info={"global_steps": 7},
    )


async def sessions_left() -> int:
    from verl.experimental.agent_loop.proxy_agent import server

    started = server._STARTED.get(asyncio.get_running_loop(), {})
    return sum([(await task).proxy.service.sessions for task in started.values()])


def told(output: Any, tokenizer: Any) -> list[dict[str, Any]]:
    """Each row without its padding."""
    rows = []
    routed = "routed_experts" in output.batch.keys()  # noqa: SIM118
    width = output.batch["prompts"].shape[1]
    for i in range(len(output)):
        row = output.batch[i]
        kept = row["attention_mask"].bool()
        length = int(kept[width:].sum())
        mask = row["response_mask"][:length].bool()
        responses = row["responses"][:length]
        rows.append(
            {
                "prompt": row["prompts"][kept[:width]].tolist(),
                "response": responses.tolist(),
                "trained": tokenizer.decode(responses[mask]),
                "trained_ids": responses[mask].tolist(),
                "log_probs": row["rollout_log_probs"][:length][mask].tolist(),
                "masked_behind": int(row["response_mask"][length:].sum()),
                "reward": row["rm_scores"].sum().item(),
                "reward_at_end": row["rm_scores"][length - 1].item(),
                "routes": row["routed_experts"][kept].tolist() if routed else None,
                **{
                    name: output.non_tensor_batch[name][i]
                    for name in (
                        "termination_reason",
                        "request_id",
                        "min_global_steps",
                        "max_global_steps",
                        "trial_dir",
                    )
                },
                "num_turns": int(output.non_tensor_batch["__num_turns__"][i]),
            }
        )
    return rows


async def in_process(folder: Path, model: Path) -> dict[str, Any]:
    from verl.experimental.agent_loop import AgentLoopWorker
    from verl.experimental.agent_loop.proxy_agent import server

    agent = f"{sys.executable} -I -S {HERE / 'scripted_agent.py'}"
    loops = [
        loop("proxy_agent", folder, f"TASK={{instruction}} {agent} openai 3"),
        loop("anthropic", folder, f"TASK={{instruction}} {agent} anthropic 2"),
        loop("crash", folder, f"{agent} openai 1 --then 3"),
        loop("hang", folder, f"{agent} openai 2 --then sleep", scaffold={"timeout_s": HANG_S}),
        loop("absent", folder, "no-such-agent", trial={"attempts": 1}),
        loop("overflow", folder, f"{agent} openai 1 --then overflow 2"),
        loop("flaky", folder, f"test -e {folder}/again || {{ touch {folder}/again; exit 1; }}; {agent} openai 1"),
        loop("broken", folder, "true", trial={"trials_dir": "/dev/null/trials"}),
    ]
    result: dict[str, Any] = {}
    for name, moe in (("dense", False), ("moe", True)):
        client = Client(str(model), moe)
        options = {"enable_rollout_routing_replay": True} if moe else {}
        worker = AgentLoopWorker(make_config(folder, model, loops, **options), client)
        names = [entry["name"] for entry in loops] if not moe else ["absent", "proxy_agent"]
        running = asyncio.create_task(worker.generate_sequences(batch(names)))
        if "hang" in names:
            await until(lambda trial=running: trial.done() or only_hangs(folder / "harbor_trials"), 300)
            pass_time(HANG_S)
        output = await running
        result[name] = {
            "rows": told(output, worker.tokenizer),
            "asked": client.asked,
            "metrics": output.meta_info["metrics"],
        }
    result["sessions"] = await sessions_left()
    result["servers"] = len(server._STARTED[asyncio.get_running_loop()])

    worker = AgentLoopWorker(make_config(folder, model, [loop("proxy_agent", folder, "echo {sample.no}")]), client)
    try:
        await worker.generate_sequences(batch(["proxy_agent"]))
    except ValueError as error:
        result["template"] = str(error)

    lonely = loop("proxy_agent", folder, "true", trial={"outputs": "all"})
    worker = AgentLoopWorker(make_config(folder, model, [lonely]), Client(str(model)))
    try:
        await worker.generate_sequences(batch(["proxy_agent"]))
    except ValueError as error:
        result["several"] = str(error)
    result["registered"] = registered()
    await server.stop_all()
    return result


def only_hangs(trials: Path) -> bool:
    """The agent of row 3 has its two answers, and the other rows' trials are over."""
    over = {path.parent.name.partition("-")[0] for path in trials.glob("**/trial.json")}
    said = [line for log in trials.glob("**/3-*/agent.log") for line in log.read_text().split()]
    return {"0", "1", "2", "4", "5", "6"} <= over and said == ["one", "two"]


def registered() -> Any:
    """What the registry has without a configuration file, seen by a process of its own."""
    import subprocess

    code = (
        "from verl.experimental.agent_loop.agent_loop import _agent_loop_registry as r\n"
        "import verl.experimental.agent_loop, sys\n"
        "print(r['proxy_agent']['_target_'], 'aiohttp.web' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return done.stdout.split()[-2:] or done.stderr


def through_ray(folder: Path, model: Path) -> dict[str, Any]:
    import ray
    from verl.experimental.agent_loop import AgentLoopWorker

    agent = f"{sys.executable} -I -S {HERE / 'scripted_agent.py'}"
    loops = [loop("proxy_agent", folder, f"{agent} openai 3"), loop("hang", folder, f"{agent} openai 1 --then sleep")]
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        worker = ray.remote(AgentLoopWorker).remote(make_config(folder, model, loops), Client(str(model)))
        output = ray.get(worker.generate_sequences.remote(batch(["proxy_agent", "proxy_agent"])))
        from transformers import AutoTokenizer

        rows = told(output, AutoTokenizer.from_pretrained(model))
        # A worker that is killed takes its agents with it.
        running = worker.generate_sequences.remote(batch(["hang"]))
        end = time.monotonic() + 120
        while not (found := agents(folder)) and time.monotonic() < end:
            assert not ray.wait([running], timeout=0.1)[0]
        ray.kill(worker)
        while (left := agents(folder)) and time.monotonic() < end:
            time.sleep(0.1)
        return {"rows": rows, "running_before": len(found), "running_after": len(left)}
    finally:
        ray.shutdown()


def agents(folder: Path) -> list[int]:
    """Processes that work in a trial of ``folder``."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and (process / "cwd").readlink().is_relative_to(folder / "harbor_trials"):
                found.append(int(process.name))
        except OSError:
            continue
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ray", action="store_true")
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    model = make_model(folder / "model")
    found = through_ray(folder, model) if arguments.ray else asyncio.run(in_process(folder, model))
    print("RESULT " + json.dumps(found, default=lambda value: value.item() if hasattr(value, "item") else str(value)))


if __name__ == "__main__":
    main()
