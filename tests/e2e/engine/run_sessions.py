"""Agents' sessions on the chat proxy, on verl's LLM clients, on a real vLLM. Writes what each side says of them.

    python run_sessions.py FOLDER

The patched verl tree, this folder and the folder of shims.write_metadata are on PYTHONPATH. FOLDER/result.json gets,
for every scenario, what the engine returned, what the archives' reader reads, and what the clients got.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import engine_runs
import engine_world
import sdk_agents
from engine_world import World
from sdk_agents import Agent, agent

TOOL_CALL = '<tool_call>\n{"name": "run", "arguments": {"command": "ls %s"}}\n</tool_call>'
Result = dict[str, Any]


class Proxied:
    """A proxy on one of verl's clients, and the sessions that agents had on it."""

    def __init__(self, proxy: Any, folder: Path) -> None:
        self.proxy = proxy
        self.folder = folder
        self.agents: list[tuple[str, Agent]] = []

    @classmethod
    async def start(cls, world_: World, client: Any, folder: Path) -> Proxied:
        from transformers import AutoTokenizer
        from verl.experimental.agent_loop.vllm_chat_completion_proxy import ChatCompletionProxy

        tokenizer = AutoTokenizer.from_pretrained(world_.model)
        proxy = await ChatCompletionProxy.start(client, tokenizer, context_limit=engine_world.CONTEXT)
        return cls(proxy, folder)

    def session(self, name: str) -> Any:
        from verl.experimental.agent_loop.chat_proxy.archive import Archive
        from verl.experimental.agent_loop.chat_proxy.fields import SamplingPolicy

        policy = SamplingPolicy({"temperature": 1.0, "top_p": 1.0})
        return self.proxy.open_session(name, sampling=policy, archive=Archive(self.folder / name))

    def agent(self, number: int, name: str) -> Agent:
        made = agent(number, self.proxy, self.session(f"{name}-{number}"))
        self.agents.append((made.session.id, made))
        return made

    async def stop(self) -> list[Result]:
        """Ends all sessions; what the archives' reader reads of each."""
        for session_id, made in self.agents:
            await made.close()
            await self.proxy.close_session(session_id)
        await self.proxy.stop()
        return [
            {"agent": made.name, "said": [dataclasses.asdict(said) for said in made.said], **read(self.folder / name)}
            for name, made in self.agents
        ]


def read(folder: Path) -> Result:
    """A session as its archive tells it."""
    from verl.experimental.agent_loop.chat_proxy.archive import read_archive
    from verl.experimental.agent_loop.chat_proxy.turns import path_ids

    recovered = read_archive(folder)
    return {
        "id": recovered.id,
        "folder": folder.parent.name,
        "complete": recovered.complete,
        "lost": recovered.lost,
        "errors": recovered.errors,
        "turns": [
            {
                "id": turn.id,
                "kind": turn.kind,
                "state": turn.state,
                "error": turn.error,
                "delivered": turn.delivered,
                "proved": turn.proved,
                "prompt": list(map(int, path_ids(turn)))[: turn.start + turn.context_length],
                "sampled": turn.sampled.tolist(),
                "log_probs": turn.log_probs.tolist(),
                "steps": [turn.min_global_steps, turn.max_global_steps],
                "max_tokens": turn.max_tokens,
                "finish_reason": turn.answer.finish_reason if turn.answer is not None else None,
                "text": turn.answer.text if turn.answer is not None else None,
                "engine": dict(turn.engine_extra),
                "recomputed": None if turn.recomputed is None else turn.recomputed.tolist(),
                "recomputed_steps": turn.recomputed_steps,
                "start": turn.start,
            }
            for turn in recovered.turns
        ],
        "samples": [
            {
                "ids": acc.traj_acc_ids,
                "prompt_length": acc.prompt_length,
                "mask": acc.traj_response_mask,
                "log_probs": acc.traj_response_logprobs,
                "source": acc.traj_response_source,
                "spans": list(acc.spans),
                "steps": [acc.min_global_steps, acc.max_global_steps],
            }
            for acc in recovered.accumulators()
        ],
    }


async def conversation(made: Agent, number: int) -> None:
    """Every kind of answer, in one history: free, tool call, stop string, stop token, reasoning, cut by its length."""
    made.hear(f"hello {number}")
    await made.answer(24)
    made.hear(f"Say [[I will look.\n{TOOL_CALL % number}]]")
    said = await made.answer(80)
    for call in said.calls:
        made.result(call, f"file{number}.txt")
    await made.answer(16)
    made.hear("Say [[one two HALT three]]")
    await made.answer(40, stop=["HALT"])
    made.hear(f"Say [[<think>\nwhy {number}\n</think>\n\nshort]]")
    await made.answer(40)
    made.hear("count")
    await made.answer(5)


async def conversations(here: World, folder: Path) -> Result:
    """Eight agents at once."""
    proxied = await Proxied.start(here, here.plain, folder)
    made = [proxied.agent(number, "talk") for number in range(8)]
    await asyncio.gather(*(conversation(each, number) for number, each in enumerate(made)))
    return {"sessions": await proxied.stop(), "records": await here.records()}


async def rewrites(here: World, folder: Path) -> Result:
    """Agents that shorten what was said; the log-probabilities of the rest are asked for again."""
    proxied = await Proxied.start(here, here.plain, folder)

    async def run(number: int) -> None:
        made = proxied.agent(number, "rewrite")
        for text in ("first", "second", "third"):
            made.hear(f"{text} of {number}")
            await made.answer(40)
        made.edit(0, "(removed)")
        made.hear("go on")
        await made.answer(20)

    await asyncio.gather(*(run(number) for number in range(4)))
    sessions = await proxied.stop()
    records = await here.records()
    contexts = [turn["prompt"] for session in sessions for turn in session["turns"] if turn["recomputed"]]

    async def score(ids: list[int]) -> list[float]:
        params = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        output = await here.plain.generate("score", prompt_ids=ids, sampling_params=params)
        return [row[0] for row in output.extra_fields["prompt_logprobs"][:-1]]

    alone = [await score(ids) for ids in contexts]
    crowd = await asyncio.gather(*(score(ids) for ids in contexts * 3))
    await here.records()
    reference = engine_world.Reference(here.model)
    return {
        "sessions": sessions,
        "records": records,
        "contexts": contexts,
        "alone": alone,
        "crowd": crowd,
        "transformers": [reference.log_probs(ids, list(range(1, len(ids))), 0) for ids in contexts],
    }


async def streams(here: World, folder: Path) -> Result:
    """The same requests, generated and streamed."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(here.model)
    question = [{"role": "user", "content": "Say [[one two HALT three]]"}]
    ordered, free = (
        list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
        for messages in (question, [{"role": "user", "content": "hello"}])
    )
    seeded = {"temperature": 1.0, "seed": 5, "logprobs": True}
    cases: dict[str, tuple[list[int], Result]] = {
        "seeded": (free, {**seeded, "max_tokens": 60}),
        "greedy": (free, {"temperature": 0.0, "logprobs": True, "max_tokens": 60}),
        "without log-probabilities": (free, {"temperature": 1.0, "seed": 6, "max_tokens": 20}),
        "one token": (free, {**seeded, "max_tokens": 1}),
        "stop string": (ordered, {**seeded, "max_tokens": 60, "stop": ["HALT"]}),
        "stop token": (ordered, {**seeded, "max_tokens": 60}),
    }

    def told(outputs: list[Any]) -> Result:
        known = [value for output in outputs for value in output.log_probs or ()]
        return {
            "tokens": [token for output in outputs for token in output.token_ids],
            "log_probs": known,
            "stop_reason": outputs[-1].stop_reason,
            "steps": outputs[-1].extra_fields.get("global_steps"),
            "ended": [output.stop_reason for output in outputs[:-1]],
            "finish_reason": outputs[-1].extra_fields.get("finish_reason"),
            "matched_stop": outputs[-1].extra_fields.get("matched_stop"),
            "pieces": len(outputs),
        }

    found: Result = {}
    for client_name in ("plain", "resuming"):
        client = getattr(here, client_name)
        for name, (prompt, params) in cases.items():
            pieces = client.generate_stream("s", prompt_ids=prompt, sampling_params=dict(params))
            streamed = told([piece async for piece in pieces])
            whole = told([await client.generate("s", prompt_ids=prompt, sampling_params=dict(params))])
            found[f"{client_name}, {name}"] = {"whole": whole, "streamed": streamed}
    await here.records()
    return found


async def interrupted(made: Agent, number: int) -> None:
    """Long answers, so that weights are synced within them; a tool call among them."""
    words = " ".join(f"word{n}" for n in range(25))
    made.hear(f"hello {number}")
    await made.answer(90 + 30 * (number % 3))
    made.hear(f"Say [[{words}\n{TOOL_CALL % number}]]")
    said = await made.answer(300)
    for call in said.calls:
        made.result(call, "done")
    await made.answer(60)
    made.hear(f"Say [[{words}]]!")
    await made.answer(160)


async def weight_syncs(here: World, folder: Path) -> Result:
    """Agents on all three clients at once while the weights change under them, again and again."""
    proxies = [
        await Proxied.start(here, client, folder / name)
        for name, client in (("resuming", here.resuming), ("whole", here.whole), ("plain", here.plain))
    ]
    work = [
        asyncio.ensure_future(interrupted(proxied.agent(number, "sync"), number))
        for proxied in proxies
        for number in range(4)
    ]
    chance, aborted, version = random.Random(5), [], 0
    due = chance.randint(100, 600)
    while not all(task.done() for task in work):
        await asyncio.sleep(0.05)
        if await here.server.sampled.remote() < due:
            continue
        version += 1
        # The clients send a request again after a second; in each third sync that is aborted, too, without a token.
        aborted.append(await here.sync_weights(version, 1.3 if version % 3 == 0 else None))
        due = await here.server.sampled.remote() + chance.randint(300, 700)
    await asyncio.gather(*work)
    sessions = [session for proxied in proxies for session in await proxied.stop()]
    records = await here.records()
    checked = await asyncio.to_thread(forward_again, here.model, sessions, records)
    await here.sync_weights(0)
    return {"sessions": sessions, "records": records, "aborted": aborted, "checked": checked}


def forward_again(model: Path, sessions: list[Result], records: list[Result]) -> list[Result]:
    """Log-probabilities of freely sampled tokens by each one's weights, and by those before or after, for some turns.

    Those are the turns that were resumed, at most six of a client.
    """
    reference = engine_world.Reference(model)
    found, kept = [], Counter()
    for each in engine_runs.match(sessions, records)[0]:
        client = each.session["folder"]
        free = [index for index, value in enumerate(each.turn["log_probs"]) if value != 0.0]  # not ordered ones
        if len(each.parts) == 1 or len(free) < 20 or kept[client] >= 6:
            continue
        kept[client] += 1
        versions = [each.versions[index] for index in free]
        ids, begin = each.turn["prompt"] + each.turn["sampled"], len(each.turn["prompt"])
        tables = {
            version: reference.log_probs(ids, [begin + index for index in free], version)
            for version in {near for version in versions for near in (version, abs(version - 1))}
        }
        found.append(
            {
                "client": client,
                "versions": versions,
                "log_probs": [each.turn["log_probs"][index] for index in free],
                "own": [tables[version][at] for at, version in enumerate(versions)],
                "other": [tables[abs(version - 1)][at] for at, version in enumerate(versions)],
            }
        )
    return found


async def departures(here: World, folder: Path) -> Result:
    """Clients that leave in mid-answer, and a trial that ends in one."""
    import aiohttp
    import openai

    proxied = await Proxied.start(here, here.resuming, folder)
    names, body = [], {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3000}

    async def leave(streamed: bool) -> None:
        session = proxied.session(f"gone-{len(names)}")
        names.append(session.id)
        url = proxied.proxy.openai_url(session) + "/chat/completions"
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {session.token}"}) as http:
            request = asyncio.ensure_future(http.post(url, json={**body, "stream": streamed}))
            if streamed:
                response = await request
                await response.content.readany()
                response.close()
                return
            await asyncio.sleep(0.5)
            request.cancel()

    await asyncio.gather(leave(True), leave(False))
    session = proxied.session("ended")
    ended = sdk_agents.OpenAIAgent(proxied.proxy, session, True)
    ended.hear("hello")
    asked = asyncio.ensure_future(ended.answer(3000))
    while not await here.server.running.remote():
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.3)
    await proxied.proxy.close_session(session.id)
    told = isinstance((await asyncio.gather(asked, return_exceptions=True))[0], openai.APIError)
    await ended.close()
    idle = await here.until_idle()
    for name in names:
        await proxied.proxy.close_session(name)
    await proxied.proxy.stop()
    sessions = [read(folder / name) for name in [*names, "ended"]]
    return {"sessions": sessions, "records": await here.records(), "idle": idle, "told": told}


async def agent_loop(here: World, folder: Path) -> Result:
    """verl's AgentLoopWorker with `proxy_agent` trials: agents are processes, and rows are what training gets."""
    import agent_loop_worker as trials
    from verl.experimental.agent_loop import AgentLoopWorker
    from verl.experimental.agent_loop.proxy_agent import server

    scripted = f"{sys.executable} -I -S {engine_world.PROXY_TESTS / 'scripted_agent.py'}"
    loops = [
        trials.loop("proxy_agent", folder, f"{scripted} openai 3"),
        trials.loop("anthropic", folder, f"{scripted} anthropic 2"),
    ]
    config = trials.make_config(folder, here.model, loops, prompt_length=256, response_length=512)
    worker = AgentLoopWorker(config, here.resuming)
    output = await worker.generate_sequences(trials.batch(["proxy_agent", "anthropic"]))
    await server.stop_all()
    rows = trials.told(output, worker.tokenizer)
    return {"rows": rows, "records": await here.records()}


SCENARIOS: dict[str, Callable[[World, Path], Awaitable[Result]]] = {
    each.__name__: each for each in (conversations, rewrites, streams, weight_syncs, departures, agent_loop)
}


async def main(folder: Path, names: list[str]) -> None:
    began = time.monotonic()
    model = engine_world.write_model(folder / "model")
    result: Result = {"seconds": {}}
    async with engine_world.start(model) as here:
        result["seconds"]["launch"] = time.monotonic() - began
        for name in names or SCENARIOS:
            began = time.monotonic()
            (folder / name).mkdir()
            result[name] = await SCENARIOS[name](here, folder / name)
            result["seconds"][name] = time.monotonic() - began
            print(f"{name}: {result['seconds'][name]:.1f} s", flush=True)
    (folder / "result.json").write_text(json.dumps(result, default=str), encoding="utf-8")


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    asyncio.run(main(Path(sys.argv[1]).absolute(), sys.argv[2:]))
