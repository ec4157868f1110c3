"""``kill -9`` at random instants: pages served afterwards are correct or absent."""

from pathlib import Path

import pytest

from support.crash import CrashCounts, kill_once


def kill_and_check(folder: Path, kills: int) -> None:
    counts = CrashCounts()
    for seed in range(kills):
        kill_once(folder, 1000 * seed, counts)
    assert counts.wrong_pages == 0, counts.problems
    assert counts.start_failures == 0, counts.problems
    assert counts.kills == kills
    assert counts.stored_pages > 60 * kills
    # An acknowledged page may since have been evicted, by the other writer; few can have been.
    assert counts.surviving_pages >= 0.8 * counts.acknowledged_pages > 0, counts


def test_no_page_is_wrong_after_four_kills(tmp_path):
    kill_and_check(tmp_path / "store", 4)


@pytest.mark.long
def test_no_page_is_wrong_after_thirty_kills(tmp_path):
    kill_and_check(tmp_path / "store", 30)
