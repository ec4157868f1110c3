"""``kill -9`` at random instants: what is served afterwards is right or absent.

The same 200 times, with figures: ``python benchmark/tiers/crash.py``.
"""

from __future__ import annotations

from support.crash import CrashCounts, kill_once


def test_nothing_wrong_after_fifteen_kills(tmp_path):
    counts = CrashCounts()
    for seed in range(15):
        kill_once(tmp_path / "store", 1000 * seed, counts)
    assert counts.wrong == 0, counts.problems
    assert counts.start_failures == 0, counts.problems
    assert counts.kills == 15
    assert counts.found > 1000
    # An acknowledged page may since have been evicted, by the other writer; few can have been.
    assert counts.survived >= 0.8 * counts.acknowledged > 0, counts
