"""The mutation run: broken lines that tests notice, and broken lines that they do not."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = '''"""Docstring."""
LIMIT = 3


def larger(one: int, other: int) -> int:
    assert one >= 0, "one is below 0"
    return one if one > other else other


def count(items: list[int], seen: dict[str, int]) -> None:
    for _ in items:
        seen["items"] += 1


def last(items: list[int]) -> int:
    at = 0
    while at + 1 < len(items):
        at += 1
    return at
'''
TESTS = """from small import count, larger, last


def test_larger():
    assert larger(1, 2) == 2
    assert larger(2, 1) == 2


def test_count():
    count([1], {"items": 0})


def test_last():
    assert last([5, 6, 7]) == 2
    assert last([5, 6]) == 1
    assert last([5]) == 0
"""
RUN = """import json, sys
from pathlib import Path
sys.path[:0] = [sys.argv[1], sys.argv[2]]
from mutants import mutants
import run
from run import Suite
run.CPU_LEAST_S = 0.5
suite = Suite([sys.argv[2] + "/test_small.py"])
made = mutants(Path(sys.argv[2]) / "small.py", "small", Path(sys.argv[2]))
print(json.dumps({mutant.text: suite.run(mutant) for mutant in made}))
"""


def test_mutants_that_no_test_notices_survive(tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(CODE)
    (tmp_path / "test_small.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-c", RUN, str(ROOT / "benchmark" / "mutation"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    survives = json.loads(done.stdout)
    assert {text for text, passed in survives.items() if passed} == {
        "small.py:7: `one > other` -> `one >= other`",  # equal numbers: no test can notice
        "small.py:12: `seen['items'] += 1` -> `seen['items'] -= 1`",
        "small.py:12: `1` -> `2`",
        "small.py:11: `seen['items'] += 1` -> `pass`",
    }
    assert not survives["small.py:18: `at += 1` -> `at -= 1`"]  # an endless loop is noticed
