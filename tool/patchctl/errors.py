"""The one error type that commands turn into a line on stderr and an exit code."""

from __future__ import annotations

DONE = 0
FAILED = 1
USAGE = 2
IN_THE_WAY = 3
PARTLY_APPLIED = 4
INTERRUPTED = 130

EXIT_CODES = {
    DONE: "done or nothing to do",
    FAILED: "a check or an application failed",
    USAGE: "usage",
    IN_THE_WAY: "wrong pin or files in the way",
    PARTLY_APPLIED: "partly applied",
    INTERRUPTED: "interrupted",
}


class PatchctlError(Exception):
    """A failure the user can act on: the message names the object, the cause and the next step."""

    exit_code: int = FAILED

    def __init__(self, message: str, *, exit_code: int | None = None) -> None:
        super().__init__(message)
        if exit_code is not None:
            self.exit_code = exit_code


class UsageError(PatchctlError):
    """What was asked for can't be done with these arguments."""

    exit_code = USAGE


class InTheWayError(PatchctlError):
    """A wrong pin, a local edit or another run stands in the way; nothing was changed."""

    exit_code = IN_THE_WAY
