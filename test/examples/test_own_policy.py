"""The example of a policy of one's own. Those that need a server: test/e2e/test_examples_served.py."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from canopy_lab.cli.main import main

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_a_policy_in_thirty_lines_runs_beside_the_others(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    assert main(["trace", "synth", "--preset", "small", "--seconds", "60", "--seed", "1", "-o", str(trace)]) == 0  # fmt: skip
    script = EXAMPLES / "own_policy.py"
    done = subprocess.run([sys.executable, script, trace], capture_output=True, text=True, check=True)  # fmt: skip
    assert re.findall(r"^(\S+) +\d", done.stdout, re.M) == ["lru", "wa", "heads-last"]


def test_every_example_says_how_to_run_it() -> None:
    for script in EXAMPLES.glob("*.py"):
        assert f"python examples/{script.name}" in script.read_text().split('"""')[1]
