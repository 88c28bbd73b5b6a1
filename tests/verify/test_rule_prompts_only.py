"""Rule prompts-only: both trainers crop when they are told to."""

from __future__ import annotations

import pytest
from made_up import source

from patchctl.verify import prompts_only

PPO, FULLY_ASYNC = prompts_only.TRAINERS
LOG_PROB = "self._compute_old_log_prob(crop_to_prompts(batch, self.global_steps))"
FIT = """
    class RayPPOTrainer:
        def _update_actor(self, batch):
            if prompts_only():
                return Nothing()
            return self.actor.update(batch)

        def _update_critic(self, batch):
            \"\"\"Updates the critic.\"\"\"
            if prompts_only():
                return Nothing()
            return self.critic.update(batch)

        def fit(self):
            for batch in self.loader:
                if self.val_only:
                    return
                rewards = extract_reward(batch)
                if prompts_only():
                    self._compute_old_log_prob(crop_to_prompts(batch, self.global_steps))
                if self.bypass:
                    apply_bypass_mode(batch)
                else:
                    old = self._compute_old_log_prob(batch)
"""
GENERATE = """
    class FullyAsyncTrainer(Trainer):
        async def _fit_generate(self, batch=None):
            with timer():
                epoch, batch = await self._get_samples_from_queue()
                if batch is None:
                    raise Stop()
            if prompts_only():
                self._compute_old_log_prob(crop_to_prompts(batch, self.global_steps))
            return batch
"""
NESTED = """
    class RayPPOTrainer:
        def fit(self):
            for batch in self.loader:
                rewards = extract_reward(batch)
                compute_prompts_only = int(os.getenv("PROMPTS_ONLY", "0"))
                if compute_prompts_only:
                    def get_prompts_only_batch(data):
                        length = data.batch["responses"].size(1)
                        data.batch["input_ids"] = data.batch["input_ids"][:, :-length]
                        data.batch["attention_mask"] = data.batch["attention_mask"][:, :-length]
                        if data.batch["position_ids"].dim() == 3:
                            data.batch["position_ids"] = data.batch["position_ids"][:, :, :-length]
                        else:
                            data.batch["position_ids"] = data.batch["position_ids"][:, :-length]
                        data.batch["responses"] = data.batch["responses"][:, :0]
                        return data
                    batch = get_prompts_only_batch(batch)
                if self.bypass:
                    apply_bypass_mode(batch)
"""
INLINE = """
    class FullyAsyncTrainer:
        async def _fit_generate(self, batch=None):
            epoch, batch = await self._get_samples_from_queue()
            compute_prompts_only = int(os.getenv("PROMPTS_ONLY", "0"))
            if compute_prompts_only:
                if "responses" in batch.batch:
                    length = batch.batch["responses"].size(1)
                    batch.batch["input_ids"] = batch.batch["input_ids"][:, :-length]
                    batch.batch["attention_mask"] = batch.batch["attention_mask"][:, :-length]
                    batch.batch["position_ids"] = batch.batch["position_ids"][:, :-length]
                    batch.batch["responses"] = batch.batch["responses"][:, :0]
            return batch
"""


def check(text: str, path: str) -> list[tuple[int | None, str]]:
    return [(finding.line, finding.message) for finding in prompts_only.check(source(text, path))]


@pytest.mark.parametrize(
    ("text", "path"),
    [
        (FIT, PPO),
        (GENERATE, FULLY_ASYNC),
        (NESTED, PPO),
        (INLINE, FULLY_ASYNC),
        (FIT.replace(LOG_PROB, "batch = crop_to_prompts(batch)"), PPO),
        (GENERATE.replace("if prompts_only()", "if os.environ.get('PROMPTS_ONLY') == '1'"), FULLY_ASYNC),
    ],
    ids=["ppo", "fully async", "recipe, ppo", "recipe, fully async", "in place", "by the environment"],
)  # fmt: skip
def test_accepts(text: str, path: str) -> None:
    assert check(text, path) == []


CROP = f"                if prompts_only():\n                    {LOG_PROB}\n"


@pytest.mark.parametrize(
    ("text", "path", "old", "new", "line", "message"),
    [
        (FIT, PPO, CROP, "", 14, "`RayPPOTrainer.fit` does not crop"),
        (FIT, PPO, CROP, CROP.replace("if prompts_only()", "if True"), 20, "crops in every run"),
        (FIT, PPO, CROP, CROP.replace("if prompts_only()", "if self.bypass"), 20, "crops in every run"),
        (FIT, PPO, CROP, CROP.replace("if prompts_only()", "if not prompts_only()"), 20, "crops in every run"),
        (FIT, PPO, LOG_PROB, "crop_to_prompts(batch)", 20, "the cropped batch is dropped"),
        (FIT, PPO, "crop_to_prompts(batch, self.global_steps)", "batch", 14, "does not crop"),
        (FIT, PPO, "crop_to_prompts(batch, self.global_steps)", "crop_to_prompts()", 20, "is given no batch"),
        (FIT, PPO, "                rewards = extract_reward(batch)\n" + CROP,
         CROP + "                rewards = extract_reward(batch)\n", 19, "comes before extract_reward"),
        (FIT, PPO, CROP, "                old = self._compute_old_log_prob(batch)\n" + CROP, 21,
         "comes after _compute_old_log_prob in line 19"),
        (FIT, PPO, "            if prompts_only():\n                return Nothing()\n            return self.actor",
         "            return self.actor", 3, "`_update_actor` trains"),
        (FIT, PPO, "            if prompts_only():\n                return Nothing()\n            return self.critic",
         "            return self.critic", 8, "`_update_critic` trains"),
        (FIT, PPO, "def fit(", "def train(", None, "RayPPOTrainer.fit is gone"),
        (GENERATE, FULLY_ASYNC, f"            if prompts_only():\n                {LOG_PROB}\n", "", 3,
         "does not crop"),
        (GENERATE, FULLY_ASYNC, "            if prompts_only():\n", "            if self.first and prompts_only():\n"
         "                return batch\n            if prompts_only():\n", 9, "returns before the crop"),
        (GENERATE, FULLY_ASYNC, "            if prompts_only():\n                self", "            if self.first:\n"
         "              if prompts_only():\n                self", 8, "another test than PROMPTS_ONLY"),
        (NESTED, PPO, "batch = get_prompts_only_batch(batch)", "get_prompts_only_batch(batch)", 18, "is dropped"),
        (NESTED, PPO, "                    batch = get_prompts_only_batch(batch)\n", "", 3, "does not crop"),
        (NESTED, PPO, '            data.batch["responses"] = data.batch["responses"][:, :0]\n',
         "            pass\n", 18, "`responses` is not cropped"),
        (INLINE, FULLY_ASYNC, '                batch.batch["attention_mask"] = '
         'batch.batch["attention_mask"][:, :-length]\n', "                pass\n", 9,
         "`attention_mask` is not cropped"),
        (INLINE, FULLY_ASYNC, 'batch.batch["input_ids"] = batch.batch["input_ids"][:, :-length]', "pass", 3,
         "does not crop"),
    ],
)  # fmt: skip
def test_refuses(text: str, path: str, old: str, new: str, line: int | None, message: str) -> None:
    assert old in text, old
    found = check(text.replace(old, new, 1), path)
    assert any(at == line and message in said for at, said in found), found
