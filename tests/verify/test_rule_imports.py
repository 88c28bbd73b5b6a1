"""Rule imports: every name is bound, every import of the own package leads somewhere."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from made_up import source

from patchctl.verify import imports
from patchctl.verify.rules import is_hook

HOOKS = "verl/utils/consistency_dump/__init__.py"
FOR_CHECKERS = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from m import T\n"


def check(
    text: str, files: Iterable[str] = (HOOKS,), path: str = "verl/a/b.py", **others: str
) -> list[tuple[int | None, str]]:
    touched = {name: source(other, name) for name, other in others.items()}
    found = imports.check(source(text, path), touched, lambda wanted: wanted in {*files, *touched}, is_hook)
    return [(finding.line, finding.message) for finding in found]


@pytest.mark.parametrize(
    "text",
    [
        "import os\nprint(os.path, __name__, __file__)\n",
        "def f(a, *b, c=1, **d):\n    return [x for x in a if (y := x)], y, b, c, d\n",
        "def f():\n    global q\n    q = 1\ndef g():\n    return q\n",
        "def f():\n    def g():\n        return later\n    later = 1\n    return g\n",
        "class A:\n    x = 1\n    y = x\n    def f(self):\n        return __class__\n",
        "try:\n    import numpy as np\nexcept ImportError:\n    np = None\nprint(np)\n",
        "from os import *\nprint(getcwd(), anything)\n",
        "from __future__ import annotations\n" + FOR_CHECKERS + "def f(a: T) -> T:\n    b: T = a\n    return b\n",
        FOR_CHECKERS + "def f(a: 'T'):\n    b: T = a\n    return b\n",
        "import typing\nif typing.TYPE_CHECKING:\n    from m import T\nelse:\n    T = None\nprint(T)\n",
        "from verl.utils.consistency_dump import crop\ncrop()\n",
        "def f():\n    from verl.utils.consistency_dump import crop\n    return crop()\n",
        "try:\n    from verl.gone import x\nexcept ImportError:\n    x = None\n",
        "match [1]:\n    case [first, *rest]:\n        print(first, rest)\n",
        "from verl import _build_info\nimport verl._build_info, verl.verl_C\n",
    ],
)
def test_accepts(text: str) -> None:
    assert check(text, [HOOKS, "verl/__init__.py"]) == []


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("def f():\n    return json.dumps(1)\n", 2, "name `json` is not defined"),
        ("x = 1\nprint(y)\n", 2, "name `y` is not defined"),
        ("class A:\n    y = z\n", 2, "name `z` is not defined"),
        ("@wraps\ndef f():\n    pass\n", 1, "name `wraps` is not defined"),
        ("def f(a=default):\n    pass\n", 1, "name `default` is not defined"),
        ("f = lambda: gone\n", 1, "name `gone` is not defined"),
        ("print([i for i in items])\n", 1, "name `items` is not defined"),
        ("def f():\n    import os\ndef g():\n    return os\n", 4, "name `os` is not defined"),
        ("def f(output):\n    pass\ndef finish():\n    log(output)\nlog = f\n", 4, "`output` is not defined"),
        ("def f():\n    return ExceptionGroup\n", 2, "name `ExceptionGroup` is not defined"),
        (FOR_CHECKERS + "def f(a: T):\n    pass\n", 4,
         "`T` is imported for type checkers only"),
        (FOR_CHECKERS + "def f(a):\n    return T()\n", 5,
         "`T` is imported for type checkers only"),
        ("from __future__ import annotations\n" + FOR_CHECKERS
         + "def f(a: T):\n    return isinstance(a, T)\n",
         6, "`T` is imported for type checkers only"),
        ("from verl.utils.consistency_dump import crop\n", 1, "`crop` is imported and not used"),
        ("def f():\n    from verl.utils.consistency_dump import crop\n    return 1\n", 2,
         "`crop` is imported and not used"),
        ("from verl.utils.consistency_dump.bracket import crop\ncrop()\n", 1,
         "imports `verl.utils.consistency_dump.bracket`"),
        ("def f():\n    import verl.gone\n", 2, "imports `verl.gone`, which the tree does not have"),
        ("from . import c\nfrom .d import e\nprint(c, e)\n", 2, "imports `verl.a.d`"),
    ],
)  # fmt: skip
def test_refuses(text: str, line: int, message: str) -> None:
    found = check(text, [HOOKS, "verl/a/__init__.py"])
    assert [at for at, said in found if message in said] == [line], found


def test_names_of_touched_modules_are_known() -> None:
    text = "from verl.utils.consistency_dump import crop, other\ncrop, other\n"
    assert check(text, **{HOOKS: "from x import crop, other\n"}) == []
    assert check(text, **{HOOKS: "from x import *\n"}) == []
    assert check(text, **{HOOKS: "def __getattr__(name): ...\ncrop = 1\n"}) == []
    assert check(text, ["verl/utils/consistency_dump/other.py"], **{HOOKS: "def crop(): ...\n"}) == []
    [(line, message)] = check(text, **{HOOKS: "def crop(): ...\n"})
    assert (line, message) == (1, "imports `other` from `verl.utils.consistency_dump`, which does not define it")


def test_a_package_imports_for_others() -> None:
    text = "from verl.utils.consistency_dump.bracket import crop\n"
    assert check(text, ["verl/utils/consistency_dump/bracket.py"], HOOKS) == []


def test_a_module_without_a_file_is_a_folder() -> None:
    assert check("from verl.space import x\nprint(x)\n", ["verl/space"]) == []
