"""`canopy doctor` against started servers, on public command lines and on lines of our own."""

import json
from pathlib import Path

import pytest

from doctor.public_lines import LINES, Line
from doctor.started_lines import compared, models, started, words_of
from support.doctored import reports_on

ROOT = Path(__file__).resolve().parents[2]
OWN = (
    "--enable-hierarchical-cache --schedule-policy lpm",
    "--tokenizer-worker-num 2",
    "--canopy-queue-order sglang --canopy-whatif wa,floor=off",
)
STARTED = json.loads((ROOT / "benchmark/setups/results/doctor_lines.json").read_text())
"""The lines that were started so far."""
ALL = (
    *(line for line in LINES if line.source in STARTED),
    *(Line(flags, f"sglang.launch_server --model-path M {flags}") for flags in OWN),
)


@pytest.fixture(scope="module")
def made(smollm2: Path, tmp_path_factory: pytest.TempPathFactory):
    return models(tmp_path_factory.mktemp("lines"), smollm2)


@pytest.fixture(scope="module")
def reports(made):
    given = {line.source: ["sglang", "serve", *words_of(line, made)] for line in ALL}
    return reports_on(given)


@pytest.mark.long
@pytest.mark.parametrize("line", ALL, ids=[line.source[-40:] for line in ALL])
def test_a_started_server_does_what_the_doctor_answered(line, made, reports, tmp_path) -> None:
    """The same refusal, or the same parts of `auto` on or off for the same reasons."""
    found = started(words_of(line, made), tmp_path / "log")
    row = compared(line, reports[line.source], found)
    assert row["agrees"], (row, found)
