"""A logits processor that makes a random model say what the last user message orders: ``Say [[...]]``.

Tool calls and stop strings come out of a random model in no other way. What follows an order, and every answer to a
message without one, is sampled freely.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import shims
import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

HEADER = "<|im_start|>assistant\n"


class Obedient(AdapterLogitsProcessor):
    """See the module."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        from transformers import AutoTokenizer

        super().__init__(vllm_config, device, is_pin_memory)
        self._tokenizer = AutoTokenizer.from_pretrained(vllm_config.model_config.tokenizer)
        self._header = self._tokenizer.encode(HEADER, add_special_tokens=False)
        self._orders: dict[tuple[int, ...], list[int]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Callable[[list[int], list[int], torch.Tensor], torch.Tensor]:
        known: tuple[int, list[int]] | None = None  # number of ids that were said before this request, ids to say

        def process(prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            nonlocal known
            if known is None:
                known = self._order(prompt_ids)
            at = known[0] + len(output_ids)
            if at < len(known[1]):
                kept = logits[known[1][at]].clone()
                logits.fill_(float("-inf"))
                logits[known[1][at]] = kept
            return logits

        return process

    def _order(self, prompt_ids: list[int]) -> tuple[int, list[int]]:
        """A prompt may end inside an answer: one that was aborted and goes on."""
        n = len(self._header)
        starts = [at for at in range(len(prompt_ids) - n, -1, -1) if prompt_ids[at : at + n] == self._header][:1]
        if not starts:
            return 0, []
        begin = starts[0] + n
        question = self._tokenizer.decode(prompt_ids[max(0, starts[0] - 2000) : starts[0]])
        order = shims.order_in(question.rpartition("<|im_start|>user\n")[2])
        if order is None:
            return 0, []
        ids = self._tokenizer.encode(order[0], add_special_tokens=False)
        return len(prompt_ids) - begin, ids + [self._tokenizer.eos_token_id] * order[1]
