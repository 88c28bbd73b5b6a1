#!/usr/bin/env bash
# A dump run, fully-async: 16 prompts, each prefilled alone, dumped on both sides.
# Arguments are added behind the overrides: model, data and devices of your own run.
set -euo pipefail

export DUMP_ON=1
export PROMPTS_ONLY=1
export DUMP_PHASE=log_prob
export DUMP_CONFIG_PATH=/home/config_actor.json
export TORCHDYNAMO_DISABLE=1

overrides=(
  # one unpadded prompt a micro batch
  actor_rollout_ref.model.use_remove_padding=True
  # dynamic batches pack several requests into one step
  actor_rollout_ref.actor.use_dynamic_bsz=False
  # likewise in the log_prob pass, which is what is dumped
  actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=False
  # one request a training step
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1
  # one request a training step
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1
  # further samples of a prompt add nothing to compare
  actor_rollout_ref.rollout.n=1
  # msprobe hooks modules, graphs have none
  actor_rollout_ref.rollout.enforce_eager=True
  # every prefill has a step of its own
  actor_rollout_ref.rollout.max_num_seqs=1
  # a prompt fits into a step
  actor_rollout_ref.rollout.max_num_batched_tokens=8192
  # the longest prompt of the run
  data.max_prompt_length=1024
  # decode steps are dumped as well, and never compared
  data.max_response_length=2
  # msprobe's file of the inference side
  '+actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config={dump_config_path:"/home/config_generate.json"}'
  # rollout.enable_prefix_caching=False reaches vLLM as nothing at all
  +actor_rollout_ref.rollout.engine_kwargs.vllm.no_enable_prefix_caching=True
  # likewise
  +actor_rollout_ref.rollout.engine_kwargs.vllm.no_enable_chunked_prefill=True
  # validation would fill the dump first
  trainer.val_before_train=False
  # requests stay in the order of the rollout
  trainer.balance_batch=False
  # no larger than what is rolled out
  actor_rollout_ref.actor.ppo_mini_batch_size=16
  # fully async takes samples one by one
  data.train_batch_size=0
  # the same prompts in every run
  data.shuffle=False
  # rollout and trainer have their own devices
  actor_rollout_ref.hybrid_engine=False
  # bypass mode, the default here, has no log_prob pass to dump
  algorithm.rollout_correction=null
  # the rollouter has a number of samples of its own
  rollout.n=1
  # samples of the run
  rollout.total_rollout_steps=16
  # rollout and trainer hold the same weights
  async_training.trigger_parameter_sync_step=1
)
exec python3 -m verl.experimental.fully_async_policy.fully_async_main "${overrides[@]}" "$@"
