"""Rule `compiles`: every touched file compiles on Python 3.10.

Why: verl and vllm-ascend run on 3.10 and later, and the machine that proves a tree may run a newer Python, which
accepts more. `ast.parse(..., feature_version=(3, 10))` refuses most newer grammar on any Python, but not all: a Python
from 3.12 on reads f-strings by the newer rules whatever the feature version, one from 3.11 on takes `a[*b]` and
`*args: *b` and compiles asynchronous comprehensions inside plain ones. Those are looked for here.

How to fix: write it as Python 3.10 reads it. In the braces of an f-string: not the string's own quotes, no backslash,
no `#`, no line break unless the string is triple-quoted, at most one level of braces inside a format spec.
"""

from __future__ import annotations

import ast
import re
import sys
import warnings
from collections.abc import Iterator

from patchctl.verify.findings import Finding

RULE = "compiles"
_FIX = "write it so that Python 3.10 reads it"

# Comments and strings as the tokenizer knew them before 3.12: an f-string is one string, whatever its braces hold.
# The last alternative is a quote that opens no string: its string does not end on its line.
_STRING = rb"""
    \#[^\n]*
    | (?<![A-Za-z0-9_\x80-\xff]) (?P<prefix>[A-Za-z]{0,2})
      (?: (?P<quote>'''|\"""|'|") (?:
            (?<=''') [^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)* '''
          | (?<=\""") [^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)* \"""
          | (?<!'')(?<=') [^'\\\n]*(?:\\.[^'\\\n]*)* '
          | (?<!"")(?<=") [^"\\\n]*(?:\\.[^"\\\n]*)* "
        )
        | (?P<open>['"])
      )
    """
_STARRED_ITEM = re.compile(rb"[\[,]\s*\*(?![*,)\s])")
_STARRED_ANNOTATION = re.compile(rb"\*\w+\s*:\s*\*")
_F_STRING = re.compile(rb"""(?i:\b(?:f|fr|rf))['"]""")


def parse(path: str, data: bytes) -> tuple[ast.Module | None, list[Finding]]:
    """The file's tree, or None and why there is none.

    The tree is also handed to the compiler, which refuses what the grammar allows (`return` outside a function).
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an invalid escape sequence in upstream's text is not ours to report
        try:
            tree = ast.parse(data, filename=path, feature_version=(3, 10))
            compile(tree, path, "exec", dont_inherit=True)
        except SyntaxError as error:
            return None, [Finding(RULE, path, error.lineno, f"does not compile: {error.msg}", _FIX)]
        except ValueError as error:  # a null byte; before 3.12 not a SyntaxError
            return None, [Finding(RULE, path, None, f"does not compile: {error}", _FIX)]
        except (RecursionError, MemoryError):
            return None, [Finding(RULE, path, None, "does not compile: it is nested too deeply", _FIX)]
    return tree, []


def newer_than_3_10(path: str, data: bytes, tree: ast.Module) -> list[Finding]:
    """What the Python that runs this reads in the file though 3.10 does not."""
    found: list[Finding] = []
    if sys.version_info < (3, 11):
        return found
    if sys.version_info >= (3, 12) and _F_STRING.search(data):
        found += [
            Finding(RULE, path, line, f"Python 3.10 can't read it: {what}", _FIX) for line, what in f_strings(data)
        ]
    if _may_be_starred(data):
        found += [
            Finding(RULE, path, line, "Python 3.10 knows no starred item in a subscript or an annotation", _FIX)
            for line in _starred(tree)
        ]
    if b"async for" in data:
        found += [
            Finding(
                RULE, path, line, "Python 3.10 can't compile an asynchronous comprehension inside a plain one", _FIX
            )
            for line in _async_inside_plain(tree, False)
        ]
    return found


def f_strings(data: bytes) -> Iterator[tuple[int, str]]:
    """The f-strings that only Python 3.12 and later read: their lines, and what is new in them."""
    line, counted = 1, 0
    for match in re.finditer(_STRING, data, re.VERBOSE | re.DOTALL):
        what = None
        prefix = (match["prefix"] or b"").lower()
        if match["open"]:
            what = "a string is not closed on its line"
        elif match["quote"] and b"f" in prefix:
            width = len(match["quote"])
            body = data[match.end("quote") : match.end() - width].decode("utf-8", "replace")
            what = _scan_literal(body, 0, raw=b"r" in prefix, depth=0)[1]
        if what:
            line += data.count(b"\n", counted, match.start())
            counted = match.start()
            yield line, what


def _scan_literal(text: str, start: int, *, raw: bool, depth: int) -> tuple[int, str | None]:
    """Reads literal text and its replacement fields up to the end, or inside a format spec to the closing brace.

    Returns: where it stopped, and what 3.10 refuses in it.
    """
    at = start
    while at < len(text):
        char = text[at]
        if char == "\\" and not raw:
            named = text.startswith("\\N{", at)
            at = text.find("}", at) + 1 if named and "}" in text[at:] else at + 2
        elif char == "{":
            if depth == 0 and text.startswith("{{", at):
                at += 2
                continue
            if depth == 2:
                return at, "replacement fields are nested more than two deep in an f-string"
            at, what = _scan_field(text, at + 1, raw=raw, depth=depth)
            if what:
                return at, what
        elif char == "}" and depth:
            return at, None
        else:
            at += 1
    return at, None if depth == 0 else "a replacement field of an f-string holds the string's own quotes"


def _scan_field(text: str, start: int, *, raw: bool, depth: int) -> tuple[int, str | None]:
    """Reads a replacement field from after its `{` to after its `}`."""
    quote = ""
    nesting = 0
    at = start
    while at < len(text):
        char = text[at]
        if char == "\\":
            return at, "a replacement field of an f-string holds a backslash"
        if quote:
            if text.startswith(quote, at):
                at += len(quote)
                quote = ""
                continue
        elif char in "'\"":
            quote = char * 3 if text.startswith(char * 3, at) else char
            at += len(quote)
            continue
        elif char == "#":
            return at, "a replacement field of an f-string holds a comment"
        elif char in "([{":
            nesting += 1
        elif nesting and char in ")]}":
            nesting -= 1
        elif not nesting and char == "}":
            return at + 1, None
        elif not nesting and char == ":":
            at, what = _scan_literal(text, at + 1, raw=raw, depth=depth + 1)
            return at + 1, what
        at += 1
    return at, "a replacement field of an f-string holds the string's own quotes"


def _may_be_starred(data: bytes) -> bool:
    """Whether a starred item stands in square brackets that follow a value; most stand in a call's."""
    for match in _STARRED_ITEM.finditer(data):
        opening = _opening_bracket(data, match.start() + (data[match.start()] == ord("[")))
        if (
            opening > 0
            and data[opening] == ord("[")
            and (data[opening - 1 : opening].isalnum() or data[opening - 1] in b"_)]")
        ):
            return True
    return _STARRED_ANNOTATION.search(data) is not None


def _opening_bracket(data: bytes, end: int) -> int:
    """Where the bracket opens that is still open at `end`; -1 if none is."""
    depth = 0
    for at in range(end - 1, -1, -1):
        if data[at] in b")]}":
            depth += 1
        elif data[at] in b"([{":
            if not depth:
                return at
            depth -= 1
    return -1


def _starred(tree: ast.Module) -> Iterator[int]:
    """The lines of subscripts and annotations with a star of their own; `a[(*b,)]` is an ordinary tuple."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple) and node.slice.elts:
            items = node.slice.elts
            parenthesized = (node.slice.lineno, node.slice.col_offset) != (items[0].lineno, items[0].col_offset)
            if not parenthesized and any(isinstance(item, ast.Starred) for item in items):
                yield node.lineno
        elif isinstance(node, ast.arg) and isinstance(node.annotation, ast.Starred):
            yield node.lineno


def _async_inside_plain(node: ast.AST, inside_plain: bool) -> Iterator[int]:
    """The lines of asynchronous comprehensions whose nearest comprehension around them is a plain one."""
    if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        asynchronous = any(generator.is_async for generator in node.generators)
        if asynchronous and inside_plain and not isinstance(node, ast.GeneratorExp):
            yield node.lineno
        # The first iterable is evaluated outside the comprehension's own scope.
        first = node.generators[0].iter
        yield from _async_inside_plain(first, inside_plain)
        for child in ast.iter_child_nodes(node):
            for inner in ast.iter_child_nodes(child) if isinstance(child, ast.comprehension) else (child,):
                if inner is not first:
                    yield from _async_inside_plain(inner, not asynchronous)
        return
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        inside_plain = False
    for child in ast.iter_child_nodes(node):
        yield from _async_inside_plain(child, inside_plain)
