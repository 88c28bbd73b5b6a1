"""Is this machine ready for a dump run? Every finding says what to change.

Most of what makes a dump worthless raises no error anywhere: a key that msprobe ignores, a runner that does not dump,
an environment variable that does not reach the Ray workers. This looks for it before hours are spent.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchctl.config_files import ModelShape, RunPlan, config_problems, estimate_disk, human
from patchctl.errors import PatchctlError
from patchctl.tree import Progress

PACKAGES = (
    "mindstudio-probe",
    "msprobe",
    "torch",
    "torch-npu",
    "vllm",
    "vllm-ascend",
    "verl",
    "transformers",
    "megatron-core",
    "mbridge",
    "ray",
)
PROBED = ("26.0.0", "26.2.0")
VARIABLES = (
    "DUMP_ON",
    "DUMP_PHASE",
    "PROMPTS_ONLY",
    "DUMP_CONFIG_PATH",
    "DUMP_UNSAFE",
    "TORCHDYNAMO_DISABLE",
    "VLLM_USE_V2_MODEL_RUNNER",
    "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION",
    "RAY_ADDRESS",
)
# Runs in the interpreter of the training or the inference environment.
_PROBE = """
import importlib.metadata as m, importlib.util as u, json, os, platform, sys
def version(name):
    try: return m.version(name)
    except Exception: return None
def place(name):
    try: spec = u.find_spec(name)
    except Exception: return None
    return os.path.dirname(os.path.dirname(spec.origin)) if spec and spec.origin else None
print(json.dumps({"python": platform.python_version(), "platform": platform.platform(),
  "packages": {name: version(name) for name in sys.argv[1].split(",")},
  "places": {name: place(name) for name in ("verl", "vllm_ascend")}}))
"""


@dataclass(frozen=True)
class Finding:
    """One thing to know: level is "error", "warning" or "ok"."""

    level: str
    area: str
    what: str
    change: str = ""


def read_environments(infer: Path | None, train: Path | None) -> dict[str, dict[str, str]]:
    """The environments that `patchctl doctor --json` printed on each side. Raises PatchctlError."""
    found: dict[str, dict[str, str]] = {}
    for side, path in (("infer", infer), ("train", train)):
        if path is None:
            continue
        try:
            document = json.loads(path.read_bytes())
            found[side] = {str(key): str(value) for key, value in document["environment"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise PatchctlError(f"`{path}` is no output of `patchctl doctor --json`") from error
    return found


def probe(python: str | None) -> dict[str, Any]:
    """Versions and places of packages in `python`'s environment (default: this one). Raises PatchctlError."""
    command = [python or sys.executable, "-c", _PROBE, ",".join(PACKAGES)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        found: dict[str, Any] = json.loads(done.stdout)
        if not {"python", "platform", "packages", "places"} <= found.keys():
            raise ValueError
    except (OSError, subprocess.SubprocessError, ValueError, AttributeError) as error:
        raise PatchctlError(
            f"cannot ask `{command[0]}` for its packages: {_why(error)}; "
            "give --python the interpreter of the environment, for example ~/venv/bin/python"
        ) from error
    return found


def _why(error: Exception) -> str:
    """In a few words, why an interpreter gave no answer."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, subprocess.CalledProcessError):
        said = str(error.stderr).strip().splitlines()
        return said[-1] if said else f"exit code {error.returncode}"
    if isinstance(error, subprocess.TimeoutExpired):
        return f"no answer within {error.timeout:.0f} s"
    return "its answer is not that of a Python interpreter"


def environment_of(found: Mapping[str, Any], variables: Mapping[str, str]) -> dict[str, str]:
    """One flat table, for the report: versions, platform, variables."""
    table = {"python": str(found["python"]), "platform": str(found["platform"])}
    table |= {name: str(version) for name, version in found["packages"].items() if version}
    return table | {name: variables[name] for name in VARIABLES if name in variables}


def check_packages(packages: Mapping[str, str | None]) -> Iterator[Finding]:
    """msprobe is there and is the right project; the pieces that must agree do."""
    msprobe, other = packages.get("mindstudio-probe"), packages.get("msprobe")
    if other is not None:
        yield Finding(
            "error",
            "packages",
            f"`msprobe` {other} from PyPI is another project",
            "pip uninstall msprobe; pip install --force-reinstall mindstudio-probe",
        )
    if msprobe is None:
        yield Finding(
            "error",
            "packages",
            "msprobe (mindstudio-probe) is missing: nothing will be dumped",
            "pip install mindstudio-probe==26.2.0",
        )
    elif msprobe not in PROBED:
        yield Finding(
            "warning",
            "packages",
            f"mindstudio-probe {msprobe} was never tried, only {' and '.join(PROBED)}",
            "compare a few steps first, or install one of these",
        )
    else:
        yield Finding("ok", "packages", f"mindstudio-probe {msprobe}")
    if packages.get("torch") is None:
        yield Finding(
            "error", "packages", "torch is missing in this environment", "run with --python of the training environment"
        )
    vllm, ascend = packages.get("vllm"), packages.get("vllm-ascend")
    if vllm and ascend and vllm.split(".")[:2] != ascend.split(".")[:2]:
        yield Finding(
            "error", "packages", f"vllm {vllm} with vllm-ascend {ascend}", "install the same minor version of both"
        )


def check_trees(states: Mapping[str, tuple[str, str] | None], python: str) -> Iterator[Finding]:
    """Every tree carries the whole series.

    `states`: how far it is applied, and the tree's place; None for a package that `python` does not import.
    """
    progress = {state.value for state in Progress}
    for name, found in states.items():
        if found is None:
            package = name.replace("-", "_")
            yield Finding("warning", "patches", f"{package} is not importable by {python}", f"give --{name} DIR")
            continue
        state, place = found
        if state == Progress.APPLIED.value:
            yield Finding("ok", "patches", f"{name} in {place} is patched")
        else:
            apply = f"patchctl apply --{name} {shlex.quote(place)} --only {name}"
            change = apply if state in progress else f"give --{name} DIR"
            yield Finding("error", "patches", f"{name} in {place} is {state}", change)


def check_configs(generate: Path | None, actor: Path | None) -> Iterator[Finding]:
    """msprobe's two files, alone and together."""
    configs: dict[str, Mapping[str, Any]] = {}
    for name, path in (("config_generate", generate), ("config_actor", actor)):
        if path is None:
            continue
        raw, problem = _read_json(path)
        if raw is None:
            yield problem
            continue
        configs[name] = raw
        count = 0
        for level, what, change in config_problems(raw):
            count += 1
            yield Finding(level, "msprobe config", f"{path}: {what}", change)
        yield from check_dump_path(str(raw.get("dump_path") or ""), str(path))
        if not count:
            yield Finding("ok", "msprobe config", f"{path}: every key is known and fits a comparison")
    if len(configs) == 2:
        left, right = configs["config_generate"], configs["config_actor"]
        if left.get("task", "statistics") != right.get("task", "statistics"):
            yield Finding("error", "msprobe config", "the two files have different tasks", "set the same task in both")
        if left.get("dump_path") == right.get("dump_path"):
            yield Finding(
                "error",
                "msprobe config",
                "both sides dump into one folder and overwrite each other",
                "give each file a dump_path of its own",
            )


def check_dump_path(path: str, config: str) -> Iterator[Finding]:
    """The folder is writable and empty, here and now."""
    if not path:
        return
    folder = Path(path)
    if folder.is_dir() and any(folder.iterdir()):
        yield Finding(
            "error", "dump path", f"{path} is not empty: steps of two runs would mix", f"empty it or change {config}"
        )
    elif folder.exists() and not folder.is_dir():
        yield Finding("error", "dump path", f"{path} is not a folder", f"change dump_path in {config}")
        return
    parent = next((place for place in (folder, *folder.absolute().parents) if place.exists()), Path("/"))
    if not os.access(parent, os.W_OK | os.X_OK):
        yield Finding("error", "dump path", f"{parent} is not writable for this user", f"change dump_path in {config}")


def check_disk(generate: Path | None, shape: ModelShape | None, plan: RunPlan) -> Iterator[Finding]:
    """The estimate of the run against the free space of its dump path."""
    raw = _read_json(generate)[0] if generate else None
    path = raw.get("dump_path") if raw else None
    if shape is None or not isinstance(path, str):
        return
    place = next((place for place in (Path(path), *Path(path).absolute().parents) if place.exists()), Path("/"))
    free, need = shutil.disk_usage(place).free, estimate_disk(plan, shape)["total"]
    text = f"the run takes about {human(need)}, {place} has {human(free)} free"
    if need > free:
        yield Finding("error", "disk", text, "dump fewer requests, or statistics in place of tensors")
    else:
        yield Finding("ok", "disk", text)


def check_variables(
    variables: Mapping[str, str], forwards: bool | None, actor: Path | None = None
) -> Iterator[Finding]:
    """The dump's variables are set, reach the Ray workers, and nothing switches the dump off.

    `variables`: this shell's, with what the launch script makes of them (`exported`). `forwards`: the patched verl
    forwards them itself; None when that is not known. `actor`: the training side's msprobe config that is checked.
    """
    if variables.get("DUMP_ON") != "1":
        yield Finding("warning", "environment", "DUMP_ON is not 1", "export DUMP_ON=1 where verl is started")
    if variables.get("PROMPTS_ONLY") != "1":
        yield Finding(
            "warning",
            "environment",
            "PROMPTS_ONLY is not 1: training would see the responses too",
            "export PROMPTS_ONLY=1",
        )
    if variables.get("DUMP_PHASE", "log_prob") not in ("log_prob", "all"):
        yield Finding(
            "error",
            "environment",
            f"DUMP_PHASE={variables['DUMP_PHASE']} does not dump the log_prob pass",
            "export DUMP_PHASE=log_prob",
        )
    if variables.get("VLLM_USE_V2_MODEL_RUNNER", "0") not in ("", "0"):
        yield Finding(
            "error",
            "environment",
            "the v2 model runner (VLLM_USE_V2_MODEL_RUNNER) has no debugger: no dump",
            "unset VLLM_USE_V2_MODEL_RUNNER",
        )
    config = variables.get("DUMP_CONFIG_PATH", "/home/config_actor.json")
    name_it = f"export DUMP_CONFIG_PATH={shlex.quote(str(actor.absolute()))}" if actor else ""
    if not Path(config).is_file():
        yield Finding(
            "warning",
            "environment",
            f"the training side's msprobe config {config} does not exist here",
            name_it or "set DUMP_CONFIG_PATH to a file that every training machine has",
        )
    elif actor and actor.is_file() and not actor.samefile(config):
        yield Finding("warning", "environment", f"the training side reads {config}, not {actor}", name_it)
    if forwards is False:
        yield Finding(
            "error",
            "environment",
            "this verl does not forward the variables to its Ray workers",
            "apply the series, or add +ray_kwargs.ray_init.runtime_env.env_vars.DUMP_ON=1 and so on",
        )
    elif forwards:
        yield Finding("ok", "environment", "verl forwards the dump's variables to its Ray workers")
    if variables.get("RAY_ADDRESS") and not forwards:
        yield Finding(
            "warning",
            "environment",
            "RAY_ADDRESS names a running cluster, whose workers have its environment",
            "start the cluster with the variables set, or use a patched verl",
        )


_VLLM = "actor_rollout_ref.rollout.engine_kwargs.vllm"
_WANTED = (
    # override, values that are right, what else happens
    ("actor_rollout_ref.actor.use_dynamic_bsz", ("False", "false"), "dynamic batches pack requests into one step"),
    ("actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu", ("1",), "several requests share a training step"),
    ("actor_rollout_ref.rollout.n", ("1",), "every prompt is dumped n times"),
    ("actor_rollout_ref.rollout.max_num_seqs", ("1",), "several prefills share a step"),
    ("actor_rollout_ref.rollout.enforce_eager", ("True", "true"), "graphs have no modules to hook"),
    ("actor_rollout_ref.model.use_remove_padding", ("True", "true"), "prompts are padded"),
    (
        "actor_rollout_ref.rollout.engine_kwargs.vllm.no_enable_prefix_caching",
        ("True", "true"),
        "cached tokens are missing from the prefill",
    ),
    (
        "actor_rollout_ref.rollout.engine_kwargs.vllm.no_enable_chunked_prefill",
        ("True", "true"),
        "a prefill is cut in several steps",
    ),
    ("trainer.val_before_train", ("False", "false"), "validation fills the dump first"),
    ("trainer.balance_batch", ("False", "false"), "requests change their order"),
)


def check_overrides(settings: Mapping[str, str]) -> Iterator[Finding]:
    """The overrides of the run, as `key` -> `value` without any plus sign."""
    for key, right, otherwise in _WANTED:
        value = settings.get(key)
        if value not in right:
            shown = "is not set" if value is None else f"is {value}"
            plus = "+" if "engine_kwargs" in key else ""
            yield Finding("error", "launch", f"{key} {shown}: {otherwise}", f"add {plus}{key}={right[0]}")
    for feature in ("prefix_caching", "chunked_prefill"):
        if f"actor_rollout_ref.rollout.enable_{feature}" in settings:
            yield Finding(
                "warning",
                "launch",
                f"rollout.enable_{feature}=False reaches vLLM as nothing at all",
                f"use +{_VLLM}.no_enable_{feature}=True",
            )
    tools = ("global_profiler.tool", "actor_rollout_ref.actor.profiler.tool")
    if any(settings.get(tool) == "precision_debugger" for tool in tools):
        yield Finding(
            "error",
            "launch",
            "verl's own msprobe integration is on as well: a process has one debugger, one does nothing",
            "remove global_profiler.tool=precision_debugger",
        )
    extra = settings.get(f"{_VLLM}.additional_config", "")
    if "dump_config_path" not in extra:
        renamed = " (dump_config was renamed to dump_config_path)" if "dump_config" in extra else ""
        yield Finding(
            "error",
            "launch",
            f"vLLM gets no dump_config_path: the inference side dumps nothing{renamed}",
            f"add '+{_VLLM}.additional_config={{dump_config_path:\"FILE\"}}'",
        )
    if settings.get("algorithm.rollout_correction.bypass_mode") in ("True", "true"):
        yield Finding(
            "error", "launch", "bypass mode has no log_prob pass to dump", "set algorithm.rollout_correction=null"
        )


def check_launch(script: Path) -> Iterator[Finding]:
    """The overrides of a launch script. Raises PatchctlError."""
    findings = list(check_overrides(read_overrides(script)))
    yield from findings or [Finding("ok", "launch", f"{script}: every override fits a dump")]


def read_overrides(script: Path) -> dict[str, str]:
    """The `key=value` words of a launch script, comments aside; the last one counts. Raises PatchctlError."""
    lines = [line for line in _read_script(script).splitlines() if not line.lstrip().startswith("#")]
    try:
        words = shlex.split(" ".join(line.rstrip("\\") for line in lines), comments=False)
    except ValueError as error:
        raise PatchctlError(f"`{script}` has an open quote: {error}") from error
    found = {}
    for word in words:
        match = re.match(r"^\+{0,2}([A-Za-z_][\w.]*\.[\w.]+)=(.*)$", word)
        if match:
            found[match[1]] = match[2]
    return found


_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_REFERENCE = re.compile(r"\$([A-Za-z_]\w*)|\$\{([A-Za-z_]\w*)(?::?-([^}]*))?\}")
_QUOTED_DOLLAR = "\0"


def exported(script: Path, variables: Mapping[str, str]) -> dict[str, str]:
    """The environment that a launch script gives verl, started in that of `variables`. Raises PatchctlError.

    It is read, not run: assignments, `export` and `unset` count wherever they stand, $NAME and ${NAME:-default} are
    known, other expansions stay as they are written.
    """
    known, names = dict(variables), set(variables)
    for words in _statements(_read_script(script)):
        command = next((number for number, word in enumerate(words) if not _ASSIGNMENT.fullmatch(word)), len(words))
        if words[0] == "unset":
            for name in words[1:]:
                known.pop(name, None)
                names.discard(name)
            continue
        given = words[1:] if words[0] == "export" else words[:command]
        starts_verl = any(word.startswith("verl.") for word in words[command:])
        if words[0] != "export" and command < len(words) and not starts_verl:
            continue  # variables of another command
        for word in given:
            if match := _ASSIGNMENT.fullmatch(word):
                known[match[1]] = _expanded(match[2], known)
        if words[0] == "export" or starts_verl:
            names |= {word.partition("=")[0] for word in given}
    return {name: known[name] for name in names if name in known}


def _statements(text: str) -> Iterator[list[str]]:
    """The words of each simple command, unquoted; the $ of single quotes is _QUOTED_DOLLAR."""
    for line in text.replace("\\\n", " ").splitlines():
        hidden = re.sub(r"'[^']*'", lambda quoted: quoted[0].replace("$", _QUOTED_DOLLAR), line)
        lexer = shlex.shlex(hidden, posix=True, punctuation_chars=";&|")
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:
            continue  # a text of several lines; none of the variables looked at has one
        start = 0
        for end in (*(number for number, word in enumerate(words) if not word.strip(";&|")), len(words)):
            if words[start:end]:
                yield words[start:end]
            start = end + 1


def _expanded(value: str, known: Mapping[str, str]) -> str:
    def look_up(match: re.Match[str]) -> str:
        return known.get(match[1] or match[2]) or match[3] or ""

    return _REFERENCE.sub(look_up, value).replace(_QUOTED_DOLLAR, "$")


def _read_script(script: Path) -> str:
    give = "give --launch the bash script that starts verl"
    try:
        return script.read_text(encoding="utf-8")
    except OSError as error:
        raise PatchctlError(f"cannot read `{script}`: {error.strerror}; {give}") from error
    except UnicodeDecodeError as error:
        raise PatchctlError(f"`{script}` is not UTF-8 text; {give}") from error


def forwards_variables(verl: Path | None) -> bool | None:
    """Whether this verl tree forwards the dump's variables to its workers; None without a tree."""
    if verl is None:
        return None
    settings = verl / "verl" / "utils" / "consistency_dump"
    constants = verl / "verl" / "trainer" / "constants_ppo.py"
    return settings.is_dir() and constants.is_file() and "forwarded_env" in constants.read_text(encoding="utf-8")


def failed(findings: Sequence[Finding]) -> bool:
    return any(finding.level == "error" for finding in findings)


def _read_json(path: Path) -> tuple[Mapping[str, Any] | None, Finding]:
    area = "msprobe config"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        return None, Finding("error", area, f"{path}: {error.strerror}", "write it with `patchctl config`")
    except ValueError as error:
        return None, Finding(
            "error", area, f"{path} is not plain JSON: {error}", "no comments, no trailing commas, no BOM"
        )
    if not isinstance(raw, dict):
        return None, Finding("error", area, f"{path} is no JSON object", "write it with `patchctl config`")
    return raw, Finding("ok", area, str(path))
