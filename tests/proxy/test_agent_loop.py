"""Trials of the agent loop: how they end, what they leave, and what training gets of them."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from serving import Reply, Served, asynchronous, pass_time, serve, until

AGENT = f"{sys.executable} -I -S {Path(__file__).with_name('scripted_agent.py')}"


def settings(**sections: Any) -> Any:
    from verl.experimental.agent_loop.proxy_agent.settings import read

    return read(sections)


def attempt(served: Served, root: Path, given: Any, **options: Any) -> Any:
    from verl.experimental.agent_loop.proxy_agent.trial import Attempt

    options = {
        "name": "t-",
        "sampling": {"temperature": 0.7},
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "do 'it' \"$(now)\""}],
        "sample": {"index": 3, "extra_info": {"answer": "42"}},
        **options,
    }
    return Attempt(served.proxy, given, root=root, **options)


async def run(served: Served, root: Path, command: str, **sections: Any) -> Any:
    scaffold = {"command": command, **sections.pop("scaffold", {})}
    options = sections.pop("options", {})
    return await attempt(served, root, settings(scaffold=scaffold, **sections), **options).run()


async def run_to_timeout(served: Served, root: Path, command: str, come: Any, **scaffold: Any) -> Any:
    """As ``run``, of a trial whose time is over once ``come()``."""
    trial = asyncio.create_task(run(served, root, command, scaffold={"timeout_s": 100.0, **scaffold}))
    await until(lambda: trial.done() or come())
    assert not trial.done()
    pass_time(100.0)
    return await trial


def logged(root: Path) -> list[str]:
    """What the agents have printed."""
    return [line for log in root.glob("*/agent.log") for line in log.read_text().split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def sampled(outcome: Any, **options: Any) -> list[Any]:
    from verl.experimental.agent_loop.proxy_agent.outputs import samples

    options = {"prompt_length": 512, "response_length": 512, "train_recomputed": False, "scored": True, **options}
    return list(samples(outcome.trajectory, options.pop("outputs", "primary"), **options))


def trained(sample: Any) -> list[int]:
    return [token for token, action in zip(sample.response_ids, sample.response_mask, strict=True) if action]


def nothing_left(served: Served) -> None:
    """Only the fixture's own session is open, and nothing runs in the engine."""
    assert served.proxy.service.sessions == 1
    assert served.engine.running == 0


@pytest.mark.parametrize("api", ["openai", "anthropic"])
@asynchronous
async def test_trial(api: str, tmp_path: Path) -> None:
    async with serve(["one", "two", "three"]) as served:
        outcome = await run(served, tmp_path, f"{AGENT} {api} 3")
        nothing_left(served)
    assert (outcome.termination, outcome.exit_code, outcome.reward) == ("completed", 0, None)
    assert (outcome.folder / "agent.log").read_text().split() == ["one", "two", "three"]
    (sample,) = sampled(outcome)
    decoded = served.engine.tokenizer.decode(trained(sample))
    assert decoded == "one<|im_end|>two<|im_end|>three<|im_end|>"
    assert sample.prompt_ids == served.engine.calls[0][0]
    assert sample.prompt_ids + sample.response_ids[: -len("three") - 1] == served.engine.calls[2][0]
    at = [value for value, action in zip(sample.response_logprobs, sample.response_mask, strict=True) if action]
    assert at == pytest.approx([-0.5 - 0.001 * token for token in trained(sample)])
    assert (sample.num_turns, sample.cut, sample.unscored) == (6, 0, 0)
    assert {call[1]["temperature"] for call in served.engine.calls} == {0.7}
    assert (sample.min_global_steps, sample.max_global_steps) == (3, 3)
    archive = json.loads((outcome.folder / "proxy_trajectory.json").read_text())
    assert archive["branches"][0]["traj_acc_ids"] == sample.prompt_ids + sample.response_ids
    assert not (outcome.folder / "work").exists() and not (outcome.folder / "home").exists()


@asynchronous
async def test_what_a_command_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("NODE_EXTRA_CA_CERTS", "/ca.pem")
    command = (
        "printf '%s|' {instruction} \"is {instruction}\" {system} {sample.extra_info.answer} {model}; awk '{print $1}' "
        "{instruction_file}; pwd; echo $HOME; env"
    )
    async with serve() as served:
        scaffold = {"environment": {"WHERE": "{trial_dir}"}, "pass_environment": ["NODE_EXTRA_CA_CERTS"]}
        outcome = await run(served, tmp_path, command, scaffold=scaffold)
    text = (outcome.folder / "agent.log").read_text()
    instruction = "do 'it' \"$(now)\""
    assert text.startswith(f"{instruction}|is {instruction}|be brief|42|vllm-rollout|do\n")
    lines = text.splitlines()
    assert lines[1:3] == [str(outcome.folder / "work"), str(outcome.folder / "home")]
    environment = dict(line.split("=", 1) for line in lines[3:] if "=" in line)
    session = outcome.trajectory.id
    assert environment["ANTHROPIC_BASE_URL"].endswith(f"/sess/{session}")
    assert environment["OPENAI_BASE_URL"] == environment["OPENAI_API_BASE"] == environment["ANTHROPIC_BASE_URL"] + "/v1"
    assert environment["OPENAI_API_KEY"] == environment["ANTHROPIC_API_KEY"] != ""
    assert environment["ANTHROPIC_MODEL"] == environment["OPENAI_MODEL"] == "vllm-rollout"
    assert (environment["WHERE"], environment["NODE_EXTRA_CA_CERTS"]) == (str(outcome.folder), "/ca.pem")
    assert "WANDB_API_KEY" not in environment


@asynchronous
async def test_timeout_ends_everything_and_keeps_what_was_sampled(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    agent = f"trap '' TERM; setsid sleep 3600 & echo $! > {pids}; {AGENT} openai 2 --then sleep; sleep 3600"
    async with serve(["one", "two"]) as served:
        outcome = await run_to_timeout(
            served, tmp_path, agent, lambda: logged(tmp_path) == ["one", "two"], kill_grace_s=0.3
        )
        nothing_left(served)
    assert outcome.termination == "timeout"
    assert not alive(int(pids.read_text()))
    (sample,) = sampled(outcome)
    assert served.engine.tokenizer.decode(trained(sample)) == "one<|im_end|>two<|im_end|>"


@asynchronous
async def test_timeout_while_the_engine_samples(tmp_path: Path) -> None:
    gate = asyncio.Event()
    async with serve(["one", Reply("never", gate=gate)]) as served:
        outcome = await run_to_timeout(served, tmp_path, f"{AGENT} openai 2", lambda: len(served.engine.calls) == 2)
        nothing_left(served)
    assert outcome.termination == "timeout"
    assert [turn.state for turn in outcome.trajectory.turns] == ["finished", "aborted"]
    (sample,) = sampled(outcome)
    assert served.engine.tokenizer.decode(trained(sample)) == "one<|im_end|>"


@asynchronous
async def test_background_processes_of_an_agent_are_ended(tmp_path: Path) -> None:
    async with serve() as served:
        outcome = await run(served, tmp_path, f"{AGENT} openai 1 --then background {tmp_path}/pids")
    assert outcome.termination == "completed"
    pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2 and not any(map(alive, pids))


@asynchronous
async def test_crash_keeps_what_was_sampled(tmp_path: Path) -> None:
    async with serve(["one"]) as served:
        outcome = await run(served, tmp_path, f"{AGENT} openai 1; kill -SEGV $$")
        nothing_left(served)
    assert (outcome.termination, outcome.exit_code) == ("agent_error", 139)
    assert len(sampled(outcome)) == 1


@asynchronous
async def test_an_agent_that_kills_its_supervisor_is_ended(tmp_path: Path) -> None:
    async with serve() as served:
        command = f"sleep 3600 & echo $! > {tmp_path}/pid; kill $PPID; sleep 0.3; kill -9 $PPID; sleep 3600"
        outcome = await run(served, tmp_path, command)
    assert (outcome.termination, outcome.exit_code) == ("agent_error", 137)
    await until(lambda: not alive(int((tmp_path / "pid").read_text())))


@asynchronous
async def test_overflow_that_the_agent_gives_up_on(tmp_path: Path) -> None:
    async with serve(["one"], context_limit=600) as served:
        outcome = await run(served, tmp_path, f"{AGENT} openai 1 --then overflow 2")
        nothing_left(served)
    assert (outcome.termination, outcome.exit_code) == ("overlong", 1)
    assert "context_length_exceeded" in (outcome.folder / "agent.log").read_text()
    assert len(sampled(outcome)) == 1


@asynchronous
async def test_overflow_for_ever_is_ended(tmp_path: Path) -> None:
    async with serve(["one"], context_limit=600) as served:
        scaffold = {"stop_grace_s": 0.5, "timeout_s": 90.0}
        outcome = await run(served, tmp_path, f"{AGENT} openai 1 --then overflow", scaffold=scaffold)
        nothing_left(served)
    assert outcome.termination == "overlong"
    assert len(sampled(outcome)) == 1


@asynchronous
async def test_overflow_that_the_agent_recovers_from(tmp_path: Path) -> None:
    async with serve(["one"], context_limit=600) as served:
        command = f"{AGENT} openai 1 --then overflow 1; {AGENT} openai 2"
        outcome = await run(served, tmp_path, command)
    assert outcome.termination == "completed"


@asynchronous
async def test_most_calls(tmp_path: Path) -> None:
    from verl.experimental.agent_loop.chat_proxy.limits import Limits

    async with serve(["one"], service={"limits": Limits(calls=2)}) as served:
        outcome = await run(served, tmp_path, f"{AGENT} openai 5")
    assert outcome.termination == "max_calls"
    (sample,) = sampled(outcome)
    assert served.engine.tokenizer.decode(trained(sample)) == "one<|im_end|>one<|im_end|>"


@pytest.mark.parametrize(
    ("command", "setup", "timeout_s", "code"),
    [("true", "echo no >&2; exit 3", 60.0, 3), ("no-such-agent", None, 60.0, 127), ("true", "sleep 60", 0.1, 143)],
)
@asynchronous
async def test_a_trial_that_does_not_begin(
    command: str, setup: str | None, timeout_s: float, code: int, tmp_path: Path
) -> None:
    async with serve() as served:
        scaffold = {"setup": setup, "setup_timeout_s": timeout_s}
        verifier = {"command": "echo 1 > {reward_file}", "failed": -1.0}
        outcome = await run(served, tmp_path, command, scaffold=scaffold, verifier=verifier)
        nothing_left(served)
    assert (outcome.termination, outcome.exit_code, outcome.reward) == ("env_setup_failed", code, -1.0)
    assert sampled(outcome) == []


@asynchronous
async def test_an_instruction_that_is_too_long_for_a_command(tmp_path: Path) -> None:
    async with serve() as served:
        options = {"messages": [{"role": "user", "content": "x" * 300_000}]}
        outcome = await run(served, tmp_path, "echo {instruction}", options=options)
        assert outcome.termination == "env_setup_failed"
        assert "could not be started" in (outcome.folder / "agent.log").read_text()
        outcome = await run(served, tmp_path, "wc -c < {instruction_file}", options=options)
    assert (outcome.folder / "agent.log").read_text().strip() == "300000"


@asynchronous
async def test_a_cancelled_trial_leaves_nothing(tmp_path: Path) -> None:
    async with serve() as served:
        command = f"setsid sleep 3600 & echo $! > {tmp_path}/pid; sleep 3600"
        task = asyncio.create_task(run(served, tmp_path, command))
        await until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().endswith("\n"))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        nothing_left(served)
    assert not alive(int((tmp_path / "pid").read_text()))
    assert list(tmp_path.glob("t-*/proxy_trajectory.json"))


@pytest.mark.parametrize("also", ["nobody", "first", "second"])
def test_processes_end_with_the_process_that_started_them(also: str, tmp_path: Path, proxy_tree: Path) -> None:
    """Ray kills the children of a worker that it kills, so one of the two supervisors can be dead by then."""
    supervisor = proxy_tree / "verl/experimental/agent_loop/proxy_agent/supervisor.py"
    command = f"setsid sleep 3600 & echo $! $PPID > {tmp_path}/part; mv {tmp_path}/part {tmp_path}/pids; sleep 3600"
    arguments = [sys.executable, "-I", "-S", str(supervisor), "0.2", "/bin/sh", "-c", command]
    code = "import subprocess, sys; p = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE); print(p.pid); p.wait()"
    parent = subprocess.Popen([sys.executable, "-u", "-c", code, *arguments], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    first = int(parent.stdout.readline())
    asyncio.run(until((tmp_path / "pids").exists))
    daemon, second = map(int, (tmp_path / "pids").read_text().split())
    os.kill(second, signal.SIGSTOP)  # else both may have done their work before the next one is killed
    parent.kill()
    if also != "nobody":
        os.kill({"first": first, "second": second}[also], signal.SIGKILL)
    if also != "second":
        os.kill(second, signal.SIGCONT)
    parent.wait()
    asyncio.run(until(lambda: not any(map(alive, (daemon, first, second)))))


@asynchronous
async def test_a_placeholder_in_single_quotes_is_refused(tmp_path: Path) -> None:
    async with serve() as served:
        with pytest.raises(ValueError, match="single quotes"):
            await run(served, tmp_path, "echo '{instruction}'")
        nothing_left(served)


# -- rewards ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "command", "reward"),
    [
        ("file", "echo 0.25 > {reward_file}", 0.25),
        ("file", 'echo \'{"reward": 1, "lines": 3}\' > {reward_file}; exit 1', 1.0),
        ("file", "echo '{\"accuracy\": 0.5}' > {reward_file}", 0.5),
        ("file", "true", None),
        ("file", "echo NaN > {reward_file}", None),
        ("file", "echo passed > {reward_file}", None),
        ("file", 'echo \'{"a": 1, "b": 2}\' > {reward_file}', None),
        ("stdout", "echo running; echo 0.75; echo done >&2", 0.75),
        ("stdout", "echo 1; echo traceback", None),
        ("exit_code", "exit 0", 1.0),
        ("exit_code", "exit 1", 0.0),
        ("exit_code", "exit 2", None),
        ("exit_code", "no-such-verifier", None),
        ("file", "echo 1 > {reward_file}; sleep 60", None),
    ],
)
@asynchronous
async def test_reward(how: str, command: str, reward: float | None, tmp_path: Path) -> None:
    async with serve() as served:
        verifier = {"command": command, "reward": how, "failed": -0.5, "timeout_s": 1.0 if "sleep" in command else 60.0}
        outcome = await run(served, tmp_path, f"{AGENT} openai 1", verifier=verifier)
    assert outcome.reward == (-0.5 if reward is None else reward)
    assert (outcome.reward_error is None) == (reward is not None)


@asynchronous
async def test_a_verifier_sees_the_work_and_the_agent_not_the_answer(tmp_path: Path) -> None:
    agent = "cp ../sample.json . ; env > seen; echo 42 > result; echo 1 > ../reward.json; exit 1"
    verifier = (
        "test ! -e sample.json && grep -q OPENAI_API_KEY seen && ! env | grep OPENAI_API_KEY && test {termination} = "
        'agent_error && grep -q \'"answer": "42"\' {sample_file} && cat result > {reward_file}'
    )
    async with serve() as served:
        outcome = await run(
            served, tmp_path, agent, verifier={"command": verifier}, scaffold={"setup": "test -s {sample_file}"}
        )
    assert (outcome.reward, outcome.reward_error) == (42.0, None)
    assert not (outcome.folder / "sample.json").exists()


@asynchronous
async def test_a_reward_that_the_agent_wrote_does_not_count(tmp_path: Path) -> None:
    async with serve() as served:
        for agent in ("echo 1 > ../reward.json", "mkdir ../reward.json"):
            outcome = await run(served, tmp_path, agent, verifier={"command": "true"})
            assert (outcome.reward, outcome.reward_error is None) == (0.0, False)


# -- samples ----------------------------------------------------------------------------------------------------------


@asynchronous
async def test_a_first_prompt_longer_than_its_window_loses_nothing(tmp_path: Path) -> None:
    async with serve(["one", "two"]) as served:
        outcome = await run(served, tmp_path, f"{AGENT} openai 2")
    (whole,) = sampled(outcome)
    (sample,) = sampled(outcome, prompt_length=10)
    assert len(sample.prompt_ids) == 10 < len(whole.prompt_ids)
    assert sample.prompt_ids + sample.response_ids == whole.prompt_ids + whole.response_ids
    assert trained(sample) == trained(whole)
    moved = len(whole.prompt_ids) - 10
    assert sample.response_mask == [0] * moved + whole.response_mask
    assert sample.response_logprobs == [0.0] * moved + whole.response_logprobs


@asynchronous
async def test_a_response_longer_than_its_window_is_cut(tmp_path: Path) -> None:
    async with serve(["one", "two"]) as served:
        outcome = await run(served, tmp_path, f"{AGENT} openai 2")
    (whole,) = sampled(outcome)
    (sample,) = sampled(outcome, response_length=6)
    assert sample.response_ids == whole.response_ids[:6]
    assert (len(sample.response_mask), len(sample.response_logprobs)) == (6, 6)
    assert sample.cut == len(whole.response_ids) - 6
    assert [turn.number for turn in sample.turns] == [0, 1]


@asynchronous
async def test_tokens_without_a_log_probability_are_not_trained_on(tmp_path: Path) -> None:
    async with serve(["one", "two"]) as served:
        plain = served.engine.stream

        async def stream(*arguments: Any, **options: Any) -> Any:
            async for chunk in plain(*arguments, **options):
                yield dataclasses.replace(chunk, log_probs=None) if len(served.engine.calls) == 1 else chunk

        served.engine.stream = stream  # type: ignore[method-assign]
        outcome = await run(served, tmp_path, f"{AGENT} openai 2")
    (sample,) = sampled(outcome)
    assert served.engine.tokenizer.decode(trained(sample)) == "two<|im_end|>"
    assert sample.unscored == len("one") + 1
    (unscored,) = sampled(outcome, scored=False)
    assert served.engine.tokenizer.decode(trained(unscored)) == "one<|im_end|>two<|im_end|>"


async def rewritten(tmp_path: Path, temperature: float) -> Any:
    """Two turns; then the first user message is another one, with both answers behind it."""
    import aiohttp

    async with serve(["one", "two", "three"]) as served:
        from verl.experimental.agent_loop.chat_proxy.fields import SamplingPolicy

        session = served.proxy.open_session("again", sampling=SamplingPolicy({"temperature": temperature}))
        headers = {"Authorization": f"Bearer {session.token}"}
        messages: list[dict[str, Any]] = [{"role": "user", "content": "begin"}]
        async with aiohttp.ClientSession(headers=headers) as client:
            for number in range(3):
                if number == 2:
                    messages[0] = {"role": "user", "content": "begin anew"}
                url = f"{served.proxy.openai_url(session)}/chat/completions"
                async with client.post(url, json={"messages": messages}) as response:
                    said = (await response.json())["choices"][0]["message"]["content"]
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"go on {number}"}]
        trajectory = await served.proxy.close_session("again")
        return types.SimpleNamespace(trajectory=trajectory), served.engine.tokenizer


@asynchronous
async def test_rewritten_history(tmp_path: Path) -> None:
    outcome, tokenizer = await rewritten(tmp_path, 1.0)
    (sample,) = sampled(outcome)
    assert tokenizer.decode(trained(sample)) == "three<|im_end|>"
    (sample,) = sampled(outcome, train_recomputed=True)
    assert tokenizer.decode(trained(sample)) == "one<|im_end|>two<|im_end|>three<|im_end|>"
    main = sampled(outcome, outputs="main")
    assert [tokenizer.decode(trained(s)) for s in main] == ["one<|im_end|>two<|im_end|>", "three<|im_end|>"]


@asynchronous
async def test_recomputed_values_of_another_temperature_are_not_trained_on(tmp_path: Path) -> None:
    outcome, tokenizer = await rewritten(tmp_path, 0.7)
    (sample,) = sampled(outcome, train_recomputed=True)
    assert tokenizer.decode(trained(sample)) == "three<|im_end|>"


# -- Harbor -----------------------------------------------------------------------------------------------------------


def fake_harbor(monkeypatch: pytest.MonkeyPatch, run: Any) -> list[Any]:
    """Harbor's two classes as far as they are used; ``run`` is the trial's."""
    configs: list[Any] = []

    class TrialConfig(types.SimpleNamespace):
        @classmethod
        def model_validate(cls, given: dict[str, Any]) -> TrialConfig:
            configs.append(given)
            return cls(**given)

    class Trial:
        def __init__(self, config: Any) -> None:
            self.config = config
            self.result = types.SimpleNamespace(exception_info=None, verifier_result=None)

        @classmethod
        async def create(cls, config: Any) -> Trial:
            return cls(config)

        async def run(self) -> Any:
            return await run(self)

    for name, content in {
        "harbor": {},
        "harbor.trial": {},
        "harbor.models": {},
        "harbor.models.trial": {},
        "harbor.trial.trial": {"Trial": Trial},
        "harbor.models.trial.config": {"TrialConfig": TrialConfig},
    }.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    return configs


async def harbor_trial(served: Served, root: Path, **options: Any) -> Any:
    trial = {"task": {"path": "/tasks/{sample.index}"}, "agent": {"name": "claude-code", "model_name": "{model}"}}
    return await attempt(served, root, settings(harbor={"trial": trial, "failed": -1.0, **options})).run()


@asynchronous
async def test_harbor_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(trial: Any) -> Any:
        process = await asyncio.create_subprocess_shell(f"{AGENT} anthropic 2", env=trial.config.agent["env"])
        assert await process.wait() == 0
        trial.result.verifier_result = types.SimpleNamespace(rewards={"reward": 0.5})
        return trial.result

    configs = fake_harbor(monkeypatch, run)
    async with serve(["one", "two"]) as served:
        outcome = await harbor_trial(served, tmp_path)
        nothing_left(served)
    assert (outcome.termination, outcome.reward) == ("completed", 0.5)
    assert configs[0]["task"] == {"path": "/tasks/3"}
    assert configs[0]["agent"]["model_name"] == "vllm-rollout"
    assert configs[0]["trials_dir"] == outcome.folder / "harbor"
    (sample,) = sampled(outcome)
    assert served.engine.tokenizer.decode(trained(sample)) == "one<|im_end|>two<|im_end|>"


@pytest.mark.parametrize(
    ("error", "termination"),
    [
        ("AgentTimeoutError", "timeout"),
        ("EnvironmentStartTimeoutError", "env_setup_failed"),
        ("RuntimeError", "agent_error"),
    ],
)
@asynchronous
async def test_harbor_failures(error: str, termination: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(trial: Any) -> Any:
        trial.result.exception_info = types.SimpleNamespace(exception_type=error)
        return trial.result

    fake_harbor(monkeypatch, run)
    async with serve() as served:
        outcome = await harbor_trial(served, tmp_path)
    assert (outcome.termination, outcome.reward, outcome.reward_error) == (termination, -1.0, error)


@asynchronous
async def test_harbor_trial_that_takes_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cleaned = []

    async def run(trial: Any) -> Any:
        try:
            await asyncio.sleep(3600)
        finally:
            cleaned.append(True)

    fake_harbor(monkeypatch, run)
    async with serve() as served:
        outcome = await harbor_trial(served, tmp_path, timeout_s=0.2)
        nothing_left(served)
    assert (outcome.termination, outcome.reward, cleaned) == ("timeout", -1.0, [True])


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "either `scaffold`"),
        ({"scaffold": {"command": "x"}, "harbor": {"trial": {"task": {}}}}, "either `scaffold`"),
        ({"scaffold": {}}, "scaffold.command: missing"),
        ({"scaffold": {"command": "x", "comand": "y"}}, "unknown setting `comand`"),
        ({"scaffolds": {}}, "unknown setting `scaffolds`"),
        ({"scaffold": {"command": "x"}, "server": {"sampling": "mine"}}, "'mine' is none of"),
        ({"scaffold": {"command": "x"}, "trial": {"attempts": 0}}, "attempts"),
        ({"scaffold": {"command": "x"}, "trial": {"outputs": "all", "train_recomputed": True}}, "twice"),
        ({"scaffold": "x"}, "must be a mapping"),
        ({"harbor": {"trial": {"task": {}}}, "verifier": {"command": "x"}}, "Harbor's own verifier"),
    ],
)
def test_wrong_settings(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings(**given)


def test_the_example_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    yaml = pytest.importorskip("yaml")
    path = Path(__file__).parents[2] / "configs" / "launch" / "proxy_agent.yaml"
    entries = yaml.safe_load(path.read_text())
    assert {entry["name"] for entry in entries} >= {"proxy_agent"}
    for entry in entries:
        assert entry.pop("_target_") == "verl.experimental.agent_loop.proxy_agent_loop.ProxyAgentLoop"
        entry.pop("name")
        settings(**entry)


@asynchronous
async def test_a_field_that_the_sample_has_not(tmp_path: Path) -> None:
    async with serve() as served:
        with pytest.raises(ValueError, match=r"sample\.extra_info\.task"):
            await run(served, tmp_path, "echo {sample.extra_info.task}")
        nothing_left(served)


def test_no_descendant_of_this_process_is_left() -> None:
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    if children.exists():
        commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid in children.read_text().split()]
        assert not [command for command in commands if "supervisor" in command or "sleep" in command]
