"""The notebook runs from its first cell to its last, and is committed without outputs."""

import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "compare_policies.ipynb"


def test_the_notebook_is_committed_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    assert [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []


def test_the_notebook_runs_and_compares_policies() -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    resources = {"metadata": {"path": str(NOTEBOOK.parent)}}
    executed = nbclient.NotebookClient(notebook, timeout=120, resources=resources).execute()
    outputs = [output for cell in executed.cells for output in cell.get("outputs", ())]
    figures = [o for o in outputs if "image/png" in o.get("data", {})]
    assert len(figures) == 2
    text = "".join(o["text"] for o in outputs if o.output_type == "stream" and o.name == "stdout")
    rows = {}
    for line in text.splitlines():
        name, values = line[:14].strip(), line[14:].replace("%", " ").split()
        if len(values) == 5 and name != "capacity":
            rows[name] = [float(value) for value in values]
    assert list(rows) == ["lru", "lfu", "wa", "wa, placebo"]
    assert all(row == sorted(row) for row in rows.values())  # more memory, no fewer hits
    assert sum(rows["wa"]) > sum(rows["lru"])
