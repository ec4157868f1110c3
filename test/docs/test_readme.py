"""README: each result's kind is the result file's own, and the page stays short."""

import json
import re

from environment import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
KINDS = {"served over HTTP", "at the scheduler", "simulated"}
ROW = re.compile(r"^\|.*?\| \[([^]]+)\]\((benchmark/[^)]+\.json)\) \|", re.M)


def test_the_kind_of_a_row_is_that_of_its_result_file() -> None:
    rows = ROW.findall(README)
    assert len(rows) >= 5
    for kind, file in rows:
        assert kind in KINDS
        assert json.loads((ROOT / file).read_text(encoding="utf-8"))["kind"] == kind, file


def test_every_row_of_results_states_its_kind() -> None:
    table = README[README.index("## Results") :].split("\n## ")[1]
    rows = [line for line in table.splitlines() if line.startswith("| [")]
    assert len(rows) == len(ROW.findall(table))


def test_the_page_has_at_most_420_words() -> None:
    assert len(README.split()) <= 420
