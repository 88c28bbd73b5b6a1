"""verl's vLLM server, with a record of every output of the engine below it, and weights that can be changed.

Nothing else differs: generation, streaming, abort and resume are verl's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import shims

shims.load()

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension  # noqa: E402
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer  # noqa: E402

SCALE = 0.15


def change(name: str, weight: Any, version: int, base: dict[str, Any]) -> None:
    """Make a weight that of `version`; `base` keeps what it was at version 0.

    The norms alone change: vLLM keeps the matrices in a packed form besides.
    """
    if name.endswith("norm.weight"):
        weight.data.copy_(base.setdefault(name, weight.data.clone()) * (1 + SCALE * version))


class WorkerExtension(vLLMColocateWorkerExtension):
    """In the engine's worker: a weight update that comes from no trainer."""

    def change_weights(self, version: int) -> None:
        base = self.__dict__.setdefault("_base", {})
        for name, weight in self.model_runner.model.named_parameters():
            change(name, weight, version, base)


class RecordingServer(vLLMHttpServer):
    """See the module."""

    def _get_worker_extension_cls(self) -> str:
        return f"{WorkerExtension.__module__}.{WorkerExtension.__name__}"

    async def launch_server(self, *args: Any, **kwargs: Any) -> None:
        await super().launch_server(*args, **kwargs)
        self._records: list[dict[str, Any]] = []
        self._generate = self.engine.generate
        self.engine.generate = self._recorded

    async def _recorded(
        self, *, prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any
    ) -> AsyncIterator[Any]:
        record: dict[str, Any] = {
            "request_id": request_id,
            "prompt": list(prompt["prompt_token_ids"]),
            "max_tokens": sampling_params.max_tokens,
            "temperature": sampling_params.temperature,
            "scores": sampling_params.prompt_logprobs is not None,
            "tokens": [],
            "log_probs": [],
            "steps": [],
            "finish_reason": None,
            "stop_reason": None,
        }
        self._records.append(record)
        outputs = self._generate(prompt=prompt, sampling_params=sampling_params, request_id=request_id, **kwargs)
        async for output in outputs:
            for completion in output.outputs[:1]:
                begin = len(record["tokens"])
                new = list(completion.token_ids[begin:])
                record["tokens"] += new
                record["steps"] += [self.global_steps] * len(new)  # the weights' version when each token came
                if completion.logprobs is not None:
                    rows = completion.logprobs[begin : begin + len(new)]
                    record["log_probs"] += [row[token].logprob for token, row in zip(new, rows, strict=True)]
                record["finish_reason"] = completion.finish_reason
                record["stop_reason"] = completion.stop_reason
            yield output

    async def records(self) -> list[dict[str, Any]]:
        """Everything that the engine gave back since the last call."""
        found, self._records = self._records, []
        return found

    async def sampled(self) -> int:
        """Tokens that the engine has sampled since the last call of `records`."""
        return sum(len(record["tokens"]) for record in self._records)

    async def running(self) -> int:
        """Requests that the engine has now."""
        return len(self.engine.output_processor.request_states)

    async def change_weights(self, version: int) -> None:
        """The part of a weight sync that a trainer would do, between abort and resume."""
        await self.engine.collective_rpc("change_weights", args=(version,))
        await self.set_global_steps(version)
