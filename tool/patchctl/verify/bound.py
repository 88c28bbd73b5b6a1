"""Is a name bound, on every path, where a statement of a function runs?"""

from __future__ import annotations

import ast
from collections.abc import Iterable

from patchctl.verify.source import Function, Source, bound_names, captures

Names = frozenset[str]


def bound_at(source: Source, function: Function, statement: ast.stmt) -> Names:
    """The local names that are surely bound when `statement` of `function` starts, its parameters included.

    Empty where no path reaches the statement.
    """
    flow = _Flow(source, function, statement)
    flow.after(function.node.body, function.parameters)
    return frozenset.intersection(*flow.reached) if flow.reached else frozenset()


def _joined(branches: Iterable[Names | None]) -> Names | None:
    """What is bound after any of several branches; None stands for one that does not come to its end."""
    ended = [names for names in branches if names is not None]
    return frozenset.intersection(*ended) if ended else None


class _Flow:
    """Follows a function; `reached` collects what is bound each time `wanted` is met."""

    def __init__(self, source: Source, function: Function, wanted: ast.stmt) -> None:
        self.source = source
        self.function = function
        self.wanted = wanted
        self.reached: list[Names] = []

    def after(self, block: list[ast.stmt], start: Names | None) -> Names | None:
        """What is bound after a statement list, None where its end is not reached."""
        bound = start
        for statement in block:
            if bound is None:
                return None
            if statement is self.wanted:
                self.reached.append(bound)
            bound = self._after_one(statement, bound)
        return bound

    def _after_one(self, statement: ast.stmt, bound: Names) -> Names | None:
        if isinstance(statement, ast.Return | ast.Raise | ast.Break | ast.Continue):
            return None
        if isinstance(statement, ast.Delete):
            return bound - {target.id for target in statement.targets if isinstance(target, ast.Name)}
        if not isinstance(statement, ast.For | ast.AsyncFor | ast.Match | ast.Try):  # they bind on some paths only
            bound |= self.function.bound_by(statement)
        if isinstance(statement, ast.If):
            return _joined([self.after(statement.body, bound), self.after(statement.orelse, bound)])
        if isinstance(statement, ast.For | ast.AsyncFor):
            self.after(statement.body, bound | set(bound_names(statement.target)))
            return self.after(statement.orelse, bound)
        if isinstance(statement, ast.While):
            self.after(statement.body, bound)
            return self.after(statement.orelse, bound)
        if isinstance(statement, ast.With | ast.AsyncWith):
            ended = self.after(statement.body, bound)
            return bound if self.source.swallows(self.function, statement) else ended
        if isinstance(statement, ast.Match):
            branches = [self.after(case.body, bound | captures(case.pattern)) for case in statement.cases]
            last = statement.cases[-1]
            everything = isinstance(last.pattern, ast.MatchAs) and last.pattern.pattern is None and last.guard is None
            return _joined(branches if everything else [*branches, bound])
        if isinstance(statement, ast.Try):
            return self._after_try(statement, bound)
        return bound

    def _after_try(self, statement: ast.Try, bound: Names) -> Names | None:
        body = self.after(statement.body, bound)
        branches = [None if body is None else self.after(statement.orelse, body)]
        for handler in statement.handlers:  # the exception can come before the body has bound anything
            name = {handler.name} if handler.name else set()
            ended = self.after(handler.body, bound | name)
            branches.append(None if ended is None else ended - name)
        normal = _joined(branches)
        if not statement.finalbody:
            return normal
        in_any_case = self.after(statement.finalbody, bound)
        return None if normal is None or in_any_case is None else normal | in_any_case
