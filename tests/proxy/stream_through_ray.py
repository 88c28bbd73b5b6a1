"""verl's own LLM clients, and the chat proxy on them, stream from a server actor through a real Ray. Prints what came.

    python stream_through_ray.py

The patched tree is on PYTHONPATH. The server is verl's `vLLMHttpServer` as far as `generate` and `generate_stream` go;
its engine samples what a script says, with cumulative outputs as vLLM gives them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).parent
PROMPT = [5, 6, 7]


def log_prob(token: int) -> float:
    return -token / 512


def routes(ids: list[int]) -> Any:
    """Experts of a sequence: a row for every token but the last, [len(ids) - 1, layers, top_k]."""
    import torch

    return torch.tensor([[[token % 8, 8]] for token in ids[:-1]]).reshape(-1, 1, 2)


class Engine:
    """One request after another gets the next plan.

    A plan has `tokens`; a `gate` that is waited for before the token `gate_at`, or before the end; an `error`, or the
    engine's own cancellation (`cancel`), or no outputs at all (`nothing`) behind the tokens; `finish` and `matched` as
    the engine's last words.
    """

    def __init__(self) -> None:
        self.plans: list[dict[str, Any]] = []
        self.gates: dict[str, asyncio.Event] = {}
        self.aborting = asyncio.Event()
        self.seen: list[tuple[str, list[int], int, dict[str, Any]]] = []
        self.running: set[str] = set()
        self.stopped: list[str] = []

    def gate(self, name: str) -> asyncio.Event:
        return self.gates.setdefault(name, asyncio.Event())

    async def generate(self, prompt: Any, sampling_params: Any, request_id: str, **more: Any) -> Any:
        plan = self.plans.pop(0)
        self.seen.append((request_id, list(prompt["prompt_token_ids"]), sampling_params.max_tokens, more))
        self.running.add(request_id)
        try:
            token_ids: list[int] = []
            rows: list[dict[int, Any]] = []
            tokens = plan["tokens"][: sampling_params.max_tokens]
            for index in range(len(tokens) + 1):
                if index == plan.get("gate_at"):
                    waits = {asyncio.ensure_future(event.wait()) for event in (self.gate(plan["gate"]), self.aborting)}
                    try:
                        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        for wait in waits:
                            wait.cancel()
                if self.aborting.is_set() or index == len(tokens):
                    break
                token = tokens[index]
                token_ids.append(token)
                rows.append({token: SimpleNamespace(logprob=log_prob(token)), 0: SimpleNamespace(logprob=-9.0)})
                yield self._output(prompt, token_ids, rows, sampling_params, None, None)
                await asyncio.sleep(0)
            if plan.get("error"):
                raise ValueError(plan["error"])
            if plan.get("cancel"):
                raise asyncio.CancelledError
            if plan.get("nothing"):
                yield SimpleNamespace(outputs=[])
                return
            finish = "abort" if self.aborting.is_set() else plan.get("finish", "stop")
            yield self._output(prompt, token_ids, rows, sampling_params, finish, plan.get("matched"))
        except (asyncio.CancelledError, GeneratorExit):
            self.stopped.append(request_id)
            raise
        finally:
            self.running.discard(request_id)

    @staticmethod
    def _output(prompt: Any, token_ids: list[int], rows: Any, params: Any, finish: Any, matched: Any) -> Any:
        completion = SimpleNamespace(
            token_ids=token_ids,  # the same growing list each time, as in vLLM
            logprobs=None if params.logprobs is None else rows,
            finish_reason=finish,
            stop_reason=matched,
            routed_experts=routes([*prompt["prompt_token_ids"], *token_ids]) if finish else None,
        )
        return SimpleNamespace(outputs=[completion], metrics=None)


class Params(SimpleNamespace):
    """vLLM's SamplingParams; cumulative outputs are its default, and verl never asks for others."""

    prompt_logprobs = None
    logprobs = None


def make_server(tree: str) -> Any:
    """verl's server over a scripted engine, without its __init__, which starts vLLM."""
    sys.path.insert(0, str(HERE.parent / "patched" / "verl"))
    from verl.utils.tokenizer import normalize_token_ids
    from verl.workers.rollout import replica
    from verl.workers.rollout.streaming import stream_generation
    from verl_parts import load

    modules = {
        "verl.workers.rollout.replica": vars(replica),
        "verl.workers.rollout.streaming": {"stream_generation": stream_generation},
        "verl.utils.tokenizer": {"normalize_token_ids": normalize_token_ids},
        "verl.workers.rollout.utils": {
            **dict.fromkeys(("get_max_position_embeddings", "run_uvicorn"), None),
            "qwen2_5_vl_dedup_image_tokens": lambda ids, processor: ids,
        },
        "vllm": {"SamplingParams": Params},
        "vllm.inputs": {"TokensPrompt": dict},
    }
    server_class = load(Path(tree, "verl/workers/rollout/vllm_rollout/vllm_async_server.py"), "vLLMHttpServer", modules)
    server = object.__new__(type("Scripted", (server_class,), {"lora_as_adapter": False}))
    server.config = SimpleNamespace(
        max_model_len=4096,
        response_length=64,
        prompt_length=64,
        mtp=None,
        enable_rollout_routing_replay=True,
        full_determinism=False,  # of verl 0.9
        get=lambda name, default=None: default,
    )
    server.model_config = SimpleNamespace(processor=None)
    # Of verl 0.9: this server both prefills and decodes, and is the only one.
    server._disaggregation_role, server.replica_rank = "null", 0
    server.global_steps = 3
    server.engine = Engine()
    return server


class WholeServer:
    """A server that knows `generate` alone, as those of other engines."""

    def __init__(self, tree: str) -> None:
        self.server = make_server(tree)
        self.engine = self.server.engine

    async def generate(self, **request: Any) -> Any:
        return await self.server.generate(**request)

    async def plan(self, *plans: dict[str, Any]) -> None:
        self.engine = self.server.engine = Engine()
        self.engine.plans = list(plans)

    async def open(self, name: str) -> None:
        self.engine.gate(name).set()

    async def abort(self, steps: int | None = None) -> None:
        """Aborts what runs, as `pause_generation` does, and then goes on with other weights."""
        self.engine.aborting.set()
        while self.engine.running:
            await asyncio.sleep(0.01)
        self.engine.aborting.clear()
        self.server.global_steps = steps or self.server.global_steps

    async def state(self) -> dict[str, Any]:
        engine = self.engine
        return {"running": len(engine.running), "stopped": list(engine.stopped), "seen": list(engine.seen)}


class Server(WholeServer):
    async def generate_stream(self, **request: Any) -> Any:
        async with aclosing(self.server.generate_stream(**request)) as pieces:
            async for piece in pieces:
                yield piece


def told(piece: Any) -> dict[str, Any]:
    experts = piece.routed_experts
    return {**piece.model_dump(), "routed_experts": None if experts is None else experts.tolist()}


async def until(condition: Any, timeout_s: float = 30.0) -> None:
    """Waits for an asynchronous condition; the bound only ends a run that has failed."""
    for _ in range(int(timeout_s / 0.02)):
        if await condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the condition did not come true")


class World:
    """Two balanced servers, of which one only knows `generate`, and the clients on them."""

    def __init__(self, tree: str) -> None:
        import ray
        from omegaconf import OmegaConf
        from verl.workers.rollout import llm_server

        try:
            from verl.experimental.fully_async_policy.fully_async_rollouter import FullyAsyncLLMServerClient as Resuming
        except ImportError:  # a later verl has it beside its parent
            Resuming = llm_server.FullyAsyncLLMServerClient
        balancer_class = llm_server.GlobalRequestLoadBalancer
        balancer_class = balancer_class if hasattr(balancer_class, "remote") else ray.remote(balancer_class)
        self.server = ray.remote(Server).options(max_concurrency=100).remote(tree)
        self.whole_server = ray.remote(WholeServer).options(max_concurrency=100).remote(tree)
        self.balancer = balancer_class.remote({"streams": self.server})
        self.whole_balancer = balancer_class.remote({"whole": self.whole_server})

        def config(partial: bool) -> Any:
            # Upstream's clients read these.
            rollout = {"name": "vllm", "full_determinism": False}
            return OmegaConf.create(
                {"async_training": {"partial_rollout": partial}, "actor_rollout_ref": {"rollout": rollout}}
            )

        self.client = llm_server.LLMServerClient(config(True), self.balancer)
        self.resuming = Resuming(config(True), self.balancer)
        self.dropping = Resuming(config(False), self.balancer)
        self.whole = llm_server.LLMServerClient(config(True), self.whole_balancer)
        self.resuming_whole = Resuming(config(True), self.whole_balancer)

    async def free(self) -> dict[str, int]:
        """What is still held, once the server has nothing left to do."""

        async def idle() -> bool:
            status = await self.balancer.get_status.remote()
            return not status["total_inflight"] and not (await self.server.state.remote())["running"]

        await until(idle)
        return {"inflight": (await self.balancer.get_status.remote())["total_inflight"]}

    async def pieces(self, client: Any, **params: Any) -> list[dict[str, Any]]:
        sampling = self._sampling(params)
        return [told(piece) async for piece in client.generate_stream("s", prompt_ids=PROMPT, sampling_params=sampling)]

    async def output(self, client: Any, **params: Any) -> dict[str, Any]:
        return told(await client.generate("s", prompt_ids=PROMPT, sampling_params=self._sampling(params)))

    @staticmethod
    def _sampling(params: dict[str, Any]) -> dict[str, Any]:
        given = {"max_tokens": 40, "logprobs": True, **params}
        return {name: value for name, value in given.items() if value is not None}


TOKENS = list(range(20, 50))


async def plain(world: World) -> dict[str, Any]:
    """The same plan whole and in pieces; with and without log-probabilities."""
    plan = {"tokens": TOKENS, "finish": "stop", "matched": "x"}
    await world.server.plan.remote(plan, plan, plan, plan)
    return {
        "output": await world.output(world.client),
        "pieces": await world.pieces(world.client),
        "bare": await world.pieces(world.client, logprobs=False),
        "short": await world.pieces(world.client, max_tokens=7),
        **await world.free(),
        **await world.server.state.remote(),
    }


async def first_at_once(world: World) -> dict[str, Any]:
    await world.server.plan.remote({"tokens": TOKENS, "gate_at": 1, "gate": "rest"})
    found: list[list[int]] = []
    running = []
    sampling = {"max_tokens": 40}
    async for piece in world.client.generate_stream("s", prompt_ids=PROMPT, sampling_params=sampling):
        found.append(piece.token_ids)
        running.append((await world.server.state.remote())["running"])
        await world.server.open.remote("rest")
    return {"pieces": found, "running": running}


async def closed_early(world: World) -> dict[str, Any]:
    await world.server.plan.remote({"tokens": TOKENS, "gate_at": 4, "gate": "never"})
    pieces = world.client.generate_stream("s", prompt_ids=PROMPT, sampling_params={"max_tokens": 40})
    first = await anext(pieces)
    await pieces.aclose()
    return {"first": first.token_ids, **await world.free(), **await world.server.state.remote()}


async def cancelled_while_waiting(world: World, tokens_before: int) -> dict[str, Any]:
    """The caller's task ends while nothing comes."""
    await world.server.plan.remote({"tokens": TOKENS, "gate_at": tokens_before, "gate": "never"})
    task = asyncio.ensure_future(world.pieces(world.client))

    async def waits() -> bool:
        return bool((await world.server.state.remote())["running"])

    await until(waits)
    task.cancel()
    ended = await asyncio.gather(task, return_exceptions=True)
    return {"ended": type(ended[0]).__name__, **await world.free(), **await world.server.state.remote()}


async def without_streams(world: World) -> dict[str, Any]:
    plan = {"tokens": TOKENS}
    await world.whole_server.plan.remote(plan, plan)
    return {
        "pieces": await world.pieces(world.whole),
        "resuming": await world.pieces(world.resuming_whole),
        "inflight": (await world.whole_balancer.get_status.remote())["total_inflight"],
        **await world.whole_server.state.remote(),
    }


async def failing(world: World, tokens: list[int], prompt: list[int] | None = None, **plan: Any) -> dict[str, Any]:
    """What the caller gets when the server fails, in pieces and whole."""
    await world.server.plan.remote({"tokens": tokens, **plan}, {"tokens": tokens, **plan})
    got: list[int] = []
    errors = []

    async def stream() -> None:
        sampling = {"max_tokens": 40}
        async for piece in world.client.generate_stream("s", prompt_ids=prompt or PROMPT, sampling_params=sampling):
            got.extend(piece.token_ids)

    async def whole() -> None:
        await world.client.generate("s", prompt_ids=prompt or PROMPT, sampling_params={"max_tokens": 40})

    for ask in (stream, whole):
        try:
            await ask()
        except (Exception, asyncio.CancelledError) as error:
            errors.append([[base.__name__ for base in type(error).__mro__], str(error)[-300:]])
    return {"got": got, "errors": errors, **await world.free()}


async def resumed(world: World, client: Any, *plans: dict[str, Any], steps: int = 9, **params: Any) -> dict[str, Any]:
    """Each plan with a gate is aborted there; in pieces and whole."""
    found: dict[str, Any] = {}
    for name, ask in (("pieces", world.pieces), ("output", world.output)):
        await world.server.plan.remote(*plans)
        task = asyncio.ensure_future(ask(client, **params))
        for number, plan in enumerate(plans):
            if "gate_at" not in plan:
                continue

            async def there(number: int = number) -> bool:
                state = await world.server.state.remote()
                return len(state["seen"]) > number and state["running"] == 1

            await until(there)
            await asyncio.sleep(0.2)  # so that what was sampled before the abort has been sent
            await world.server.abort.remote(steps + number)
        found[name] = await task
        found[f"{name}_state"] = await world.server.state.remote()
        await world.server.abort.remote(3)
    return {**found, **await world.free()}


async def slow_reader(world: World) -> dict[str, Any]:
    await world.server.plan.remote({"tokens": TOKENS})
    found = []
    async for piece in world.client.generate_stream("s", prompt_ids=PROMPT, sampling_params={"max_tokens": 40}):
        found.append(piece.token_ids)
        await asyncio.sleep(0.3)
    return {"pieces": found, **await world.free()}


async def dead_server(world: World) -> dict[str, Any]:
    """The last of all: the server is gone behind it."""
    import ray

    await world.server.plan.remote({"tokens": TOKENS, "gate_at": 2, "gate": "never"})
    pieces = world.client.generate_stream("s", prompt_ids=PROMPT, sampling_params={"max_tokens": 40})
    await anext(pieces)
    ray.kill(world.server)
    try:
        async for _ in pieces:
            pass
        ended = "no error"
    except Exception as error:
        ended = type(error).__name__
    return {"ended": ended, "inflight": (await world.balancer.get_status.remote())["total_inflight"]}


async def in_process() -> dict[str, Any]:
    """`stream_generation` alone: what no network between can vary."""
    from verl.workers.rollout.replica import TokenOutput
    from verl.workers.rollout.streaming import stream_generation

    def output(count: int, log_probs: bool = True) -> Any:
        rows = [{token: SimpleNamespace(logprob=log_prob(token))} for token in TOKENS[:count]]
        return SimpleNamespace(
            outputs=[
                SimpleNamespace(
                    token_ids=TOKENS[:count],
                    logprobs=rows if log_probs else None,
                    finish_reason=None,
                    stop_reason=None,
                )
            ]
        )

    def final(count: int) -> Any:
        values = [log_prob(token) for token in TOKENS[:count]]
        return TokenOutput(token_ids=TOKENS[:count], log_probs=values, stop_reason="completed", extra_fields={"a": 1})

    async def merged(on_output: Any) -> Any:
        for count in range(1, 21):
            on_output(output(count))
            await asyncio.sleep(0)
        return final(25)

    async def held(on_output: Any) -> Any:
        on_output(output(2))
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0.05)  # the engine's abort takes its time
            ended.append("aborted")
            raise

    async def broken(on_output: Any) -> Any:
        faulty = output(3)
        del faulty.outputs[0].logprobs[2]
        on_output(faulty)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("broken")

    async def loses_rest(on_output: Any) -> Any:
        on_output(output(4))
        await asyncio.sleep(0.02)
        return TokenOutput(token_ids=[], log_probs=None, stop_reason="aborted")

    async def fails(on_output: Any) -> Any:
        on_output(output(2))
        raise ValueError("no such thing")

    async def failed_abort(on_output: Any) -> Any:
        on_output(output(1))
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise RuntimeError("the abort failed") from None

    async def ids(generate: Any, interval_s: float = 3600.0) -> list[list[int]]:
        return [piece.token_ids async for piece in stream_generation(generate, interval_s)]

    ended: list[str] = []
    complaints: list[str] = []
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(f"{record.getMessage()}: {record.exc_info[1]}")  # type: ignore
    logging.getLogger("verl.workers.rollout.streaming").addHandler(handler)
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context["message"]))
    found: dict[str, Any] = {"merged": await ids(merged), "loses_rest": await ids(loses_rest)}
    found["stepwise"] = await ids(merged, 0.0)
    for name, generate in (("held", held), ("failed_abort", failed_abort)):
        pieces = stream_generation(generate)
        found[name] = (await anext(pieces)).token_ids
        await pieces.aclose()
        found[f"{name}_ended"] = list(ended)
    for name, generate in (("broken", broken), ("fails", fails)):
        try:
            await ids(generate)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    found["broken_ended"] = list(ended)
    import gc

    gc.collect()
    await asyncio.sleep(0)
    return {**found, "complaints": complaints, "logged": logged}


@asynccontextmanager
async def proxy_on(client: Any) -> Any:
    """The chat proxy on a client; its one session."""
    import serving
    from verl.experimental.agent_loop.chat_proxy.service import ServiceConfig
    from verl.experimental.agent_loop.vllm_chat_completion_proxy import ChatCompletionProxy, ProxyConfig

    settings = ProxyConfig(service=ServiceConfig(disconnect_grace_s=0.1))
    proxy = await ChatCompletionProxy.start(client, serving.byte_tokenizer(), context_limit=4096, config=settings)
    try:
        yield serving.Served(proxy, proxy.open_session(), None)
    finally:
        await proxy.stop()


def said(text: str) -> list[int]:
    import serving

    tokenizer = serving.byte_tokenizer()
    return [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]


ASK = {"messages": [{"role": "user", "content": "hi"}], "model": "m", "stream": True}


def deltas(text: str) -> str:
    import serving

    data = [data for _, data in serving.events(text) if data != "[DONE]"]
    return "".join(choice["delta"].get("content") or "" for event in data for choice in event.get("choices", ()))


def turn_of(served: Any) -> dict[str, Any]:
    turn = served.turns[-1]
    return {
        "state": turn.state,
        "sampled": turn.sampled.tolist(),
        "log_probs": turn.log_probs.tolist(),
        "steps": [turn.min_global_steps, turn.max_global_steps],
        "extra": dict(turn.engine_extra),
        "streams": served.proxy.service.engine.streams,
    }


async def proxy_deltas(world: World) -> dict[str, Any]:
    """Text reaches the client while the engine is held, and what is archived is what was sampled."""
    import aiohttp

    tokens = said("first and the rest")
    await world.server.plan.remote({"tokens": tokens, "gate_at": 6, "gate": "rest"})
    async with proxy_on(world.client) as served, aiohttp.ClientSession() as http:
        async with http.post(served.chat_url, json=ASK, headers=served.bearer) as response:
            seen = b""
            while "first" not in deltas(seen.decode()):
                seen += await response.content.readany()
            early, running = deltas(seen.decode()), (await world.server.state.remote())["running"]
            state_early = served.turns[-1].state
            await world.server.open.remote("rest")
            seen += await response.read()
        return {
            "early": early,
            "early_state": [running, state_early],
            "text": deltas(seen.decode()),
            "turn": turn_of(served),
            "tokens": tokens,
            **await world.free(),
            **await world.server.state.remote(),
        }


async def proxy_disconnect(world: World) -> dict[str, Any]:
    import aiohttp

    await world.server.plan.remote({"tokens": said("first and the rest"), "gate_at": 6, "gate": "never"})
    async with proxy_on(world.client) as served:
        async with aiohttp.ClientSession() as http:
            response = await http.post(served.chat_url, json=ASK, headers=served.bearer)
            seen = b""
            while "first" not in deltas(seen.decode()):
                seen += await response.content.readany()
            response.close()
        held = await world.free()
        return {"turn_state": served.turns[-1].state, **held, **await world.server.state.remote()}


async def proxy_resumed(world: World) -> dict[str, Any]:
    """The fully async client under the proxy: an abort amid a turn is not seen by the proxy's client."""
    import aiohttp

    tokens = said("first and the rest")
    plans = [{"tokens": tokens[:9], "gate_at": 6, "gate": "never"}, {"tokens": tokens[6:]}]
    await world.server.plan.remote(*plans)
    async with proxy_on(world.resuming) as served, aiohttp.ClientSession() as http:
        async with http.post(served.chat_url, json=ASK, headers=served.bearer) as response:
            seen = b""
            while "first" not in deltas(seen.decode()):
                seen += await response.content.readany()
            await world.server.abort.remote(9)
            seen += await response.read()
        await world.server.abort.remote(3)
        return {
            "text": deltas(seen.decode()),
            "turn": turn_of(served),
            "tokens": tokens,
            **await world.free(),
            **await world.server.state.remote(),
        }


async def proxy_fails(world: World) -> dict[str, Any]:
    """The engine fails amid a streamed answer."""
    import aiohttp
    import serving

    await world.server.plan.remote({"tokens": said("first"), "error": "secret detail"})
    async with proxy_on(world.client) as served, aiohttp.ClientSession() as http:
        async with http.post(served.chat_url, json=ASK, headers=served.bearer) as response:
            text = await response.text()
        return {"last": serving.events(text)[-1][1], "turn_state": served.turns[-1].state, **await world.free()}


async def everything(tree: str) -> dict[str, Any]:
    world = World(tree)
    await asyncio.gather(world.server.state.remote(), world.whole_server.state.remote())  # they import for long
    gated = {"gate": "never"}
    half, rest = {"tokens": TOKENS, "gate_at": 12, **gated}, {"tokens": TOKENS[12:]}
    nothing = {"tokens": TOKENS, "gate_at": 0, **gated}
    cases = {
        "in_process": in_process(),
        "plain": plain(world),
        "first_at_once": first_at_once(world),
        "closed_early": closed_early(world),
        "cancelled_before": cancelled_while_waiting(world, 0),
        "cancelled_amid": cancelled_while_waiting(world, 3),
        "without_streams": without_streams(world),
        "error_before": failing(world, [], error="no such thing"),
        "error_amid": failing(world, TOKENS[:5], error="no such thing"),
        "too_long": failing(world, TOKENS, prompt=[1] * 5000),
        "cancelled_inside": failing(world, TOKENS[:2], cancel=True),
        "resumed": resumed(world, world.resuming, half, rest),
        "resumed_early": resumed(world, world.resuming, nothing, half, rest),
        "resumed_full": resumed(world, world.resuming, half, max_tokens=12),
        "resumed_nearly_full": resumed(world, world.resuming, half, rest, max_tokens=13),
        "unlimited": resumed(world, world.resuming, half, rest, max_tokens=None),
        "dropped": resumed(world, world.dropping, half),
        "aborted": resumed(world, world.client, half),
        "nothing_left": resumed(world, world.dropping, {"tokens": TOKENS[:3], "nothing": True}),
        "slow_reader": slow_reader(world),
        "proxy_deltas": proxy_deltas(world),
        "proxy_disconnect": proxy_disconnect(world),
        "proxy_resumed": proxy_resumed(world),
        "proxy_fails": proxy_fails(world),
        "dead_server": dead_server(world),
    }
    # The bound only ends a run that has failed.
    return {name: await asyncio.wait_for(case, 240) for name, case in cases.items()}


def main() -> None:
    import os

    import ray
    import verl

    sys.path.insert(0, str(HERE))
    tree = str(Path(verl.__file__).parents[1])
    environment = {"PYTHONPATH": os.pathsep.join([tree, str(HERE)])}
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        runtime_env={"env_vars": environment},
    )
    try:
        print("RESULT " + json.dumps(asyncio.run(everything(tree)), default=str))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
