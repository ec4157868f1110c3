"""Counts of ``test/trace/test_fuzz_readers.py`` for docs/research/tests.md."""

from __future__ import annotations

from result_tables import load

RESULTS = "benchmark/traces/results/fuzz.json"
OUTCOMES = {
    "equal": "gave equal requests",
    "part": "were cut and gave a part of the requests",
    "read": "had a huge number and were read",
    "said": "were read with a report of what is missing",
    "refused": "were refused in words",
}


def counts() -> str:
    """Damaged files by outcome."""
    found = load(RESULTS)
    files = found["files"]
    each = "; ".join(f"{files[key]:,} {text}" for key, text in OUTCOMES.items())
    return f"{sum(files.values()):,} damaged files of {found['formats']} formats: {each}"


PARTS = {"counts": counts}
