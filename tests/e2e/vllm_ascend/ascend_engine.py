"""vLLM's real scheduler and vllm-ascend's real, patched model runner around a tiny model, on a CPU.

Real, from source: the scheduler with its KV cache manager, requests, `SchedulerOutput`, the persistent batch, both
constructors of the runner, `execute_model`, `sample_tokens` and the methods they call, and the dispatch logger.
Stand-ins: distributed groups, attention metadata, sampling (every token is `NEXT_TOKEN`), the drafter, NPU streams.

`install_sources` comes first, once per process.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import real_source
import torch
from torch import nn

REAL_MODULES = (
    "vllm._bc_linter",
    "vllm.utils",
    "vllm.v1.core",
    "vllm.v1.engine",
    "vllm.v1.kv_cache_interface",
    "vllm.v1.kv_cache_spec_registry",
    "vllm.v1.metrics.stats",
    "vllm.v1.outputs",
    "vllm.v1.request",
    "vllm.v1.sample.logits_processor",
    "vllm.v1.utils",
    "vllm.v1.worker.gpu_input_batch",
    "vllm.v1.worker.gpu_model_runner",
    "vllm_ascend.attention.attention_v1",
    "vllm_ascend.worker.dispatch_logger",
    "vllm_ascend.worker.model_runner_v1",
    "vllm_ascend.worker.npu_input_batch",
    "vllm_ascend.worker.worker",
)
VOCABULARY = 64
HIDDEN = 8
NEXT_TOKEN = 7
BLOCK_SIZE = 16
MAX_MODEL_LEN = 512


@dataclass(frozen=True)
class Options:
    """What differs between the engines of the tests."""

    dump_config: Path | None = None
    token_budget: int = 256
    num_blocks: int = 64
    prefix_caching: bool = True
    async_scheduling: bool = False
    draft_tokens: int = 0
    pooling: bool = False
    last_stage: bool = True
    kv_transfer: bool = False
    encoder_only: bool = False
    external_launcher: bool = False
    graph_mode: bool = False


def install_sources(vllm: Path, vllm_ascend: Path) -> None:
    real_source.install(vllm, vllm_ascend, REAL_MODULES)
    torch.npu = MagicMock(name="torch.npu")
    torch.cuda.Stream = MagicMock(name="Stream")
    torch.cuda.Event = MagicMock(name="Event")
    torch.Event = MagicMock(name="Event")
    torch.Tensor.pin_memory = lambda self: self


def settings(**values: Any) -> MagicMock:
    """A configuration object: the values given, a truthy stand-in for the rest."""
    made = MagicMock()
    for name, value in values.items():
        setattr(made, name, value)
    return made


class TinyModel(nn.Module):
    """Two layers over token ids; an intermediate pipeline stage returns them wrapped."""

    def __init__(self, wrap: type | None) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCABULARY)
        self._wrap = wrap

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, **unused: Any) -> Any:
        hidden = self.embed_tokens(input_ids.long().clamp(min=0))  # drafts that are still on the device are -1
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden if self._wrap is None else self._wrap(hidden)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden)


class _GraphMode(Enum):
    """`CUDAGraphMode`; NONE in eager mode, which a dump of layers needs."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2


def vllm_config(options: Options) -> MagicMock:
    speculative = None
    if options.draft_tokens:
        speculative = settings(
            num_speculative_tokens=options.draft_tokens,
            method="ngram",
            draft_model_config=None,
            use_dflash=lambda: False,
            use_eagle=lambda: False,
            uses_extract_hidden_states=lambda: False,
            uses_draft_model=lambda: False,
            use_ngram_gpu=lambda: False,
        )
    return settings(
        model_config=settings(
            attention_chunk_size=None,
            disable_cascade_attn=True,
            dtype=torch.float32,
            enable_prompt_embeds=False,
            enable_return_routed_experts=False,
            enforce_eager=not options.graph_mode,
            get_inputs_embeds_size=lambda: HIDDEN,
            get_vocab_size=lambda: VOCABULARY,
            is_encoder_decoder=False,
            is_multimodal_model=False,
            is_multimodal_raw_input_only_model=False,
            logits_processors=None,
            max_model_len=MAX_MODEL_LEN,
            is_mm_prefix_lm=False,
            runner_type="pooling" if options.pooling else "generate",
            uses_mrope=False,
            uses_xdrope_dim=0,
        ),
        cache_config=settings(
            block_size=BLOCK_SIZE,
            cache_dtype="auto",
            calculate_kv_scales=False,
            enable_prefix_caching=options.prefix_caching,
            kv_sharing_fast_prefill=False,
            mamba_cache_mode="none",
            num_gpu_blocks=options.num_blocks,
        ),
        scheduler_config=settings(
            async_scheduling=options.async_scheduling,
            enable_chunked_prefill=True,
            long_prefill_token_threshold=0,
            max_num_batched_tokens=options.token_budget,
            max_num_scheduled_tokens=options.token_budget,
            max_num_seqs=8,
            policy="fcfs",
            scheduler_reserve_full_isl=False,
        ),
        parallel_config=settings(
            cp_kv_cache_interleave_size=1,
            data_parallel_index=0,
            data_parallel_rank=0,
            data_parallel_size=2 if options.external_launcher else 1,
            decode_context_parallel_size=1,
            distributed_executor_backend="external_launcher" if options.external_launcher else "mp",
            enable_dbo=False,
            pipeline_parallel_size=1 if options.last_stage else 2,
            prefill_context_parallel_size=1,
            tensor_parallel_size=1,
        ),
        compilation_config=settings(
            cudagraph_capture_sizes=[],
            cudagraph_mode=_GraphMode.PIECEWISE if options.graph_mode else _GraphMode.NONE,
            static_forward_context={},
        ),
        observability_config=settings(kv_cache_metrics=False, enable_mfu_metrics=False),
        num_speculative_tokens=options.draft_tokens,
        speculative_config=speculative,
        ec_transfer_config=None,
        kv_events_config=None,
        kv_transfer_config=None,
        lora_config=None,
        offload_config=None,
        reasoning_config=None,
        use_v2_model_runner=False,
    )


@dataclass(frozen=True)
class _Batch:
    """`BatchDescriptor` without padding."""

    num_tokens: int
    num_reqs: int | None = None


class _Rejection:
    """`RejectionSampler` as far as the runner's bookkeeping calls it."""

    def __init__(self, sampler: Any) -> None:
        """The sampler is not needed: `make_runner` gives the runner its own rejection."""

    @staticmethod
    def parse_output(sampled: torch.Tensor, vocabulary: int, discarded: Any, *args: Any, **kwargs: Any) -> Any:
        rows = [[token for token in row if token >= 0] for row in sampled.tolist()]
        for index in discarded:
            rows[index] = []
        return rows, None


class _Sampled:
    """In place of `AsyncGPUModelRunnerOutput`, which copies from an NPU: the sampled tokens are on the CPU already."""

    def __init__(
        self, model_runner_output: Any, sampled_token_ids: torch.Tensor, invalid_req_indices: list[int], **unused: Any
    ) -> None:
        rows, _ = _Rejection.parse_output(sampled_token_ids, VOCABULARY, invalid_req_indices)
        self._output = model_runner_output
        self._output.sampled_token_ids = rows
        self.sampled_token_ids_cpu = sampled_token_ids
        self.async_copy_ready_event = MagicMock()

    def get_output(self) -> Any:
        return self._output


@contextmanager
def _no_context(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


def adapt_runner_modules(options: Options) -> Any:
    """Replace what needs an NPU or other processes; return the runner's module."""
    gpu_runner = importlib.import_module("vllm.v1.worker.gpu_model_runner")
    runner = importlib.import_module("vllm_ascend.worker.model_runner_v1")
    stages = SimpleNamespace(
        is_first_rank=True,
        is_last_rank=options.last_stage,
        world_size=1,
        ranks=[0],
        broadcast_tensor_dict=lambda tensors, src: tensors,
    )
    alone = SimpleNamespace(world_size=1, rank_in_group=0)
    no, none = (lambda *args, **kwargs: False), (lambda *args, **kwargs: None)
    no_processors = importlib.import_module("vllm.v1.sample.logits_processor").LogitsProcessors()
    for module in (gpu_runner, runner):
        module.build_logitsprocs = lambda *args, **kwargs: no_processors
        module.get_pp_group = lambda: stages
        module.get_kv_transfer_group = lambda: settings(get_finished=lambda finished: (None, None))
        module.has_kv_transfer_group = lambda: options.kv_transfer
        module.has_ec_transfer = lambda: options.encoder_only
    gpu_runner.is_pin_memory_available = no
    gpu_runner.MULTIMODAL_REGISTRY.supports_multimodal_inputs = no
    for name, value in {
        "AsyncGPUModelRunnerOutput": _Sampled,
        "BatchDescriptor": _Batch,
        "CUDAGraphMode": _GraphMode,
        "RejectionSampler": _Rejection,
        "enable_sp": no,
        "enable_sp_by_pass": no,
        "get_ascend_config": lambda: ascend_config(options),
        "get_c_env": none,
        "get_dcp_group": lambda: alone,
        "get_pcp_group": lambda: alone,
        "get_forward_context": lambda: settings(flash_comm_v1_enabled=False, sp_enabled=False),
        "lmhead_tp_enable": no,
        "maybe_create_ubatch_slices": lambda *args, **kwargs: (None, None),
        "set_ascend_forward_context": _no_context,
        "vllm_version_is": lambda version: version in ("0.13.0", "0.23.0"),  # of one tree, only its own is asked for
    }.items():
        setattr(runner, name, value)
    return runner


def ascend_config(options: Options) -> MagicMock:
    return settings(
        dump_config_path=None if options.dump_config is None else str(options.dump_config),
        dynamic_eplb=False,
        enable_async_exponential=False,
        enable_reduce_sample=False,
        enable_sparse_c8=False,
        eplb_config=settings(dynamic_eplb=False, expert_map_path=None),
        expert_map_record_path=None,
        profiling_chunk_config=settings(need_timing=False),
    )


def make_runner(options: Options) -> Any:
    """The real `NPUModelRunner`, constructed, with the tiny model loaded."""
    module = adapt_runner_modules(options)
    runner = module.NPUModelRunner(vllm_config(options), torch.device("cpu"))
    outputs = importlib.import_module("vllm.v1.outputs")

    accepted: list[int] = []  # tokens that the last step kept of each request, in the order of the batch

    def sample(logits: torch.Tensor, **unused: Any) -> Any:
        tokens = torch.full((logits.shape[0], 1), NEXT_TOKEN, dtype=torch.int32)
        accepted[:] = [1] * len(tokens)
        return outputs.SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=None)

    def sample_and_reject(*args: Any) -> Any:
        """One draft is accepted for each request that has any: rows of tokens, -1 for what was rejected."""
        drafts = runner.last_scheduled.scheduled_spec_decode_tokens
        rows = [[NEXT_TOKEN] * (1 + (req_id in drafts)) for req_id in runner.input_batch.req_ids]
        accepted[:] = [len(row) for row in rows]
        tokens = torch.tensor([row + [-1] * (1 + options.draft_tokens - len(row)) for row in rows], dtype=torch.int32)
        return outputs.SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=None)

    def propose_drafts(sampled_token_ids: list[list[int]], *args: Any) -> list[list[int]]:
        return [[NEXT_TOKEN] * options.draft_tokens if sampled else [] for sampled in sampled_token_ids]

    runner.model = TinyModel(wrap=None if options.last_stage else module.IntermediateTensors)
    runner.model.pooler = MagicMock(name="pooler")
    runner.sampler = sample
    runner.rejection_sampler = sample_and_reject
    runner.propose_draft_token_ids = propose_drafts
    runner._pool = lambda *args: outputs.ModelRunnerOutput(
        req_ids=list(runner.input_batch.req_ids),
        req_id_to_index=dict(runner.input_batch.req_id_to_index),
        sampled_token_ids=[],
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[torch.zeros(HIDDEN) for _ in runner.input_batch.req_ids],
    )
    runner._get_valid_sampled_token_count = lambda: list(accepted)
    runner.cudagraph_dispatcher.dispatch = lambda num_tokens, **unused: (_GraphMode.NONE, _Batch(num_tokens))
    runner._build_attention_metadata = lambda *args, **kwargs: ({}, MagicMock())
    return runner


def make_scheduler(options: Options) -> Any:
    """The real `Scheduler` or `AsyncScheduler`."""
    scheduling = importlib.import_module("vllm.v1.core.sched.scheduler")
    async_scheduling = importlib.import_module("vllm.v1.core.sched.async_scheduler")
    caches = importlib.import_module("vllm.v1.kv_cache_interface")
    envs = importlib.import_module("vllm.envs")
    envs.VLLM_USE_V2_MODEL_RUNNER = False
    envs.VLLM_PREFIX_CACHE_RETENTION_INTERVAL = None
    attention = caches.FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=HIDDEN, dtype=torch.float32)
    return (async_scheduling.AsyncScheduler if options.async_scheduling else scheduling.Scheduler)(
        vllm_config=vllm_config(options),
        kv_cache_config=caches.KVCacheConfig(
            num_blocks=options.num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[caches.KVCacheGroupSpec(["layer"], attention)],
        ),
        structured_output_manager=settings(should_advance=lambda request: False),
        block_size=BLOCK_SIZE,
        mm_registry=settings(supports_multimodal_inputs=lambda config: False),
    )


def start_worker(options: Options, use_v2_model_runner: bool) -> None:
    """The real `NPUWorker.init_device`, which makes a runner; both runners are stand-ins here."""
    module = importlib.import_module("vllm_ascend.worker.worker")
    module.NPUModelRunner = MagicMock()
    module.get_ascend_config = lambda: ascend_config(options)
    worker = object.__new__(module.NPUWorker)
    worker.use_v2_model_runner = use_v2_model_runner
    worker.vllm_config = vllm_config(options)
    worker._init_device = lambda: torch.device("cpu")
    worker.init_device()


@dataclass
class Engine:
    """Scheduler and runner, stepped one by one; `steps` has what the scheduler said for each executed step."""

    options: Options
    steps: list[Any] = field(default_factory=list)
    _unreported: list[tuple[Any, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.runner = make_runner(self.options)
        self.scheduler = make_scheduler(self.options)
        utils = importlib.import_module("vllm.v1.core.kv_cache_utils")
        sha256 = importlib.import_module("vllm.utils.hashing").sha256
        utils.init_none_hash(sha256)
        self._block_hasher = utils.get_request_block_hasher(BLOCK_SIZE, sha256)
        self._request = importlib.import_module("vllm.v1.request").Request

    def add(self, request_id: str, prompt: list[int], answer: int) -> None:
        """Queue a request that will generate `answer` tokens."""
        sampling = settings(
            allowed_token_ids=None,
            bad_words_token_ids=None,
            extra_args=None,
            frequency_penalty=0.0,
            logprobs=None,
            max_tokens=answer,
            min_tokens=0,
            prompt_logprobs=None,
            repetition_detection=None,
            presence_penalty=0.0,
            repetition_penalty=1.0,
            skip_reading_prefix_cache=False,
            stop_token_ids=[],
            structured_outputs=None,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=None,
            all_stop_token_ids=set(),
        )
        arguments: dict[str, Any] = {
            "request_id": request_id,
            "prompt_token_ids": prompt,
            "sampling_params": None if self.options.pooling else sampling,
            "pooling_params": settings(extra_kwargs=None, task="embed") if self.options.pooling else None,
            "block_hasher": self._block_hasher,
        }
        if "eos_token_id" in inspect.signature(self._request).parameters:
            arguments["eos_token_id"] = None
        self.scheduler.add_request(self._request(**arguments))

    def abort(self, request_id: str) -> None:
        status = importlib.import_module("vllm.v1.request").RequestStatus.FINISHED_ABORTED
        self.scheduler.finish_requests(request_id, status)

    def execute(self, scheduled: Any) -> Any:
        """Run one scheduled step on the runner, both halves of it; return the runner's output."""
        if self.options.kv_transfer:
            scheduled.kv_connector_metadata = MagicMock()
        self.steps.append(scheduled)
        self.runner.last_scheduled = scheduled
        output = self.runner.execute_model(scheduled)
        self.runner.spec_decode_common_attn_metadata = MagicMock()  # the drafter's, of which there is none
        return self.runner.sample_tokens(None) if output is None else output

    def step(self) -> Any:
        """Schedule and execute; return what was scheduled.

        The scheduler gets the output back at once, or, with asynchronous scheduling, after it has scheduled the next
        step.
        """
        scheduled = self.scheduler.schedule()
        self._unreported.append((scheduled, self.execute(scheduled)))
        if not self.options.async_scheduling or len(self._unreported) > 1:
            self._report(*self._unreported.pop(0))
        return scheduled

    def step_without_output(self) -> None:
        """Schedule and execute a step whose output has nothing of a model in it."""
        self.execute(self.scheduler.schedule())

    def run_dry(self) -> None:
        """Step until nothing is left to compute."""
        while self.scheduler.has_unfinished_requests():
            self.step()

    def _report(self, scheduled: Any, output: Any) -> None:
        if hasattr(output, "get_output"):
            output = output.get_output()
        self.scheduler.update_from_output(scheduled, output)
        if self.options.async_scheduling:
            return  # it has placeholders for the drafts, which never leave the device
        if self.options.draft_tokens and (drafts := self.runner.take_draft_token_ids()) is not None:
            self.scheduler.update_draft_token_ids(drafts)
