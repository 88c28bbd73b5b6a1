"""Rule start-stop: a debugger that is started is stopped on every path."""

from __future__ import annotations

import textwrap

import pytest
from made_up import source

from patchctl.verify import paths


def check(body: str, more: str = "", name: str = "step") -> list[tuple[int | None, str]]:
    """The findings on a method with this body, which begins in line 2."""
    text = f"class Runner:\n    def {name}(self, model, batches):\n"
    text += textwrap.indent(textwrap.dedent(body).strip("\n"), " " * 8) + "\n\n"
    text += textwrap.indent(textwrap.dedent(more), " " * 4)
    return [(finding.line, finding.message) for finding in paths.check(source(text))]


ACCEPTED = {
    "straight": """
        self.debugger.start()
        forward()
        self.debugger.stop()
    """,
    "under the same test": """
        if self.debugger is not None:
            if self.level == "L0":
                self.debugger.start(model)
            else:
                self.debugger.start()
        output = forward()
        if not self.broadcast:
            if self.is_last():
                if self.debugger is not None:
                    self.debugger.stop()
                return output
        if self.debugger:
            self.debugger.stop()
        return None
    """,
    "under a flag": """
        dump = self.debugger is not None
        started = False
        if dump:
            self.debugger.start()
            started = True
        forward()
        if started:
            self.debugger.stop()
    """,
    "in a loop": """
        for batch in batches:
            if batch is None:
                continue
            self.debugger.start()
            forward(batch)
            self.debugger.stop()
            if batch.last:
                break
    """,
    "finally": """
        self.debugger.start()
        try:
            return forward()
        finally:
            self.debugger.stop()
    """,
    "finally, with a continue and a caught exception": """
        for batch in batches:
            try:
                self.debugger.start()
                try:
                    if skip(batch):
                        continue
                    forward(batch)
                finally:
                    self.debugger.stop()
            except RuntimeError:
                continue
    """,
    "an exception that nothing catches": """
        self.debugger.start()
        if not model:
            raise ValueError
        self.debugger.stop()
    """,
    "a handler that stops": """
        self.debugger.start()
        try:
            forward()
        except Exception:
            self.debugger.stop()
            return None
        self.debugger.stop()
    """,
    "a stop that fails": """
        self.debugger.start()
        try:
            self.debugger.stop()
        except Exception as error:
            print(error)
    """,
    "a start that fails": """
        try:
            self.debugger.start()
        except Exception:
            return
        self.debugger.stop()
    """,
    "while True": """
        while True:
            self.debugger.start()
            done = forward()
            self.debugger.stop()
            if done:
                break
    """,
    "match": """
        match model:
            case None:
                return
            case _:
                self.debugger.start()
        if model:
            self.debugger.stop()
        else:
            self.debugger.stop()
    """,
    "a debugger by another name": """
        dbg = self.debugger
        if dbg is not None:
            dbg.start()
        forward()
        if dbg is not None:
            dbg.stop()
    """,
    "lambda": "self.later = lambda: self.debugger.start()",
}


@pytest.mark.parametrize("body", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_accepts(body: str) -> None:
    assert check(body) == []


REFUSED = {
    "no stop": ("self.debugger.start()\nforward()", 4),
    "early return": (
        """
        self.debugger.start()
        if not forward():
            return None
        self.debugger.stop()
        """,
        5,
    ),
    "under another test": (
        """
        if self.debugger is not None:
            self.debugger.start()
        if self.logger is not None:
            self.debugger.stop()
        """,
        6,
    ),
    "continue": (
        """
        for batch in batches:
            self.debugger.start()
            if batch is None:
                continue
            self.debugger.stop()
        """,
        4,
    ),
    "break": (
        """
        for batch in batches:
            self.debugger.start()
            if batch is None:
                break
            self.debugger.stop()
        """,
        7,
    ),
    "an exception that a handler goes on from": (
        """
        self.debugger.start()
        try:
            forward()
            self.debugger.stop()
        except RuntimeError:
            pass
        return 1
        """,
        9,
    ),
    "an exception that suppress goes on from": (
        """
        self.debugger.start()
        with contextlib.suppress(RuntimeError):
            forward()
            self.debugger.stop()
        """,
        6,
    ),
    "started twice": (
        """
        self.debugger.start()
        self.debugger.start()
        self.debugger.stop()
        """,
        4,
    ),
    "a loop that starts only": (
        """
        for batch in batches:
            self.debugger.start()
        self.debugger.stop()
        """,
        4,
    ),
    "a finally that stops on a condition": (
        """
        self.debugger.start()
        try:
            forward()
        finally:
            if self.done:
                self.debugger.stop()
        """,
        8,
    ),
    "a stop that is never reached": (
        """
        self.debugger.start()
        if False:
            self.debugger.stop()
        """,
        5,
    ),
    "a stop in a nested function": (
        """
        self.debugger.start()
        def stop():
            self.debugger.stop()
        """,
        5,
    ),
    "a match that misses a case": (
        """
        self.debugger.start()
        match model:
            case 1:
                self.debugger.stop()
        """,
        6,
    ),
}


@pytest.mark.parametrize(("body", "line"), REFUSED.values(), ids=REFUSED.keys())
def test_refuses(body: str, line: int) -> None:
    assert line in {found for found, _ in check(body)}


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("self.debugger.stop()", 3),
        ("if model:\n    self.debugger.start()\nelse:\n    self.debugger.stop()", 6),
        ("return\nself.debugger.start()\nself.debugger.stop()", 5),
    ],
    ids=["no start", "in another branch", "never reached"],
)
def test_a_stop_has_its_start(body: str, line: int) -> None:
    assert (line, "stops a debugger that nothing has started on any path to here") in check(body)


def test_says_what_raises() -> None:
    [(line, message)] = check(REFUSED["an exception that a handler goes on from"][0])
    assert (line, message) == (9, "this path leaves the debugger running that line 3 starts when line 5 raises")


GENERATOR = """
    from contextlib import contextmanager

    class Dump:
        @contextmanager
        def _harmless(self):
            try:
                yield
            except Exception as error:
                warn(error)

        @contextmanager
        def bracket(self):
            debugger = None
            with self._harmless():
                debugger = make()
                debugger.start()
            BODY
"""
SAFE = """
            try:
                yield
            finally:
                if debugger is not None:
                    with self._harmless():
                        write_line()
                    with self._harmless():
                        debugger.stop()
"""


def bracket(body: str) -> list[str]:
    return [str(finding) for finding in paths.check(source(GENERATOR.replace("            BODY\n", body)))]


def test_a_context_manager_stops_in_finally() -> None:
    assert bracket(SAFE) == []


@pytest.mark.parametrize(
    ("body", "message"),
    [
        pytest.param(
            """
            yield
            if debugger is not None:
                debugger.stop()
            """,
            "an exception at this `yield` leaves the debugger running",
            id="no finally",
        ),
        pytest.param(
            """
            try:
                yield
            except Exception:
                debugger.stop()
                raise
            debugger.stop()
            """,
            "an exception at this `yield` leaves the debugger running",
            id="a handler that a closed generator does not reach",
        ),
        pytest.param(
            """
            try:
                yield
            finally:
                if debugger is not None:
                    with self._harmless():
                        write_line()
                        debugger.stop()
            """,
            "when line 24 raises",
            id="a line that fails before the stop",
        ),
    ],
)
def test_a_context_manager_that_can_leave_it_running(body: str, message: str) -> None:
    assert any(message in finding for finding in bracket(body))


def test_a_finally_without_a_handler_around_the_log_is_safe_from_what_it_catches() -> None:
    """Only what is caught inside goes on: an exception of the log that leaves the bracket ends the run."""
    body = SAFE.replace("with self._harmless():\n                        write_line()", "write_line()")
    assert bracket(body) == []


ENTER = """
    class Dump:
        def __enter__(self):
            self.debugger.start()
            return self

        def __exit__(self, *error):
            STOP
"""


def test_exit_stops_what_enter_starts() -> None:
    assert paths.check(source(ENTER.replace("STOP", "self.debugger.stop()"))) == []
    [finding] = paths.check(source(ENTER.replace("STOP", "pass")))
    assert finding.line == 5
    [finding] = paths.check(source(ENTER.replace("STOP", "if self.ok: self.debugger.stop()")))
    assert finding.line == 8


OBJECT = """
    class Step:
        def __enter__(self):
            self.debugger.start()

        def __exit__(self, *error):
            BODY

    class Dump:
        def bracket(self):
            step: Step | None = None
            with suppress(Exception):
                step = Step(self.debugger)
                step.__enter__()
            try:
                yield
            finally:
                if step is not None:
                    with suppress(Exception):
                        step.__exit__()
"""


def test_calls_of_a_local_objects_methods_count() -> None:
    stops = OBJECT.replace("BODY", "try: write()\n            finally: self.debugger.stop()")
    assert paths.check(source(stops)) == []
    never = stops.replace("                        step.__exit__()", "                        pass")
    assert {17, 21} <= {finding.line for finding in paths.check(source(never))}


def test_a_local_objects_method_that_fails_before_it_stops() -> None:
    found = paths.check(source(OBJECT.replace("BODY", "write()\n            self.debugger.stop()")))
    assert {finding.line for finding in found} == {17, 21}
    assert all(finding.message.endswith("raises") for finding in found)


HANDED_OVER = """
    class Runner:
        def execute_model(self, scheduler_output):
            if self.debugger is not None:
                self.debugger.start()
            if forward() is None:
                if self.debugger is not None:
                    self.debugger.stop()
                return 1
            self.execute_model_state = State(scheduler_output)
            self.kv_output = 2
            return None

        def sample_tokens(self):
            if self.execute_model_state is None:
                return None
            (scheduler_output,) = self.execute_model_state
            self.execute_model_state = None
            sample()
            if not self.use_async:
                if self.debugger is not None:
                    self.debugger.stop()
                return 3
            if self.debugger is not None:
                self.debugger.stop()
            return 4
"""


def test_a_step_can_be_handed_over_to_another_method() -> None:
    assert paths.check(source(HANDED_OVER)) == []


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        (
            "                    self.debugger.stop()\n                return 1",
            "                    pass\n                return 1",
            9,
        ),
        (
            "                    self.debugger.stop()\n                return 3",
            "                    pass\n                return 3",
            23,
        ),
        (
            "            if self.debugger is not None:\n                self.debugger.stop()\n            return 4",
            "            return 4",
            24,
        ),
        ("            self.execute_model_state = State(scheduler_output)\n", "", 11),
        ("            if self.execute_model_state is None:\n                return None\n", "", 12),
    ],
    ids=["stop before the hand-over", "first stop after it", "second stop after it", "hand-over", "test of it"],
)
def test_a_step_that_is_handed_over_and_not_stopped(old: str, new: str, line: int) -> None:
    assert old in HANDED_OVER
    assert line in {finding.line for finding in paths.check(source(HANDED_OVER.replace(old, new)))}


HELPERS = """
def _start(self):
    if self.debugger is None or self._started:
        return
    self.debugger.start(self.model)
    self._started = True

def _finish(self, **words):
    if self.debugger is None or not self._started:
        return
    if hasattr(self.debugger, "stop"):
        self.debugger.stop()
        self._started = False
    self.debugger.step(**words)

def load_model(self):
    if self.graph:
        self._start()
"""


def test_calls_of_helpers_count() -> None:
    body = """
        self._start()
        if model is None:
            self._finish(dump=False)
            return None
        forward()
        self._finish()
    """
    assert check(body, HELPERS) == []
    [(line, message)] = check(body.replace("    self._finish(dump=False)\n", "    pass\n"), HELPERS)
    assert line == 6
    assert message.startswith("this path leaves the debugger running")
    assert check("self._start()\nself._start()\nself._finish()", HELPERS) == []


def test_a_helper_can_say_whether_it_started() -> None:
    helper = """
        def _begin(self):
            if self.debugger is None:
                return False
            self.debugger.start()
            return True
    """
    assert check("if self._begin():\n    self.debugger.stop()", helper) == []
    assert check("begun = self._begin()\nif begun:\n    self.debugger.stop()", helper) == []
    found = check("if not self._begin():\n    self.debugger.stop()", helper)
    assert sorted((line, message.partition(" ")[0]) for line, message in found) == [(4, "stops"), (4, "this")]


def test_a_helper_that_never_returns_to_itself() -> None:
    helper = "def again(self):\n    self.debugger.start()\n    self.again()\n    self.debugger.stop()\n"
    assert isinstance(check("self.again()", helper), list)


def test_many_tests_do_not_make_many_paths() -> None:
    lines = [f"if self.flag{number}:\n    self.debugger.start()\n    self.debugger.stop()" for number in range(30)]
    assert check("\n".join(lines)) == []
