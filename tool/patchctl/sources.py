"""Where upstream trees come from: git, by commit; or the PyPI wheel of a pin that is a release."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from patchctl.errors import PatchctlError, UsageError
from patchctl.git import Git, GitError
from patchctl.pins import Pin, Upstream, Wheel
from patchctl.series import sha256
from patchctl.transaction import exclusive

Say = Callable[[str], None]

_REACH_SECONDS = 30
_FETCH_SECONDS = 1800


def cache_folder() -> Path:
    """Where downloaded wheels are kept between runs: `PATCHCTL_CACHE`, or the user's cache folder."""
    if named := os.environ.get("PATCHCTL_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "patchctl"


def obtain(pin: Pin, folder: Path, source: str, say: Say) -> str:
    """Put the pin's tree at `folder`, which must not exist; it appears there complete or not at all.

    Of two runs that obtain the same tree the second waits, and takes what the first made.

    With source "auto" git is tried first, and PyPI where git can't be reached and the pin is a release.

    Returns:
        Where the tree came from.
    Raises:
        PatchctlError: it can't be had from the sources allowed; the message says what each of them answered.
    """
    if folder.exists():
        raise PatchctlError(f"{folder}: is there already; move it away or give another place")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PatchctlError(f"{folder}: can't be made: {error.strerror}") from None
    with exclusive([folder.parent], wait=True):
        if folder.exists():
            return "another run"
        return _obtain(pin, folder, source, say)


def _obtain(pin: Pin, folder: Path, source: str, say: Say) -> str:
    reasons = []
    if source in ("auto", "git"):
        try:
            with _appearing(folder) as fresh:
                return _checkout(pin, fresh, say)
        except GitError as error:
            reasons.append(f"{pin.upstream.fetch_url()}: {error.cause}")
            if source == "git":
                raise _out_of_reach(pin, pin.upstream, pin.commit[:12], reasons[0]) from None
    if pin.wheel is None:
        cause = reasons[0] if reasons else "no PyPI release has its files"
        raise _out_of_reach(pin, pin.upstream, pin.commit[:12], cause)
    if reasons:
        say(f"{pin}: not to be had from git ({reasons[0]}); taking the PyPI release, whose files equal the pin's")
    with _appearing(folder) as fresh, zipfile.ZipFile(wheel_file(pin, pin.wheel, say)) as archive:
        archive.extractall(fresh)
    return f"PyPI {pin.wheel.requirement}"


def _out_of_reach(what: object, upstream: Upstream, commits: str, cause: str) -> PatchctlError:
    """The error for what git can't give; where the user named the place, the place is what is wrong."""
    variable = upstream.url_variable
    if os.environ.get(variable):
        return PatchctlError(f"{what}: {variable} can't give commit {commits}: {cause}; correct the variable")
    return PatchctlError(f"{what}: comes from git only: {cause}; set {variable} to a mirror or a local clone")


@contextlib.contextmanager
def _appearing(folder: Path) -> Iterator[Path]:
    """A fresh folder that is renamed to `folder` once it is complete."""
    fresh = folder.with_name(f".{folder.name}.fetching")
    try:
        shutil.rmtree(fresh, ignore_errors=True)  # of a run that was killed
        fresh.mkdir()
        yield fresh
        fresh.rename(folder)
    except OSError as error:
        raise PatchctlError(f"{folder}: can't be made: {error.strerror or error}") from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _checkout(pin: Pin, folder: Path, say: Say) -> str:
    _fetch(pin, folder, say)
    Git(folder).run("checkout", "--quiet", "--detach", pin.commit)
    return f"git {pin.upstream.fetch_url()}"


def _fetch(pin: Pin, folder: Path, say: Say) -> None:
    """A repository at `folder` that has the pin's commit."""
    git = Git(folder)
    git.run("init", "--quiet")
    _fetch_commit(git, pin.upstream, pin.commit, say)


def _fetch_commit(git: Git, upstream: Upstream, commit: str, say: Say) -> None:
    url = upstream.fetch_url()
    git.run("ls-remote", url, "HEAD", timeout=_REACH_SECONDS, network=True)
    say(f"{upstream.name}: fetching {commit[:12]} from {url}")
    try:
        git.run("fetch", "--quiet", "--depth=1", "--no-tags", url, commit, timeout=_FETCH_SECONDS, network=True)
    except GitError as error:
        if "unadvertised" not in error.stderr and "not our ref" not in error.stderr:
            raise
        # An old server gives no single commit; its branches and tags hold it.
        git.run("fetch", "--quiet", url, "+refs/*:refs/fetched/*", timeout=_FETCH_SECONDS, network=True)


def _local_clone(upstream: Upstream) -> Git | None:
    """The clone that the upstream's address names, where it is a folder of this machine with the whole history."""
    place = Path(upstream.fetch_url())
    if not place.is_dir():
        return None
    git = Git(place)
    return git if git.line("rev-parse", "--is-shallow-repository") == "false" else None


def borrow(clone: Git, folder: Path) -> Git:
    """Make the folder a git repository that reads the objects of a clone on this machine, which is not written to."""
    objects = (clone.folder / clone.line("rev-parse", "--git-path", "objects")).resolve()
    git = Git(folder)
    git.run("init", "--quiet")
    (folder / ".git/objects/info/alternates").write_text(f"{objects}\n", encoding="utf-8")
    return git


def attach(upstream: Upstream, commits: Sequence[str], folder: Path, say: Say) -> Git:
    """Make the folder a git repository that has these commits; nothing is checked out.

    A local clone lends its objects, history included. From elsewhere the commits alone come.

    Raises:
        PatchctlError: a commit can't be had.
    """
    git = Git(folder)
    try:
        if (clone := _local_clone(upstream)) is not None:
            borrow(clone, folder)
        else:
            git.run("init", "--quiet")
        for commit in commits:
            if clone is None:
                say(f"{upstream.name}: asking {upstream.fetch_url()}")  # which may take long to give no answer
                _fetch_commit(git, upstream, commit, say)
            git.run("rev-parse", "--quiet", "--verify", f"{commit}^{{commit}}")
    except GitError as error:
        names = ", ".join(commit[:12] for commit in commits)
        raise _out_of_reach(upstream.name, upstream, names, error.cause) from None
    return git


def resolve(upstream: Upstream, revision: str, say: Say) -> str:
    """The commit that a tag, a branch or a commit id of the upstream names.

    Raises:
        UsageError: it names none, or can't be looked up where the upstream is.
    """
    url = upstream.fetch_url()
    try:
        if (clone := _local_clone(upstream)) is not None:
            for name in (revision, f"origin/{revision}"):
                if clone.succeeds("rev-parse", "--quiet", "--verify", f"{name}^{{commit}}"):
                    return clone.line("rev-parse", "--quiet", "--verify", f"{name}^{{commit}}")
            raise UsageError(f"{url} has no tag, branch or commit {revision!r}; update that clone, or correct the name")
        if re.fullmatch(r"[0-9a-f]{40}", revision):
            return revision
        say(f"{upstream.name}: asking {url} for {revision}")
        with tempfile.TemporaryDirectory() as scratch:
            names = [f"refs/{kind}/{revision}" for kind in ("tags", "heads")]
            listing = Git(Path(scratch)).run(
                "ls-remote", url, *names, f"{names[0]}^{{}}", timeout=_REACH_SECONDS, network=True
            )
    except GitError as error:
        raise PatchctlError(
            f"{upstream.name} {revision}: {url} can't be asked: {error.cause}; "
            f"set {upstream.url_variable} to a mirror or a local clone"
        ) from None
    found = {name: commit for commit, _, name in (row.partition("\t") for row in listing.decode().splitlines())}
    for name in (f"{names[0]}^{{}}", *names):  # what an annotated tag points at, before the tag itself
        if name in found:
            return found[name]
    raise UsageError(f"{url} has no tag or branch {revision!r}; a commit is named by all of its 40 digits")


def wheel_file(pin: Pin, wheel: Wheel, say: Say) -> Path:
    """The wheel, downloaded once and kept in the cache; pip checks its sha256, and so do we on every use."""
    folder = _wheels() / wheel.sha256
    kept = list(folder.glob("*.whl"))
    if kept and sha256(kept[0].read_bytes()) == wheel.sha256:
        return kept[0]
    say(f"{pin}: downloading {wheel.requirement} from PyPI")
    with _downloading() as fresh:
        shutil.rmtree(folder, ignore_errors=True)
        requirement = f"{wheel.requirement} --hash=sha256:{wheel.sha256}"
        try:
            platforms = [wheel.platform] if wheel.platform else []
            _pip_download(requirement, platforms, wheel.python, fresh, "--require-hashes")
        except subprocess.CalledProcessError as error:
            raise PatchctlError(
                f"{pin}: pip can't download {wheel.requirement}: {error.stderr}; check pip's index settings"
            ) from None
        _keep(fresh, folder)
    return next(folder.glob("*.whl"))


def released(requirement: str, like: Wheel | None, say: Say) -> tuple[Wheel, Path]:
    """A release of PyPI's, its wheel kept in the cache.

    Args:
        like: a wheel of the same project, whose processor and Python are asked for.
    Raises:
        PatchctlError: PyPI has none, or can't be reached.
    """
    say(f"looking for {requirement} on PyPI")
    platforms = []
    if like is not None and like.platform is not None:
        # A release is built for one glibc, and which one changes from release to release.
        processor = re.sub(r"^manylinux(_\d+_\d+|\d+)_", "", like.platform)
        platforms = [f"manylinux_2_{minor}_{processor}" for minor in range(17, 41)]
    with _downloading() as fresh:
        try:
            _pip_download(requirement, platforms, like.python if like else None, fresh)
        except subprocess.CalledProcessError as error:
            raise PatchctlError(f"{requirement}: {error.stderr}") from None
        found = next(fresh.glob("*.whl"))
        digest = sha256(found.read_bytes())
        folder = _wheels() / digest
        _keep(fresh, folder)
    platform = found.stem.rpartition("-")[2].partition(".")[0]
    if platform == "any":
        return Wheel(requirement, digest), folder / found.name
    return Wheel(requirement, digest, platform, like.python if like else None), folder / found.name


def _wheels() -> Path:
    return cache_folder() / "wheels"


@contextlib.contextmanager
def _downloading() -> Iterator[Path]:
    """A fresh folder in the cache."""
    fresh = _wheels() / f".downloading.{os.getpid()}"
    try:
        fresh.mkdir(parents=True)
        yield fresh
    except OSError as error:
        raise PatchctlError(
            f"{fresh.parent}: can't be written: {error.strerror}; set PATCHCTL_CACHE to a folder that can"
        ) from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _keep(fresh: Path, folder: Path) -> None:
    with contextlib.suppress(OSError):  # another run was faster: its wheel is the same
        fresh.rename(folder)


def _pip_download(requirement: str, platforms: Sequence[str], python: str | None, folder: Path, *options: str) -> None:
    """Let pip put a project's wheel into the folder.

    Args:
        platforms: the wheel may be for any of them; none: for this machine.
    Raises:
        subprocess.CalledProcessError: it can't; `stderr` is the line that says why.
    """
    with tempfile.TemporaryDirectory() as scratch:
        requirements = Path(scratch, "requirements.txt")
        requirements.write_text(f"{requirement}\n", encoding="utf-8")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *options]
        command += ["--disable-pip-version-check", "--only-binary=:all:", "--dest", str(folder)]
        command += ["-r", str(requirements)]
        if platforms and python:
            command += [word for platform in platforms for word in ("--platform", platform)]
            command += ["--python-version", python, "--implementation", "cp"]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise subprocess.CalledProcessError(done.returncode, command, stderr=lines[-1] if lines else "no reason given")


def pristine(pin: Pin, say: Say) -> zipfile.ZipFile:
    """The pin's own package, as an archive: from git where a clone is at hand or PyPI has no equal, else its wheel.

    What is made from git is kept in the cache.

    Raises:
        PatchctlError: neither can be had.
    """
    kept = cache_folder() / "git" / f"{pin.commit}.zip"
    if pin.wheel is not None and not kept.exists():
        return zipfile.ZipFile(wheel_file(pin, pin.wheel, say))
    if not kept.exists():
        try:
            kept.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=kept.parent) as scratch:
                git = attach(pin.upstream, [pin.commit], Path(scratch), say)
                fresh = Path(scratch, "tree.zip")
                fresh.write_bytes(archive(git, pin.commit, pin.upstream))
                fresh.replace(kept)
        except OSError as error:
            raise PatchctlError(
                f"{kept}: can't be written: {error.strerror}; set PATCHCTL_CACHE to a folder that can"
            ) from None
    return zipfile.ZipFile(kept)


def archive(git: Git, commit: str, upstream: Upstream) -> bytes:
    """The upstream's package at a commit, as a zip file with every file as it is; `git` is a scratch repository."""
    # What attributes in the tree leave out of an archive, or expand in one, is upstream's own release business.
    attributes = git.folder / ".git/info/attributes"
    attributes.parent.mkdir(exist_ok=True)
    attributes.write_text("* -export-ignore -export-subst -text -eol -filter -ident\n", encoding="utf-8")
    return git.run("archive", "--format=zip", "-1", commit, "--", upstream.package)
