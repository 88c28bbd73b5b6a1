"""The configuration of a dump run: msprobe's two files, the launch script, and how much disk the run takes.

The dump document's own files are valid, but dump every step of the rollout for as long as it lasts, and its overrides
leave vLLM's prefix cache and chunked prefill on. What is written here is bounded and comparable.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchctl.errors import PatchctlError, UsageError

TASKS = ("statistics", "tensor_list", "tensor")
MODES = ("hybrid", "fully-async")
# What a comparison needs real tensors of, when it is not all: enough to place a difference in a layer.
TENSOR_LIST = ("embed_tokens", "layernorm", "o_proj", "linear_proj", "down_proj", "linear_fc2", "model.norm")
MSPROBE_PATH = re.compile(r"^[A-Za-z0-9_.:/-]+$")
# Bytes of a module in dump.json (and its share of the launch), from dumps of 24 to 64 layers.
BYTES_A_MODULE = 1200
INFER_MODULES, TRAIN_MODULES = 13, 15


@dataclass(frozen=True)
class RunPlan:
    """What a dump run is to look like.

    `requests` prompts of at most `prompt` tokens are rolled out with `response` tokens each; every rollout server
    computes one request at a time, so that every prefill has a step of its own.
    """

    mode: str = "hybrid"
    task: str = "statistics"
    dump_root: str = "/dump_data"
    config_dir: str = "/home"
    requests: int = 16
    prompt: int = 1024
    response: int = 2
    ranks: int = 1
    virtual_stages: int = 1

    @property
    def train_steps(self) -> int:
        """Steps of a trainer's rank that computes all requests itself; each virtual pipeline stage has its own."""
        return self.requests * self.virtual_stages

    @property
    def infer_steps(self) -> int:
        """Steps of a rollout server that computes all requests itself: a prefill and the decodes of each."""
        return self.requests * max(1, self.response)

    @property
    def generate_path(self) -> str:
        return f"{self.dump_root.rstrip('/')}/generate_sequence"

    @property
    def actor_path(self) -> str:
        return f"{self.dump_root.rstrip('/')}/update_actor"


@dataclass(frozen=True)
class ModelShape:
    """What the disk estimate needs of a model."""

    layers: int
    hidden: int
    q: int
    kv: int
    intermediate: int


def check_plan(plan: RunPlan) -> None:
    """Raises UsageError for paths that msprobe refuses after the model was loaded."""
    for path in (plan.dump_root, plan.config_dir):
        if not MSPROBE_PATH.match(path) or not path.startswith("/"):
            raise UsageError(
                f"`{path}`: msprobe takes absolute paths of letters, digits and _ . : / - only; choose another folder"
            )


def msprobe_config(plan: RunPlan, is_training: bool) -> dict[str, Any]:
    """config_actor.json for the training side, config_generate.json for the other."""
    steps = plan.train_steps if is_training else plan.infer_steps
    task = "tensor" if plan.task == "tensor" else "statistics"
    config: dict[str, Any] = {
        "task": task,
        "dump_path": plan.actor_path if is_training else plan.generate_path,
        "rank": [],
        "step": [f"0-{steps - 1}"] if steps > 1 else [0],
        "level": "L0",
        "async_dump": False,
        "extra_info": False,
    }
    block: dict[str, Any] = {"scope": [], "list": [], "data_mode": ["forward"]}
    if task == "statistics":
        tensors = list(TENSOR_LIST) if plan.task == "tensor_list" else []
        block |= {"tensor_list": tensors, "summary_mode": "statistics"}
    config[task] = block
    return config


def overrides(plan: RunPlan) -> list[tuple[str, str]]:
    """Hydra overrides of the run, each with the reason for it."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    vllm = f"+{rollout}.engine_kwargs.vllm"
    found = [
        ("actor_rollout_ref.model.use_remove_padding=True", "one unpadded prompt a micro batch"),
        (f"{actor}.use_dynamic_bsz=False", "dynamic batches pack several requests into one step"),
        (f"{rollout}.log_prob_use_dynamic_bsz=False", "likewise in the log_prob pass, which is what is dumped"),
        (f"{rollout}.log_prob_micro_batch_size_per_gpu=1", "one request a training step"),
        (f"{actor}.ppo_micro_batch_size_per_gpu=1", "one request a training step"),
        (f"{rollout}.n=1", "further samples of a prompt add nothing to compare"),
        (f"{rollout}.enforce_eager=True", "msprobe hooks modules, graphs have none"),
        (f"{rollout}.max_num_seqs=1", "every prefill has a step of its own"),
        (f"{rollout}.max_num_batched_tokens={max(8192, plan.prompt + plan.response)}", "a prompt fits into a step"),
        (f"data.max_prompt_length={plan.prompt}", "the longest prompt of the run"),
        (f"data.max_response_length={plan.response}", "decode steps are dumped as well, and never compared"),
        (
            f'{vllm}.additional_config={{dump_config_path:"{plan.config_dir.rstrip("/")}/config_generate.json"}}',
            "msprobe's file of the inference side",
        ),
        (f"{vllm}.no_enable_prefix_caching=True", "rollout.enable_prefix_caching=False reaches vLLM as nothing at all"),
        (f"{vllm}.no_enable_chunked_prefill=True", "likewise"),
        ("trainer.val_before_train=False", "validation would fill the dump first"),
        ("trainer.balance_batch=False", "requests stay in the order of the rollout"),
        (f"{actor}.ppo_mini_batch_size={plan.requests}", "no larger than what is rolled out"),
    ]
    if plan.mode == "fully-async":
        return [
            *found,
            ("data.train_batch_size=0", "fully async takes samples one by one"),
            ("data.shuffle=False", "the same prompts in every run"),
            ("actor_rollout_ref.hybrid_engine=False", "rollout and trainer have their own devices"),
            ("algorithm.rollout_correction=null", "bypass mode, the default here, has no log_prob pass to dump"),
            ("rollout.n=1", "the rollouter has a number of samples of its own"),
            (f"rollout.total_rollout_steps={plan.requests}", "samples of the run"),
            ("async_training.trigger_parameter_sync_step=1", "rollout and trainer hold the same weights"),
        ]
    return [
        (f"data.train_batch_size={plan.requests}", "prompts of the one step"),
        *found,
        ("trainer.total_training_steps=1", "one step is enough"),
    ]


def environment(plan: RunPlan) -> dict[str, str]:
    """Environment variables of the run."""
    found = {
        "DUMP_ON": "1",
        "PROMPTS_ONLY": "1",
        "DUMP_PHASE": "log_prob",
        "DUMP_CONFIG_PATH": f"{plan.config_dir.rstrip('/')}/config_actor.json",
    }
    if plan.mode == "fully-async":
        found["TORCHDYNAMO_DISABLE"] = "1"
    return found


def launch_script(plan: RunPlan) -> str:
    """A bash script that starts the run; what it is given is passed on to verl."""
    module = {"hybrid": "verl.trainer.main_ppo", "fully-async": "verl.experimental.fully_async_policy.fully_async_main"}
    lines = [
        "#!/usr/bin/env bash",
        f"# A dump run, {plan.mode}: {plan.requests} prompts, each prefilled alone, dumped on both sides.",
        "# Arguments are added behind the overrides: model, data and devices of your own run.",
        "set -euo pipefail",
        "",
        *(f"export {name}={value}" for name, value in environment(plan).items()),
        "",
        "overrides=(",
    ]
    for override, reason in overrides(plan):
        lines += [f"  # {reason}", f"  {shlex.quote(override)}"]
    return "\n".join([*lines, ")", f'exec python3 -m {module[plan.mode]} "${{overrides[@]}}" "$@"', ""])


def write_configs(plan: RunPlan, out: Path, overwrite: bool = False) -> list[Path]:
    """Write the three files into `out`. Raises UsageError, PatchctlError when a file is in the way."""
    check_plan(plan)
    name = "hybrid.sh" if plan.mode == "hybrid" else "fully_async.sh"
    contents = {
        "config_generate.json": json.dumps(msprobe_config(plan, is_training=False), indent=2) + "\n",
        "config_actor.json": json.dumps(msprobe_config(plan, is_training=True), indent=2) + "\n",
        name: launch_script(plan),
    }
    taken = [file for file in contents if (out / file).exists()]
    if taken and not overwrite:
        raise PatchctlError(f"`{out / taken[0]}` exists; remove it, choose another folder or add --overwrite")
    try:
        out.mkdir(parents=True, exist_ok=True)
        for file, text in contents.items():
            (out / file).write_text(text, encoding="utf-8")
        (out / name).chmod(0o755)
    except OSError as error:
        raise PatchctlError(f"cannot write to `{out}`: {error.strerror}") from error
    return [out / file for file in contents]


def read_shape(model: Path) -> ModelShape:
    """The sizes in a model's config.json. Raises PatchctlError."""
    file = model / "config.json" if model.is_dir() else model
    try:
        raw = json.loads(file.read_bytes())
        raw = raw.get("text_config", raw)
        hidden, heads = raw["hidden_size"], raw["num_attention_heads"]
        head = raw.get("head_dim") or hidden // heads
        experts = raw.get("num_experts_per_tok")
        width = raw["moe_intermediate_size"] * experts if experts and "moe_intermediate_size" in raw else None
        return ModelShape(
            layers=raw["num_hidden_layers"],
            hidden=hidden,
            q=heads * head,
            kv=raw.get("num_key_value_heads", heads) * head,
            intermediate=width or raw["intermediate_size"],
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PatchctlError(f"`{file}` is no config.json of a causal language model ({error!r})") from error


def estimate_disk(plan: RunPlan, shape: ModelShape) -> dict[str, int]:
    """Bytes that the run writes, by side: {"infer", "train", "total"}."""
    h, q, kv, m, n = shape.hidden, shape.q, shape.kv, shape.intermediate, plan.prompt
    # Numbers that the inputs and outputs of a layer's modules hold for each token, 2 bytes each.
    infer_width = 17 * h + 3 * q + 4 * kv + 6 * m
    train_width = 15 * h + 3 * q + 2 * kv + 5 * m
    if plan.task == "statistics":
        infer_width = train_width = 0
    elif plan.task == "tensor_list":
        infer_width, train_width = 9 * h + q + m, 6 * h + q + m
    infer = _statistics(INFER_MODULES, shape, plan.infer_steps)
    train = _statistics(TRAIN_MODULES, shape, plan.requests)  # virtual stages share the modules
    infer += 2 * shape.layers * infer_width * (n * plan.requests + plan.infer_steps - plan.requests)
    train += 2 * shape.layers * train_width * n * plan.requests
    return {"infer": infer * plan.ranks, "train": train * plan.ranks, "total": (infer + train) * plan.ranks}


def _statistics(modules: int, shape: ModelShape, steps: int) -> int:
    return (modules * shape.layers + 10) * BYTES_A_MODULE * steps


def human(size: float) -> str:
    """1.5 GB and the like."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


KNOWN_KEYS = frozenset(
    {
        "task",
        "dump_path",
        "rank",
        "step",
        "level",
        "async_dump",
        "dump_enable",
        "extra_info",
        "precision",
        "risk_level",
        "custom_op_namespaces",
        "load",
        "statistics",
        "tensor",
        "acc_check",
        "structure",
        "nan_check",
        "diff_check",
    }
)
KNOWN_BLOCK_KEYS = frozenset(
    {
        "scope",
        "list",
        "tensor_list",
        "data_mode",
        "summary_mode",
        "slice",
        "request_id",
        "file_format",
        "diff_nums",
        "check_mode",
        "white_list",
        "black_list",
        "error_data_path",
    }
)


def config_problems(raw: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(level, what is wrong, what to change) for msprobe's file; level is "error" or "warning".

    msprobe ignores unknown keys without a word, and checks some values only after the model was loaded.
    """
    found: list[tuple[str, str, str]] = []
    task = raw.get("task", "statistics")
    block = raw.get(task, {}) if isinstance(task, str) else {}
    for keys, known, where in ((raw, KNOWN_KEYS, ""), (block, KNOWN_BLOCK_KEYS, f"{task}.")):
        for key in keys if isinstance(keys, Mapping) else ():
            if key not in known:
                close = _closest(key, known)
                hint = f"write `{close}`" if close else "remove it"
                found.append(("error", f"msprobe ignores the key `{where}{key}`", hint))
    if task not in ("statistics", "tensor"):
        found.append(("error", f"task `{task}` cannot be compared", "set task to statistics or tensor"))
    if raw.get("level", "L1") not in ("L0", "mix"):
        found.append(("error", f"level {raw.get('level', 'L1 (the default)')} dumps no modules", "set level to L0"))
    for key in ("rank", "step"):
        if not isinstance(raw.get(key, []), list):
            found.append(("error", f"`{key}` is {raw[key]!r}", 'write a list: [] or [0, 1] or ["0-31"]'))
    if raw.get("step", []) == []:
        found.append(
            (
                "warning",
                "`step` is empty: every decode step is dumped as well, for as long as the run lasts",
                'give a bounded list, for example ["0-31"]',
            )
        )
    if raw.get("async_dump"):
        found.append(
            (
                "warning",
                "async_dump keeps references until the step ends, which kernels that write in place change",
                "set async_dump to false",
            )
        )
    if raw.get("precision", "low") != "low":
        found.append(("error", "precision high leaves norm and mean out of the statistics", "set precision to low"))
    found += _path_problems(raw.get("dump_path"))
    found += _block_problems(block if isinstance(block, Mapping) else {}, str(task))
    return found


def _path_problems(path: object) -> list[tuple[str, str, str]]:
    if not isinstance(path, str) or not path:
        return [("error", "no dump_path", "add dump_path")]
    if not MSPROBE_PATH.match(path):
        return [
            (
                "error",
                f"msprobe refuses the characters of dump_path `{path}`, after the model was loaded",
                "use letters, digits and _ . : / - only",
            )
        ]
    return []


def _block_problems(block: Mapping[str, Any], task: str) -> list[tuple[str, str, str]]:
    found: list[tuple[str, str, str]] = []
    scope = block.get("scope", [])
    if not isinstance(scope, list) or len(scope) not in (0, 2):
        found.append(("error", f"{task}.scope is {scope!r}", "give none or exactly two full names"))
    modes = block.get("data_mode", ["all"])
    allowed = {"all", "forward", "backward", "input", "output"}
    if not isinstance(modes, list) or not set(map(str, modes)) <= allowed or ("all" in modes and len(modes) > 1):
        found.append(("error", f"{task}.data_mode is {modes!r}", 'write ["forward"]'))
    elif "forward" not in modes and "all" not in modes:
        found.append(("error", f"{task}.data_mode {modes!r} leaves inputs or outputs out", 'write ["forward"]'))
    if block.get("summary_mode", "statistics") != "statistics":
        found.append(
            (
                "error",
                f"{task}.summary_mode {block['summary_mode']} cannot be compared between engines",
                "set summary_mode to statistics",
            )
        )
    if block.get("list"):
        found.append(("warning", f"{task}.list dumps some modules only", "leave it empty to compare every layer"))
    return found


def _closest(key: str, known: Sequence[str] | frozenset[str]) -> str | None:
    from difflib import get_close_matches

    return next(iter(get_close_matches(key, sorted(known), 1, 0.75)), None)
