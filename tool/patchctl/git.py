"""The only module that runs git, and it runs it alone with itself: no configuration, hook or variable leaks in."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from patchctl.errors import PatchctlError

# Each setting says what it keeps out.
_SETTINGS = (
    "core.hooksPath=/dev/null",  # the user's and the tree's hooks
    "core.fsmonitor=false",  # a daemon of the user's
    "core.autocrlf=false",  # line ends are upstream's, byte for byte
    "core.quotePath=false",  # names as they are
    "core.attributesFile=/dev/null",  # the user's own attributes: eol, filters, diff drivers
    "core.eol=lf",
    "core.abbrev=40",
    "apply.whitespace=nowarn",  # no opinion on blanks at line ends
    "apply.ignoreWhitespace=no",
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
    """git ended with an error; `stderr` holds what it said, `cause` the line of it that says why."""

    def __init__(self, message: str, stderr: str) -> None:
        super().__init__(message)
        self.stderr = stderr
        self.cause = message.rpartition("fatal: ")[2]


class Git:
    """git in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()  # git takes no relative ceiling

    def run(
        self,
        *arguments: str,
        stdin: bytes | None = None,
        timeout: float | None = None,
        network: bool = False,
    ) -> bytes:
        """What `git ARGUMENTS` prints.

        With `network` the user's own configuration is read as well: how to reach a server (proxies, credentials,
        `url.*.insteadOf`) is theirs to say. What could change contents stays overridden.

        Raises:
            GitError: git is not installed, ended with an error, or took longer than `timeout` seconds.
        """
        return self.start(*arguments, with_stdin=stdin is not None, network=network)(stdin, timeout)

    def start(
        self, *arguments: str, with_stdin: bool = False, network: bool = False
    ) -> Callable[[bytes | None, float | None], bytes]:
        """Start `git ARGUMENTS` and return at once; the result takes its input and a time limit, and gives its output.

        Raises:
            GitError: as for `run`, the start's own failures here and the others from the result.
        """
        settings = [word for setting in _SETTINGS for word in ("-c", setting)]
        # A tree that another user owns (a container's volume, say) is still the one we were pointed at.
        command = ["git", *settings, "-c", f"safe.directory={self.folder}", *arguments]
        verb = next(word for word in arguments if not word.startswith("-") and "=" not in word)
        where = f"git {verb} in {self.folder}"
        try:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self._environment(network),
                stdin=subprocess.PIPE if with_stdin else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        except FileNotFoundError:
            if not self.folder.is_dir():
                raise GitError(f"{self.folder}: no such folder", "") from None
            raise GitError("git is not installed, or not on PATH; install it (2.25 or newer)", "") from None
        except OSError as error:
            raise GitError(f"git can't be run in {self.folder}: {error.strerror}", "") from None

        def result(stdin: bytes | None, timeout: float | None) -> bytes:
            with process:  # which waits for its end
                try:
                    out, err = process.communicate(stdin, timeout)
                except subprocess.TimeoutExpired:
                    process.kill()
                    raise GitError(f"{where} took longer than {timeout:.0f} s", "") from None
                except BaseException:
                    process.kill()
                    raise
            if process.returncode != 0:
                stderr = err.decode("utf-8", "replace").strip()
                lines = stderr.splitlines() or [f"exit code {process.returncode}"]
                cause = next((line for line in lines if line.startswith(("fatal: ", "error: "))), lines[-1])
                raise GitError(f"{where}: {cause}", stderr)
            return out

        return result

    def line(self, *arguments: str) -> str:
        return self.run(*arguments).decode("utf-8", "surrogateescape").strip()

    def succeeds(self, *arguments: str) -> bool:
        """Whether `git ARGUMENTS` ends without an error, for questions that git answers by its exit code."""
        try:
            self.run(*arguments)
        except GitError:
            return False
        return True

    def blobs(self, ids: Sequence[str]) -> list[bytes]:
        """The contents of these objects, in one process."""
        if not ids:
            return []
        out = self.run("cat-file", "--batch", stdin="".join(f"{blob}\n" for blob in ids).encode())
        contents: list[bytes] = []
        at = 0
        for blob in ids:
            end = out.index(b"\n", at)
            fields = out[at:end].split()
            if len(fields) != 3:
                raise GitError(f"git cat-file in {self.folder}: object {blob} is missing", "")
            at = end + 1 + int(fields[2])
            contents.append(out[end + 1 : at])
            at += 1
        return contents

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
            GIT_ATTR_NOSYSTEM="1",
            GIT_NO_REPLACE_OBJECTS="1",  # `git replace` shows other contents under the same id
            GIT_TERMINAL_PROMPT="0",
            GIT_OPTIONAL_LOCKS="0",
            LC_ALL="C",
            TZ="UTC",
        )
        return kept


def start_numstat(folder: Path) -> Callable[[Sequence[bytes]], list[tuple[int, int, str]]]:
    """Start git's reading of patches; given them, the result is (added, removed, path) of every file section in order.

    One process for all of them, and its start passes while the patches are parsed here.
    """
    result = Git(folder).start("apply", "--numstat", "-z", "-p1", "-", with_stdin=True)

    def rows(patches: Sequence[bytes]) -> list[tuple[int, int, str]]:
        fields = (record.split(b"\t", 2) for record in result(b"".join(patches), None).split(b"\0") if record)
        return [(int(added), int(removed), path.decode("utf-8", "surrogateescape")) for added, removed, path in fields]

    return rows


def head(folder: Path) -> str | None:
    """The commit that a checkout stands at; None where there is none yet, or no git here: hashes decide anyway."""
    try:
        return Git(folder).line("rev-parse", "HEAD")
    except GitError:
        return None
