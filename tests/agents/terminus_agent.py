"""Harbor's Terminus 2 as it is, on this machine in place of a container: python terminus_agent.py INSTRUCTION CONTEXT.

The proxy's URL, key and model are in OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from harbor.agents.terminus_2.terminus_2 import Terminus2
from harbor.environments.base import ExecResult
from harbor.models.agent.context import AgentContext


class Here:
    """What Terminus needs of an environment."""

    default_user = None
    session_id = "here"

    def __init__(self, logs: Path) -> None:
        self.trial_paths = SimpleNamespace(agent_dir=logs)

    async def exec(self, command: str, **_: Any) -> ExecResult:
        """Runs a command in the working directory."""
        process = await asyncio.create_subprocess_exec(
            "bash", "-c", command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        out, err = await process.communicate()
        return ExecResult(stdout=out.decode(), stderr=err.decode(), return_code=process.returncode or 0)

    async def is_dir(self, path: str, **_: Any) -> bool:
        return Path(path).is_dir()


async def main(instruction: str, context: int) -> None:
    """Solves one task."""
    logs = Path(os.environ["HOME"])
    agent = Terminus2(
        logs_dir=logs,
        model_name=f"hosted_vllm/{os.environ['OPENAI_MODEL']}",
        api_base=os.environ["OPENAI_BASE_URL"],
        llm_kwargs={"api_key": os.environ["OPENAI_API_KEY"]},
        model_info={
            "max_input_tokens": context,
            "max_output_tokens": 8192,
            "input_cost_per_token": 0.0,
            "output_cost_per_token": 0.0,
        },
        record_terminal_session=False,
        max_turns=30,
        suppress_max_turns_warning=True,
    )
    here = Here(logs)
    await agent.setup(here)  # type: ignore[arg-type]
    await agent.run(instruction, here, AgentContext())  # type: ignore[arg-type]


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
