"""A patch as a commit: read one from a worktree or from a patch, write it as either.

Whatever a commit is read from, its patch is exported from a scratch repository that holds nothing but the files it
touches. No setting, attribute, hook or note of the repository that the commit was made in can so change a byte.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from patchctl import patchfile
from patchctl.errors import PatchctlError
from patchctl.git import Git
from patchctl.patchfile import Patch

# Each flag keeps out one way in which the same commit could give other bytes.
_EXPORT_FLAGS = (
    "--full-index",  # blob ids whole, however many objects the repository has
    "--zero-commit",  # no commit id, which every rebase changes
    "--no-signature",  # no version of git
    "--no-stat",  # no diffstat, whose width depends on the terminal
    "--keep-subject",  # no [PATCH n/m]
    "--no-numbered",
    "--unified=3",
    "--inter-hunk-context=0",
    "--diff-algorithm=myers",
    "--no-renames",  # a rename as deletion and addition, which every tool applies
    "--no-ext-diff",
    "--no-textconv",
    "--no-color",
    "--no-attach",
    "--no-thread",
    "--no-base",
    "--no-from",
    "--no-to",
    "--no-cc",
    "--no-add-header",
    "--no-notes",
    "--no-signoff",
    "--no-cover-letter",
    "--no-encode-email-headers",
    "--src-prefix=a/",
    "--dst-prefix=b/",
    "-O/dev/null",  # files in the order of their names
)
_EXPORT_SETTINGS = ("diff.indentHeuristic=true", "diff.suppressBlankEmpty=false", "diff.context=3")
_FILE_MODES = {"100644": False, "100755": True}
_OTHER_MODES = {"120000": "a symbolic link", "160000": "a submodule"}
_ABSENT = "000000"


class FileState(NamedTuple):
    """A file at one point of the series; `content` is None where there is none."""

    content: bytes | None
    executable: bool = False


ABSENT = FileState(None)
States = Mapping[str, FileState]


@dataclass(frozen=True)
class Change:
    """One commit of the series.

    Attributes:
        origin: what it was read from, for messages.
        author: `Name <mail>`.
        date: seconds since 1970 and the zone, as git stores it.
        files: what it makes of each file it touches.
    """

    origin: str
    author: bytes
    date: bytes
    message: bytes
    files: States

    @property
    def subject(self) -> str:
        """The first paragraph of the message, in one line."""
        text = self.message.decode("utf-8", "surrogateescape").lstrip("\n")
        return " ".join(re.split(r"\n[ \t]*\n", text, maxsplit=1)[0].split("\n")).strip()


class Exported(NamedTuple):
    """A change with the patch that says the same."""

    change: Change
    text: bytes
    patch: Patch


def read_commits(git: Git, base: str, tip: str = "HEAD") -> list[Change]:
    """The commits of a repository on top of `base`, the oldest first.

    Raises:
        PatchctlError: `tip` does not stand on `base`, there is a merge, two commits of one subject, or a commit that no
            patch can carry.
    """
    if not git.succeeds("merge-base", "--is-ancestor", base, tip):
        raise PatchctlError(
            f"{git.folder}: {tip} does not stand on {base[:12]} any more; put the commits back on it "
            "(git rebase --onto), or carry the series with `patchctl port`"
        )
    merges = git.line("rev-list", "--merges", f"{base}..{tip}")
    if merges:
        raise PatchctlError(
            f"{git.folder}: {merges.split()[0][:12]} is a merge; the series is a line of commits: rebase"
        )
    changes = [_read_commit(git, commit) for commit in git.line("rev-list", "--reverse", f"{base}..{tip}").split()]
    subjects = [change.subject for change in changes]
    loose = [subject for subject in subjects if subject.startswith(("fixup! ", "squash! ", "amend! "))]
    if loose:
        raise PatchctlError(
            f"{git.folder}: {loose[0]!r} is to be melted into its commit: "
            f"git -C {git.folder} rebase -i --autosquash {base[:12]}"
        )
    doubled = [subject for subject in subjects if subjects.count(subject) > 1]
    if doubled:
        raise PatchctlError(f"{git.folder}: two commits are called {doubled[0]!r}; a subject names its patch")
    return changes


def _read_commit(git: Git, commit: str) -> Change:
    origin = f"commit {commit[:12]}"
    headers, _, message = git.run("cat-file", "commit", commit).partition(b"\n\n")
    fields = dict(line.split(b" ", 1) for line in headers.split(b"\n") if b" " in line[1:])
    encoding = fields.get(b"encoding", b"UTF-8").decode("ascii", "replace")
    author, _, date = fields[b"author"].rpartition(b"> ")
    try:
        author, message = (_recode(text, encoding) for text in (author + b">", message))
    except (LookupError, UnicodeDecodeError):
        raise PatchctlError(f"{origin}: its message is not {encoding}; reword it (git rebase -i)") from None
    raw = git.run("diff-tree", "-r", "-z", "--raw", "--no-renames", "--no-abbrev", f"{commit}^", commit)
    words = raw.decode("utf-8", "surrogateescape").split("\0")
    paths: list[tuple[str, str, str]] = []
    for entry, path in zip(words[0:-1:2], words[1::2], strict=False):
        _, mode, _, blob, _ = entry.split(" ")
        if mode in _OTHER_MODES:
            raise PatchctlError(
                f"{origin}: {path}: {_OTHER_MODES[mode]}; the series carries regular files only: drop it"
            )
        paths.append((path, mode, blob))
    if not paths:
        raise PatchctlError(f"{origin}: changes no file; drop it (git rebase -i)")
    contents = iter(git.blobs([blob for _, mode, blob in paths if mode != _ABSENT]))
    files = {
        path: ABSENT if mode == _ABSENT else FileState(next(contents), _FILE_MODES[mode]) for path, mode, _ in paths
    }
    return Change(origin, author, date, message.strip(b"\n") + b"\n", files)


def _recode(text: bytes, encoding: str) -> bytes:
    return text if encoding.upper() in ("UTF-8", "UTF8") else text.decode(encoding).encode()


def read_patch(data: bytes, origin: str, files: States) -> Change:
    """The commit that a patch is, as git reads it from a mail.

    Args:
        files: what the patch makes of the files it touches.
    Raises:
        PatchctlError: its header has no author or no date.
    """
    from email.utils import mktime_tz, parsedate_tz  # costs 20 ms, and only maintainers need it

    with tempfile.TemporaryDirectory() as scratch:
        message = Path(scratch, "message")
        fields = Git(Path(scratch)).run(
            "mailinfo", "-b", "--encoding=UTF-8", "--no-scissors", str(message), str(Path(scratch, "diff")), stdin=data
        )
        body = message.read_bytes()
    header = dict(line.split(b": ", 1) for line in fields.split(b"\n") if b": " in line)
    when = parsedate_tz(header.get(b"Date", b"").decode("ascii", "replace"))
    if when is None or b"Email" not in header:
        raise PatchctlError(f"{origin}: its header has no `From:` or no `Date:` that can be read; restore them")
    minutes = abs(when[9] or 0) // 60
    zone = f"{'-' if (when[9] or 0) < 0 else '+'}{minutes // 60:02d}{minutes % 60:02d}"
    return Change(
        origin,
        author=header.get(b"Author", header[b"Email"]) + b" <" + header[b"Email"] + b">",
        date=f"{mktime_tz(when):.0f} {zone}".encode(),
        message=(header.get(b"Subject", b"") + b"\n\n" + body).strip(b"\n") + b"\n",
        files=files,
    )


def apply_patch(patch: Patch, before: States) -> dict[str, FileState]:
    """What the patch makes of the files it touches.

    Args:
        before: at least the files that the patch touches.
    Raises:
        HunkError: a hunk does not fit.
    """
    after: dict[str, FileState] = {}
    for file in patch.files:
        old = before.get(file.path, ABSENT)
        content = file.apply(old.content, patch.name)
        bit = old.executable if file.executable is None else file.executable
        after[file.path] = ABSENT if content is None else FileState(content, bit)
    return after


def write_commits(git: Git, ref: str, parent: str | None, changes: Sequence[Change]) -> list[str]:
    """Put changes on top of `parent` (of nothing where that is None) and let `ref` name the last; gives their ids.

    The same changes give the same ids: the committer is the author. Neither index nor work tree is touched.
    """
    stream = bytearray()
    for number, change in enumerate(changes, start=1):
        who = change.author + b" " + change.date
        stream += b"commit %s\nmark :%d\nauthor %s\ncommitter %s\n" % (ref.encode(), number, who, who)
        stream += b"data %d\n%s\n" % (len(change.message), change.message)
        if number == 1 and parent is not None:
            stream += b"from %s\n" % parent.encode()
        for path, state in change.files.items():
            name = b'"' + b"".join(b"\\%03o" % byte for byte in path.encode("utf-8", "surrogateescape")) + b'"'
            if state.content is None:
                stream += b"D %s\n" % name
            else:
                stream += b"M %s inline %s\n" % (b"100755" if state.executable else b"100644", name)
                stream += b"data %d\n%s\n" % (len(state.content), state.content)
        stream += b"\n"
    with tempfile.TemporaryDirectory() as scratch:
        marks = Path(scratch, "marks")
        git.run("fast-import", "--quiet", "--force", f"--export-marks={marks}", stdin=bytes(stream))
        lines = marks.read_text().split() if changes else []
    by_mark = dict(zip(lines[0::2], lines[1::2], strict=True))
    return [by_mark[f":{number}"] for number in range(1, len(changes) + 1)]


def export(changes: Sequence[Change], base: States) -> list[Exported]:
    """Each change as a patch; the first stands on `base`, which has every file that any of them touches.

    Raises:
        PatchctlError: a change that no patch can carry (binary contents, a message that looks like a diff).
    """
    if not changes:
        return []
    origin = Change("", b"base <>", b"0 +0000", b"base\n", {p: s for p, s in base.items() if s.content is not None})
    settings = [word for setting in _EXPORT_SETTINGS for word in ("-c", setting)]
    with tempfile.TemporaryDirectory() as scratch:
        git = Git(Path(scratch))
        git.run("init", "--quiet", "--bare")
        ids = write_commits(git, "refs/heads/main", None, [origin, *changes])
        out = Path(scratch, "out")
        span = f"{ids[0]}..{ids[-1]}"
        git.run(*settings, "format-patch", "--quiet", *_EXPORT_FLAGS, "--numbered-files", "-o", str(out), span)
        texts = [Path(out, str(number)).read_bytes().rstrip(b"\n") + b"\n" for number in range(1, len(changes) + 1)]
    return [
        Exported(change, text, patchfile.load(text, change.origin)) for change, text in zip(changes, texts, strict=True)
    ]


def check_mail(exported: Exported) -> None:
    """That the patch gives back the commit it was exported from.

    Raises:
        PatchctlError: git reads another message or author from it, as with a body whose first line is `From: x`.
    """
    change = exported.change
    again = read_patch(exported.text, change.origin, change.files)
    for what in ("message", "author", "date"):
        if getattr(again, what) != getattr(change, what):
            raise PatchctlError(
                f"{change.origin}: its {what} would not come back from the patch; reword it (git rebase -i): "
                f"{_first_difference(getattr(change, what), getattr(again, what))}"
            )


def _first_difference(meant: bytes, read: bytes) -> str:
    pairs: Iterator[tuple[bytes, bytes]] = zip(meant.split(b"\n"), [*read.split(b"\n"), b""], strict=False)
    for old, new in pairs:
        if old != new:
            return f"{patchfile.show(old)} is read as {patchfile.show(new)}"
    return "it is read as a longer one"
