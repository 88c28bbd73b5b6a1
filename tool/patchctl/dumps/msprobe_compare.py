"""The real `msprobe compare --consistent_check` for every pair: inputs that it can match, and what it found.

msprobe matches FSDP1 names only, knows nothing of pipeline stages, and ends successfully when nothing matched. So a
copy of the dumps is made with FSDP1's names and global layer numbers, one folder a pair, and matched rows are counted.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchctl.errors import PatchctlError

from .names import parse_name

WORKER = Path(__file__).with_name("msprobe_worker.py")
_LAYER = re.compile(r"(?<=\blayers\.)(\d+)(?=\.)")
_SHEBANG = re.compile(rb"^#!\s*(\S*python\S*)\s*$")
_SAFE = re.compile(r"^[A-Za-z0-9_./:-]+$")  # what msprobe accepts in a path

_CONTAINERS = frozenset({"", ".", "model", "self_attn", "self_attention", "mlp", "decoder", "embedding"})


@dataclass(frozen=True)
class Msprobe:
    """An installed msprobe: the interpreter behind its command, and its version."""

    python: str
    version: str


def find_msprobe(command: str | None) -> Msprobe | None:
    """msprobe by the path or name of its command; None when none was asked for and none is installed.

    Raises PatchctlError when the one asked for cannot be run.
    """
    path = shutil.which(command or "msprobe")
    if path is None:
        if command is None:
            return None
        raise PatchctlError(f"no command `{command}`; install it with `pip install mindstudio-probe`")
    with Path(path).open("rb") as stream:
        shebang = _SHEBANG.match(stream.readline())
    python = os.fsdecode(shebang[1]) if shebang else shutil.which("python3") or "python3"
    probe = "import importlib.metadata as m; print(m.version('mindstudio-probe'))"
    done = subprocess.run([python, "-c", probe], capture_output=True, text=True, check=False)
    if done.returncode:
        if command is None:
            return None
        raise PatchctlError(f"`{path}` is not mindstudio-probe's msprobe ({python} has no such package)")
    return Msprobe(python, done.stdout.strip())


@dataclass(frozen=True)
class Job:
    """One pair for msprobe: its arguments, the folder its table goes to and its log."""

    request_id: str
    argv: tuple[str, ...]
    out: Path
    log: Path


def prepare(request_id: str, entry: Mapping[str, Any], backend: str, folder: Path) -> Job:
    """Write the copies that msprobe can match into `folder`. Raises OSError, ValueError for a broken dump.json."""
    if not _SAFE.match(str(folder)):
        raise PatchctlError(f"msprobe refuses paths with special characters: `{folder}`; choose another OUT")
    train, infer = folder / "train", folder / "infer"
    _merge(entry["train_dumps"], train, backend)
    _merge(entry["infer_dumps"][:1], infer, f"infer-{backend}")
    out = folder / "result"
    out.mkdir(parents=True, exist_ok=True)
    argv = (
        "compare",
        "-tp",
        str(train / "dump.json"),
        "-gp",
        str(infer / "dump.json"),
        "--consistent_check",
        "--backend",
        backend,
        "-o",
        str(out),
    )
    return Job(request_id, argv, out, folder / "msprobe.log")


def run_jobs(msprobe: Msprobe, jobs: Sequence[Job], workers: int) -> Iterator[dict[str, Any]]:
    """What msprobe found for each job, in any order: see msprobe_worker. Raises PatchctlError when msprobe dies."""
    shares = [share for share in (jobs[index::workers] for index in range(workers)) if share]
    with ExitStack() as stack:
        running = [stack.enter_context(_Worker(msprobe, share)) for share in shares]
        for worker in running:
            yield from worker.answers()


class _Worker:
    """One msprobe process with its share of the jobs."""

    def __init__(self, msprobe: Msprobe, jobs: Sequence[Job]) -> None:
        self._jobs = jobs
        self._errors = jobs[0].out.parent / "msprobe_worker.log"
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [msprobe.python, str(WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def __enter__(self) -> _Worker:
        lines = [
            json.dumps({"id": job.request_id, "argv": job.argv, "out": str(job.out), "log": str(job.log)})
            for job in self._jobs
        ]
        assert self._process.stdin is not None
        self._process.stdin.write("\n".join(lines) + "\n")
        self._process.stdin.close()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def answers(self) -> Iterator[dict[str, Any]]:
        assert self._process.stdout is not None
        count = 0
        for line in self._process.stdout:
            count += 1
            yield json.loads(line)
        if self._process.wait() or count < len(self._jobs):
            tail = self._errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise PatchctlError(f"msprobe ended early: {tail[-1] if tail else 'no message'} (see `{self._errors}`)")


def _merge(dumps: Sequence[Mapping[str, Any]], folder: Path, backend: str) -> None:
    """Write one dump.json (and links to its tensors) out of all pipeline stages and chunks of a side.

    Of ranks that hold the same layers (tensor parallelism) the first one counts: msprobe joins no shards.
    """
    folder.mkdir(parents=True, exist_ok=True)
    merged: dict[str, Any] | None = None
    seen: set[tuple[Any, Any]] = set()
    for number, dump in enumerate(sorted(dumps, key=lambda dump: dump.get("layer_offset") or 0)):
        stage = (dump.get("pp_rank"), dump.get("vpp_rank"))
        if stage in seen:
            continue
        seen.add(stage)
        path = Path(dump["path"])
        document = json.loads(path.read_bytes())
        tensors = path.parent / "dump_tensor_data"
        data: dict[str, Any] = {}
        for name, entry in document["data"].items():
            if backend.endswith("megatron") and _is_container(name):
                continue
            data[_renamed(name, dump.get("layer_offset") or 0, backend)] = (
                _linked(entry, tensors, folder / "dump_tensor_data", number) if tensors.is_dir() else entry
            )
        if merged is None:
            merged = {**document, "data": {}}
            if tensors.is_dir():
                merged["dump_data_dir"] = str((folder / "dump_tensor_data").resolve())
        for name, entry in data.items():
            merged["data"].setdefault(name, entry)
    if merged is None:
        raise ValueError("no dump")
    (folder / "dump.json").write_text(json.dumps(merged), encoding="utf-8")


def _is_container(name: str) -> bool:
    """Containers complete in an order that msprobe takes for conflicting data; their parts are what it compares."""
    parsed = parse_name(name)
    return parsed is not None and parsed.path in _CONTAINERS


def _renamed(name: str, layer_offset: int, backend: str) -> str:
    """The name that msprobe's matching expects: global layer numbers, FSDP1's wrappers, no chunk number."""
    if layer_offset:
        name = _LAYER.sub(lambda match: str(int(match[1]) + layer_offset), name, count=1)
    if backend == "megatron":
        return re.sub(r"^Module\.\d+\.", "Module.", name)
    if backend != "fsdp" or "_fsdp_wrapped_module" in name or not name.startswith("Module."):
        return name
    name = name.replace("Module.", "Module._fsdp_wrapped_module.", 1)
    name = re.sub(r"\blayers\.(\d+)\.", r"layers.\1._fsdp_wrapped_module.", name, count=1)
    return re.sub(r"\.FSDP(\w+\.(?:forward|backward)\.\d+)$", r".\1", name)


def _linked(entry: Any, source: Path, target: Path, number: int) -> Any:
    """The entry with its tensor files linked into `target` under names of their own for each stage."""
    if isinstance(entry, list):
        return [_linked(item, source, target, number) for item in entry]
    if not isinstance(entry, dict):
        return entry
    found = {key: _linked(value, source, target, number) for key, value in entry.items()}
    name = found.get("data_name")
    if isinstance(name, str) and name:
        target.mkdir(exist_ok=True)
        link = target / (f"stage{number}.{name}" if number else name)
        if not link.exists() and (source / name).exists():
            try:
                os.link(source / name, link)
            except OSError:  # another file system
                shutil.copyfile(source / name, link)
        found["data_name"] = link.name
    return found
