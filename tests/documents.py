"""What the documents say, read for tests: headings, tables, links, and the commands with the output they show."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Command:
    """One command of a document; `output` is what the document shows below it, None where it shows nothing."""

    document: str
    line: int
    text: str
    output: str | None = None

    def __str__(self) -> str:
        return f"{self.document}:{self.line}: {self.text}"


def documents() -> list[Path]:
    return [ROOT / "README.md", ROOT / "README.zh-CN.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(text: str) -> Iterator[tuple[str, int, str]]:
    """Each fenced block: its language, the line of its first line, its text."""
    for match in _FENCE.finditer(text):
        yield match[1], text.count("\n", 0, match.start()) + 2, match[2]


def commands(path: Path) -> Iterator[Command]:
    """The commands of the bash and console blocks, continued lines joined, comments left out."""
    name = path.relative_to(ROOT).as_posix()
    for language, first, block in blocks(path.read_text(encoding="utf-8")):
        if language == "console":
            for part in re.finditer(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE):
                yield Command(name, first + block.count("\n", 0, part.start()), part[1], part[2])
        elif language == "bash":
            joined = re.sub(r"\\\n\s*", lambda found: " " + "\x00" * found[0].count("\n"), block)
            at = first
            for line in joined.split("\n"):
                text = re.sub(r"(^|\s)#.*", "", line.replace("\x00", "")).strip()
                if text:
                    yield Command(name, at, text)
                at += 1 + line.count("\x00")


def shows(expected: str, printed: str) -> bool:
    """Whether `printed` is what a document shows; `...` there stands for anything."""
    pattern = re.escape(expected.strip()).replace(r"\.\.\.", ".*")
    return re.fullmatch(pattern, printed.strip(), re.DOTALL) is not None


def headings(text: str) -> list[int]:
    """The levels of the headings, in order."""
    return [len(found) for found in re.findall(r"^(#+) ", _FENCE.sub("", text), re.MULTILINE)]


def tables(text: str) -> list[list[list[str]]]:
    """Every table: its rows, their cells, without the rule below the head."""
    found: list[list[list[str]]] = []
    inside = False
    for line in _FENCE.sub("", text).split("\n"):
        if line.startswith("|"):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            if not inside:
                found.append([])
            if not all(re.fullmatch(":?-+:?", cell) for cell in cells):
                found[-1].append(cells)
        inside = line.startswith("|")
    return found


def code(text: str) -> list[str]:
    """What stands in backquotes, in order."""
    return re.findall(r"`([^`\n]+)`", text)


def links(text: str) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", _FENCE.sub("", text))


def column(table: Sequence[Sequence[str]], number: int) -> list[str]:
    """One column of a table, without its head."""
    return [row[number] for row in table[1:]]
