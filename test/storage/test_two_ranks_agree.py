"""Two ranks in two processes: they use equal records with different clocks and disks."""

import json
from pathlib import Path

import pytest

from support.live_tree import LiveTree
from support.ranks import Runner

pytestmark = pytest.mark.xdist_group("ranks")


def test_every_read_from_disk_restores_metadata_on_both_ranks(on_two_ranks, tmp_path):
    first, second = on_two_ranks("rank_scenarios:read_three_times", tmp_path)
    assert first == second
    for tokens, metadata in first["reads"]:
        assert tokens == 8
        assert [row[:5] for row in metadata] == [[0, 8, "chat", "c", 1]]
    assert (first["compared"], first["disagreed"]) == (3, 0)


def test_a_record_that_differs_is_the_first_ranks_and_is_counted(on_two_ranks, tmp_path):
    first, second = on_two_ranks("rank_scenarios:read_before_use_is_stored", tmp_path)
    assert first == second
    nodes = [row[:5] for row in first["metadata"]]
    assert nodes == [[0, 4, "agent", "d", 2], [4, 4, "chat", "c", 1]]
    assert (first["compared"], first["disagreed"]) == (1, 1)


def test_ranks_rewrite_together_whichever_refused(on_two_ranks: Runner, tmp_path: Path) -> None:
    first, second = on_two_ranks("rank_scenarios:refuse_pages", tmp_path)
    assert first == second == [0, 4]


def test_ranks_on_two_machines_start_from_the_first_ones_profile(on_two_ranks, tmp_path):
    for rank in range(2):
        (tmp_path / f"machine-{rank}").mkdir()
    tree = LiveTree(4096, "wa")
    for i in range(60):
        tree.serve([i % 5] * 20, 2.0 * i, path=list(range(i % 5, 400, 5))[: i + 1])
    saved = tree.core.live.device_policy.state()
    assert saved["categories"]
    (tmp_path / "machine-0" / "wa.json").write_text(json.dumps(saved))
    first, second = on_two_ranks("rank_scenarios:load_first_profile", tmp_path)
    assert first == second
    assert first == saved


def test_a_damaged_profile_of_the_first_machine_leaves_both_with_nothing_learnt(
    on_two_ranks: Runner, tmp_path: Path
) -> None:
    for rank in range(2):
        (tmp_path / f"machine-{rank}").mkdir()
    (tmp_path / "machine-0" / "wa.json").write_text("{")
    first, second = on_two_ranks("rank_scenarios:load_first_profile", tmp_path)
    assert first is second is None
    assert (tmp_path / "machine-0" / "wa.json.bad").read_text() == "{"


def test_ranks_change_their_order_at_the_same_request(on_two_ranks: Runner, tmp_path: Path) -> None:
    first, second = on_two_ranks("rank_scenarios:alternate_orders", tmp_path)
    assert first == second
    assert {"wa", "canopy-lru"} == set(first["running"])
    assert first["victims"][-1][0] > 0


def test_ranks_with_disks_of_different_speed_drain_the_same_pages(on_two_ranks, tmp_path):
    first, second = on_two_ranks("rank_scenarios:drain_slowly", tmp_path)
    assert first == second
    assert 0 < sum(first) < 200


def test_a_rank_whose_host_lacks_room_does_not_block_the_others_drain(on_two_ranks, tmp_path):
    first, second = on_two_ranks("rank_scenarios:drain_without_host_memory", tmp_path)
    assert first[-1] == 8
    assert sum(second) > 0
