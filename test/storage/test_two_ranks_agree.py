"""Two ranks in two processes use equal records, although their clocks and disks differ."""

import json
from pathlib import Path

import pytest

from support.live_tree import LiveTree
from support.ranks import RankRun

pytestmark = pytest.mark.xdist_group("ranks")


def test_every_read_from_disk_restores_metadata_on_both_ranks(on_two_ranks, tmp_path):
    first, second = on_two_ranks("rank_scenarios:read_three_times", tmp_path)
    assert first == second
    for tokens, metadata in first["reads"]:
        assert tokens == 8
        assert [node[:5] for node in metadata] == [[0, 8, "chat", "c", 1]]
    assert (first["compared"], first["disagreed"]) == (3, 0)


def test_ranks_use_the_first_ones_record_where_theirs_differ_and_count_it(on_two_ranks, tmp_path):
    first, second = on_two_ranks("rank_scenarios:read_before_use_is_stored", tmp_path)
    assert first == second
    nodes = [node[:5] for node in first["metadata"]]
    assert nodes == [[0, 4, "agent", "d", 2], [4, 4, "chat", "c", 1]]
    assert (first["compared"], first["disagreed"]) == (1, 1)


def test_ranks_write_refused_pages_again_together(on_two_ranks: RankRun, tmp_path: Path) -> None:
    first, second = on_two_ranks("rank_scenarios:refuse_pages", tmp_path)
    assert first == second == [0, 4]


def test_ranks_on_two_machines_start_from_the_first_ones_profile(on_two_ranks, tmp_path):
    for rank in range(2):
        (tmp_path / f"machine-{rank}").mkdir()
    tree = LiveTree(4096, "wa")
    for i in range(60):
        tree.serve([i % 5] * 20, 2.0 * i, path=list(range(i % 5, 400, 5))[: i + 1])
    saved_profile = tree.core.live.device_policy.state()
    assert saved_profile["categories"]
    (tmp_path / "machine-0" / "wa.json").write_text(json.dumps(saved_profile))
    first, second = on_two_ranks("rank_scenarios:load_first_profile", tmp_path)
    assert first == second
    assert first == saved_profile


def test_a_damaged_profile_of_the_first_machine_leaves_both_with_nothing_learnt(
    on_two_ranks: RankRun, tmp_path: Path
) -> None:
    for rank in range(2):
        (tmp_path / f"machine-{rank}").mkdir()
    (tmp_path / "machine-0" / "wa.json").write_text("{")
    first, second = on_two_ranks("rank_scenarios:load_first_profile", tmp_path)
    assert first is second is None
    assert (tmp_path / "machine-0" / "wa.json.bad").read_text() == "{"


def test_ranks_change_order_at_the_same_request(on_two_ranks: RankRun, tmp_path: Path) -> None:
    first, second = on_two_ranks("rank_scenarios:alternate_orders", tmp_path)
    assert first == second
    assert {"wa", "canopy-lru"} == set(first["running"])
    assert first["victims"][-1][0] > 0


def test_ranks_with_disks_of_different_speed_drain_the_same_pages(on_two_ranks, tmp_path):
    first, second = on_two_ranks("rank_scenarios:drain_slowly", tmp_path)
    assert first == second
    assert 0 < sum(first) < 200


def test_a_rank_without_host_memory_does_not_block_the_others_drain(on_two_ranks, tmp_path):
    first, second = on_two_ranks("rank_scenarios:drain_without_host_memory", tmp_path)
    assert first[-1] == 8
    assert sum(second) > 0
