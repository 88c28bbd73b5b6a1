"""Admission's scheduler: leases, the queue and its order, on times that the test says."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

CAPACITY = 1000


def scheduler(**config: float) -> Any:
    from verl.experimental.agent_loop.chat_proxy.admission import AdmissionConfig, Scheduler

    found = Scheduler(AdmissionConfig(**config))
    found.observe("s", (0.0, CAPACITY))
    return found


def call(session: str, tokens: int, conversation: str | None = None, *, server: str = "s", shared: int = 0) -> Any:
    from verl.experimental.agent_loop.chat_proxy.admission import Call

    return Call(session, conversation or session, server, tokens, shared)


def arrive(
    scheduler: Any, now: float, session: str, tokens: int, conversation: str | None = None, **kwargs: Any
) -> Any:
    """A call that was let in, or that waits."""
    made = call(session, tokens, conversation, **kwargs)
    if not scheduler.arrive(made, now):
        scheduler.wait(made, now)
    return made


def let_in(scheduler: Any, now: float) -> list[tuple[str, str]]:
    found = []
    while (each := scheduler.next_in(now)) is not None:
        found.append((each.session, each.how))
    return found


# -- settings ----------------------------------------------------------------------------------------------------------


def read(**environment: str) -> Any:
    from verl.experimental.agent_loop.chat_proxy.admission import AdmissionConfig

    return AdmissionConfig.from_environment({f"HARBOR_SESSION_{name}": value for name, value in environment.items()})


@pytest.mark.parametrize("switch", [{}, {"LEVEL_SCHEDULER": "0"}, {"LEVEL_SCHEDULER": ""}])
def test_it_is_off_unless_it_is_switched_on(switch: dict[str, str]) -> None:
    assert read(**switch, SCHEDULER_HIGH_WATERMARK="nonsense") is None


def test_every_setting_is_read() -> None:
    from verl.experimental.agent_loop.chat_proxy.admission import AdmissionConfig

    assert read(LEVEL_SCHEDULER="1") == AdmissionConfig(0.85, 0.80, 60, 5, 300, 1, 2)
    given = {"HIGH_WATERMARK": "0.5", "HIT_THRESHOLD": "1", "IDLE_GRACE_SEC": "0", "WAIT_POLL_SEC": "0.5"}
    given |= {"MAX_WAIT_SEC": "7", "PROBE_INTERVAL_SEC": "3", "PROBE_TIMEOUT_SEC": "4"}
    found = read(LEVEL_SCHEDULER="1", **{f"SCHEDULER_{name}": value for name, value in given.items()})
    assert found == AdmissionConfig(0.5, 1, 0, 0.5, 7, 3, 4)


def test_the_table_of_the_settings_is_what_is_read() -> None:
    from dataclasses import fields

    from verl.experimental.agent_loop.chat_proxy import admission

    for item in fields(admission.AdmissionConfig):
        row = next(line for line in (admission.__doc__ or "").splitlines() if item.name.upper() in line)
        assert float(row.replace("`", " ").split()[1]) == item.default, row


@pytest.mark.parametrize(
    "name, value, reason",
    [
        ("LEVEL_SCHEDULER", "yes", "HARBOR_SESSION_LEVEL_SCHEDULER is 'yes'; give 1"),
        ("SCHEDULER_HIGH_WATERMARK", "85", "HIGH_WATERMARK is 85; give a share above 0, 1 at most"),
        ("SCHEDULER_HIGH_WATERMARK", "nan", "HIGH_WATERMARK is nan; give a share"),
        ("SCHEDULER_HIT_THRESHOLD", "0", "HIT_THRESHOLD is 0; give a share"),
        ("SCHEDULER_HIT_THRESHOLD", "much", "HIT_THRESHOLD is 'much', which is no number"),
        ("SCHEDULER_IDLE_GRACE_SEC", "-1", "IDLE_GRACE_SEC is -1; give seconds"),
        ("SCHEDULER_MAX_WAIT_SEC", "0", "MAX_WAIT_SEC is 0; give seconds"),
        ("SCHEDULER_MAX_WAIT_SEC", "inf", "MAX_WAIT_SEC is inf; give seconds"),
        (
            "SCHEDULER_WATERMARK",
            "0.5",
            "HARBOR_SESSION_SCHEDULER_WATERMARK is no setting; there are HARBOR_SESSION_SCHED",
        ),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_with_the_reason(name: str, value: str, reason: str) -> None:
    with pytest.raises(ValueError) as refused:
        read(**({"LEVEL_SCHEDULER": "1"} | {name: value}))
    assert reason in str(refused.value)


# -- who is let in -----------------------------------------------------------------------------------------------------


def test_sessions_are_let_in_up_to_the_watermark_and_then_wait() -> None:
    s = scheduler(high_watermark=0.8)
    assert arrive(s, 0, "a", 500).how == "open"
    assert arrive(s, 0, "b", 300).how == "open"
    assert arrive(s, 0, "c", 1).how is None
    assert let_in(s, 1) == []
    assert s.pressure("s") == 0.8


def test_a_session_with_a_lease_passes_even_when_others_wait() -> None:
    s = scheduler()
    first = arrive(s, 0, "a", 800)
    waiting = arrive(s, 1, "b", 100)
    s.release(first, 820, 2)
    assert arrive(s, 3, "a", 840).how == "reserved"
    assert waiting.how is None


def test_another_conversation_of_a_session_passes_by_its_lease_and_takes_one() -> None:
    s = scheduler()
    arrive(s, 0, "a", 800)
    assert arrive(s, 1, "a", 100, "sub-agent").how == "reserved"
    assert sorted(lease.tokens for lease in s.leases) == [100, 800]


def test_what_other_processes_use_counts() -> None:
    s = scheduler(high_watermark=0.8)
    arrive(s, 0, "a", 300)
    s.observe("s", (0.7, CAPACITY))  # 300 of the 700 are a's
    assert arrive(s, 1, "b", 101).how is None
    s.observe("s", (0.3, CAPACITY))
    assert let_in(s, 2) == [("b", "open")]


def test_a_session_without_company_is_let_in_whatever_its_size() -> None:
    s = scheduler()
    s.observe("s", (0.99, CAPACITY))
    assert arrive(s, 0, "a", 5000).how == "open"
    assert arrive(s, 0, "b", 1).how is None


def test_a_server_that_cannot_be_asked_holds_nobody_back() -> None:
    s = scheduler()
    arrive(s, 0, "a", 900)
    arrive(s, 0, "b", 900)
    s.observe("s", None)
    assert let_in(s, 1) == [("b", "unprobed")]
    assert arrive(s, 1, "c", 900).how == "unprobed"


def test_a_full_server_holds_nobody_back_on_another() -> None:
    s = scheduler()
    s.observe("t", (0.0, CAPACITY))
    arrive(s, 0, "a", 800)
    arrive(s, 0, "b", 800)
    assert arrive(s, 0, "c", 800, server="t").how == "open"
    late = arrive(s, 0, "d", 300, server="t")
    s.observe("t", (0.0, 2 * CAPACITY))
    assert let_in(s, 1) == [("d", "open")] and late.how == "open"


def test_only_the_own_part_of_a_prompt_takes_room_and_counts_as_resident() -> None:
    s = scheduler()
    assert arrive(s, 0, "a", 800).how == "open"
    assert arrive(s, 0, "b", 700, shared=650).how == "open"
    fresh = call("c", 700, shared=650)
    assert not s.arrive(fresh, 1)
    assert not s.is_resident(fresh, 650)  # that is the others' prefix
    assert not s.is_resident(fresh, 689)
    assert s.is_resident(fresh, 690)  # 0.8 of its own 50
    assert not s.is_resident(call("d", 650, shared=650), 650)


# -- order -------------------------------------------------------------------------------------------------------------


def test_sessions_go_in_the_order_in_which_they_first_came_and_one_by_one_as_room_comes() -> None:
    s = scheduler(idle_grace_sec=10)
    first = arrive(s, 0, "a", 400)
    other = arrive(s, 0, "b", 400)
    for number, session in enumerate(("c", "d", "e")):
        arrive(s, 1 + number, session, 300)
    assert let_in(s, 5) == []
    s.release(first, 400, 5)
    assert let_in(s, 14.9) == []
    assert let_in(s, 15) == [("c", "open")]
    s.release(other, 400, 15)
    s.forget("b")
    assert let_in(s, 16) == [("d", "open")]
    assert [waiting.session for waiting in s.waiting] == ["e"]


def test_one_that_comes_later_does_not_slip_past_those_who_wait() -> None:
    s = scheduler()
    arrive(s, 0, "a", 500)
    arrive(s, 1, "big", 800)
    assert arrive(s, 2, "small", 10).how is None
    assert let_in(s, 2) == []
    s.forget("a")
    assert let_in(s, 3) == [("big", "open"), ("small", "open")]


def test_a_session_that_lost_its_lease_goes_before_those_that_start() -> None:
    s = scheduler(idle_grace_sec=10)
    old = arrive(s, 0, "old", 500)
    s.release(old, 500, 1)
    arrive(s, 2, "a", 300)
    assert let_in(s, 11) == []  # the lease is over
    arrive(s, 12, "b", 500)
    arrive(s, 13, "fresh", 400)
    assert arrive(s, 14, "old", 520).how is None
    s.forget("b")
    assert let_in(s, 15) == [("old", "open")]


def test_a_second_call_of_a_waiting_session_follows_the_first() -> None:
    s = scheduler()
    arrive(s, 0, "a", 800)
    arrive(s, 1, "b", 400, "main")
    arrive(s, 2, "c", 400)
    arrive(s, 3, "b", 400, "title")
    s.forget("a")
    assert let_in(s, 4) == [("b", "open"), ("b", "reserved")]


def test_a_call_that_left_the_queue_is_not_let_in() -> None:
    s = scheduler()
    arrive(s, 0, "a", 800)
    gone = arrive(s, 1, "b", 400)
    arrive(s, 2, "c", 400)
    s.leave(gone)
    s.forget("a")
    assert let_in(s, 3) == [("c", "open")]


# -- bounded waits -----------------------------------------------------------------------------------------------------


def test_nobody_waits_longer_than_the_bound_and_not_all_are_let_in_at_once() -> None:
    s = scheduler(max_wait_sec=100)
    arrive(s, 0, "a", 850)
    for number in range(50):
        arrive(s, 1, f"w{number}", 10)
    assert let_in(s, 50.9) == []
    steps = [len(let_in(s, now)) for now in range(51, 102)]
    assert sum(steps) == 50
    assert max(steps) <= 2


def test_one_that_is_overdue_takes_the_place_of_the_longest_idle() -> None:
    s = scheduler(max_wait_sec=10, idle_grace_sec=1000)
    calls = [arrive(s, 0, name, 300) for name in ("a", "b")]
    for number, each in enumerate(calls):
        s.release(each, 300, 1 + number)
    arrive(s, 3, "c", 300)
    assert let_in(s, 13) == [("c", "overdue")]
    assert sorted(lease.session for lease in s.leases) == ["b", "c"]
    assert s.ended == {"expired": 0, "displaced": 1, "session": 0}


def test_time_alone_changes_something_at_the_next_deadline_or_expiry() -> None:
    s = scheduler(max_wait_sec=100, idle_grace_sec=60)
    assert s.next_change(0) == math.inf
    first = arrive(s, 0, "a", 850)
    waiting = arrive(s, 1, "b", 10)
    assert s.next_change(1) == waiting.deadline
    assert 51 <= waiting.deadline <= 101
    s.release(first, 850, 2)
    s.forget("nobody")
    assert s.next_change(2) == min(62, waiting.deadline)


# -- leases ------------------------------------------------------------------------------------------------------------


def test_a_lease_outlives_its_call_by_the_grace() -> None:
    s = scheduler(idle_grace_sec=60)
    first = arrive(s, 0, "a", 800)
    s.release(first, 810, 5)
    assert arrive(s, 64.9, "a", 820).how == "reserved"
    again = s.leases[0]
    assert again.calls == 1
    s.release(first, 820, 70)
    assert s.lease_of("a", "a", 130) is None
    assert s.ended["expired"] == 1


def test_a_lease_with_a_call_in_flight_does_not_expire() -> None:
    s = scheduler(idle_grace_sec=1)
    one, two = arrive(s, 0, "a", 800), arrive(s, 0, "a", 800)
    s.release(one, 800, 1)
    assert s.lease_of("a", "a", 1000) is not None
    s.release(two, 800, 1000)
    assert s.lease_of("a", "a", 1001) is None


def test_leases_that_outgrow_the_cache_are_given_up_longest_idle_first() -> None:
    s = scheduler()
    calls = {name: arrive(s, 0, name, 280) for name in ("a", "b", "c")}
    for number, name in enumerate(("b", "a")):
        s.release(calls[name], 280, 1 + number)
    s.release(calls["c"], 440, 3)  # 280 + 280 + 440 still fit
    assert len(s.leases) == 3
    again = arrive(s, 4, "c", 441)
    assert sorted(lease.session for lease in s.leases) == ["a", "c"]  # b has been evicted by now
    s.release(again, 721, 5)
    assert [lease.session for lease in s.leases] == ["c"]  # and now a
    s.observe("s", (0.5, CAPACITY))
    assert arrive(s, 6, "b", 281).how is None


def test_the_end_of_a_session_ends_its_leases_with_calls_or_without() -> None:
    s = scheduler()
    running = arrive(s, 0, "a", 400, "main")
    s.release(arrive(s, 0, "a", 400, "sub-agent"), 400, 1)
    s.forget("a")
    assert s.leases == () and s.pressure("s") == 0
    check(s)
    s.release(running, 400, 2)  # comes late, and changes nothing
    assert s.leases == () and s.pressure("s") == 0 and not s._ranks


# -- all of it ---------------------------------------------------------------------------------------------------------

SESSIONS = st.sampled_from([f"session-{number}" for number in range(6)])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), SESSIONS, st.integers(0, 1), st.integers(1, 900), st.sampled_from("st")),
        st.tuples(st.just("release"), st.integers(0, 20), st.integers(0, 300)),
        st.tuples(st.just("leave"), st.integers(0, 20)),
        st.tuples(st.just("forget"), SESSIONS),
        st.tuples(st.just("observe"), st.sampled_from("st"), st.none() | st.floats(0, 1)),
        st.tuples(st.just("pass"), st.floats(0.1, 30)),
    ),
    max_size=80,
)


def check(s: Any) -> None:
    """The running totals are those of the leases, and an idle lease is one without calls."""
    for name in s.servers:
        server = s._servers[name]
        of_server = [lease for lease in s.leases if lease.server == name]
        assert server.leases == len(of_server)
        assert server.leased == sum(lease.tokens for lease in of_server)
        assert server.busy == sum(lease.tokens for lease in of_server if lease.calls)
        assert set(server.idle.values()) == {lease for lease in of_server if not lease.calls}
        assert [lease.idle_since for lease in server.idle.values()] == sorted(
            lease.idle_since for lease in server.idle.values()
        )
    assert {lease.session for lease in s.leases} == set(s._sessions)


@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_no_lease_leaks_and_nobody_starves(steps: list[Any]) -> None:
    s = scheduler(max_wait_sec=100, idle_grace_sec=20, high_watermark=0.8)
    s.observe("t", (0.0, CAPACITY))
    now, looked, running, waiting = 0.0, 0.0, [], {}

    def settle() -> None:
        nonlocal looked
        assert all(looked - arrived < 100 for arrived in waiting.values()), "waited for longer than the bound"
        looked = now
        while (each := s.next_in(now)) is not None:
            del waiting[each]
            if each.how == "open":
                before = [one for one in waiting if one.server == each.server and one.rank < each.rank]
                assert not before, "slipped past one that came first"
            running.append(each)
        check(s)

    for step in steps:
        match step:
            case ("arrive", session, number, tokens, server):
                made = call(session, tokens, f"{session}/{number}", server=server)
                if s.arrive(made, now):
                    running.append(made)
                else:
                    s.wait(made, now)
                    waiting[made] = now
            case ("release", index, more) if running:
                each = running.pop(index % len(running))
                s.release(each, each.tokens + more, now)
            case ("leave", index) if waiting:
                each = list(waiting)[index % len(waiting)]
                del waiting[each]
                s.leave(each)
            case ("forget", session) if not any(each.session == session for each in (*running, *waiting)):
                s.forget(session)
                assert all(lease.session != session for lease in s.leases)
            case ("observe", server, share):
                s.observe(server, None if share is None else (share, CAPACITY))
            case ("pass", seconds):
                now += seconds
        settle()
    while running:
        each = running.pop()
        s.release(each, each.tokens, now)
        settle()
    now += 130
    settle()
    assert not waiting and not s.waiting, "somebody starves"
    for each in running:
        s.release(each, each.tokens, now)
    now += 20
    s.lease_of("nobody", "none", now)
    assert s.leases == (), "a lease leaks"
    check(s)
