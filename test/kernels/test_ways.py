"""The kernel that attends: the nearest measurement in length and share of rows."""

import dataclasses
import json

import pytest

pytest.importorskip("torch")

from canopy_kernel import ways

REPORT = {
    "device": "A chip",
    "attention": [
        {"tokens": 4096, "ratio": 0.05, "triton_s": 1e-3, "fa3_s": 2e-3, "dense_fa3_s": 9.0},
        {"tokens": 4096, "ratio": 0.5, "triton_s": 5e-3, "fa3_s": 2e-3},
        {"tokens": 65536, "ratio": 0.05, "triton_s": 9e-3, "fa3_s": 4e-3},
        {"tokens": 4096, "ratio": 0.15, "triton_s": 1e-3},
        {"failed": "no memory"},
    ],
}


@pytest.fixture
def measured(tmp_path):
    """The table as the lease writes it, read as a server does."""
    report, out = tmp_path / "attention.json", tmp_path / "ways.json"
    report.write_text(json.dumps({**REPORT, "attention": REPORT["attention"][:4]}))
    found = ways.of_report(json.loads(report.read_text()))
    assert len(found) == 3
    out.write_text(json.dumps([dataclasses.asdict(one) for one in found]))
    return ways.table(out)


def test_the_nearest_measured_prompt_decides(measured) -> None:
    def faster(counts, lengths, chip="A chip", way="fa3"):
        return ways.triton_is_faster(measured, chip, way, counts, lengths)

    assert faster([300], [5000])
    assert faster([150, 300], [3000, 5000])
    assert not faster([2000], [5000])
    assert not faster([3000], [50_000])
    assert not faster([300], [5000], chip="Another")
    assert not faster([300], [5000], way="flashinfer")


def test_a_failed_section_has_no_row() -> None:
    assert len(ways.of_report({**REPORT, "attention": [{"failed": "no memory"}]})) == 0
    assert ways.of_report({"device": "A chip"}) == []


def test_without_a_table_the_backend_decides(tmp_path) -> None:
    assert ways.table(tmp_path / "none.json") == ()
    assert not ways.triton_is_faster((), "A chip", "fa3", [1], [10])
