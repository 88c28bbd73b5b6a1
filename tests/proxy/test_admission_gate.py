"""The gate before the engine: what it asks, who waits, and that nothing is left behind; on a clock of its own."""

from __future__ import annotations

import asyncio
import functools
import random
from collections import Counter
from collections.abc import Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import virtual_clock

CAPACITY = 1000


class Client:
    """verl's client, as far as the gate asks it.

    Attributes:
        usage: what other processes use, a share; an exception is raised.
        resident: tokens of any prompt that are in the cache.
        held: sessions' servers that were not given back.
        asked: how often what was asked.
    """

    def __init__(self, delay: float = 0.0) -> None:
        self.usage: Any = (0.0, CAPACITY)
        self.resident: Any = 0
        self.server: Any = "s"
        self.delay = delay
        self.held = 0
        self.asked: Counter[str] = Counter()

    async def _answer(self, about: str, answer: Any) -> Any:
        self.asked[about] += 1
        await asyncio.sleep(self.delay)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def hold_server(self, request_id: str, *, timeout_s: float) -> tuple[str, str]:
        server = await self._answer("server", self.server)
        self.held += 1
        return server, f"the handle of {server}"

    def leave_server(self, server_id: str) -> None:
        assert server_id == self.server
        self.held -= 1

    async def kv_cache_usage(self, server: str, *, timeout_s: float) -> Any:
        assert server == f"the handle of {self.server}"
        return await self._answer("usage", self.usage)

    async def resident_prefix_tokens(self, server: str, prompt_ids: list[int], *, timeout_s: float) -> Any:
        return await self._answer("prefix", self.resident)


class World:
    """A gate and its client."""

    def __init__(self, client: Any = None, **config: float) -> None:
        from verl.experimental.agent_loop.chat_proxy.admission import AdmissionConfig
        from verl.experimental.agent_loop.chat_proxy.admission_gate import AdmissionGate
        from verl.experimental.agent_loop.chat_proxy.events import Events

        self.client = Client() if client is None else client
        self.events = Events()
        self.gate = AdmissionGate(AdmissionConfig(**config), self.client, self.events)
        self.running: list[str] = []

    @asynccontextmanager
    async def turn(self, session: str, tokens: int, *, sampled: int = 0, media: Any = None, ids: Any = None) -> Any:
        root = SimpleNamespace(id=f"{session}/root")
        ids = [hash((session, n)) for n in range(tokens)] if ids is None else ids
        turn = SimpleNamespace(path=lambda: [root], parent=None, end=len(ids) + sampled)
        async with self.gate.admitted(session, SimpleNamespace(ids=ids, turn=turn, media=media)):
            self.running.append(session)
            try:
                yield
            finally:
                self.running.remove(session)

    def start(self, session: str, tokens: int, seconds: float = 1e6, **kwargs: Any) -> asyncio.Task[None]:
        """A turn that stays in the engine for a while."""

        async def turn() -> None:
            async with self.turn(session, tokens, **kwargs):
                await asyncio.sleep(seconds)

        return asyncio.ensure_future(turn())

    def how(self) -> dict[str, int]:
        counts = self.events.snapshot()
        return {dict(labels)["how"]: n for (name, labels), n in counts.items() if name == "admission"}

    def metric(self, name: str) -> float:
        line = next(line for line in self.gate.lines() if line.startswith(f"chat_proxy_admission_{name} "))
        return float(line.split()[1])

    def check_nothing_is_left(self) -> None:
        assert self.client.held == 0, "a server is still held"
        assert self.metric("waiting") == self.metric("leases") == self.metric("leased_tokens") == 0
        assert not self.gate._waiters and all(task.done() for task in self.gate._tasks.values())
        assert all(lease.calls == 0 for lease in self.gate._scheduler.leases)


def on_virtual_time(test: Callable[..., Any]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        virtual_clock.run(test(*args, **kwargs))

    return run


@on_virtual_time
async def test_a_gate_that_is_off_asks_nothing_and_shows_nothing() -> None:
    from verl.experimental.agent_loop.chat_proxy.admission_gate import AdmissionGate
    from verl.experimental.agent_loop.chat_proxy.events import Events

    client = Client()
    gate = AdmissionGate(None, client, Events())
    async with gate.admitted("a", SimpleNamespace(ids=[1] * 5000)):
        assert not client.asked
    assert list(gate.lines()) == []


@on_virtual_time
async def test_a_client_without_probes_holds_nobody_back_and_is_told_of_once(caplog: Any) -> None:
    world = World(client=SimpleNamespace())
    turns = [world.start(f"session-{number}", 900) for number in range(5)]
    await asyncio.sleep(1)
    assert len(world.running) == 5
    for turn in turns:
        turn.cancel()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no turn is held back" in caplog.text


@on_virtual_time
async def test_a_session_waits_for_room_and_is_let_in_as_soon_as_there_is_some() -> None:
    world = World()
    world.start("a", 800)
    waiting = world.start("b", 100, seconds=1)
    await asyncio.sleep(7)
    assert world.running == ["a"]
    assert world.metric("waiting") == 1 and world.metric("pressure") == 0.8
    world.gate.forget("a")
    await asyncio.sleep(0.001)
    assert world.running == ["a", "b"]
    await waiting
    assert world.how() == {"open": 2}
    buckets = [line for line in world.gate.lines() if line.startswith("chat_proxy_admission_wait_seconds_sum")]
    assert buckets == ["chat_proxy_admission_wait_seconds_sum 7"]


@on_virtual_time
async def test_a_session_with_a_lease_asks_nothing() -> None:
    world = World()
    async with world.turn("a", 800):
        pass
    asked = world.client.asked.copy()
    world.client.usage = (1.0, CAPACITY)
    async with world.turn("a", 900):
        assert world.how() == {"open": 1, "reserved": 1}
    assert world.client.asked == asked == {"server": 1, "usage": 1}


@on_virtual_time
async def test_the_prefix_is_asked_for_only_when_there_is_no_room_and_lets_pass() -> None:
    world = World()
    async with world.turn("a", 500):
        assert world.client.asked["prefix"] == 0
        world.client.resident = 479
        waiting = world.start("b", 600)
        await asyncio.sleep(1)
        assert world.running == ["a"] and world.client.asked["prefix"] == 1
        world.client.resident = 480
        async with world.turn("c", 600):
            assert world.how() == {"open": 1, "resident": 1}
        waiting.cancel()


@on_virtual_time
async def test_a_prompt_with_media_cannot_be_looked_up_and_passes() -> None:
    world = World()
    async with world.turn("a", 800), world.turn("b", 800, media="a picture"):
        assert world.how() == {"open": 1, "unprobed": 1}
    assert world.client.asked["prefix"] == 0


@on_virtual_time
async def test_what_prompts_have_in_common_takes_room_once() -> None:
    world = World()
    common = list(range(600))
    first, second = [*common, *range(-100, 0)], [*common, *range(-300, -200)]
    async with world.turn("a", 0, ids=first), world.turn("b", 0, ids=second):
        assert world.how() == {"open": 2}
        assert world.metric("leased_tokens") == 800
        world.client.resident = 600
        waiting = world.start("c", 0, ids=[*common, *range(-500, -400)])
        await asyncio.sleep(1)
        assert len(world.running) == 2  # nothing of its own is resident
        waiting.cancel()


@on_virtual_time
async def test_what_a_prompt_has_in_common_with_its_own_session_s_is_its_own() -> None:
    world = World(idle_grace_sec=10)
    async with world.turn("a", 800):
        pass
    await asyncio.sleep(11)
    async with world.turn("a", 800):
        assert world.how() == {"open": 2} and world.metric("leased_tokens") == 800


@on_virtual_time
async def test_a_queue_that_fills_again_is_looked_after_again() -> None:
    world = World(wait_poll_sec=1000)
    for number in range(3):
        world.start(f"first {number}", 800)
        await asyncio.sleep(1)
        waiting = world.start(f"second {number}", 100, seconds=1)
        await asyncio.sleep(1)
        world.gate.forget(f"first {number}")
        await asyncio.wait_for(waiting, 2)
        world.gate.forget(f"second {number}")


# -- the queue's ends --------------------------------------------------------------------------------------------------


@on_virtual_time
async def test_one_that_is_cancelled_leaves_the_queue() -> None:
    world = World(idle_grace_sec=10)
    async with world.turn("a", 800):
        gone, later = world.start("b", 100), world.start("c", 100, seconds=1)
        await asyncio.sleep(1)
        assert world.client.held == 2
        gone.cancel()
        await asyncio.sleep(0.1)
        assert world.client.held == 1 and world.metric("waiting") == 1
        world.gate.forget("a")
        await later
    assert world.how() == {"open": 2, "left": 1}
    await asyncio.sleep(11)
    world.gate._scheduler.lease_of("", "", 100)
    world.check_nothing_is_left()


@on_virtual_time
async def test_one_that_is_cancelled_while_it_is_let_in_keeps_no_lease_in_flight() -> None:
    world = World()
    world.start("a", 800)
    waiting = world.start("b", 100)
    await asyncio.sleep(1)
    world.gate.forget("a")
    while world.gate._waiters:
        await asyncio.sleep(0)
    waiting.cancel()  # it is let in, but not awake yet
    await asyncio.sleep(1)
    assert waiting.cancelled() and world.client.held == 0
    assert [lease.calls for lease in world.gate._scheduler.leases] == [0]
    assert "b" not in world.running


@pytest.mark.parametrize("reason", [RuntimeError("the engine failed"), asyncio.CancelledError(), ConnectionError()])
@on_virtual_time
async def test_a_turn_that_fails_gives_its_place_back_and_its_session_keeps_its_lease(reason: BaseException) -> None:
    world = World(idle_grace_sec=60)
    with pytest.raises(type(reason)):
        async with world.turn("a", 800):
            raise reason
    (lease,) = world.gate._scheduler.leases
    assert (lease.calls, lease.tokens) == (0, 800)
    async with world.turn("a", 800):  # what a retry is
        assert world.how() == {"open": 1, "reserved": 1}


@on_virtual_time
async def test_the_end_of_the_grace_lets_the_next_one_in() -> None:
    world = World(idle_grace_sec=60)
    async with world.turn("a", 700, sampled=100):
        pass
    assert world.metric("leased_tokens") == 800
    began = asyncio.get_running_loop().time()
    async with world.turn("b", 100):
        assert asyncio.get_running_loop().time() - began == 60


@on_virtual_time
async def test_a_grace_that_begins_while_others_wait_lets_them_in_at_its_end() -> None:
    world = World(idle_grace_sec=60, wait_poll_sec=1000)
    world.start("a", 800, seconds=10)
    await asyncio.sleep(1)
    async with world.turn("b", 100):
        assert asyncio.get_running_loop().time() == pytest.approx(70, abs=0.01)


@on_virtual_time
async def test_one_that_waits_is_let_in_at_the_bound() -> None:
    world = World(max_wait_sec=40)
    world.start("a", 800)
    await asyncio.sleep(0)
    async with world.turn("b", 100):
        assert 20 <= asyncio.get_running_loop().time() <= 40
        assert world.how() == {"open": 1, "overdue": 1}


# -- what is asked -----------------------------------------------------------------------------------------------------


@on_virtual_time
async def test_those_who_wait_ask_again_at_every_poll_the_first_one_only() -> None:
    world = World(wait_poll_sec=5, probe_interval_sec=1)
    world.client.usage = (0.0, CAPACITY)
    world.start("a", 100)
    await asyncio.sleep(2)
    world.client.usage = (0.9, CAPACITY)
    turns = [world.start(f"w{number}", 50) for number in range(20)]
    await asyncio.sleep(1.9)
    before = world.client.asked.copy()
    await asyncio.sleep(10)
    assert world.client.asked - before == {"usage": 2, "prefix": 2}
    world.client.usage = (0.1, CAPACITY)
    await asyncio.sleep(5)
    assert len(world.running) == 1 + 15  # a's 100 and 15 times 50 are the 850 of the watermark
    for turn in turns:
        turn.cancel()


@on_virtual_time
async def test_one_whose_prefix_came_back_passes_at_the_next_poll() -> None:
    world = World(wait_poll_sec=5)
    async with world.turn("a", 800):
        waiting = world.start("b", 100)
        await asyncio.sleep(1)
        world.client.resident = 96
        await asyncio.sleep(5)
        assert world.running == ["a", "b"] and world.how() == {"open": 1, "resident": 1}
        waiting.cancel()


@on_virtual_time
async def test_many_that_come_at_once_ask_for_the_usage_once_an_interval() -> None:
    world = World(Client(delay=0.1), probe_interval_sec=3)
    turns = [world.start(f"session-{number}", 1) for number in range(50)]
    await asyncio.sleep(1)
    assert len(world.running) == 50 and world.client.asked["usage"] == 1
    late = world.start("late", 1)
    await asyncio.sleep(1)
    assert world.client.asked["usage"] == 1
    await asyncio.sleep(2)
    later = world.start("later", 1)
    await asyncio.sleep(1)
    assert world.client.asked["usage"] == 2
    for turn in (*turns, late, later):
        turn.cancel()


@on_virtual_time
async def test_without_an_answer_the_last_one_counts_for_a_while_and_then_nobody_is_held_back(caplog: Any) -> None:
    world = World(max_wait_sec=1e6)
    world.start("a", 800)
    await asyncio.sleep(2)
    world.client.usage = TimeoutError("no answer within 2 s")
    waiting = world.start("b", 800)
    await asyncio.sleep(55)
    assert world.running == ["a"]
    await asyncio.sleep(10)
    assert world.running == ["a", "b"] and world.how() == {"open": 1, "unprobed": 1}
    assert world.events.total("admission_probe_error", probe="usage", kind="TimeoutError") > 10
    assert caplog.text.count("not held back") == 1
    waiting.cancel()


@on_virtual_time
async def test_a_server_that_cannot_tell_holds_nobody_back(caplog: Any) -> None:
    world = World()
    world.client.usage = None
    async with world.turn("a", 900), world.turn("b", 900):
        assert world.how() == {"unprobed": 2}
    assert caplog.text.count("can't tell the usage") == 1


@on_virtual_time
async def test_where_no_server_can_be_found_nobody_is_held_back() -> None:
    world = World()
    world.client.server = TimeoutError("the load balancer is gone")
    async with world.turn("a", 900), world.turn("b", 900):
        assert world.how() == {"unprobed": 2}
    assert world.client.held == 0


@on_virtual_time
async def test_a_prefix_that_cannot_be_asked_for_lets_pass() -> None:
    world = World()
    world.client.resident = RuntimeError("gone")
    async with world.turn("a", 800), world.turn("b", 800):
        assert world.how() == {"open": 1, "unprobed": 1}


@on_virtual_time
async def test_the_probes_seconds_and_errors_are_on_the_metrics_page() -> None:
    world = World(Client(delay=0.0))
    async with world.turn("a", 800):
        pass
    lines = list(world.gate.lines())
    assert 'chat_proxy_admission_probe_seconds_count{probe="usage"} 1' in lines
    assert 'chat_proxy_admission_probe_seconds_count{probe="server"} 1' in lines
    assert 'chat_proxy_admission_lease_ended_total{how="expired"} 0' in lines


@on_virtual_time
async def test_a_fault_of_admission_lets_everybody_in_and_is_told_of_once(caplog: Any) -> None:
    world = World()
    world.start("a", 800)
    await asyncio.sleep(1)
    turns = [world.start(f"w{number}", 800) for number in range(3)]
    await asyncio.sleep(1)
    assert world.running == ["a"]

    def broken(*args: Any) -> None:
        raise ZeroDivisionError

    world.gate._scheduler.next_in = broken
    world.gate.forget("nobody")
    await asyncio.sleep(1)
    assert len(world.running) == 4
    async with world.turn("late", 800):
        assert world.client.held == 0
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert list(world.gate.lines()) == []
    for turn in turns:
        turn.cancel()
    await asyncio.gather(*turns, return_exceptions=True)


@on_virtual_time
async def test_a_fault_on_the_way_to_the_gate_is_none_of_the_turn(caplog: Any) -> None:
    world = World()
    world.client.usage = "nonsense"
    async with world.turn("a", 800):
        pass
    assert "no turn is held back from now on" in caplog.text and world.client.held == 0


# -- many sessions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_sessions_come_go_fail_and_are_cancelled_and_nothing_is_left(seed: int) -> None:
    rng = random.Random(seed)

    async def main() -> None:
        world = World(Client(delay=0.05), max_wait_sec=200, idle_grace_sec=rng.choice([0, 5, 60]), wait_poll_sec=5)
        loop = asyncio.get_running_loop()
        turns = 0

        async def session(name: str) -> None:
            nonlocal turns
            tokens = rng.randint(20, 300)
            for _ in range(rng.randint(1, 8)):
                began = loop.time()
                try:
                    async with world.turn(name, tokens, sampled=20):
                        assert loop.time() - began <= 200 + 1, "waited for longer than the bound"
                        turns += 1
                        await asyncio.sleep(rng.uniform(0, 20))
                        if rng.random() < 0.1:
                            raise RuntimeError("the engine failed")
                except RuntimeError:
                    continue
                tokens += rng.randint(20, 80)
                await asyncio.sleep(rng.uniform(0, 30))

        async def run(name: str) -> None:
            await asyncio.sleep(rng.uniform(0, 30))
            work = asyncio.ensure_future(session(name))
            await asyncio.wait({work}, timeout=rng.choice([20, 400, 1e9]))
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            world.gate.forget(name)
            if not work.cancelled():
                work.result()

        async def others() -> None:
            while True:
                await asyncio.sleep(rng.uniform(1, 20))
                world.client.usage = rng.choice([(rng.uniform(0, 1), CAPACITY), TimeoutError("late")])
                world.client.resident = rng.choice([0, 10_000])

        background = asyncio.ensure_future(others())
        await asyncio.gather(*(run(f"session-{number}") for number in range(30)))
        background.cancel()
        await asyncio.sleep(6)
        assert turns and not world.running
        world.check_nothing_is_left()

    virtual_clock.run(main())
