"""The rules on a patched tree, by what its files mean: they hold on the pins and, without a lock, on any tree.

Each family of rules is a module: `compiles`, `imports`, `dump_calls` (log before stop, number of stops), `paths`
(start and stop), `micro_batch`, `request_chain`, `prompts_only`. All of them see a file's text and tree, parsed once,
and nothing else; this module reads the files and says which rule looks at which.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from patchctl.verify import clients, compiles, dump_calls, imports, micro_batch, paths, prompts_only, request_chain
from patchctl.verify.files import Files
from patchctl.verify.findings import Finding
from patchctl.verify.source import Source

_ENGINES = "verl/workers/engine/"
_CLIENTS = (
    "verl/workers/rollout/llm_server.py",
    "verl/experimental/fully_async_policy/fully_async_rollouter.py",
)
_MAIN_ENGINES = (f"{_ENGINES}fsdp/transformer_impl.py", f"{_ENGINES}megatron/transformer_impl.py")
# Where the rules apply whatever a series touches. Clients are looked for everywhere: upstream moves them.
KNOWN: Mapping[str, tuple[str, ...]] = {
    "verl": (*prompts_only.TRAINERS, *_MAIN_ENGINES),
    "vllm-ascend": ("vllm_ascend/worker/model_runner_v1.py",),
}
PACKAGES: Mapping[str, str] = {"verl": "verl", "vllm-ascend": "vllm_ascend"}
# What exists for the dump alone.
_DUMP_PACKAGE = "verl.utils.consistency_dump"
_DISPATCH_LOGGER = "vllm_ascend.worker.dispatch_logger"
# Upstream's own profiler drives msprobe by stages of the trainer and knows no requests; the two exclude each other.
_OTHER_TOOLS = frozenset({"verl/utils/profiler/precision_debugger_profile.py"})
_STOPS = (b"debugger.stop(", b"Debugger.stop(")
_DUMP_WORDS = (b"debugger", b"Debugger", b"log_step")
_ENGINE_WORDS = (b"debugger", b"consistency_dump")


def is_hook(module: str) -> bool:
    """Whether a module exists for the dump alone."""
    return module in (_DUMP_PACKAGE, _DISPATCH_LOGGER) or module.startswith(_DUMP_PACKAGE + ".")


def check_tree(
    root: Path,
    upstream: str,
    expected_stops: int | None,
    touched: Sequence[str],
    unchanged: bool = False,
) -> list[Finding]:
    """All that is wrong with a patched tree, ordered by file and line.

    Args:
        root: the folder that holds the upstream's package.
        upstream: `verl` or `vllm-ascend`.
        expected_stops: how many `debugger.stop()` the pin has. None for a tree that is no pin: then the rules look
            where they are known to apply, every file of the package is searched for further stops and for clients,
            and a file that the series would add may be missing.
        touched: the files that the series changes or adds, relative to the root.
        unchanged: all of them have the bytes that the lock says. Whether they compile and have their names depends on
            nothing else and was found out when the lock was written, so that it isn't asked again.
    """
    with _uncollected():
        files = Files(root, touched if unchanged else ())
        required = list(touched if expected_stops is not None else KNOWN[upstream])
        others = [] if expected_stops is not None else [*touched, *_concerned(root, PACKAGES[upstream])]
        findings = [finding for path in required for finding in files.check(path, required=True)]
        findings += [finding for path in others for finding in files.check(path, required=False)]
        wanted = dict.fromkeys([*required, *others])
        sources = {path: source for path in wanted if (source := files.source(path)) is not None}
        ours = {*required, *touched} - set(touched if unchanged else ())
        for path, source in sources.items():
            findings += check_source(source, sources, files.exists, changed=path in ours)
        findings += _check_together(upstream, expected_stops, sources)
        files.forget()
        sources.clear()
    return sorted(dict.fromkeys(findings), key=lambda found: (found.path, found.line or 0, found.rule, found.message))


def check_source(
    source: Source, sources: Mapping[str, Source], exists: Callable[[str], bool], changed: bool = True
) -> list[Finding]:
    """What the rules find in a file. Each looks at the files whose text says that it is about them.

    Args:
        sources: the files whose definitions are known, by path.
        exists: whether the tree has a path.
        changed: whether the file's names and grammar are to be looked at too.
    """
    findings: list[Finding] = []
    if changed:
        findings += compiles.newer_than_3_10(source.path, source.data, source.tree)
        findings += imports.check(source, sources, exists, is_hook)
    if source.path not in _OTHER_TOOLS and any(word in source.data for word in _DUMP_WORDS):
        findings += dump_calls.check(source)
        findings += paths.check(source)
    if source.path.startswith(_ENGINES) and any(word in source.data for word in _ENGINE_WORDS):
        findings += micro_batch.check(source, is_hook)
    findings += request_chain.check(source)
    if source.path in prompts_only.TRAINERS:
        findings += prompts_only.check(source)
    return findings


def _check_together(upstream: str, expected_stops: int | None, sources: Mapping[str, Source]) -> list[Finding]:
    """What no file shows by itself: the number of stops, and that clients and engines are hooked at all."""
    findings: list[Finding] = []
    places = [source for path, source in sources.items() if path not in _OTHER_TOOLS]
    if expected_stops is not None:
        findings += dump_calls.check_count(places, expected_stops)
    elif not any(dump_calls.stops(source) for source in places):
        path = KNOWN[upstream][0] if upstream != "verl" else f"{_DUMP_PACKAGE.replace('.', '/')}/bracket.py"
        message = "nothing in this tree calls debugger.stop(): it can't dump"
        findings.append(
            Finding(dump_calls.COUNT_RULE, path, None, message, "apply the series, or port it to this tree")
        )
    if upstream == "verl" and (expected_stops is None or any(clients.may_define(one.data) for one in sources.values())):
        findings += request_chain.check_presence(sources.values(), _CLIENTS)
    engines = [sources[path] for path in _MAIN_ENGINES if path in sources]
    if not any(word in engine.data for engine in engines for word in _ENGINE_WORDS):
        findings += [finding for engine in engines for finding in micro_batch.check(engine, is_hook)]
    return findings


def _concerned(root: Path, package: str) -> Iterator[str]:
    """The Python files of a package that stop a debugger or define a client, by their text."""
    for folder, names, file_names in os.walk(root / package):
        names[:] = sorted(name for name in names if name != "__pycache__")
        for name in sorted(file_names):
            if name.endswith(".py"):
                path = Path(folder, name)
                try:
                    data = path.read_bytes()
                except OSError:
                    continue  # unreadable files are none of the series; those of it are reported
                if any(stop in data for stop in _STOPS) or clients.may_define(data):
                    yield path.relative_to(root).as_posix()


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the garbage collector: trees are large, live to the end, and scanning them takes a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
