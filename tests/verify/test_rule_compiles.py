"""Rule compiles: a touched file compiles on Python 3.10, whatever Python looks at it."""

from __future__ import annotations

import sys

import pytest

from patchctl.verify import compiles

# What Python 3.10 compiles, though it looks like something that it does not.
OLD = [
    'x = f"{a}"',
    "x = f\"{d['a']}\"",
    "x = f'{d[\"a\"]}'",
    'x = f"{chr(10)}\\n"',
    'x = f"""{a["b"]}"""',
    'x = f"""{\n  a\n}"""',
    'x = f"{a:{b}}"',
    'x = f"{{a}}"',
    'x = f"{{{a}}}"',
    'x = f"\\N{EM DASH}{a}"',
    'x = rf"{a}\\d"',
    'x = f"{a!r:>{w}}"',
    'x = f"{a != b}"',
    'x = f"{a=}"',
    'x = f"{(lambda x: 1)(2)}"',
    "x = f\"{a['}']}\"",
    "x = f\"{'#'}\"",
    'x = f"{a:%Y-%m-%d}"',
    'x = f"{a}" "{" f"{b}"',
    "x = f'{f\"{a}\"}'",
    'x = f"{a}\\\n{b}"',
    "x = '# not' # ' f\"{\n",
    "x = f\"{a['b']:{c['d']}}\"",
    "x = '' f'{a}'",
    "if x: f'{a}'",
    "a[(*b,)]",
    "a[[*b], c]",
    "a[f(1, *b)]",
    "def f(*a: b): pass",
    "with (a as b, c as d): pass",
    "match a:\n  case 1: pass",
    "async def f():\n  return [[y async for y in x] async for x in z]",
    "async def f():\n  return [y for y in [x async for x in z]]",
]
# What the grammar of every Python from 3.11 or 3.12 on reads.
F_STRINGS = [
    ("x = 1\nx = f'{d['a']}'", 2),
    ('x = f"{d["a"]}"', 1),
    ("x = f\"{'\\n'.join(a)}\"", 1),
    ('x = f"""{a[""" b """]}"""', 1),
    ('x = f"{\n  a\n}"', 1),
    ('x = f"""{a # c\n}"""', 1),
    ('x = f"{a:{b:{c}}}"', 1),
    ("x = rf\"{'\\d'}\"", 1),
    ("x = f'{f'{a}'}'", 1),
]
LATER = [
    ("a[*b]", 1),
    ("a[1:2, *b]", 1),
    ("x = a[\n  b[0],\n  *c,\n]", 1),
    ("def f(*a: *b): pass", 1),
    ("async def f():\n  return [[y async for y in x] for x in z]", 2),
    ("async def f():\n  return {x: [y async for y in x] for x in z}", 2),
]
NEVER = [
    ("try: pass\nexcept* E: pass", None),
    ("type X = int", 1),
    ("def f[T](): pass", 1),
    ("x = 1\nreturn x", 2),
    ("class A:\n  return 1", 2),
    ("for a in b:\n  pass\nbreak", 3),
    ("def f():\n  await x", 2),
    ("def f(a, a): pass", 1),
    ("def f():\n  nonlocal x", 2),
    ("if x:\ny = 1", 2),
    ("x = 1\x00", None),
    ("x = f'{}'", 1),
]


def findings(text: str) -> list[int | None]:
    data = text.encode()
    tree, found = compiles.parse("a.py", data)
    if tree is not None:
        found = compiles.newer_than_3_10("a.py", data, tree)
    assert all(finding.rule == compiles.RULE and finding.path == "a.py" for finding in found)
    return [finding.line for finding in found]


@pytest.mark.parametrize("text", OLD)
def test_accepts(text: str) -> None:
    assert findings(text) == []
    assert list(compiles.f_strings(text.encode())) == []


@pytest.mark.parametrize(("text", "line"), NEVER)
def test_refuses_what_3_10_does_not_compile(text: str, line: int | None) -> None:
    found = findings(text)
    assert len(found) == 1
    assert line is None or found == [line]


@pytest.mark.parametrize(("text", "line"), LATER)
def test_refuses_what_later_grammars_read(text: str, line: int) -> None:
    found = findings(text)
    assert len(found) == 1
    assert found == [line] or sys.version_info < (3, 11)


@pytest.mark.parametrize(("text", "line"), F_STRINGS)
def test_refuses_the_f_strings_of_3_12(text: str, line: int) -> None:
    assert [at for at, _ in compiles.f_strings(text.encode())][:1] == [line]
    assert len(findings(text)) >= 1


def test_the_samples_are_what_they_are_said_to_be() -> None:
    """Each sample against the Python that runs the tests: what 3.10 reads, all read; what is newer, only the newer."""

    def compiled(text: str) -> bool:
        try:
            compile(text, "a.py", "exec")
        except (SyntaxError, ValueError):
            return False
        return True

    assert all(compiled(text) for text in OLD)
    assert {compiled(text) for text, _ in F_STRINGS} == {sys.version_info >= (3, 12)}
    assert {compiled(text) for text, _ in LATER} == {sys.version_info >= (3, 11)}


def test_nesting_that_no_parser_follows() -> None:
    assert len(findings("x = " + "(" * 500 + ")" * 500)) == 1
