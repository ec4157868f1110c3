"""``canopy characterize`` as a user runs it."""

import json
import re
from pathlib import Path

import pytest
from synthetic.presets import get_preset
from synthetic.trace import synthesise, to_bailian, write_trace

from canopy_lab.cli.main import main


@pytest.fixture(scope="module")
def small_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "small.jsonl"
    write_trace(path, get_preset("small"), 200.0, 1)
    return path


@pytest.fixture(scope="module")
def report_dir(small_trace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report") / "deep" / "er"
    command = ["characterize", str(small_trace), "--format", "bailian", "--out", str(out)]
    assert main(command) == 0
    return out


def test_the_page_has_a_heading_and_a_figure_for_each_question(report_dir: Path) -> None:
    html = (report_dir / "report.html").read_text()
    assert html.count("<img ") == html.count('src="data:image/png;base64,') == 6
    assert "the trace names no users" in html
    headings = re.findall(r"<h2>(.*?)</h2>", html)
    assert headings[0] == "How much could be reused?"
    for question in ("How long are conversations?", "When are blocks used again?", "How much room does it take?"):  # fmt: skip
        assert question in headings


def test_the_json_is_strict_and_agrees_with_itself(report_dir: Path) -> None:
    def refuse(constant: str) -> float:
        raise AssertionError(constant)

    report = json.loads((report_dir / "report.json").read_text(), parse_constant=refuse)
    hits = report["hits"]
    assert sum(kind["hits"] for kind in hits["kinds"]) == pytest.approx(1.0)
    assert sum(turn["requests"] for turn in hits["turns"]) == pytest.approx(1.0)
    assert report["capacity"]["ideal_hit_ratio"] == pytest.approx(hits["block_hit_ratio"])


def test_a_second_run_gives_the_same_report(small_trace, report_dir, tmp_path) -> None:
    command = ["characterize", str(small_trace), "--format", "bailian", "--out", str(tmp_path)]
    assert main(command) == 0
    assert (tmp_path / "report.json").read_bytes() == (report_dir / "report.json").read_bytes()


def test_a_trace_without_ids_gets_partial_answers(tmp_path, capsys):
    """Mooncake lines that share nothing: no turns, no reuse, no failure."""
    trace = tmp_path / "bare.jsonl"
    lines = [
        {"timestamp": 1000 * i, "input_length": 600, "output_length": 5, "hash_ids": [2 * i, 2 * i + 1]}
        for i in range(30)
    ]  # fmt: skip
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "out"
    assert main(["characterize", str(trace), "--format", "mooncake", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "no block is ever used twice" in printed
    report = json.loads((out / "report.json").read_text())
    assert report["turns"] is None
    assert report["hits"] is report["reuse"] is None


def test_a_trace_of_one_request_has_a_report(tmp_path: Path) -> None:
    trace = tmp_path / "one.jsonl"
    first_request = next(iter(synthesise(get_preset("small"), 60.0, 1)))
    trace.write_text(to_bailian(first_request) + "\n")
    command = ["characterize", str(trace), "--format", "bailian", "--out", str(tmp_path / "out")]
    assert main(command) == 0


def test_a_trace_of_one_window_has_no_sentence_about_change(tmp_path: Path, capsys) -> None:
    trace = tmp_path / "short.jsonl"
    write_trace(trace, get_preset("small"), 30.0, 1)
    assert main(["characterize", str(trace), "--format", "bailian", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "After a first turn another one comes" in printed
    assert "From one window to the next" not in printed


@pytest.mark.long
def test_the_conversation_trace_has_its_known_numbers(data_dir: Path, tmp_path: Path) -> None:
    trace = data_dir / "mooncake" / "conversation_first60.jsonl"
    command = ["characterize", str(trace), "--format", "mooncake", "--out", str(tmp_path)]
    assert main([*command]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["overview"]["requests"] == 6848
    assert report["overview"]["distinct_blocks"] == 111_932
    assert 0.34 < report["hits"]["block_hit_ratio"] < 0.36
    assert report["notes"]
