"""What a rule of `patchctl verify` found wrong."""

from __future__ import annotations

from typing import NamedTuple


class Finding(NamedTuple):
    """One broken rule at one place.

    Attributes:
        rule: the rule's name, such as `log-before-stop`.
        path: relative to the tree's root, with `/`.
        line: counted from 1; None where the finding is about the whole file.
        message: what is wrong there.
        fix: what to do about it.
    """

    rule: str
    path: str
    line: int | None
    message: str
    fix: str

    def __str__(self) -> str:
        place = self.path if self.line is None else f"{self.path}:{self.line}"
        return f"{place}: [{self.rule}] {self.message}; {self.fix}"
