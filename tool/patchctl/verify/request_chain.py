"""Rule `request-id`: the request id that the server is sent is the one that is recorded, also through resumes.

Why: the id is all that joins a training micro batch to the rollout's log. The client makes a new one for each request,
so that the id its caller knows is not the one the server sees. Where a request is resumed after an abort, every part
has an id of its own, and the one of the first part that returned a token is the one whose prefill is the prompt alone:
without the whole chain nothing tells which that was, nor which weights the first token is of.

How to fix, in each method of `LLMServerClient` that sends:

    server_request_id = uuid4().hex
    output = await server.generate.remote(request_id=server_request_id, ...)
    output.extra_fields["request_id"] = server_request_id

(of a stream, in the piece that ends it), and in a client that resumes, append what each request returned to a list made
before the loop, and put the chosen id, the list and the first and last weight version into the final output's
`extra_fields`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence

from patchctl.verify.clients import Request, is_word, loop_around, named, requests, yielded
from patchctl.verify.findings import Finding
from patchctl.verify.source import Function, Source, dotted, flat

RULE = "request-id"
_ID = "request_id"
_STEPS = "global_steps"
_SEND_FIX = "make the id once, send it, and put the same variable into the output's extra_fields after the call"
_CHAIN_FIX = (
    "append every request's id to a list made before the loop, and put the chosen id and the list into the output"
)
_STEPS_FIX = "put the first request's global_steps and the last one's into the output"
# The weight versions of a sample's first and last token, and where each stands in the requests' list.
_BOUNDS = {"min_global_steps": 0, "max_global_steps": -1, _STEPS: -1}


def check(source: Source) -> list[Finding]:
    """What is wrong with the request ids of a file's clients."""
    findings: list[Finding] = []
    for request in requests(source):
        findings += _check_resumed(source, request) if request.by_parent else _check_sent(source, request)
    return findings


def check_presence(sources: Iterable[Source], known: Sequence[str]) -> list[Finding]:
    """Whether the files still have the client that sends and the one that resumes, in whichever file, and whether what
    is sent in one way or another is resumed in all of them.

    Args:
        known: where the two have been.
    """
    found = [(source, request) for source in sources for request in requests(source)]
    kinds = {request.by_parent for _, request in found}
    findings = [
        Finding(RULE, path, None, f"no client {what} here or elsewhere", "port the hook to where it went")
        for path, is_parents, what in zip(known, (False, True), ("sends a request", "resumes a request"), strict=True)
        if is_parents not in kinds
    ]
    resumed = {request.function.name: (source, request) for source, request in found if request.by_parent}
    for name in sorted({request.function.name for _, request in found if not request.by_parent} - set(resumed)):
        for source, request in list(resumed.values())[:1]:
            line = request.function.owner.lineno if request.function.owner else None
            message = f"`{name}` of the client that sends is not resumed here: an aborted sample loses its chain"
            findings.append(Finding(RULE, source.path, line, message, f"override `{name}` as `generate` is"))
    return findings


def _check_sent(source: Source, request: Request) -> Iterator[Finding]:
    def finding(node: ast.stmt | ast.expr, message: str) -> Finding:
        return Finding(RULE, source.path, node.lineno, message, _SEND_FIX)

    function, output = request.function, request.output
    carried = request.carried(_ID)
    if not carried:
        yield finding(request.call, "the request is sent without a request_id")
        return
    for carrier, sent in carried:
        if not isinstance(sent, ast.Name):
            yield finding(sent, f"the id that is sent, `{ast.unparse(sent)}`, is kept nowhere and so can't be recorded")
            return
        values = function.values_of(sent.id)
        if sent.id in function.parameters or not values:
            yield finding(sent, f"`{sent.id}` is not made for this request: a later turn would send the same id")
        for setter, value in values:
            if not any(isinstance(node, ast.Call) for node in ast.walk(value)):
                yield finding(setter, f"`{sent.id}` is not a fresh id: it is `{ast.unparse(value)}`")
            if not _runs_before(function, setter, carrier):
                yield finding(setter, f"`{sent.id}` is changed after it was sent")
    if output is None:
        yield finding(
            request.statement, "what the server returns is given no name, so that the id can't be put into it"
        )
        return
    name = dotted(carried[-1][1])
    records = [
        (inner, value)
        for inner in _behind(request)
        for key, value in _recorded(function, inner, output)
        if is_word(key, _ID)
    ]
    if not records:
        yield finding(request.statement, f'`{output}.extra_fields["{_ID}"]` is not set to the id that is sent here')
    for inner, value in records:
        if dotted(value) != name:
            yield finding(inner, f"the id recorded is `{ast.unparse(value)}`, the one sent is `{name}`")
    good = [inner for inner, value in records if dotted(value) == name]
    reached = [inner for inner in good if request.is_reached(inner)]
    if good and not reached:
        yield finding(good[0], "the id is not recorded on every path after the request")
    for record in reached:
        for inner in request.between(record):
            if isinstance(inner, ast.Return | ast.Break | ast.Continue):
                yield finding(inner, "this path ends before the id is recorded")
            elif yielded(inner) == output:
                yield finding(inner, f"`{output}` is yielded before the id is recorded in it")
            elif named(inner) == output:
                yield finding(inner, f"`{output}` is replaced before the id is recorded in it")


def _behind(request: Request) -> Iterator[ast.stmt]:
    """The statements behind the output: of pieces, those of their loop."""
    if request.pieces is not None:
        yield from flat(request.block[request.index + 1 :])
    else:
        yield from request.function.statements


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


def _recorded(function: Function, statement: ast.stmt, output: str) -> Iterator[tuple[ast.expr, ast.expr]]:
    """The keys and values that a statement puts into an output's extra fields."""
    fields = f"{output}.extra_fields"
    if isinstance(statement, ast.Assign):
        for target in statement.targets:
            if isinstance(target, ast.Subscript) and dotted(target.value) == fields:
                yield target.slice, statement.value
    for call in function.calls[statement]:
        if dotted(call.func) == f"{fields}.update":
            yield from ((ast.Constant(word.arg), word.value) for word in call.keywords if word.arg)
            for argument in call.args:
                if isinstance(argument, ast.Dict):
                    pairs = zip(argument.keys, argument.values, strict=True)
                    yield from ((key, value) for key, value in pairs if key)


def _check_resumed(source: Source, request: Request) -> Iterator[Finding]:
    def finding(node: ast.stmt | ast.expr, message: str) -> Finding:
        return Finding(RULE, source.path, node.lineno, message, _CHAIN_FIX)

    function, statement, output = request.function, request.statement, request.output
    loop = loop_around(function, function.places[statement].parent)
    if loop is None or output is None:
        return  # a client that sends once and hands on what it got has nothing to lose
    held = _holders(request, output)
    kept = next((inner for inner in _on_every_path(request, held) if _keeps(inner, held) is not None), None)
    if kept is None:
        late = [inner for inner in flat(loop.body) if _keeps(inner, held) is not None]
        where = late[0] if late else statement
        why = "is not kept on every path of the loop" if late else "is not kept"
        yield finding(
            where, f"the id of each request of a resumed sample {why}: `{output}` is the only one that has it"
        )
        return
    chain = _keeps(kept, held)
    assert chain is not None
    setters = [setter for setter, _ in function.values_of(chain)]
    if not any(_runs_before(function, setter, loop) for setter in setters):
        yield finding(kept, f"`{chain}` is not made before the loop")
    for setter in setters:
        if setter in set(flat(loop.body)):
            yield finding(setter, f"`{chain}` is made anew in the loop, so that earlier ids are lost")
    for inner in flat(loop.body):
        grown, _ = _appended(inner)
        if grown is None or "." in grown or grown in {chain, *function.parameters}:
            continue
        if not any(_runs_before(function, setter, inner) for setter, _ in function.values_of(grown)):
            yield finding(inner, f"`{grown}` is not made before it grows")
    yield from _check_final(source, request, loop, held, chain, _entry_keys(kept))


def _reached_pieces(request: Request) -> Iterator[ast.stmt]:
    """The statements of the loop over pieces that run for the last piece."""
    if request.pieces is not None:
        yield from (inner for inner in flat(request.block[request.index + 1 :]) if request.is_reached(inner))


def _on_every_path(request: Request, held: frozenset[str]) -> Iterator[ast.stmt]:
    """The statements that run behind every request while its output is still held."""
    yield from _reached_pieces(request)
    place = request.function.places[request.statement]
    for later in place.block[place.index + 1 :]:
        yield later
        if named(later) in held or any(isinstance(one, ast.Break | ast.Continue | ast.Return) for one in flat([later])):
            return


def _holders(request: Request, output: str) -> frozenset[str]:
    """The names that hold the output that ended a request."""
    copies = [
        name
        for inner in _reached_pieces(request)
        if isinstance(inner, ast.Assign) and dotted(inner.value) == output and (name := named(inner))
    ]
    return frozenset({output, *copies})


def _check_final(
    source: Source,
    request: Request,
    loop: ast.stmt,
    held: frozenset[str],
    chain: str,
    keys: frozenset[str] | None,
) -> Iterator[Finding]:
    def finding(node: ast.stmt | ast.expr, message: str, fix: str = _CHAIN_FIX) -> Finding:
        return Finding(RULE, source.path, node.lineno, message, fix)

    function = request.function
    place = function.places[loop]
    after = place.block[place.index + 1 :]
    final = next((name for inner in after if (name := _handed_on(inner))), None)
    if final is None:
        yield finding(loop, f"after the loop no output is {'yielded' if request.pieces else 'returned'} by name")
        return
    if request.pieces is None and final in held:
        yield finding(loop, f"`{final}` is the last request's output: ids of earlier ones are lost")
    records = [(inner, *pair) for inner in after for pair in _recorded(function, inner, final)]
    ids = [(inner, value) for inner, key, value in records if is_word(key, _ID)]
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
        for read in sorted(_keys_read(chosen) - keys) if keys is not None else ():
            yield finding(inner, f"`{chain}` is chosen from by {read!r}, which its entries don't have")
        for later in after[after.index(inner) + 1 :]:
            for call in function.calls[later]:
                if dotted(call.func) == f"{final}.extra_fields.update" and any(
                    dotted(node) in {f"{name}.extra_fields" for name in held}
                    for argument in call.args
                    for node in ast.walk(argument)
                ):
                    yield finding(later, "this overwrites the chosen id with the last request's")
    whole = [value for _, key, value in records if not is_word(key, _ID)]
    if not any(dotted(node) == chain for value in whole for node in ast.walk(value)):
        yield finding(loop, f"`{chain}` is not put into `{final}.extra_fields`, so that the other ids are lost")
    for bound, element in _BOUNDS.items():
        values = [(inner, value) for inner, key, value in records if is_word(key, bound)]
        if not values:
            yield finding(loop, f'`{final}.extra_fields["{bound}"]` is not set after the loop', _STEPS_FIX)
        for inner, value in values:
            if not any(_is_read(node, name, _STEPS) for node in _sources(function, value) for name in held):
                yield finding(inner, f"{bound} does not come from what the requests returned", _STEPS_FIX)
            elif isinstance(value, ast.Subscript) and ast.unparse(value.slice) != str(element):
                which = "first" if element == 0 else "last"
                yield finding(inner, f"{bound} is not that of the {which} request", _STEPS_FIX)


def _handed_on(statement: ast.stmt) -> str | None:
    """The name that a statement returns or yields."""
    if isinstance(statement, ast.Return) and statement.value is not None:
        return dotted(statement.value)
    return yielded(statement)


def _keeps(statement: ast.stmt, held: frozenset[str]) -> str | None:
    """The list to which a statement appends the request id of an output."""
    chain, added = _appended(statement)
    reads = any(_is_read(node, name, _ID) for one in added for node in ast.walk(one) for name in held)
    return chain if reads else None


def _appended(statement: ast.stmt) -> tuple[str | None, list[ast.expr]]:
    """The list to which a statement appends, and what."""
    if isinstance(statement, ast.AugAssign):
        return dotted(statement.target), [statement.value]
    call = statement.value if isinstance(statement, ast.Expr) else None
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in ("append", "extend"):
        return dotted(call.func.value), call.args
    return None, []


def _entry_keys(statement: ast.stmt) -> frozenset[str] | None:
    """The keys of the mapping that a statement appends; None where it appends something else."""
    _, added = _appended(statement)
    if len(added) != 1 or not isinstance(added[0], ast.Dict):
        return None
    return frozenset(key.value for key in added[0].keys if isinstance(key, ast.Constant) and isinstance(key.value, str))


def _is_read(node: ast.AST, output: str, key: str) -> bool:
    """Whether a node is `output.extra_fields["key"]`, or that by `.get`."""
    fields = f"{output}.extra_fields"
    if isinstance(node, ast.Subscript):
        return dotted(node.value) == fields and is_word(node.slice, key)
    return (
        isinstance(node, ast.Call)
        and dotted(node.func) == f"{fields}.get"
        and bool(node.args)
        and is_word(node.args[0], key)
    )


def _keys_read(nodes: list[ast.AST]) -> set[str]:
    keys = [
        node.slice.value for node in nodes if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant)
    ]
    return {key for key in keys if isinstance(key, str)}


def _expanded(function: Function, value: ast.expr) -> list[ast.AST]:
    """The nodes of an expression, and of what its local names were assigned."""
    nodes = list(ast.walk(value))
    for node in list(nodes):
        if isinstance(node, ast.Name):
            for _, assigned in function.values_of(node.id):
                nodes += ast.walk(assigned)
    return nodes


def _sources(function: Function, value: ast.expr) -> list[ast.AST]:
    """The nodes of an expression, and of all that its local names were assigned or had appended, and so on."""
    nodes = list(ast.walk(value))
    seen: set[str] = set()
    for node in nodes:  # grows as names are found
        if isinstance(node, ast.Name) and node.id not in seen:
            seen.add(node.id)
            for _, assigned in function.values_of(node.id):
                nodes += ast.walk(assigned)
            for statement in function.mentioning(node.id.encode()):
                chain, added = _appended(statement)
                nodes += [inner for one in added if chain == node.id for inner in ast.walk(one)]
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
