"""An agent for trials: some turns over either API, with the standard library alone, so that it starts fast.

    python scripted_agent.py openai|anthropic TURNS [--then CODE|sleep|overflow|background PIDFILE]

Prints the answers. `overflow` goes on with ever longer messages until its call is refused twice, `sleep` never ends and
`background` leaves two processes behind, one of them in a session of its own, and writes their ids.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any


def call(api: str, messages: list[dict[str, Any]]) -> str:
    body: dict[str, Any] = {"model": "policy", "max_tokens": 64, "messages": messages}
    if api == "openai":
        url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
        headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    else:
        url = os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages"
        headers = {"x-api-key": os.environ["ANTHROPIC_API_KEY"], "anthropic-version": "2023-06-01"}
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json", **headers}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer = json.load(response)
    if api == "openai":
        return str(answer["choices"][0]["message"]["content"])
    return "".join(block["text"] for block in answer["content"] if block["type"] == "text")


def main(api: str, turns: int, then: str, argument: str) -> int:
    messages: list[dict[str, Any]] = [{"role": "user", "content": os.environ.get("TASK", "begin")}]
    for number in range(turns):
        said = call(api, messages)
        print(said, flush=True)
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"go on {number}"}]
    if then == "overflow":
        refused = 0
        while True:
            messages[-1] = {"role": "user", "content": "long " * 200 * (refused + 1)}
            try:
                call(api, messages)
            except urllib.error.HTTPError as error:
                refused += 1
                print(error.code, error.read().decode(), flush=True)
                if argument and refused >= int(argument):
                    return 1
    if then == "sleep":
        time.sleep(3600)
    if then == "background":
        with Path(argument).open("w") as file:
            for own in (False, True):
                child = subprocess.Popen(["sleep", "3600"], start_new_session=own)
                print(child.pid, file=file)
        return 0
    return int(then or 0)


if __name__ == "__main__":
    rest = sys.argv[3:]
    sys.exit(main(sys.argv[1], int(sys.argv[2]), rest[1] if rest else "", rest[2] if len(rest) > 2 else ""))
