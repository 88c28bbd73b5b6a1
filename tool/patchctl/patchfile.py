"""One patch, byte-exact: parse it strictly, apply it to file contents without fuzz.

git, GNU patch and unidiff all accept a hunk whose header counts fewer lines than stand below it, and drop the rest
without a word. The parser here accounts for every line of the file: one that no hunk counts is a problem.
Only `\\n` ends a line; contents are bytes throughout, so no encoding and no exotic line separator can change them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple, NoReturn

from patchctl.errors import PatchctlError
from patchctl.series import Problem

_GIT_HEADER = b"diff --git "
_HUNK_HEADER = re.compile(rb"@@ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@(?: .*)?")
_INDEX = re.compile(rb"index ([0-9a-f]+)\.\.([0-9a-f]+)(?: (\d{6}))?")
_ESCAPE = re.compile(rb"\\([0-3][0-7]{2}|.)", re.DOTALL)
_QUOTED = re.compile(rb'"(?:[^"\\]|\\(?:[0-3][0-7]{2}|[abtnvfr"\\]))*"')
_ESCAPES = {b"a": b"\a", b"b": b"\b", b"t": b"\t", b"n": b"\n", b"v": b"\v", b"f": b"\f", b"r": b"\r"}
_NOTHING = "0" * 40
_EMPTY = "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"  # the blob id of no bytes
_NOT_LAST = r"`\ No newline at end of file` stands behind a line that is not the last line of its side"
_SHOWN = 160
_CRLF = "CRLF line ends: the file was converted; check out patches with `*.patch -text`"
_FILE_MODES = {b"100644", b"100755"}
_UNSUPPORTED = {
    b"rename from ": "a rename; write it as a deletion and an addition (--no-renames)",
    b"copy from ": "a copy; write it as an addition (--no-renames)",
    b"Binary files ": "a binary marker without contents, which no tool can apply",
    b"GIT binary patch": "a binary patch; the series carries text only",
}


class HunkError(PatchctlError):
    """A hunk that does not fit the file: the message names file, hunk, the expected and the found line."""


class Hunk(NamedTuple):
    """One hunk.

    Attributes:
        old_start, new_start: 1-based line numbers as in the header (0 where the side is empty).
        old, new: the lines of each side with their `\\n`; the last has none where the file ends without one.
        leading, trailing: how many context lines stand before the first and after the last change.
        line: where the header stands in the patch, 1-based.
    """

    old_start: int
    new_start: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]
    leading: int
    trailing: int
    added: int
    removed: int
    line: int

    def reversed(self) -> Hunk:
        return self._replace(
            old_start=self.new_start,
            new_start=self.old_start,
            old=self.new,
            new=self.old,
            added=self.removed,
            removed=self.added,
        )


class FilePatch(NamedTuple):
    """What one patch does to one file.

    Attributes:
        pre, post: git blob ids; None where the file does not exist on that side.
        executable: the executable bit that the patch sets; None where it sets none.
        was_executable: the bit before the patch, where the patch says so.
    """

    path: str
    pre: str | None
    post: str | None
    executable: bool | None
    was_executable: bool | None
    hunks: tuple[Hunk, ...]
    line: int

    def reversed(self) -> FilePatch:
        return self._replace(
            pre=self.post,
            post=self.pre,
            executable=self.was_executable,
            was_executable=self.executable,
            hunks=tuple(hunk.reversed() for hunk in self.hunks),
        )

    def apply(self, content: bytes | None, patch_name: str) -> bytes | None:
        """The file's contents after the patch; None where the patch deletes the file.

        A hunk fits where its old lines stand, all of them equal to the byte; it may stand elsewhere than the header
        says only where it fits in exactly one place after the hunk before it.

        Raises:
            HunkError: a hunk does not fit, or fits in several places.
        """
        if self.pre is None and content is not None:
            raise HunkError(f"{patch_name}: {self.path}: the patch creates this file, but it is there already")
        if self.pre is not None and content is None:
            raise HunkError(f"{patch_name}: {self.path}: the patch changes this file, but it is missing")
        lines = split_lines(content or b"")
        result: list[bytes] = []
        done, offset = 0, 0
        for number, hunk in enumerate(self.hunks, start=1):
            header_at = hunk.old_start - 1 if hunk.old else hunk.old_start
            at = self._find(lines, hunk, header_at + offset, done, f"{patch_name}: {self.path}: hunk {number}")
            offset = at - header_at
            result += lines[done:at]
            result += hunk.new
            done = at + len(hunk.old)
        result += lines[done:]
        if self.post is None:
            if result:
                raise HunkError(
                    f"{patch_name}: {self.path}: the patch deletes this file, but lines would be left of it"
                )
            return None
        return b"".join(result)

    def _find(self, lines: list[bytes], hunk: Hunk, expected: int, done: int, where: str) -> int:
        old, size = list(hunk.old), len(hunk.old)

        def fits(at: int) -> bool:
            if at < done or lines[at : at + size] != old:
                return False
            if hunk.old_start <= 1 and at != 0:  # too little context before it: it belongs to the file's start
                return False
            return hunk.trailing > 0 or at + size == len(lines)  # likewise to its end

        if fits(expected):
            return expected
        places = [at for at in range(done, len(lines) - size + 1) if fits(at)]
        if len(places) == 1:
            return places[0]
        if places:
            numbers = ", ".join(str(at + 1) for at in places[:5])
            raise HunkError(f"{where} fits in {len(places)} places (lines {numbers}); give it more context")
        self._mismatch(lines, old, max(expected, 0), where)

    @staticmethod
    def _mismatch(lines: list[bytes], old: list[bytes], expected: int, where: str) -> NoReturn:
        for index, line in enumerate(old):
            at = expected + index
            if at >= len(lines):
                raise HunkError(f"{where}, line {at + 1}: expected {show(line)}, found the end of the file")
            if lines[at] != line:
                raise HunkError(f"{where}, line {at + 1}: expected {show(line)}, found {show(lines[at])}")
        raise HunkError(
            f"{where}, line {expected + 1}: its lines are there, but the start or the end of the file is not"
        )


class Patch(NamedTuple):
    """A parsed patch.

    Attributes:
        subject, author, body: of the commit that the patch is; the body without its trailers' meaning taken out.
    """

    name: str
    subject: str
    author: str
    body: str
    files: tuple[FilePatch, ...]

    def trailer(self, key: str) -> str | None:
        """The value of `Key: value` in the body, continuation lines joined."""
        words: list[str] = []
        for line in self.body.split("\n"):
            if words and not line.startswith((" ", "\t")):
                break
            if words or line.startswith(f"{key}: "):
                words.append(line if words else line[len(key) + 2 :])
        return " ".join(" ".join(words).split()) or None


def split_lines(content: bytes) -> list[bytes]:
    """Lines with their `\\n`, and only that ends a line; the last has none where the content ends without one."""
    lines = [line + b"\n" for line in content.split(b"\n")]
    last = lines.pop()[:-1]
    return [*lines, last] if last else lines


def show(line: bytes) -> str:
    """A line for a message, cut where it is long."""
    text = line.decode("utf-8", "backslashreplace").rstrip("\n")
    return repr(text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…")


def parse(data: bytes, name: str) -> tuple[Patch, list[Problem]]:
    """The patch and everything that is wrong with its text; files and hunks with problems are left out."""
    return _Parser(data, name).parse()


def load(data: bytes, name: str) -> Patch:
    """The patch.

    Raises:
        PatchctlError: its text has a problem; the message names the first and says how many there are.
    """
    patch, problems = parse(data, name)
    if problems:
        first = problems[0]
        more = f" (and {len(problems) - 1} more; see `patchctl verify`)" if len(problems) > 1 else ""
        raise PatchctlError(f"{name}:{first.line}: {first.message}{more}")
    return patch


class _BadSection(Exception):
    """The rest of this file's section can't be read."""


class _Parser:
    def __init__(self, data: bytes, name: str) -> None:
        self.data = data
        self.name = name
        self.problems: list[Problem] = []
        self.lines = data.split(b"\n")
        self.at = 0

    def parse(self) -> tuple[Patch, list[Problem]]:
        if self.data.startswith(b"\xef\xbb\xbf"):
            self.problem("starts with a byte order mark; save it without", 0)
        if self.lines.pop() != b"":
            self.problem("does not end in a newline: the last line may be cut", len(self.lines))
            self.lines.append(self.data.rpartition(b"\n")[2])
        message = list(self.message_lines())
        files = list(self.file_sections())
        if not files and not self.problems:
            self.problem("changes no file", 0)
        seen: set[str] = set()
        for file in files:
            if file.path in seen:
                self.problem(f"{file.path} has two sections in one patch", file.line - 1)
            seen.add(file.path)
        if crlf := [problem for problem in self.problems if problem.message == _CRLF]:  # one cause, one line
            self.problems = crlf[:1]
        return self.header(message, files), self.problems

    def problem(self, message: str, at: int | None = None) -> None:
        self.problems.append(Problem(self.name, (self.at if at is None else at) + 1, message))

    def peek(self) -> bytes | None:
        return self.lines[self.at] if self.at < len(self.lines) else None

    # -- the commit message

    def message_lines(self) -> Iterator[bytes]:
        while (line := self.peek()) is not None and not line.startswith(_GIT_HEADER):
            if line.endswith(b"\r"):
                self.problem(_CRLF)
                self.at = len(self.lines)
                return
            if line.startswith((b"diff ", b"@@ ", b"Index: ", b"--- a/", b"+++ ")):
                self.problem("this line of the message looks like a diff, and git would read it as one; indent it")
            yield line
            self.at += 1

    def header(self, message: list[bytes], files: list[FilePatch]) -> Patch:
        text = b"\n".join(message).decode("utf-8", "surrogateescape")
        head, _, body = text.partition("\n\n")
        body = re.sub(r"(^|\n)---\n\s*\Z", "\n", body + "\n").strip("\n")
        fields: dict[str, str] = {}
        for line in re.sub(r"\n[ \t]+", " ", head).split("\n"):
            key, separator, value = line.partition(": ")
            if separator:
                fields.setdefault(key, _decode_words(value))
        subject = re.sub(r"^\[PATCH[^]]*\] *", "", fields.get("Subject", ""))
        return Patch(self.name, subject, fields.get("From", ""), body, tuple(files))

    # -- the files

    def file_sections(self) -> Iterator[FilePatch]:
        while (line := self.peek()) is not None:
            if line.startswith(_GIT_HEADER):
                start = self.at
                try:
                    section = self.file_section()
                except _BadSection:
                    self.at = max(self.at, start + 1)
                    self.skip_to_next_file()
                else:
                    if not any(p.line is not None and p.line > start for p in self.problems):
                        yield section
            elif self.is_signature():
                return
            elif line == b"":
                self.at += 1
            elif line.startswith((b"diff --cc ", b"diff --combined ", b"@@@ ")):
                self.problem("a combined diff (of a merge); export one commit a patch")
                self.at += 1
                self.skip_to_next_file()
            else:
                kind = "a hunk's line" if line[:1] in b"+- \\" else "this line"
                self.problem(f"{kind} is counted by no hunk header, and would be dropped in silence: {show(line)}")
                self.at += 1

    def counted_signature(self, old_left: int, new_left: int) -> bool:
        """Whether the line just counted, a removal of `- ` and the hunk's last, is really the patch's signature."""
        if old_left or new_left:
            return False
        self.at -= 1
        try:
            return self.is_signature()
        finally:
            self.at += 1

    def is_signature(self) -> bool:
        """Whether the rest is what format-patch puts below a patch: `-- `, a line that says which git, blank lines."""
        rest = self.lines[self.at : self.at + 2]
        blank = not any(self.lines[self.at + 2 :])
        return rest[0] == b"-- " and blank and re.fullmatch(rb"[0-9][0-9A-Za-z. ()-]*", rest[-1]) is not None

    def skip_to_next_file(self) -> None:
        while (line := self.peek()) is not None and not line.startswith(_GIT_HEADER):
            self.at += 1

    def file_section(self) -> FilePatch:
        start = self.at
        old_name, new_name = self.header_paths(self.lines[start])
        if old_name != new_name:
            self.problem(f"the section is of two files, {old_name} and {new_name}")
        self.check_path(new_name)
        self.at += 1
        modes: dict[str, bytes] = {}
        index: tuple[str, str] | None = None
        while (line := self.peek()) is not None and not line.startswith((b"@@", _GIT_HEADER, b"--- ")):
            if line.endswith(b"\r"):
                self.problem(_CRLF)
                raise _BadSection
            for prefix, what in _UNSUPPORTED.items():
                if line.startswith(prefix):
                    self.problem(f"{new_name}: {what}")
                    raise _BadSection
            if line in self.lines[start + 1 : self.at]:
                self.problem(f"{new_name}: this line stands there twice: {show(line)}")
            mode = re.fullmatch(rb"(old mode|new mode|new file mode|deleted file mode) (\d{6})", line)
            if mode:
                modes[mode[1].decode()] = mode[2]
            elif line.startswith(b"index "):
                index = self.index_line(line, modes)
            elif line == b"":
                break
            elif not line.startswith((b"similarity index ", b"dissimilarity index ")):
                self.problem(f"{new_name}: this line is no header of a file section: {show(line)}")
                raise _BadSection
            self.at += 1
        for mode_bytes in modes.values():
            if mode_bytes not in _FILE_MODES:
                what = {b"120000": "a symbolic link", b"160000": "a submodule"}.get(
                    mode_bytes, f"mode {show(mode_bytes)}"
                )
                self.problem(f"{new_name}: {what}; the series carries regular files only", start)
                raise _BadSection
        creates, deletes = "new file mode" in modes, "deleted file mode" in modes
        if creates and deletes:
            self.problem(f"{new_name}: is both created and deleted", start)
        if ("old mode" in modes) != ("new mode" in modes):
            self.problem(f"{new_name}: `old mode` and `new mode` come together or not at all", start)
        hunks = self.hunks(new_name, creates, deletes)
        if creates and any(hunk.old for hunk in hunks):
            self.problem(f"{new_name}: the file is created, but a hunk has old lines", start)
        if deletes and any(hunk.new for hunk in hunks):
            self.problem(f"{new_name}: the file is deleted, but a hunk has new lines", start)
        mode_only = "new mode" in modes and not hunks
        if index is None and not mode_only:
            self.problem(f"{new_name}: no `index` line; export with --full-index", start)
            raise _BadSection
        if not hunks and not mode_only and index not in ((_NOTHING, _EMPTY), (_EMPTY, _NOTHING)):
            self.problem(f"{new_name}: no hunk", start)
        pre, post = index if index else ("", "")
        for side, absent, blob in (("before", creates, pre), ("after", deletes, post)):
            if index and absent != (blob == _NOTHING):
                self.problem(f"{new_name}: the `index` line and the file mode lines disagree about {side}", start)
        return FilePatch(
            path=new_name,
            pre=None if creates else pre,
            post=None if deletes else post,
            executable=_executable(modes.get("new file mode") or modes.get("new mode")),
            was_executable=_executable(modes.get("deleted file mode") or modes.get("old mode")),
            hunks=tuple(hunks),
            line=start + 1,
        )

    def index_line(self, line: bytes, modes: dict[str, bytes]) -> tuple[str, str] | None:
        match = _INDEX.fullmatch(line)
        if not match or len(match[1]) != 40 or len(match[2]) != 40:
            self.problem("the `index` line has no full blob ids; export with --full-index")
            return None
        if match[3] and match[3] not in _FILE_MODES:
            modes["index"] = match[3]
        return match[1].decode(), match[2].decode()

    def header_paths(self, line: bytes) -> tuple[str, str]:
        if line.endswith(b"\r"):
            self.problem(_CRLF)
            raise _BadSection
        rest = line[len(_GIT_HEADER) :]
        quoted = re.fullmatch(rb'("(?:[^"\\]|\\.)*"|\S+) ("(?:[^"\\]|\\.)*"|\S+)', rest)
        half = len(rest) // 2
        if quoted:
            old, new = quoted[1], quoted[2]
        elif rest[half : half + 1] == b" " and rest[2:half] == rest[half + 3 :]:  # equal names with spaces
            old, new = rest[:half], rest[half + 1 :]
        else:
            self.problem("the two names of this `diff --git` line can't be told apart")
            raise _BadSection
        return self.strip_prefix(old, b"a/"), self.strip_prefix(new, b"b/")

    def strip_prefix(self, raw: bytes, prefix: bytes) -> str:
        if raw.startswith(b'"') and not _QUOTED.fullmatch(raw):
            self.problem(f"{show(raw)} is not a name that git writes")
            raise _BadSection
        name = unquote(raw)
        if not name.startswith(prefix):
            self.problem(f"{show(name)} does not start with {prefix.decode()}; export with a/ and b/ prefixes")
            raise _BadSection
        try:
            return name[len(prefix) :].decode("utf-8")
        except UnicodeDecodeError:
            self.problem(f"{show(name)} is not UTF-8; rename the file")
            raise _BadSection from None

    def check_path(self, path: str) -> None:
        parts = path.split("/")
        if any(part in ("", ".", "..") for part in parts) or re.search(r"[\0\n\r]", path):
            self.problem(f"{path!r} is not a safe path inside the tree")
            raise _BadSection
        if any(part.lower() == ".git" for part in parts):
            self.problem(f"{path!r} is inside git's own folder")
            raise _BadSection

    def hunks(self, path: str, creates: bool, deletes: bool) -> list[Hunk]:
        hunks: list[Hunk] = []
        line = self.peek()
        if line is None or not line.startswith(b"--- "):
            return hunks
        for marker, absent, prefix in ((b"--- ", creates, "a/"), (b"+++ ", deletes, "b/")):
            line = self.peek() or b""
            if line.endswith(b"\r"):
                self.problem(_CRLF)
                raise _BadSection
            # git ends a name that has spaces with a tab
            name = unquote(line[4:].removesuffix(b"\t")).decode("utf-8", "surrogateescape")
            expected = "/dev/null" if absent else prefix + path
            if not line.startswith(marker) or name != expected:
                self.problem(f"expected `{marker.decode()}{expected}`, found {show(line)}")
                raise _BadSection
            self.at += 1
        end, delta = 0, 0
        while (line := self.peek()) is not None and line.startswith(b"@@"):
            hunk = self.hunk(line)
            first = hunk.old_start if hunk.old else hunk.old_start + 1
            new_first = hunk.new_start if hunk.new else hunk.new_start + 1
            if first <= end:
                self.problem(f"{path}: this hunk overlaps the one before it, or comes out of order", hunk.line - 1)
            elif new_first != first + delta:
                self.problem(
                    f"{path}: this hunk starts at +{hunk.new_start}, but the hunks before it make it "
                    f"+{first + delta if hunk.new else first + delta - 1}",
                    hunk.line - 1,
                )
            if hunks and not all(side[-1].endswith(b"\n") for side in (hunks[-1].old, hunks[-1].new) if side):
                self.problem(_NOT_LAST, hunks[-1].line - 1)
            end = first + len(hunk.old) - 1
            delta += len(hunk.new) - len(hunk.old)
            hunks.append(hunk)
        return hunks

    def hunk(self, header: bytes) -> Hunk:
        start = self.at
        match = _HUNK_HEADER.fullmatch(header)
        if not match:
            self.problem(f"not a hunk header: {show(header)}")
            raise _BadSection
        old_left, new_left = (int(match[group]) if match[group] is not None else 1 for group in (2, 4))
        self.at += 1
        old: list[bytes] = []
        new: list[bytes] = []
        kinds = bytearray()
        cut = False
        if not old_left and new_left > 1:  # most lines of a series are those of new files: all but the last at once
            block = self.lines[self.at : self.at + new_left - 1]
            if all(map(bytes.startswith, block, itertools.repeat(b"+"))):
                new = [line[1:] + b"\n" for line in block]
                kinds += b"+" * len(block)
                new_left -= len(block)
                self.at += len(block)
        while old_left or new_left:
            line = self.peek()
            kind = b" " if line == b"" else (line or b"")[:1]  # some editors strip the space of an empty context line
            if line is None or kind not in (b" ", b"+", b"-") or line.startswith(_GIT_HEADER):
                self.problem(f"the hunk ends {max(old_left, new_left)} lines before its header says", start)
                raise _BadSection
            text = line[1:] + b"\n"
            if kind != b"+":
                old.append(text)
                old_left -= 1
            if kind != b"-":
                new.append(text)
                new_left -= 1
            if old_left < 0 or new_left < 0:
                self.problem("the hunk has more lines of one side than its header says", start)
                raise _BadSection
            kinds += kind
            self.at += 1
            if (self.peek() or b"").startswith(b"\\ "):
                cut = True
                for side, other in ((old, b"+"), (new, b"-")):
                    if kind != other:
                        side[-1] = side[-1][:-1]
                self.at += 1
            elif kind == b"-" and self.counted_signature(old_left, new_left):
                self.problem("the hunk counts the mail's signature as a removed line", self.at - 1)
                raise _BadSection
        if cut and any(not line.endswith(b"\n") for side in (old, new) for line in side[:-1]):
            self.problem(_NOT_LAST, start)
            raise _BadSection
        text_kinds = bytes(kinds)
        leading = len(text_kinds) - len(text_kinds.lstrip(b" "))
        if leading == len(text_kinds):
            self.problem("the hunk changes nothing", start)
        return Hunk(
            old_start=int(match[1]),
            new_start=int(match[3]),
            old=tuple(old),
            new=tuple(new),
            leading=leading,
            trailing=len(text_kinds) - len(text_kinds.rstrip(b" ")),
            added=text_kinds.count(b"+"),
            removed=text_kinds.count(b"-"),
            line=start + 1,
        )


def _executable(mode: bytes | None) -> bool | None:
    return None if mode is None else mode == b"100755"


def unquote(name: bytes) -> bytes:
    """A path as git writes it: C-quoted where it has special bytes."""
    if not (name.startswith(b'"') and name.endswith(b'"') and len(name) > 1):
        return name

    def unescape(match: re.Match[bytes]) -> bytes:
        code = match[1]
        return bytes([int(code, 8)]) if len(code) == 3 else _ESCAPES.get(code, code)

    return _ESCAPE.sub(unescape, name[1:-1])


def _decode_words(value: str) -> str:
    if "=?" not in value:
        return value
    from email.errors import MessageError  # costs 20 ms, and only names with accents need it
    from email.header import decode_header, make_header

    try:
        return str(make_header(decode_header(value)))
    except (MessageError, LookupError, ValueError):  # an unknown charset, bytes that are not of it
        return value


def numstat(files: Sequence[FilePatch]) -> list[tuple[int, int, str]]:
    """(added, removed, path) of each file, as `git apply --numstat` counts them."""
    return [(sum(h.added for h in f.hunks), sum(h.removed for h in f.hunks), f.path) for f in files]
