"""`patchctl compare` and `patchctl report`: documents, exit codes, msprobe beside them, and the HTML file."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from dump_files import run_cli, write_dump
from model_dumps import Shape, qwen_dumps

from patchctl.dumps import msprobe_compare
from patchctl.dumps.report_html import report_data

SHAPE = Shape(layers=2)


def pairs_document(
    root: Path, faults: list[dict[str, float] | None], others: dict[str, Any] | None = None, backend: str = "fsdp"
) -> Path:
    """A pairs document with one pair for each item of `faults`."""
    requests: dict[str, Any] = dict(others or {})
    for number, fault in enumerate(faults):
        paths = []
        for side, data in zip(("infer", "train"), qwen_dumps(SHAPE, number, 0.002, backend, fault), strict=True):
            paths.append(str(write_dump(root / f"{side}{number}" / "dump.json", data)))
        requests[f"request/{number}"] = {
            "status": "PAIR",
            "infer": {"pid": 1, "step": number, "rank": 0},
            "train": {"step": number, "rank": 0},
            "why": "",
            "tokens": {"infer": 16, "train": 16},
            "checks": {"input_ids": "same", "weights": "unknown"},
            "infer_dumps": [{"path": paths[0]}],
            "train_dumps": [{"path": paths[1]}],
        }
    path = root / "pairs.json"
    path.write_text(json.dumps({"command": "pair", "requests": requests, "warnings": ["1 unreadable line (pid 1)"]}))
    return path


NO_TRAIN = {
    "gone": {
        "status": "NO_TRAIN",
        "infer": {"pid": 1, "step": 9, "rank": 0},
        "train": None,
        "why": "no training line has this request",
        "tokens": {"infer": 5, "train": None},
    }
}


def test_agreement_exits_0_and_a_fault_exits_1(tmp_path: Path) -> None:
    good = pairs_document(tmp_path / "good", [None, None])
    assert run_cli("compare", good, "-o", tmp_path / "a", "--no-msprobe").returncode == 0
    bad = pairs_document(tmp_path / "bad", [None, {"layers.1.mlp.down_proj": 1.3}], NO_TRAIN)
    done = run_cli("compare", bad, "-o", tmp_path / "b", "--no-msprobe", "--json")
    assert done.returncode == 1
    document = json.loads(done.stdout)
    assert document["verdict"] == "diverges"
    assert document["verdicts"] == {"agrees": 1, "diverges": 1}
    assert document["pairs_by_status"] == {"NO_TRAIN": 1, "PAIR": 2}
    assert document["first"]["module"] == "layers.1.mlp.down_proj"
    assert document["warnings"] == ["1 unreadable line (pid 1)"]
    rows = (tmp_path / "b" / "pairs" / "request_1" / "rows.csv").read_text().splitlines()
    assert len(rows) == 1 + 1 + 14 * SHAPE.layers + 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{}", "no pairs document"),
        ("[1]", "no pairs document"),
        ("x", "no pairs document"),
        ('{"command": "pair", "requests": {}}', "no request at all"),
        (json.dumps({"command": "pair", "requests": NO_TRAIN}), "1 NO_TRAIN"),
        ('{"command": "pair", "requests": {"a": {"status": "PAIR"}}}', "--logs-only"),
    ],
)
def test_what_cannot_be_compared_is_one_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "pairs.json"
    path.write_text(text)
    done = run_cli("compare", path, "-o", tmp_path / "out", "--no-msprobe")
    assert done.returncode == 1
    assert says in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    pairs = pairs_document(tmp_path / "in", [None])
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("x")
    done = run_cli("compare", pairs, "-o", tmp_path / "out", "--no-msprobe")
    assert done.returncode == 1 and "not empty" in done.stderr
    assert run_cli("report", tmp_path / "out").returncode == 1


def test_a_missing_dump_refuses_its_pair_only(tmp_path: Path) -> None:
    pairs = pairs_document(tmp_path / "in", [None, None])
    (tmp_path / "in" / "infer0" / "dump.json").unlink()
    (tmp_path / "in" / "train1" / "dump.json").write_text('{"data": {"a"')
    pairs_document(tmp_path / "more", [None])
    done = run_cli("compare", pairs, tmp_path / "more" / "pairs.json", "-o", tmp_path / "out", "--no-msprobe", "--json")
    document = json.loads(done.stdout)
    assert document["verdicts"] == {"refused": 2, "agrees": 1}
    assert [pair["request_id"] for pair in document["pairs"]] == ["request/0", "request/1", "request/0#2"]
    assert document["verdict"] == "agrees" and done.returncode == 0
    assert any("No such file" in pair["reason"] for pair in document["pairs"])


def fake_msprobe(folder: Path, body: str) -> dict[str, Any]:
    """A package that answers to msprobe's names, for what the real one does only when it fails."""
    package = folder / "site" / "msprobe"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "msprobe.py").write_text(f"def main():\n    import sys, pathlib\n{body}")
    info = folder / "site" / "mindstudio_probe-26.2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mindstudio-probe\nVersion: 26.2.0\n")
    command = folder / "msprobe"
    command.write_text(f"#!{sys.executable}\n")
    command.chmod(0o755)
    return {"command": command, "path": [folder / "site"]}


TABLE = """    out = pathlib.Path(sys.argv[sys.argv.index("-o") + 1])
    rows = ["NPU Name,Bench Name,Result"] + {rows}
    (out / "compare_result_20260101000000.csv").write_text("\\n".join(rows) + "\\n")
"""


@pytest.mark.parametrize(
    ("rows", "matched", "code"),
    [(["a,b,error", "N/A,b,pass", "a,N/A,pass"], 1, 0), (["N/A,b,pass", "a,N/A,pass"], 0, 1), ([], 0, 1)],
)
def test_rows_that_msprobe_matched_are_counted(tmp_path: Path, rows: list[str], matched: int, code: int) -> None:
    fake = fake_msprobe(tmp_path, TABLE.format(rows=rows))
    pairs = pairs_document(tmp_path / "in", [None, None])
    done = run_cli("compare", pairs, "-o", tmp_path / "out", "--msprobe", fake["command"], "--json", path=fake["path"])
    document = json.loads(done.stdout)
    assert done.returncode == code, done.stderr
    assert [pair["msprobe"]["matched"] for pair in document["pairs"]] == [matched, matched]
    assert document["msprobe"]["nothing_matched"] == (0 if matched else 2)
    if not matched:
        text = run_cli("report", tmp_path / "out").stdout
        assert "NOTHING matched in 2 pairs" in text


@pytest.mark.parametrize(
    "body",
    [
        "    sys.exit(3)\n",
        "    raise ValueError('Conflicting comparison data')\n",
        "    import os\n    os.kill(os.getpid(), 9)\n",
    ],
)
def test_a_failing_msprobe_costs_its_pair_and_leaves_a_log(tmp_path: Path, body: str) -> None:
    fake = fake_msprobe(tmp_path, body)
    pairs = pairs_document(tmp_path / "in", [None])
    done = run_cli("compare", pairs, "-o", tmp_path / "out", "--msprobe", fake["command"], "--json", path=fake["path"])
    (pair,) = json.loads(done.stdout)["pairs"]
    assert done.returncode == 1 and pair["verdict"] == "agrees"
    assert pair["msprobe"]["rc"] not in (0, None) and pair["msprobe"]["matched"] == 0
    assert (tmp_path / "out" / "pairs" / "request_0" / "msprobe" / "msprobe.log").exists()


def test_an_msprobe_that_cannot_be_imported_is_one_line(tmp_path: Path) -> None:
    fake = fake_msprobe(tmp_path, "")
    (tmp_path / "site" / "msprobe" / "msprobe.py").write_text("import package_that_is_not_there")
    pairs = pairs_document(tmp_path / "in", [None])
    done = run_cli("compare", pairs, "-o", tmp_path / "out", "--msprobe", fake["command"], path=fake["path"])
    assert done.returncode == 1
    assert "package_that_is_not_there" in done.stderr and "Traceback" not in done.stderr
    done = run_cli("compare", pairs, "-o", tmp_path / "out2", "--msprobe", "no-such-command")
    assert done.returncode == 1 and "pip install mindstudio-probe" in done.stderr


@pytest.mark.parametrize(
    ("name", "offset", "backend", "expected"),
    [
        (
            "Module.model.layers.3.mlp.up_proj.Linear.forward.0",
            0,
            "fsdp",
            "Module._fsdp_wrapped_module.model.layers.3._fsdp_wrapped_module.mlp.up_proj.Linear.forward.0",
        ),
        (
            "Module.model.layers.3.FSDPQwen2DecoderLayer.forward.0",
            0,
            "fsdp",
            "Module._fsdp_wrapped_module.model.layers.3._fsdp_wrapped_module.Qwen2DecoderLayer.forward.0",
        ),
        (
            "Module._fsdp_wrapped_module.model.norm.Norm.forward.0",
            0,
            "fsdp",
            "Module._fsdp_wrapped_module.model.norm.Norm.forward.0",
        ),
        (
            "Module.1.module.module.decoder.layers.0.mlp.linear_fc1.X.forward.0",
            6,
            "megatron",
            "Module.module.module.decoder.layers.6.mlp.linear_fc1.X.forward.0",
        ),
        ("Module.model.layers.3.mlp.X.forward.0", 0, "infer-fsdp", "Module.model.layers.3.mlp.X.forward.0"),
    ],
)
def test_names_are_rewritten_for_msprobe(name: str, offset: int, backend: str, expected: str) -> None:
    assert msprobe_compare._renamed(name, offset, backend) == expected


class _Page(HTMLParser):
    """Tags and attributes of the page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for key, value in attrs if key in ("src", "href", "srcset", "action")]


def test_the_report_is_one_file_that_needs_no_network(tmp_path: Path) -> None:
    hostile = {"</script><script>alert(1)</script>": {**NO_TRAIN["gone"], "why": "<img src=x onerror=alert(1)>"}}
    pairs = pairs_document(tmp_path / "in", [None, {"layers.0.self_attn.o_proj": 1.3}], hostile)
    run_cli("compare", pairs, "-o", tmp_path / "out", "--no-msprobe")
    done = run_cli("report", tmp_path / "out", "--json", "--html", tmp_path / "r.html")
    assert done.returncode == 1
    assert json.loads(done.stdout)["first"]["module"] == "layers.0.self_attn.o_proj"
    html = (tmp_path / "r.html").read_text(encoding="utf-8")
    page = _Page()
    page.feed(html)
    assert page.links == []
    assert not re.search(r"https?://|@import|url\(", html)
    assert html.count("<script") == 2 and html.count("</script>") == 2
    data = json.loads(re.search(r'id="data">(.*?)</script>', html, re.S)[1])  # type: ignore[index]
    assert [other["id"] for other in data["others"]] == list(hostile)
    assert data["pairs"][1]["first"]["module"] == "layers.0.self_attn.o_proj"


def test_both_languages_have_every_text(tmp_path: Path) -> None:
    pairs = pairs_document(tmp_path / "in", [None])
    run_cli("compare", pairs, "-o", tmp_path / "out", "--no-msprobe")
    data = report_data(json.loads((tmp_path / "out" / "compare.json").read_text()), "now")
    english, chinese = data["text"]["en"], data["text"]["zh"]
    assert {key for key in chinese if not key.startswith("name_")} == set(english)
    for key, text in english.items():
        assert set(re.findall(r"\{\d\}", chinese[key])) == set(re.findall(r"\{\d\}", text)), key
    template = Path(msprobe_compare.__file__).with_name("report.html").read_text(encoding="utf-8")
    used = set(re.findall(r'\bt\("([a-z_0-9]+)"', template)) | set(re.findall(r'data-t="(\w+)"', template))
    whole = {key for key in used if not key.endswith("_")}  # the others are continued by a value
    assert whole <= set(english), whole - set(english)
    assert all(any(key.startswith(prefix) for key in {**english, **chinese}) for prefix in used - whole)


def test_a_thousand_pairs_stay_a_small_file(tmp_path: Path) -> None:
    pairs = pairs_document(tmp_path / "in", [{"layers.1.mlp.down_proj": 1.3}])
    run_cli("compare", pairs, "-o", tmp_path / "out", "--no-msprobe")
    document = json.loads((tmp_path / "out" / "compare.json").read_text())
    (pair,) = document["pairs"]
    pair["curves"] = {name: [[layer, 0.00123, 0.0157] for layer in range(64)] for name in pair["curves"]}
    document["pairs"] = [{**pair, "request_id": f"{number:032x}"} for number in range(1000)]
    document["first"]["example"] = f"{999:032x}"
    text = json.dumps(report_data(document, "now"))
    assert len(text) < 8_000_000
    assert report_data(document, "now")["start"] == 999
