"""The OpenHands SDK with its default tools: python openhands_agent.py INSTRUCTION EVENTS.

EVENTS is the number of events after which the conversation is condensed. The proxy's URL, key and model are in
OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from openhands.sdk import LLM, Agent, Conversation
from openhands.sdk.context.condenser import LLMSummarizingCondenser
from openhands.tools.preset.default import get_default_tools, register_builtins_agents


def main(instruction: str, events: int) -> int:
    """Solves one task; the exit code."""
    llm = LLM(
        usage_id="agent",
        model=f"hosted_vllm/{os.environ['OPENAI_MODEL']}",
        base_url=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        num_retries=3,
        retry_min_wait=1,
        retry_max_wait=2,
    )
    register_builtins_agents(enable_browser=False)
    condenser = LLMSummarizingCondenser(
        llm=llm.model_copy(update={"usage_id": "condenser"}), max_size=events, keep_first=2
    )
    tools = get_default_tools(enable_browser=False, enable_sub_agents=True)
    conversation = Conversation(
        agent=Agent(llm=llm, tools=tools, condenser=condenser),
        workspace=Path.cwd(),
        max_iteration_per_run=40,
        visualizer=None,
    )
    conversation.send_message(instruction)
    conversation.run()
    status = conversation.state.execution_status
    print("status:", status)
    conversation.close()
    return 0 if status.value == "finished" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
