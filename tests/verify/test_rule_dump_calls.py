"""Rules log-before-stop, step-after-stop and stop-count."""

from __future__ import annotations

import pytest
from made_up import GOOD, runner, source

from patchctl.verify import dump_calls
from patchctl.verify.findings import Finding

LOG = "self._dispatch_logger.log_step(scheduler_output, self.attn_state)"


def check(body: str, **how: str) -> list[Finding]:
    return dump_calls.check(runner(body, **how))


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(GOOD, id="as upstream and the recipe have it"),
        pytest.param(GOOD.replace("_dispatch_logger is not None", "_dispatch_logger"), id="guard by truth"),
        pytest.param(
            "if self.sync:" + GOOD.replace("\n", "\n    ") + "    return 1\n" + GOOD.replace("\n    ", "\n"),
            id="two ways out, each with its own",
        ),
        pytest.param(
            f"""
            if self.debugger is not None:
                if self._dispatch_logger is not None:
                    {LOG}
                assert self.debugger is not None
                stopped = True
                logger.debug("stopping")
                self.debugger.stop()
                self.debugger.step()
            """,
            id="an assertion, a plain assignment and a message between",
        ),
        pytest.param(
            f"""
            try:
                run()
            finally:
                if self._dispatch_logger is not None:
                    {LOG}
                self.debugger.stop()
                self.debugger.step()
            """,
            id="in finally",
        ),
        pytest.param(
            f"""
            try:
                run()
                if self._dispatch_logger is not None:
                    {LOG}
            finally:
                self.debugger.stop()
                self.debugger.step()
            """,
            id="at the end of the try whose finally stops",
        ),
        pytest.param(
            f"""
            if self._dispatch_logger is not None:
                {LOG}
                self.debugger.stop()
                self.debugger.step()
            """,
            id="guard around both",
        ),
        pytest.param(
            f"""
            if self._dispatch_logger is None:
                return
            {LOG}
            self.debugger.stop()
            self.debugger.step()
            """,
            id="guard by an early return",
        ),
        pytest.param(
            f"""
            assert self._dispatch_logger is not None
            {LOG}
            self.debugger.stop()
            self.debugger.step()
            """,
            id="guard by an assertion",
        ),
        pytest.param(
            f"""
            if self._dispatch_logger is not None and not self.debugger.service.should_stop_service:
                {LOG}
            self.debugger.stop()
            self.debugger.step()
            """,
            id="guard also asks the debugger",
        ),
        pytest.param(
            f"""
            if self._dispatch_logger is not None and scheduler_output is not None:
                {LOG}
            self.debugger.stop()
            self.debugger.step()
            """,
            id="guard also asks for the argument",
        ),
        pytest.param(
            """
            log = self._dispatch_logger
            if log is not None:
                log.log_step(scheduler_output, self.attn_state)
            self.debugger.stop()
            self.debugger.step()
            """,
            id="by a local name for it",
        ),
        pytest.param(
            """
            if (log := self._dispatch_logger) is not None:
                log.log_step(scheduler_output, self.attn_state)
            self.debugger.stop()
            self.debugger.step()
            """,
            id="by a name that the test gives it",
        ),
        pytest.param(
            f"""
            try:
                if self._dispatch_logger is not None:
                    {LOG}
            except Exception as error:
                logger.warning(error)
            """.rstrip()
            + "\n            self.debugger.stop()\n            self.debugger.step()\n",
            id="in a try that catches",
        ),
        pytest.param(
            f"""
            with contextlib.suppress(OSError):
                if self._dispatch_logger is not None:
                    {LOG}
            with contextlib.suppress(OSError):
                self.debugger.stop()
                self.debugger.step()
            """,
            id="log and stop each in a with",
        ),
        pytest.param(
            """
            scheduler_output, logits = self.state
            if self._dispatch_logger is not None:
                self._dispatch_logger.log_step(scheduler_output, self.attn_state)
            self.debugger.stop()
            self.debugger.step()
            """,
            id="argument unpacked before",
        ),
        pytest.param(
            """
            self._write(scheduler_output)
            self.debugger.stop()
            self.debugger.step()
            """,
            id="by a helper that logs",
        ),
    ],
)
def test_accepts(body: str) -> None:
    more = """
        def _write(self, output):
            if self._dispatch_logger is None:
                return
            self._dispatch_logger.log_step(output, self.attn_state)
    """
    findings = check(body, more=more)
    if "_write" in body:
        assert findings == []
    else:  # the helper that nothing calls logs for no stop
        assert [finding.message for finding in findings] == [
            "this log_step has no debugger.stop() after it in its block"
        ]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        pytest.param("self.debugger.stop()\nself.debugger.step()", "has no log_step before it", id="no log"),
        pytest.param(
            f"""
            self.debugger.stop()
            self.debugger.step()
            if self._dispatch_logger is not None:
                {LOG}
            """,
            "the one in line 15 comes after it",
            id="log after the stop",
        ),
        pytest.param(
            f"""
            if self.mode:
                if self._dispatch_logger is not None:
                    {LOG}
            else:
                self.debugger.stop()
                self.debugger.step()
            """,
            "has no log_step before it",
            id="in another branch",
        ),
        pytest.param(
            f"""
            if self.mode:
                if self._dispatch_logger is not None:
                    {LOG}
            self.debugger.stop()
            self.debugger.step()
            """,
            "only if `self.mode`",
            id="on some paths only",
        ),
        pytest.param(
            f"""
            if self._dispatch_logger is not None:
                pass
            else:
                {LOG}
            self.debugger.stop()
            self.debugger.step()
            """,
            "without a test that",
            id="in the guard's else",
        ),
        pytest.param(
            f"""
            def log():
                if self._dispatch_logger is not None:
                    {LOG}
            self.debugger.stop()
            self.debugger.step()
            """,
            "has no log_step before it",
            id="in a nested function that nothing calls",
        ),
        pytest.param(
            f"""
            if self.debugger is not None:
                {LOG}
                self.debugger.stop()
                self.debugger.step()
            """,
            "without a test that `self._dispatch_logger` is not None",
            id="unguarded",
        ),
        pytest.param(
            f"""
            if hasattr(self, "_dispatch_logger"):
                {LOG}
            self.debugger.stop()
            self.debugger.step()
            """,
            "without a test that",
            id="a guard that None passes",
        ),
        pytest.param(
            f"""
            if self._dispatch_logger is None:
                {LOG}
            self.debugger.stop()
            self.debugger.step()
            """,
            "without a test that",
            id="guard the wrong way round",
        ),
        pytest.param(
            f"""
            if self._dispatch_logger is not None and self.verbose:
                {LOG}
            self.debugger.stop()
            self.debugger.step()
            """,
            "only if `self.verbose`",
            id="guarded by something else as well",
        ),
        pytest.param(
            f"""
            if self._dispatch_logger is not None or self.verbose:
                {LOG}
            self.debugger.stop()
            self.debugger.step()
            """,
            "without a test that",
            id="guarded by either",
        ),
        pytest.param(
            f"""
            if self._dispatch_logger is not None and False:
                {LOG}
            self.debugger.stop()
            self.debugger.step()
            """,
            "only if `False`",
            id="constantly false",
        ),
        pytest.param(
            """
            # self._dispatch_logger.log_step(scheduler_output, self.attn_state)
            self.debugger.stop()
            self.debugger.step()
            """,
            "has no log_step before it",
            id="in a comment",
        ),
        pytest.param(
            """
            "self._dispatch_logger.log_step(scheduler_output, self.attn_state)"
            self.debugger.stop()
            self.debugger.step()
            """,
            "has no log_step before it",
            id="in a string",
        ),
        pytest.param(
            """
            if self.dispatch_logger is not None:
                self.dispatch_logger.log_step(scheduler_output, self.attn_state)
            self.debugger.stop()
            self.debugger.step()
            """,
            "`self.dispatch_logger` is no logger",
            id="an attribute that nothing assigns",
        ),
        pytest.param(
            """
            if self.debugger is not None:
                self.debugger.log_step(scheduler_output, self.attn_state)
            self.debugger.stop()
            self.debugger.step()
            """,
            "`self.debugger` is no logger",
            id="wrong receiver",
        ),
        pytest.param(
            """
            log = self._dispatch_logger
            log = self.tracker
            if log is not None:
                log.log_step(scheduler_output, self.attn_state)
            self.debugger.stop()
            self.debugger.step()
            """,
            "`log` is no logger",
            id="a name that is given something else",
        ),
        pytest.param(
            f"""
            def inner(self):
                pass
            if self._dispatch_logger is not None:
                {LOG}
            forward()
            self.debugger.stop()
            self.debugger.step()
            """,
            "has no log_step before it, back to line 17",
            id="a call between",
        ),
        pytest.param(
            f"""
            if self._dispatch_logger is not None:
                {LOG}
            if self.done:
                return None
            self.debugger.stop()
            self.debugger.step()
            """,
            "has no log_step before it, back to line 15",
            id="a way out between",
        ),
        pytest.param(
            f"""
            if self._dispatch_logger is not None:
                {LOG}
            self.debugger.stop()
            self.debugger.stop()
            self.debugger.step()
            """,
            "has no log_step before it, back to line 15",
            id="two stops after one log",
        ),
        pytest.param(
            f"""
            if self._dispatch_logger is not None:
                {LOG}
            for _ in range(2):
                self.debugger.stop()
                self.debugger.step()
            """,
            "has no log_step before it",
            id="stop in a loop after one log",
        ),
        pytest.param(
            f"""
            try:
                if self._dispatch_logger is not None:
                    {LOG}
                run()
            finally:
                self.debugger.stop()
                self.debugger.step()
            """,
            "back to line 16",
            id="before the work of the try whose finally stops",
        ),
        pytest.param(
            f"""
            try:
                run()
            except ValueError:
                if self._dispatch_logger is not None:
                    {LOG}
            finally:
                self.debugger.stop()
                self.debugger.step()
            """,
            "back to line 14",
            id="in the handler of the try whose finally stops",
        ),
        pytest.param(
            f"""
            for _ in range(2):
                if self._dispatch_logger is not None:
                    {LOG}
            self.debugger.stop()
            self.debugger.step()
            """,
            "is in a loop",
            id="log in a loop",
        ),
        pytest.param(
            f"""
            if self._dispatch_logger is not None:
                {LOG}
            if self._dispatch_logger is not None:
                {LOG}
            self.debugger.stop()
            self.debugger.step()
            """,
            "logged here and again in line 16",
            id="logged twice",
        ),
        pytest.param(
            f"""
            if self._dispatch_logger is not None:
                {LOG}
                {LOG}
            self.debugger.stop()
            self.debugger.step()
            """,
            "this log_step has no debugger.stop() after it",
            id="logged twice under one guard",
        ),
        pytest.param(
            """
            if self._dispatch_logger is not None:
                self._dispatch_logger.log_step(output, self.attn_state)
            self.debugger.stop()
            self.debugger.step()
            """,
            "`output` is not bound in `execute_model`",
            id="an argument of another function",
        ),
        pytest.param(
            """
            if self.first:
                output = scheduler_output
            if self._dispatch_logger is not None:
                self._dispatch_logger.log_step(output, self.attn_state)
            self.debugger.stop()
            self.debugger.step()
            """,
            "`output` is not bound in `execute_model` on every path",
            id="an argument bound on some paths",
        ),
        pytest.param(
            """
            del scheduler_output
            if self._dispatch_logger is not None:
                self._dispatch_logger.log_step(scheduler_output, self.attn_state)
            self.debugger.stop()
            self.debugger.step()
            """,
            "`scheduler_output` is not bound",
            id="an argument deleted before",
        ),
        pytest.param(
            """
            if self._dispatch_logger is not None:
                self._dispatch_logger.log_step(scheduler_output, self.attention_state)
            self.debugger.stop()
            self.debugger.step()
            """,
            "nothing in class Runner assigns `self.attention_state`",
            id="an attribute that the class does not have",
        ),
        pytest.param(
            """
            if self._dispatch_logger is not None:
                self._dispatch_logger.log_step(scheduler_output)
            self.debugger.stop()
            self.debugger.step()
            """,
            "`attn_state` is missing",
            id="an argument too few",
        ),
        pytest.param(
            """
            if self._dispatch_logger is not None:
                self._dispatch_logger.log_step(self.attn_state, scheduler_output)
            self.debugger.stop()
            self.debugger.step()
            """,
            "`attn_state` is given as `scheduler_output`",
            id="arguments swapped",
        ),
        pytest.param(
            """
            if self._dispatch_logger is not None:
                self._dispatch_logger.log_step(scheduler_output, state=self.attn_state)
            self.debugger.stop()
            self.debugger.step()
            """,
            "no parameter `state`",
            id="a keyword it does not have",
        ),
        pytest.param(
            """
            finish = self.debugger.stop
            finish()
            """,
            "is not called here but handed on",
            id="stop by another name",
        ),
        pytest.param(
            """
            dbg = self.debugger
            dbg.stop()
            dbg.step()
            """,
            "`dbg.stop()` has no log_step before it",
            id="debugger by another name",
        ),
        pytest.param(
            """
            dbg = getattr(self, "debugger", None)
            dbg.stop()
            dbg.step()
            """,
            "`dbg.stop()` has no log_step before it",
            id="debugger by getattr",
        ),
        pytest.param(
            "PrecisionDebugger.stop()\nPrecisionDebugger.step()", "has no log_step before it", id="stop of the class"
        ),
    ],
)
def test_refuses(body: str, message: str) -> None:
    found = check(body)
    assert any(message in finding.message for finding in found), [str(finding) for finding in found]
    assert all(finding.path == "pkg/runner.py" and finding.line for finding in found)


def test_a_logger_that_is_never_made_is_none() -> None:
    text = """
        class Runner:
            def __init__(self):
                self.attn_state = self._dispatch_logger = None

            def execute_model(self, scheduler_output):
                if self._dispatch_logger is not None:
                    self._dispatch_logger.log_step(scheduler_output, self.attn_state)
                self.debugger.stop()
                self.debugger.step()
    """
    [finding] = dump_calls.check(source(text))
    assert finding.line == 8
    assert "`self._dispatch_logger` is no logger" in finding.message


@pytest.mark.parametrize(
    "logger",
    ["class Other: pass", "class DispatchLogger: pass", "def attach(debugger): return None"],
    ids=["no such class", "no log_step", "a function of which nothing is known"],
)
def test_a_class_without_log_step_is_no_logger(logger: str) -> None:
    text = """
        from pkg.log import DispatchLogger, attach

        class Runner:
            def __init__(self):
                self.attn_state = None
                self._dispatch_logger = MAKE

            def execute_model(self, scheduler_output):
                if self._dispatch_logger is not None:
                    self._dispatch_logger.log_step(scheduler_output, self.attn_state)
                self.debugger.stop()
                self.debugger.step()
    """.replace("MAKE", "attach(1)" if "attach" in logger else "DispatchLogger()")
    [finding] = dump_calls.check(source(text, pkg__log=logger))
    assert "is no logger" in finding.message


HELPERS = """
    def start(self):
        if self.debugger is None or self._started:
            return
        self.debugger.start(self.model)
        self._started = True

    def finish(self, scheduler_output=None, **words):
        if self.debugger is None or not self._started:
            return
        LOG
        if hasattr(self.debugger, "stop"):
            self.debugger.stop()
            self._started = False

        self.debugger.step(**words)
"""
GUARDED = """if self._dispatch_logger is not None and scheduler_output is not None:
            self._dispatch_logger.log_step(scheduler_output, self.attn_state)"""


def test_a_helper_that_stops_can_log_itself() -> None:
    helpers = HELPERS.replace("LOG", GUARDED)
    assert check("self.start()\nself.finish(scheduler_output)\nself.finish(dump=False)", more=helpers) == []


def test_a_helper_that_logs_is_given_what_it_logs() -> None:
    [finding] = check("self.start()\nself.finish()", more=HELPERS.replace("LOG", GUARDED))
    assert finding.line == 14
    assert "logs with `scheduler_output`, which this call does not give" in finding.message


def test_a_helper_with_an_argument_that_it_does_not_have() -> None:
    helpers = HELPERS.replace("LOG", GUARDED).replace("scheduler_output=None, ", "")
    found = check("self.start()\nself.finish()", more=helpers)
    assert any("`scheduler_output` is not bound in `finish`" in finding.message for finding in found)


def test_each_call_of_a_helper_that_stops_can_have_its_log() -> None:
    body = """
        self.start()
        if self._dispatch_logger is not None:
            self._dispatch_logger.log_step(scheduler_output, self.attn_state)
        self.finish()
        self.finish(dump=False)
        again()
    """
    helpers = HELPERS.replace("LOG", "pass")
    assert check(body, more=helpers) == []
    [finding] = check(body.replace("again()", "self.finish()"), more=helpers)
    assert "no log_step is before this call" in finding.message
    assert finding.line == 18


def test_a_helper_and_its_caller_do_not_both_log() -> None:
    body = """
        if self._dispatch_logger is not None:
            self._dispatch_logger.log_step(scheduler_output, self.attn_state)
        self.finish(scheduler_output)
    """
    [finding] = check(body, more=HELPERS.replace("LOG", GUARDED))
    assert "`finish` logs too" in finding.message


def test_a_helper_that_nothing_logs_for_is_one_finding() -> None:
    [finding] = check("self.start()\nself.finish()\nself.finish()", more=HELPERS.replace("LOG", "pass"))
    assert "`self.debugger.stop()` has no log_step before it" in finding.message


BRACKET = """
    from contextlib import contextmanager
    from pkg.log import TrainingLog

    class Dump:
        def __init__(self):
            self._broken = False

        def _made(self) -> tuple[object, TrainingLog]:
            return 1, 2

        def _end(self):
            self._broken = True

        @contextmanager
        def bracket(self, fields):
            debugger, log = self._made()
            debugger.start()
            completed = False
            try:
                yield
                completed = True
            finally:
                step = current(debugger)
                if CONDITION:
                    log.log_step(step, fields)
                debugger.stop()
                debugger.step()
"""
TRAINING_LOG = """
    class TrainingLog:
        def log_step(self, step, fields): pass
"""


@pytest.mark.parametrize(
    ("condition", "accepted"),
    [
        ("log is not None", True),
        ("completed and log is not None", True),
        ("completed and step is not None and log is not None and not self._broken", True),
        ("completed", False),
        ("log is not None and not completed", False),
        ("log is not None and self._broken", False),
        ("log is not None and not fields['quiet']", False),
    ],
)
def test_a_context_manager_logs_what_was_completed(condition: str, accepted: bool) -> None:
    text = BRACKET.replace("CONDITION", condition)
    assert (dump_calls.check(source(text, pkg__log=TRAINING_LOG)) == []) is accepted


RECIPE = """
    class Engine:
        def forward_backward_batch(self, micro_batches):
            should_dump = phase == "log_prob"
            for micro_batch in micro_batches:
                if self._debugger is not None and should_dump:
                    self._debugger.start(model=self.module)
                loss = self.forward_step(micro_batch)
                if self._debugger is not None and should_dump:
                    self._debugger.stop()
                    self._debugger.step()
                    self._log_update_actor_step(micro_batch)

        def _log_update_actor_step(self, micro_batch):
            pass
"""


def test_the_recipe_logs_directly_after_the_step() -> None:
    assert dump_calls.check(source(RECIPE)) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("                    self._log_update_actor_step(micro_batch)\n", ""),
        ("self._log_update_actor_step(micro_batch)\n", "self.forward(micro_batch)\n"),
        ("self._log_update_actor_step(micro_batch)\n", "self._log_update_actor_steps(micro_batch)\n"),
        ("def _log_update_actor_step", "def _log"),
    ],
)
def test_the_recipe_without_its_log(old: str, new: str) -> None:
    assert old in RECIPE
    found = dump_calls.check(source(RECIPE.replace(old, new)))
    assert [finding.rule for finding in found if finding.line == 10] == [dump_calls.RULE]


@pytest.mark.parametrize(
    "body",
    [
        GOOD.replace("    self.debugger.step()\n", ""),
        GOOD.replace("self.debugger.step()", "self.debugger.start()"),
        GOOD.replace(
            "    self.debugger.stop()\n        self.debugger.step()",
            "    self.debugger.step()\n        self.debugger.stop()",
        ),
        GOOD.replace("    self.debugger.step()", "    return\n        self.debugger.step()"),
    ],
    ids=["gone", "another call", "before the stop", "after a return"],
)
def test_a_stop_is_followed_by_a_step(body: str) -> None:
    found = check(body)
    assert dump_calls.STEP_RULE in {finding.rule for finding in found}


def test_the_count_of_stops() -> None:
    one, none = runner(GOOD), source("x = 1\n", "pkg/empty.py")
    assert dump_calls.check_count([one, none], 1) == []
    [finding] = dump_calls.check_count([none, one, one], 1)
    assert (finding.rule, finding.path) == (dump_calls.COUNT_RULE, "pkg/runner.py")
    assert "2 calls of debugger.stop() (pkg/runner.py:16, pkg/runner.py:16), but this pin has 1" in finding.message
    [finding] = dump_calls.check_count([none], 3)
    assert "0 calls of debugger.stop(), but this pin has 3" in finding.message
