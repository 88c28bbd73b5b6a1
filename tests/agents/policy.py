"""The model of these trials: it follows a plan, and writes its answers as the chat template writes an assistant's.

It has no state. Every answer carries a tag of its step (`<<step 2>>`), and where the conversation stands is read from
the tags in the prompt; so a repeated call gets the same answer, and a conversation goes on behind a summary of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

MAIN, SUB = "[main task]", "[side task]"
TRIES = 3
_TAG = re.compile(r"<<(main|sub) (\d+)>>")
_TOOL = re.compile(r'\{\s*"type"\s*:\s*"function"')
_SUMMARY = re.compile(
    r"create a detailed summary of|You are about to hand off your work|The next agent has a few questions for you|"
    r"CONTEXT CHECKPOINT|Briefly continue this task:"
)
_USER = (
    "<|im_start|>user",
    "<|user|>",
    "<｜User｜>",
    "<|start_header_id|>user<|end_header_id|>",
    "<start_of_turn>user",
)


class PlanError(Exception):
    """The prompt does not let the model do what its plan says."""


@dataclass(frozen=True)
class Write:
    """Write a file into the working directory."""

    name: str
    text: str


@dataclass(frozen=True)
class Run:
    """Run a shell command, again where what it shows is not seen (terminals of agents lose output).

    Attributes:
        shows: what is to be seen.
    """

    command: str
    shows: str = ""


@dataclass(frozen=True)
class Delegate:
    """Have a sub-agent do something."""

    prompt: str


@dataclass(frozen=True)
class Await:
    """Wait for the sub-agent, where the agent starts it in the background."""


@dataclass(frozen=True)
class Say:
    """End the turn with a text."""

    text: str


Step = Write | Run | Delegate | Await | Say


@dataclass(frozen=True)
class Plan:
    """What the model does, one step for each answer.

    Attributes:
        main, sub: the steps of the agent and of its sub-agent.
    """

    main: tuple[Step, ...]
    sub: tuple[Step, ...] = ()


@dataclass(frozen=True)
class Decision:
    """An answer, and what it is.

    Attributes:
        conversation: "main", "sub", or "side" (titles, summaries).
        step: number of the step in its plan, from 1; 0 for side calls.
        ids: what is sampled, the stop token too.
    """

    conversation: str
    step: int
    ids: list[int]


@dataclass(frozen=True)
class Tool:
    """A tool as the prompt shows it."""

    name: str
    properties: dict[str, Any]
    required: tuple[str, ...]


def tools_in(prompt: str) -> dict[str, Tool]:
    """The tools that a prompt lists as JSON, by name."""
    decoder = json.JSONDecoder()
    found = {}
    for match in _TOOL.finditer(prompt):
        try:
            value, _ = decoder.raw_decode(prompt, match.start())
        except ValueError:
            continue
        function = value.get("function", {})
        schema = function.get("parameters") or {}
        if "name" in function:
            found[function["name"]] = Tool(
                function["name"], schema.get("properties") or {}, tuple(schema.get("required") or ())
            )
    return found


def _shell_write(step: Write) -> str:
    return f"cat > {step.name} <<'END'\n{step.text}END\n"


_WRITERS: dict[str, Callable[[Write, str], dict[str, Any]]] = {
    "Write": lambda step, folder: {"file_path": f"{folder}/{step.name}", "content": step.text},
    "write": lambda step, folder: {"filePath": f"{folder}/{step.name}", "content": step.text},
    "file_editor": lambda step, folder: {
        "command": "create",
        "path": f"{folder}/{step.name}",
        "file_text": step.text,
    },
}
_SHELLS: dict[str, Callable[[str], dict[str, Any]]] = {
    "Bash": lambda command: {"command": command, "description": "Runs it"},
    "bash": lambda command: {"command": command, "description": "Runs it"},
    "terminal": lambda command: {"command": command},
    "exec_command": lambda command: {"cmd": command},
    "shell_command": lambda command: {"command": command},
    "shell": lambda command: {"command": ["bash", "-lc", command]},
}
_DELEGATES: dict[str, Callable[[str, str], dict[str, Any]]] = {
    name: lambda prompt, kind: {"description": "Do it", "prompt": prompt, "subagent_type": kind}
    for name in ("Agent", "Task", "task")
}
_DELEGATES["multi_agent_v1__spawn_agent"] = lambda prompt, kind: {"message": prompt}
_AWAIT = "multi_agent_v1__wait_agent"
_AGENT_ID = re.compile(r'"agent_id":\s*"([^"]+)"')


def _arguments(step: Step, tools: dict[str, Tool], folder: str, prompt: str) -> tuple[str, dict[str, Any]]:
    """The tool that does a step and its arguments."""
    if isinstance(step, Await):
        return _AWAIT, {"targets": _AGENT_ID.findall(prompt)[-1:]}
    makers: Sequence[tuple[str, Callable[[], dict[str, Any]]]]
    if isinstance(step, Write):
        writers = [(name, lambda make=make: make(step, folder)) for name, make in _WRITERS.items()]
        shells = [(name, lambda make=make: make(_shell_write(step))) for name, make in _SHELLS.items()]
        makers = [*writers, *shells]
    elif isinstance(step, Run):
        makers = [(name, lambda make=make: make(step.command)) for name, make in _SHELLS.items()]
    else:
        assert isinstance(step, Delegate)
        kind = "general-purpose" if "general-purpose" in prompt else "general"
        makers = [(name, lambda make=make: make(step.prompt, kind)) for name, make in _DELEGATES.items()]
    for name, make in makers:
        if name in tools:
            arguments = make()
            if missing := set(tools[name].required) - set(arguments):
                raise PlanError(f"the tool {name} wants {sorted(missing)}")
            return name, {key: value for key, value in arguments.items() if key in tools[name].properties}
    raise PlanError(f"none of the tools {sorted(tools)} can do a {type(step).__name__}")


@dataclass
class Model:
    """Decides and writes answers.

    Args:
        tokenizer: with its chat template.
        stops: texts of the tokens that may end an answer.
        plan: what to do.
        folder: finds the working directory in the prompt: a pattern.
    """

    tokenizer: Any
    stops: Sequence[str]
    plan: Plan
    folder: re.Pattern[str]

    def decide(self, prompt_ids: Sequence[int]) -> Decision:
        """The answer to a prompt.

        Raises:
            PlanError: the plan cannot go on from there.
        """
        prompt = self.tokenizer.decode(prompt_ids, skip_special_tokens=False)
        conversation = "main" if MAIN in prompt else "sub" if SUB in prompt else "side"
        tools = tools_in(prompt)
        terminus = '"keystrokes"' in prompt
        done = [int(number) for name, number in _TAG.findall(prompt) if name == conversation]
        last = prompt[max(prompt.rfind(mark) for mark in _USER) :]
        if conversation == "side" or not (tools or terminus) or _SUMMARY.search(last):
            return Decision("side", 0, self._written(_summary(prompt)))
        steps = self.plan.main if conversation == "main" else self.plan.sub
        number = max(done, default=0) + 1
        if number > len(steps):
            number = len(steps)  # asked again at the end: says the same again
        before = steps[number - 2] if number > 1 else None
        if isinstance(before, Run) and before.shows not in prompt and done.count(number - 1) < TRIES:
            number -= 1
        tag = f"<<{conversation} {number}>>"
        step = steps[number - 1]
        reasoning = f"Step {number} of {len(steps)}: {type(step).__name__.lower()}."
        if terminus:
            return Decision(conversation, number, self._written(_terminus(step, tag)))
        if isinstance(step, Say):
            if "finish" in tools:
                call = ("finish", {"message": step.text})
                return Decision(conversation, number, self._written(f"{tag} {step.text}", reasoning, call))
            return Decision(conversation, number, self._written(f"{tag} {step.text}", reasoning))
        call = _arguments(step, tools, self._working_directory(prompt), prompt)
        return Decision(conversation, number, self._written(f"{tag} Next.", reasoning, call))

    def _working_directory(self, prompt: str) -> str:
        match = self.folder.search(prompt)
        return match[0] if match else "."

    def _written(self, text: str, reasoning: str = "", call: tuple[str, dict[str, Any]] | None = None) -> list[int]:
        """The ids of an answer, as the template renders it, with the token that ends it."""
        asked = [{"role": "user", "content": "?"}]
        answer: dict[str, Any] = {"role": "assistant", "content": text}
        if reasoning:
            answer["reasoning_content"] = reasoning
        after: dict[str, Any] = {"role": "user", "content": "."}
        if call is not None:
            function = {"name": call[0], "arguments": call[1]}
            answer["tool_calls"] = [{"id": "call_0", "type": "function", "function": function}]
            after = {"role": "tool", "tool_call_id": "call_0", "name": call[0], "content": "."}
        opened = self._rendered(asked, add_generation_prompt=True)
        whole = self._rendered([*asked, answer])
        if not whole.startswith(opened):
            raise PlanError("the template opens an answer otherwise than it writes one")
        said = whole[len(opened) :]
        followed = self._rendered([*asked, answer, after])
        ends = [(at, stop) for stop in self.stops if (at := said.find(stop)) >= 0]
        if ends:
            at, stop = min(ends)
            said = said[:at]
        else:
            behind = followed[followed.rfind(text) + len(text) :]
            found = [(at, stop) for stop in self.stops if (at := behind.find(stop)) >= 0]
            stop = min(found)[1] if found else self.stops[0]
        ids: list[int] = self.tokenizer.encode(said, add_special_tokens=False)
        return [*ids, self.tokenizer.convert_tokens_to_ids(stop)]

    def _rendered(self, messages: list[dict[str, Any]], **options: Any) -> str:
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, **options))


def _summary(prompt: str) -> str:
    """An answer to a call for a title or a summary: the task and what is done, with its tags."""
    tags = [f"<<{name} {number}>>" for name, number in _TAG.findall(prompt)]
    return f"{MAIN} goes on. Done so far: {' '.join(dict.fromkeys(tags)) or 'nothing'}."


def _terminus(step: Step, tag: str) -> str:
    """The JSON that Terminus asks its model for."""
    commands = []
    if isinstance(step, Write):
        commands = [{"keystrokes": _shell_write(step), "duration": 0.5}]
    elif isinstance(step, Run):
        commands = [{"keystrokes": step.command + "\n", "duration": 1.5}]
    answer = {"analysis": tag, "plan": "Next.", "commands": commands, "task_complete": isinstance(step, Say)}
    return json.dumps(answer, indent=2)
