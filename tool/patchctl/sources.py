"""Where upstream trees come from: git, by commit; or the PyPI wheel of a pin that is a release."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from patchctl.errors import PatchctlError
from patchctl.git import Git, GitError
from patchctl.pins import Pin, Wheel
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
                raise _out_of_reach(pin, reasons[0]) from None
    if pin.wheel is None:
        raise _out_of_reach(pin, reasons[0] if reasons else "no PyPI release has its files")
    if reasons:
        say(f"{pin}: not to be had from git ({reasons[0]}); taking the PyPI release, whose files equal the pin's")
    with _appearing(folder) as fresh, zipfile.ZipFile(wheel_file(pin, pin.wheel, say)) as archive:
        archive.extractall(fresh)
    return f"PyPI {pin.wheel.requirement}"


def _out_of_reach(pin: Pin, cause: str) -> PatchctlError:
    """The error for a pin that git can't give; where the user named the place, the place is what is wrong."""
    variable = pin.upstream.url_variable
    if os.environ.get(variable):
        return PatchctlError(f"{pin}: {variable} can't give commit {pin.commit[:12]}: {cause}; correct the variable")
    return PatchctlError(f"{pin}: comes from git only: {cause}; set {variable} to a mirror or a local clone")


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
    url = pin.upstream.fetch_url()
    git = Git(folder)
    git.run("init", "--quiet")
    git.run("ls-remote", url, "HEAD", timeout=_REACH_SECONDS, network=True)
    say(f"{pin}: fetching {pin.commit[:12]} from {url}")
    try:
        git.run("fetch", "--quiet", "--depth=1", "--no-tags", url, pin.commit, timeout=_FETCH_SECONDS, network=True)
    except GitError as error:
        if "unadvertised" not in error.stderr and "not our ref" not in error.stderr:
            raise
        # An old server gives no single commit; its branches and tags hold it.
        git.run("fetch", "--quiet", url, "+refs/*:refs/fetched/*", timeout=_FETCH_SECONDS, network=True)


def wheel_file(pin: Pin, wheel: Wheel, say: Say) -> Path:
    """The wheel, downloaded once and kept in the cache; pip checks its sha256, and so do we on every use."""
    folder = cache_folder() / "wheels" / wheel.sha256
    kept = list(folder.glob("*.whl"))
    if kept and sha256(kept[0].read_bytes()) == wheel.sha256:
        return kept[0]
    say(f"{pin}: downloading {wheel.requirement} from PyPI")
    fresh = folder.with_name(f".{wheel.sha256}.{os.getpid()}")
    try:
        shutil.rmtree(folder, ignore_errors=True)
        fresh.mkdir(parents=True)
        requirements = fresh / "requirements.txt"
        requirements.write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n", encoding="utf-8")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
        command += ["--disable-pip-version-check", "--only-binary=:all:", "--dest", str(fresh), "-r", str(requirements)]
        if wheel.platform and wheel.python:
            command += ["--platform", wheel.platform, "--python-version", wheel.python, "--implementation", "cp"]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
            raise PatchctlError(
                f"{pin}: pip can't download {wheel.requirement}: {lines[-1] if lines else 'no reason given'}; "
                "check pip's index settings"
            )
        requirements.unlink()
        with contextlib.suppress(OSError):  # another run was faster: its wheel is the same
            fresh.rename(folder)
    except OSError as error:
        raise PatchctlError(
            f"{folder}: can't be written: {error.strerror}; set PATCHCTL_CACHE to a folder that can"
        ) from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return next(folder.glob("*.whl"))


def pristine(pin: Pin, say: Say) -> zipfile.ZipFile:
    """The pin's own files, as an archive: its wheel where it has one, else made from git once and kept in the cache.

    Raises:
        PatchctlError: neither can be had.
    """
    if pin.wheel is not None:
        return zipfile.ZipFile(wheel_file(pin, pin.wheel, say))
    kept = cache_folder() / "git" / f"{pin.commit}.zip"
    if not kept.exists():
        try:
            kept.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=kept.parent) as scratch:
                folder = Path(scratch)
                _fetch(pin, folder, say)
                archive = ("archive", "--format=zip", "--output=tree.zip", pin.commit, "--", pin.upstream.package)
                Git(folder).run(*archive)
                (folder / "tree.zip").replace(kept)
        except GitError as error:
            raise _out_of_reach(pin, f"{pin.upstream.fetch_url()}: {error.cause}") from None
        except OSError as error:
            raise PatchctlError(
                f"{kept}: can't be written: {error.strerror}; set PATCHCTL_CACHE to a folder that can"
            ) from None
    return zipfile.ZipFile(kept)


def contents(archive: zipfile.ZipFile, paths: Iterable[str]) -> dict[str, bytes | None]:
    """These files' contents; None where there is no such file."""
    names = set(archive.namelist())
    return {path: archive.read(path) if path in names else None for path in paths}
