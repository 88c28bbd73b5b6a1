"""Rule `request-id`: the request id that the server is sent is the one that is recorded, also through resumes.

Why: the id is all that joins a training micro batch to the rollout's log. The client makes a new one for each request,
so that the id its caller knows is not the one the server sees. Where a request is resumed after an abort, every part
has an id of its own, and the one of the first part that returned a token is the one whose prefill is the prompt alone:
without the whole chain nothing tells which that was.

How to fix, in `LLMServerClient.generate`:

    server_request_id = uuid4().hex
    output = await server.generate.remote(request_id=server_request_id, ...)
    output.extra_fields["request_id"] = server_request_id

and in a client that resumes, append what each request returned to a list made before the loop, and put the chosen id
and the list into the final output's `extra_fields`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence

from patchctl.verify.findings import Finding
from patchctl.verify.source import Function, Source, dotted, flat, own_expressions

RULE = "request-id"
CLIENT = b"LLMServerClient"
_ID = "request_id"
_SEND_FIX = "make the id once, send it, and put the same variable into the output's extra_fields after the call"
_CHAIN_FIX = (
    "append every request's id to a list made before the loop, and put the chosen id and the list into the output"
)


def check(source: Source) -> list[Finding]:
    """What is wrong with the request ids of a file's clients."""
    findings: list[Finding] = []
    for function, statement, call in _requests(source):
        if _is_parents(call):
            findings += _check_resumed(source, function, statement)
        else:
            findings += _check_sent(source, function, statement, call)
    return findings


def check_presence(sources: Iterable[Source], known: Sequence[str]) -> list[Finding]:
    """Whether the files still have the client that sends and the one that resumes.

    Args:
        known: where the two have been.
    """
    kinds = {_is_parents(call) for source in sources for _, _, call in _requests(source)}
    return [
        Finding(RULE, path, None, f"no client {what} here or elsewhere", "port the hook to where it went")
        for path, is_parents, what in zip(known, (False, True), ("sends a request", "resumes a request"), strict=True)
        if is_parents not in kinds
    ]


def _requests(source: Source) -> Iterator[tuple[Function, ast.stmt, ast.Call]]:
    """The calls by which clients send a request to a server, or have their parent send it."""
    if CLIENT not in source.data:
        return
    for function in source.functions:
        if function.name == "generate" and function.owner is not None and function.owner.name.endswith(CLIENT.decode()):
            for statement in function.mentioning(b"generate"):
                for call in function.calls[statement]:
                    if (dotted(call.func) or "").endswith(".generate.remote") or _is_parents(call):
                        yield function, statement, call


def _is_parents(call: ast.Call) -> bool:
    """Whether a call is `super().generate(...)`."""
    target = call.func
    return (
        isinstance(target, ast.Attribute)
        and target.attr == "generate"
        and isinstance(target.value, ast.Call)
        and dotted(target.value.func) == "super"
    )


def _result(statement: ast.stmt) -> str | None:
    """The name that a statement gives to what it awaits."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        return dotted(statement.targets[0])
    return dotted(statement.target) if isinstance(statement, ast.AnnAssign) else None


def _check_sent(source: Source, function: Function, statement: ast.stmt, call: ast.Call) -> Iterator[Finding]:
    def finding(node: ast.stmt | ast.expr, message: str) -> Finding:
        return Finding(RULE, source.path, node.lineno, message, _SEND_FIX)

    sent = next((word.value for word in call.keywords if word.arg == _ID), None)
    output = _result(statement)
    if sent is None:
        yield finding(call, "the request is sent without a request_id")
        return
    if not isinstance(sent, ast.Name):
        yield finding(sent, f"the id that is sent, `{ast.unparse(sent)}`, is kept nowhere and so can't be recorded")
        return
    values = function.values_of(sent.id)
    if sent.id in function.parameters or not values:
        yield finding(sent, f"`{sent.id}` is not made for this request: a later turn would send the same id")
    for setter, value in values:
        if not any(isinstance(node, ast.Call) for node in ast.walk(value)):
            yield finding(setter, f"`{sent.id}` is not a fresh id: it is `{ast.unparse(value)}`")
        if not _runs_before(function, setter, statement):
            yield finding(setter, f"`{sent.id}` is changed after it was sent")
    if output is None:
        yield finding(statement, "what the server returns is given no name, so that the id can't be put into it")
        return
    place = function.places[statement]
    records = [(inner, value) for inner in function.statements for value in _recorded(function, inner, output, _ID)]
    if not records:
        yield finding(statement, f'`{output}.extra_fields["{_ID}"]` is not set to the id that is sent here')
    for inner, value in records:
        if dotted(value) != sent.id:
            yield finding(inner, f"the id recorded is `{ast.unparse(value)}`, the one sent is `{sent.id}`")
    good = [inner for inner, value in records if dotted(value) == sent.id]
    if good and not any(
        function.places[inner].block is place.block and function.places[inner].index > place.index for inner in good
    ):
        yield finding(good[0], "the id is not recorded on every path after the request")
    for record in good:
        own = function.places[record]
        if own.block is place.block:
            for inner in flat(place.block[place.index + 1 : own.index]):
                if isinstance(inner, ast.Return):
                    yield finding(inner, "this path returns before the id is recorded")
                elif _result(inner) == output:
                    yield finding(inner, f"`{output}` is replaced before the id is recorded in it")


def _runs_before(function: Function, first: ast.stmt, second: ast.stmt) -> bool:
    """Whether one statement stands before another, in its block or one around it."""
    place = function.places[first]
    inner: ast.stmt | None = second
    while inner is not None:
        own = function.places[inner]
        if own.block is place.block:
            return place.index < own.index
        inner = own.parent
    return False


def _recorded(function: Function, statement: ast.stmt, output: str, key: str) -> Iterator[ast.expr]:
    """What a statement puts into an output's extra fields under a key."""
    fields = f"{output}.extra_fields"
    if isinstance(statement, ast.Assign):
        for target in statement.targets:
            if isinstance(target, ast.Subscript) and dotted(target.value) == fields and _says(target.slice, key):
                yield statement.value
    for call in function.calls[statement]:
        if dotted(call.func) == f"{fields}.update":
            yield from (word.value for word in call.keywords if word.arg == key)
            for argument in call.args:
                if isinstance(argument, ast.Dict):
                    yield from (
                        value
                        for its, value in zip(argument.keys, argument.values, strict=True)
                        if its and _says(its, key)
                    )


def _says(node: ast.expr, key: str) -> bool:
    return isinstance(node, ast.Constant) and node.value == key


def _check_resumed(source: Source, function: Function, statement: ast.stmt) -> Iterator[Finding]:
    def finding(node: ast.stmt | ast.expr, message: str) -> Finding:
        return Finding(RULE, source.path, node.lineno, message, _CHAIN_FIX)

    output = _result(statement)
    loop = _loop_around(function, statement)
    if loop is None or output is None:
        return  # a client that sends once and hands on what it got has nothing to lose
    place = function.places[statement]
    kept: ast.stmt | None = None
    for later in place.block[place.index + 1 :]:
        if _keeps(later, output) is not None:
            kept = later
            break
        if any(isinstance(inner, ast.Break | ast.Continue | ast.Return) for inner in flat([later])):
            break
    if kept is None:
        late = [inner for inner in flat(loop.body) if _keeps(inner, output) is not None]
        where = late[0] if late else statement
        why = "is not kept on every path of the loop" if late else "is not kept"
        yield finding(
            where, f"the id of each request of a resumed sample {why}: `{output}` is the only one that has it"
        )
        return
    chain = _keeps(kept, output)
    assert chain is not None
    setters = [setter for setter, _ in function.values_of(chain)]
    if not any(_runs_before(function, setter, loop) for setter in setters):
        yield finding(kept, f"`{chain}` is not made before the loop")
    for setter in setters:
        if setter in set(flat(loop.body)):
            yield finding(setter, f"`{chain}` is made anew in the loop, so that earlier ids are lost")
    yield from _check_final(source, function, loop, output, chain)


def _check_final(source: Source, function: Function, loop: ast.stmt, output: str, chain: str) -> Iterator[Finding]:
    def finding(node: ast.stmt | ast.expr, message: str) -> Finding:
        return Finding(RULE, source.path, node.lineno, message, _CHAIN_FIX)

    place = function.places[loop]
    after = place.block[place.index + 1 :]
    final = next(
        (dotted(inner.value) for inner in after if isinstance(inner, ast.Return) and inner.value is not None), None
    )
    if final is None:
        yield finding(loop, "after the loop no output is returned by name")
        return
    if final == output:
        yield finding(loop, f"`{final}` is the last request's output: ids of earlier ones are lost")
    ids = [(inner, value) for inner in after for value in _recorded(function, inner, final, _ID)]
    whole = [
        inner
        for inner in after
        if isinstance(inner, ast.Assign | ast.Expr)
        and any(dotted(node) == chain for node in own_expressions(inner))
        and f"{final}.extra_fields" in {dotted(node) for node in own_expressions(inner)}
        and not any(_says(node, _ID) for node in own_expressions(inner) if isinstance(node, ast.Constant))
    ]
    if not ids:
        yield finding(loop, f'`{final}.extra_fields["{_ID}"]` is not set after the loop')
    for inner, value in ids:
        chosen = _expanded(function, value)
        if not any(dotted(node) == chain for node in chosen):
            yield finding(
                inner, f"the id recorded does not come from `{chain}`: after a resume it is another request's"
            )
        elif _is_last(chosen, chain):
            yield finding(inner, f"the id recorded is the last of `{chain}`: after a resume that is not the prompt's")
        for later in after[after.index(inner) + 1 :]:
            for call in function.calls[later]:
                if dotted(call.func) == f"{final}.extra_fields.update" and any(
                    dotted(node) == f"{output}.extra_fields" for argument in call.args for node in ast.walk(argument)
                ):
                    yield finding(later, "this overwrites the chosen id with the last request's")
    if not whole:
        yield finding(loop, f"`{chain}` is not put into `{final}.extra_fields`, so that the other ids are lost")


def _loop_around(function: Function, statement: ast.stmt) -> ast.While | ast.For | ast.AsyncFor | None:
    inner: ast.stmt | None = statement
    while inner is not None:
        if isinstance(inner, ast.While | ast.For | ast.AsyncFor):
            return inner
        inner = function.places[inner].parent
    return None


def _keeps(statement: ast.stmt, output: str) -> str | None:
    """The list to which a statement appends an output's request id."""
    if not isinstance(statement, ast.Expr | ast.AugAssign):
        return None
    added: list[ast.expr] = []
    chain = None
    if isinstance(statement, ast.AugAssign):
        chain, added = dotted(statement.target), [statement.value]
    elif isinstance(call := statement.value, ast.Call) and isinstance(call.func, ast.Attribute):
        chain, added = dotted(call.func.value), call.args if call.func.attr in ("append", "extend") else []
    nodes = [node for one in added for node in ast.walk(one)]
    reads = any(dotted(node) == f"{output}.extra_fields" for node in nodes)
    of_id = any(_is_read_of_id(node, output) for node in nodes)
    return chain if reads and of_id else None


def _is_read_of_id(node: ast.AST, output: str) -> bool:
    """Whether a node is `output.extra_fields["request_id"]`, or that by `.get`."""
    fields = f"{output}.extra_fields"
    if isinstance(node, ast.Subscript):
        return dotted(node.value) == fields and _says(node.slice, _ID)
    return (
        isinstance(node, ast.Call)
        and dotted(node.func) == f"{fields}.get"
        and bool(node.args)
        and _says(node.args[0], _ID)
    )


def _expanded(function: Function, value: ast.expr) -> list[ast.AST]:
    """The nodes of an expression, and of what its local names were assigned."""
    nodes = list(ast.walk(value))
    for node in list(nodes):
        if isinstance(node, ast.Name):
            for _, assigned in function.values_of(node.id):
                nodes += ast.walk(assigned)
    return nodes


def _is_last(nodes: list[ast.AST], chain: str) -> bool:
    """Whether the last element of a chain is taken and no choice is made."""
    last = any(
        isinstance(node, ast.Subscript)
        and dotted(node.value) == chain
        and isinstance(node.slice, ast.UnaryOp)
        and isinstance(node.slice.op, ast.USub)
        for node in nodes
    )
    chooses = any(isinstance(node, ast.comprehension | ast.IfExp) for node in nodes)
    return last and not chooses
