"""A disk tier on every rank: MLA, replicas, and a folder that another server still uses."""

from pathlib import Path

import pytest
from sglang.srt.runtime_context import get_parallel

from sglang_canopy.storage.backend import CanopyStorage
from support.disk_recount import count_bad_pages
from support.rank_scenarios import PROMPT
from support.store_pool import host_pool, keys, storage_config, token_indices


def open_storage(folder: Path, pool, extra: dict | None = None, **fields) -> CanopyStorage:
    settings = {"path": str(folder), "capacity_bytes": 1 << 20, "sweep_s": 3600, **(extra or {})}
    storage = CanopyStorage(storage_config(settings, **fields))
    storage.register_mem_pool_host(pool)
    return storage


def write_pages(storage: CanopyStorage, names: list[str]) -> None:
    """Write as SGLang's controller does: only on the writing rank."""
    if getattr(storage.config, "is_storage_writer", True):  # 0.5.22 has no writing rank
        slots = token_indices(storage.layout.pool, list(range(len(names))))
        storage.batch_set_v1(names, slots)


def test_every_rank_of_mla_hits_the_same_tokens(tmp_path) -> None:
    pool, names = host_pool(4), keys("a", 3)
    for start in range(2):
        ranks = [
            open_storage(tmp_path, pool, is_mla_model=True, tp_size=2, tp_rank=rank)
            for rank in (0, 1)
        ]
        assert [rank.store.unavailable for rank in ranks] == [None, None]
        if start == 0:
            for rank in ranks:
                write_pages(rank, names)
        assert [rank.batch_exists(names) for rank in ranks] == [3, 3]
        for rank in ranks:
            assert count_bad_pages(rank.store) == 0
            rank.close()


@pytest.mark.long
@pytest.mark.xdist_group("ranks")
def test_two_processes_of_mla_agree_on_hits_and_a_restart_finds_them(on_two_ranks, tmp_path):
    """SGLang's ranks take the minimum of what they find."""
    first, second = on_two_ranks("rank_scenarios:read_shared_disk", tmp_path)
    assert first == second == [[len(PROMPT), PROMPT, None]] * 2


def test_replicas_of_data_parallelism_each_have_a_disk_tier(tmp_path) -> None:
    """SGLang's storage configuration gives dp_rank 0 to all replicas."""
    pool, names, replicas = host_pool(4), keys("a", 2), []
    for rank in range(3):
        with get_parallel().override(dp_rank=rank):
            replicas.append(open_storage(tmp_path, pool))
    for replica in replicas:
        assert replica.status()["unavailable"] is None
        assert replica.batch_exists(names) == 0
        write_pages(replica, names)
    assert [replica.batch_exists(names) for replica in replicas] == [2, 2, 2]
    for replica in replicas:
        replica.close()


def test_the_sweeper_uses_a_folder_once_it_is_free(tmp_path) -> None:
    pool = host_pool(4)
    first = open_storage(tmp_path, pool)
    write_pages(first, keys("a", 2))
    second = open_storage(tmp_path, pool, {"sweep_s": 0.01})
    first.close()
    for _ in range(3000):
        if second.status()["unavailable"] is None:
            break
        second.sweeper._stopping.wait(0.01)
    assert second.batch_exists(keys("a", 2)) == 2
    second.close()
