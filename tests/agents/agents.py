"""The agents, unmodified, and what each of them is put through."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from check import Report
from client import Client, Fault
from policy import MAIN, SUB, Await, Delegate, Plan, Run, Say, Write

ENVIRONMENTS = Path(__file__).resolve().parents[2] / "build" / "agents"
NPM = ENVIRONMENTS / "npm" / "node_modules" / ".bin"
HERE = Path(__file__).resolve().parent

PROGRAM = """\
from pathlib import Path

total = sum(i * i for i in range(1000))
Path("result.txt").write_text(f"{total}\\n")
print(total)
"""
ANSWER = "332833500"
INSTRUCTION = f"{MAIN} Write hello.py, which adds up the squares below 1000 squared, and run it. Say what it printed."
WRITE, RUN, SAY = Write("hello.py", PROGRAM), Run("python3 hello.py", ANSWER), Say("It printed the sum.")


def noise(numbers: int) -> Run:
    """A command that prints about six tokens for each number."""
    return Run(f"""python3 -c "print(*(i * 7919 % 100003 for i in range({numbers})))\"""")


@dataclass(frozen=True)
class Scenario:
    """What happens in a trial and how it must end.

    Attributes:
        context_limit: tokens of prompt and answer together.
        solved: the file is written and run, and the model saw what it printed.
        termination, exit_code: as the trial's record has them; None: any.
        least, most: figures and their bounds.
    """

    name: str
    plan: Plan
    instruction: str = INSTRUCTION
    faults: tuple[Fault, ...] = ()
    context_limit: int = 131072
    timeout_s: float = 900.0
    solved: bool = True
    termination: str = "completed"
    exit_code: int | None = 0
    least: Mapping[str, int] = field(default_factory=dict)
    most: Mapping[str, int] = field(default_factory=lambda: {"main": 1})

    verifier = f"test -s hello.py && test -s result.txt && grep -qx {ANSWER} result.txt"

    def expect(self, report: Report, client: Client) -> None:
        """Holds the trial's end against what it has to be."""
        figures = report.figures
        report.hold(figures["termination"] == self.termination, f"it ended as {figures['termination']}")
        if self.exit_code is not None:
            report.hold(figures["exit_code"] == self.exit_code, f"the agent's exit code is {figures['exit_code']}")
        if self.solved:
            report.hold(figures["reward"] == 1.0, "the file was not written and run")
            last = [call for call in client.calls if call.conversation == "main"][-1:]
            seen = [client.model.tokenizer.decode(call.prompt_ids) for call in last]
            report.hold(any(ANSWER in text for text in seen), "the model never saw what the program printed")
            done = [call.step for call in last]
            report.hold(done == [len(self.plan.main)], f"the plan ended at step {done}")
        report.hold(not client.faults, f"{len(client.faults)} faults of the scenario did not happen")
        for name, least in self.least.items():
            report.hold(figures[name] >= least, f"{name}: {figures[name]}, at least {least} expected")
        for name, most in self.most.items():
            report.hold(figures[name] <= most, f"{name}: {figures[name]}, at most {most} expected")


@dataclass(frozen=True)
class Where:
    """What an agent's command depends on.

    Attributes:
        relay: URL of the relay in front of the proxy, if there is one.
    """

    relay: str | None
    scenario: str

    @property
    def anthropic(self) -> str:
        return f"{self.relay}/sess/{{session_id}}" if self.relay else "{anthropic_url}"

    @property
    def openai(self) -> str:
        return f"{self.relay}/sess/{{session_id}}/v1" if self.relay else "{openai_url}"


@dataclass(frozen=True)
class Agent:
    """
    Attributes:
        version: of the package, as installed.
        scaffold: the agent loop's `scaffold` section.
    """

    name: str
    version: str
    scaffold: Callable[[Where], dict[str, Any]]
    scenarios: Mapping[str, Scenario]


def _named(*scenarios: Scenario) -> dict[str, Scenario]:
    return {scenario.name: scenario for scenario in scenarios}


PLAIN = Scenario("plain", Plan((WRITE, RUN, SAY)), least={"turns": 3})
SUBAGENT = Scenario(
    "subagent",
    Plan(
        (Delegate(f"{SUB} Write hello.py, which adds up the squares below 1000 squared."), RUN, SAY),
        (WRITE, Say("It is written.")),
    ),
    least={"subagent": 1},
)
ERROR = Scenario("error", Plan((WRITE, RUN, SAY)), faults=(Fault("error", 2, early=True),), least={"failed": 1})
ERROR_MIDWAY = replace(ERROR, name="error-midway", faults=(Fault("error", 2),))
CUT = Scenario("cut", Plan((WRITE, RUN, SAY)), faults=(Fault("cut", 2, early=True),), least={"resumed": 1})
CUT_MIDWAY = replace(CUT, name="cut-midway", faults=(Fault("cut", 2),))
OVERFLOW = Scenario(
    "overflow", Plan((WRITE, *[noise(1000)] * 4, RUN, SAY)), least={"overflows": 1, "main": 2, "side": 1}, most={}
)
OVERFLOW_END = Scenario(
    "overflow-end",
    Plan((WRITE, noise(4000), RUN, SAY)),
    solved=False,
    termination="overlong",
    exit_code=None,
    least={"overflows": 1},
)
COMPACTION = replace(OVERFLOW, name="compaction", least={"main": 2, "side": 1})
GIVES_UP: dict[str, Any] = {"solved": False, "termination": "agent_error", "exit_code": 1, "least": {}}


# -- Claude Code ------------------------------------------------------------------------------------------------------

_GO_ON = f"{MAIN} Now run it."


def _claude_code(where: Where) -> dict[str, Any]:
    claude = f"{NPM / 'claude'} --model {{model}} --allowedTools Bash,Write,Agent --output-format json -p"
    command = f"{claude} {{instruction}}"
    if where.scenario == "compaction":
        command = f"{claude} {{instruction}} && {claude} /compact -c && {claude} {shlex.quote(_GO_ON)} -c"
    return {
        "command": command,
        "environment": {
            "ANTHROPIC_BASE_URL": where.anthropic,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
        },
    }


CLAUDE_CODE = Agent(
    "claude-code",
    "2.1.197",
    _claude_code,
    _named(
        PLAIN,
        SUBAGENT,
        ERROR,
        replace(ERROR_MIDWAY, **GIVES_UP),
        CUT,
        replace(CUT_MIDWAY, **GIVES_UP),
        replace(OVERFLOW, context_limit=34000),
        replace(OVERFLOW_END, context_limit=34000, exit_code=1),
        replace(COMPACTION, plan=Plan((WRITE, Say("Written."), RUN, SAY))),
    ),
)


# -- OpenCode ---------------------------------------------------------------------------------------------------------


def _opencode(where: Where) -> dict[str, Any]:
    context = 26000 if where.scenario == "compaction" else 131072
    config = {
        "autoupdate": False,
        "share": "disabled",
        "model": "policy/{model}",
        "small_model": "policy/{model}",
        "provider": {
            "policy": {
                "npm": "@ai-sdk/openai-compatible",
                "options": {"baseURL": where.openai, "apiKey": "{api_key}"},
                "models": {"{model}": {"limit": {"context": context, "output": 4096}}},
            }
        },
    }
    return {
        "command": f"{NPM / 'opencode'} run {{instruction}}",
        "environment": {
            "OPENCODE_CONFIG_CONTENT": json.dumps(config),
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_SHARE": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        },
    }


OPENCODE = Agent(
    "opencode",
    "1.18.33",
    _opencode,
    _named(
        PLAIN,
        SUBAGENT,
        ERROR,
        ERROR_MIDWAY,
        CUT,
        CUT_MIDWAY,
        # It goes on behind the summary, and exits with 1 all the same.
        replace(OVERFLOW, context_limit=22000, termination="agent_error", exit_code=1),
        # It compacts for ever where even its first prompt is too long; the proxy ends that.
        replace(OVERFLOW_END, plan=PLAIN.plan, context_limit=7000, least={"overflows": 8}, most={}),
        COMPACTION,
    ),
)


# -- Codex ------------------------------------------------------------------------------------------------------------


def _codex(where: Where) -> dict[str, Any]:
    compact = "model_auto_compact_token_limit = 24000\n" if where.scenario == "compaction" else ""
    config = f"""\
model = "{{model}}"
model_provider = "policy"
check_for_update_on_startup = false
{compact}
[analytics]
enabled = false

[model_providers.policy]
name = "policy"
base_url = "{where.openai}"
wire_api = "responses"
env_key = "OPENAI_API_KEY"
"""
    return {
        "setup": 'mkdir -p ~/.codex && printf %s "$CODEX_CONFIG" > ~/.codex/config.toml',
        "command": (
            f"{NPM / 'codex'} exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox {{instruction}} "
            "< /dev/null"
        ),
        "environment": {"CODEX_CONFIG": config},
    }


CODEX = Agent(
    "codex",
    "0.171.0",
    _codex,
    _named(
        PLAIN,
        replace(SUBAGENT, plan=replace(SUBAGENT.plan, main=(SUBAGENT.plan.main[0], Await(), *SUBAGENT.plan.main[1:]))),
        ERROR,
        ERROR_MIDWAY,
        CUT,
        CUT_MIDWAY,
        replace(OVERFLOW_END, plan=OVERFLOW.plan, context_limit=26000, exit_code=1),
        COMPACTION,
    ),
)


# -- OpenHands --------------------------------------------------------------------------------------------------------


def _openhands(where: Where) -> dict[str, Any]:
    events = 12 if where.scenario == "compaction" else 240
    return {
        "command": f"{ENVIRONMENTS / 'openhands/bin/python'} {HERE / 'openhands_agent.py'} {{instruction}} {events}",
        "environment": {
            "OPENAI_BASE_URL": where.openai,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "OPENHANDS_SUPPRESS_BANNER": "1",
        },
    }


OPENHANDS = Agent(
    "openhands",
    "1.58.2",
    _openhands,
    _named(PLAIN, SUBAGENT, ERROR, CUT, replace(OVERFLOW, context_limit=26000), COMPACTION),
)


# -- Terminus 2 -------------------------------------------------------------------------------------------------------


def _terminus(where: Where) -> dict[str, Any]:
    context = 18000 if where.scenario == "compaction" else 131072
    return {
        "command": f"{ENVIRONMENTS / 'harbor/bin/python'} {HERE / 'terminus_agent.py'} {{instruction}} {context}",
        "environment": {
            "OPENAI_BASE_URL": where.openai,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "TMUX_TMPDIR": "{workdir}",
        },
    }


TERMINUS = Agent(
    "terminus-2",
    "0.26.0",
    _terminus,
    _named(PLAIN, ERROR, CUT, replace(OVERFLOW, context_limit=18000), COMPACTION),
)

AGENTS: dict[str, Agent] = {agent.name: agent for agent in (CLAUDE_CODE, OPENCODE, CODEX, OPENHANDS, TERMINUS)}
