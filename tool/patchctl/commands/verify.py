"""`patchctl verify`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click

from patchctl.cli import print_json, say
from patchctl.commands import _trees
from patchctl.errors import DONE, FAILED
from patchctl.project import Project
from patchctl.tree import NAMED, TreeState
from patchctl.verify import beside
from patchctl.verify.findings import Finding
from patchctl.verify.tree import check_post_images


@click.command()
@_trees.tree_options
@_trees.revision_options
@click.option(
    "--rules-only", is_flag=True, help="Judge the trees by what their code means, not by hash: for unpinned trees."
)
@_trees.json_option
@click.pass_context
def command(
    ctx: click.Context,
    verl: Path | None,
    vllm_ascend: Path | None,
    only: str | None,
    verl_commit: str | None,
    vllm_ascend_commit: str | None,
    rules_only: bool,
    as_json: bool,
) -> None:
    """Prove the series, and the trees given or found in ./src.

    The series: order, guards, every line of every patch, messages, lock. A tree: its files are the lock's, to the
    hash; and, read from its code, every `debugger.stop()` is preceded by a `log_step`, every start has its stop, the
    request id that is sent is the one recorded. All findings are reported, with file, line and what to do.

    \b
    patchctl verify
    patchctl verify --verl ~/verl --vllm-ascend ~/vllm-ascend
    patchctl verify --rules-only --vllm-ascend ~/my-vllm-ascend
    """
    project: Project = ctx.obj
    folders = _trees.wanted(only, verl, vllm_ascend)
    revisions = {"verl": verl_commit, "vllm-ascend": vllm_ascend_commit}
    series = [] if rules_only else [partial(_series, project)]
    trees = [partial(_tree, project, state, rules_only) for state in _states(project, folders, revisions, rules_only)]
    checked = beside.run([*series, *trees])
    findings = [finding for check in checked for finding in check["findings"]]
    if as_json:
        rows = [{**check, "findings": [_document(finding) for finding in check["findings"]]} for check in checked]
        print_json({"command": "verify", "ok": not findings, "checked": rows})
    else:
        for check in checked:
            for line in _lines(check):
                click.echo(line)
            for reason in check["skipped"]:
                say(f"note: {check['what']}: skipped {reason}")
            count = len(check["findings"])
            found = "ok" if not count else "1 finding" if count == 1 else f"{count} findings"
            click.echo(f"{check['what']}: {found} ({check['extent']})")
        if len(checked) == 1 and not rules_only:
            say("note: no tree was checked; give --verl DIR or --vllm-ascend DIR")
    ctx.exit(FAILED if findings else DONE)


def _states(
    project: Project, folders: dict[str, Path | None], revisions: dict[str, str | None], rules_only: bool
) -> list[TreeState]:
    found = any(folders.values()) or any((_trees.SRC / name).is_dir() for name in folders)
    if not found and not rules_only:
        return []  # the series alone
    return _trees.states(project, folders, revisions)


def _series(project: Project) -> dict[str, Any]:
    from patchctl.verify.series import check_series  # brings unidiff, which --rules-only does not need

    report = check_series(project)
    pins = len(project.pins.pins)
    return {
        "what": "series",
        "extent": f"{report.patches} patches, {pins} pins",
        "findings": report.findings,
        "skipped": report.skipped,
    }


def _tree(project: Project, state: TreeState, rules_only: bool) -> dict[str, Any]:
    tree, pin = state.tree, state.pin
    pinned = not rules_only
    diagnosis = None
    if pinned and state.modified:
        from patchctl.diagnose import diagnose  # may ask git what the tree is: only where something is wrong

        diagnosis = diagnose(project, state)
    findings = list(check_post_images(state, diagnosis)) if pinned else []
    touched = [file.path for file in state.files]
    bare = any(finding.path == "." for finding in findings)
    foreign = diagnosis is not None and diagnosis.foreign
    by_rule = rules_only or (pin.debugger_stops is not None and not bare and not foreign)
    if by_rule:
        from patchctl.verify.rules import check_tree  # the rules read code; an unpatched tree has none for them

        expected = pin.debugger_stops if pinned else None
        by_hash = pinned and not findings
        findings += check_tree(tree.root, tree.upstream.name, expected, touched, unchanged=by_hash)
    return {
        "what": f"{pin} in {_trees.at(tree)}" if pinned else f"{tree.upstream.name} in {_trees.at(tree)}",
        "upstream": tree.upstream.name,
        "pin": pin.name if pinned else None,
        "root": str(tree.root),
        "extent": f"{len(touched)} files by hash{' and by rule' if by_rule else ''}" if pinned else "by rule",
        "diagnosis": None if diagnosis is None else str(diagnosis),
        "findings": tuple(findings),
        "skipped": (),
    }


def _lines(check: dict[str, Any]) -> Iterator[str]:
    """What was found, for people: why first, then where; of files that differ, the first few."""
    root = check.get("root")
    if check.get("diagnosis"):
        yield f"{root}: {check['diagnosis']}"
    differing = [finding for finding in check["findings"] if finding.rule == "post-image" and finding.path != "."]
    left_out = differing[NAMED:]
    for finding in check["findings"]:
        if finding not in left_out:
            yield _placed(finding, root)
        elif finding is left_out[0]:
            yield f"and {len(left_out)} more (--json names all)"


def _placed(finding: Finding, root: str | None) -> str:
    """The finding's line, with the tree's folder before its path, or in the place of it."""
    if root is None:
        return str(finding)
    return str(finding._replace(path=root if finding.path == "." else f"{root}/{finding.path}"))


def _document(finding: Finding) -> dict[str, Any]:
    return {
        "rule": finding.rule,
        "path": finding.path,
        "line": finding.line,
        "message": finding.message,
        "fix": finding.fix,
    }
