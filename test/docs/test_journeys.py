"""The journeys of docs/architecture.md: each step was called, in the page's order, under a tracer."""

import ast
import json
import re
import sys
from pathlib import Path

import pytest

from support import forked

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / "python"
TRACER = ROOT / "benchmark" / "golden" / "trace_request.py"
STEP = re.compile(r"^\d+\. `([\w/]+\.py)` `([\w.]+)`: .", re.M)
TRACED = {
    "One request through the server": "tree",
    "One request through `canopy simulate`": "simulate",
}
NOT_TRACED = "One document through the server"
Call = tuple[str, str]


def steps(title: str) -> list[Call]:
    """File and function of each step below a heading of the page."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    _, _, rest = page.partition(f"\n### {title}\n")
    found = STEP.findall(re.split(r"^##", rest, maxsplit=1, flags=re.M)[0])
    assert len(found) >= 5, f"{title}: {found}"
    return found


def not_in_order(steps: list[Call], called: list[Call]) -> list[Call]:
    """Return the steps that were not called, or were called before the previous step."""
    wrong, at = [], -1
    for step in steps:
        place = called.index(step) if step in called else -1
        if place < at or place < 0:
            wrong.append(step)
        at = max(at, place)
    return wrong


def test_a_step_that_is_missing_or_out_of_order_is_found() -> None:
    called = [("a.py", "f"), ("b.py", "C.g"), ("c.py", "h")]
    assert not_in_order([("a.py", "f"), ("c.py", "h")], called) == []
    assert not_in_order([("a.py", "f"), ("b.py", "g")], called) == [("b.py", "g")]
    assert not_in_order([("b.py", "C.g"), ("a.py", "f")], called) == [("a.py", "f")]


@pytest.mark.parametrize("title", TRACED)
def test_a_traced_request_takes_the_steps_of_the_page(title: str, tmp_path: Path) -> None:
    if TRACED[title] == "tree":
        pytest.importorskip("sglang", reason="sglang is not installed")
    out = tmp_path / "trace.json"
    command = [sys.executable, str(TRACER), "--way", TRACED[title], "--json", str(out)]
    done = forked.run(command, cwd=ROOT)
    assert out.exists(), done.stdout + done.stderr
    called = [(call["file"], call["name"]) for call in json.loads(out.read_text())["order"]]
    assert not_in_order(steps(title), called) == []


def test_the_steps_of_a_document_exist() -> None:
    """Not traced: it needs a model's forward."""
    missing = [(file, name) for file, name in steps(NOT_TRACED) if name not in defined(file)]
    assert missing == []


def defined(file: str) -> set[str]:
    """Functions, classes and methods of a file: ``Class.method``."""
    names = set()
    for node in ast.parse((PYTHON / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            inside = (n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
            names |= {node.name, *(f"{node.name}.{n.name}" for n in inside)}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
    return names
