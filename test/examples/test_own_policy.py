"""The example of a custom policy. Examples that need a server: test/served/test_plan.py."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
TRACE = ROOT / "benchmark" / "quickstart" / "mixed_synthetic.jsonl"


def test_a_policy_of_thirty_lines_runs_next_to_the_others() -> None:
    script = EXAMPLES / "own_policy.py"
    process = subprocess.run([sys.executable, script, TRACE], capture_output=True, text=True, check=True)  # fmt: skip
    assert re.findall(r"^(\S+) +\d", process.stdout, re.M) == ["lru", "wa", "heads-last"]


def test_every_runnable_example_has_its_command() -> None:
    for script in EXAMPLES.glob("*.py"):
        text = script.read_text()
        assert "__main__" not in text or f"python examples/{script.name}" in text.split('"""')[1]
