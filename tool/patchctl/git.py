"""The only module that runs git, and it runs it alone with itself: no configuration, hook or variable leaks in."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from patchctl.errors import PatchctlError

# Each setting says what it keeps out.
_SETTINGS = (
    "core.hooksPath=/dev/null",  # the user's and the tree's hooks
    "core.fsmonitor=false",  # a daemon of the user's
    "core.autocrlf=false",  # line ends are upstream's, byte for byte
    "core.quotePath=false",  # names as they are
    "core.attributesFile=/dev/null",  # the user's own attributes: eol, filters, diff drivers
    "core.abbrev=40",
    "commit.gpgsign=false",
    "tag.gpgsign=false",
    "gc.auto=0",  # no background process after we are gone
    "maintenance.auto=false",
    "advice.detachedHead=false",
    "init.defaultBranch=main",
    "protocol.version=2",  # lets any commit be fetched by its id
    "http.lowSpeedLimit=1000",  # a stalled connection ends
    "http.lowSpeedTime=30",
)


class GitError(PatchctlError):
    """git ended with an error; `stderr` holds what it said."""

    def __init__(self, message: str, stderr: str) -> None:
        super().__init__(message)
        self.stderr = stderr


class Git:
    """git in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(
        self,
        *arguments: str,
        stdin: bytes | None = None,
        timeout: float | None = None,
        variables: dict[str, str] | None = None,
        network: bool = False,
    ) -> bytes:
        """What `git ARGUMENTS` prints.

        With `network` the user's own configuration is read as well: how to reach a server (proxies, credentials,
        `url.*.insteadOf`) is theirs to say. What could change contents stays overridden.

        Raises:
            GitError: git is not installed, ended with an error, or took longer than `timeout` seconds.
        """
        settings = [word for setting in _SETTINGS for word in ("-c", setting)]
        # A tree that another user owns (a container's volume, say) is still the one we were pointed at.
        verb = next(word for word in arguments if not word.startswith("-") and "=" not in word)
        command = ["git", *settings, "-c", f"safe.directory={self.folder}", *arguments]
        try:
            done = subprocess.run(
                command,
                cwd=self.folder,
                env=self._environment(network) | (variables or {}),
                input=stdin,
                stdin=subprocess.DEVNULL if stdin is None else None,
                capture_output=True,
                timeout=timeout,
                check=False,
            )
        except FileNotFoundError:
            raise GitError("git is not installed, or not on PATH; install it (2.25 or newer)", "") from None
        except subprocess.TimeoutExpired:
            raise GitError(f"git {verb} in {self.folder} took longer than {timeout:.0f} s", "") from None
        if done.returncode != 0:
            stderr = done.stderr.decode("utf-8", "replace").strip()
            last = stderr.splitlines()[-1] if stderr else f"exit code {done.returncode}"
            raise GitError(f"git {verb} in {self.folder}: {last}", stderr)
        return done.stdout

    def line(self, *arguments: str) -> str:
        return self.run(*arguments).decode("utf-8", "surrogateescape").strip()

    def _environment(self, network: bool) -> dict[str, str]:
        # GIT_DIR, GIT_INDEX_FILE and the like are set inside hooks, and would point git at another repository.
        reach = ("GIT_SSH", "GIT_SSL_", "GIT_PROXY_", "GIT_ASKPASS", "GIT_CONFIG_GLOBAL")
        kept = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith("GIT_") or (network and key.startswith(reach))
        }
        if not network:
            kept.update(GIT_CONFIG_GLOBAL=os.devnull, GIT_CONFIG_NOSYSTEM="1")
        kept.update(
            GIT_CEILING_DIRECTORIES=str(self.folder.parent),  # a repository around the folder is not ours
            GIT_TERMINAL_PROMPT="0",
            GIT_OPTIONAL_LOCKS="0",
            LC_ALL="C",
            TZ="UTC",
        )
        return kept


def numstat(patches: Sequence[bytes], folder: Path) -> list[tuple[int, int, str]]:
    """(added, removed, path) of every file section, in order, as git reads the patches. One process for all."""
    out = Git(folder).run("apply", "--numstat", "-z", "-p1", "-", stdin=b"".join(patches))
    rows: list[tuple[int, int, str]] = []
    for record in out.split(b"\0"):
        if record:
            added, removed, path = record.split(b"\t", 2)
            rows.append((int(added), int(removed), path.decode("utf-8", "surrogateescape")))
    return rows
