"""A disk tier on every rank: MLA, replicas, and a folder that another server still uses."""

from pathlib import Path

import pytest
from sglang.srt.runtime_context import get_parallel

from sglang_canopy.storage.backend import CanopyStorage
from support.disk_recount import count_bad_pages
from support.rank_scenarios import PROMPT
from support.store_pool import host_pool, page_hashes, storage_config, token_indices


def open_storage(folder: Path, pool, settings: dict | None = None, **fields) -> CanopyStorage:
    settings = {"path": str(folder), "capacity_bytes": 1 << 20, "sweep_s": 3600} | (settings or {})
    storage = CanopyStorage(storage_config(settings, **fields))
    storage.register_mem_pool_host(pool)
    return storage


def write_pages(storage: CanopyStorage, hashes: list[str]) -> None:
    """Write as SGLang's controller does: only on the writing rank."""
    if getattr(storage.config, "is_storage_writer", True):  # 0.5.22 has no writing rank
        storage.batch_set_v1(hashes, token_indices(storage.layout.pool, list(range(len(hashes)))))


def test_every_rank_of_mla_hits_the_same_tokens(tmp_path) -> None:
    pool, hashes = host_pool(4), page_hashes("a", 3)
    for start_number in range(2):
        ranks = [
            open_storage(tmp_path, pool, is_mla_model=True, tp_size=2, tp_rank=rank)
            for rank in (0, 1)
        ]
        assert [rank.store.unavailable for rank in ranks] == [None, None]
        if start_number == 0:
            for rank in ranks:
                write_pages(rank, hashes)
        assert [rank.batch_exists(hashes) for rank in ranks] == [3, 3]
        for rank in ranks:
            assert count_bad_pages(rank.store) == 0
            rank.close()


@pytest.mark.long
@pytest.mark.xdist_group("ranks")
def test_two_processes_of_mla_agree_on_hits_and_a_restart_finds_them(on_two_ranks, tmp_path):
    """Each of SGLang's ranks uses the fewest tokens that any of them found."""
    first, second = on_two_ranks("rank_scenarios:read_shared_disk", tmp_path)
    assert first == second == [[len(PROMPT), PROMPT, None]] * 2


def test_replicas_of_data_parallelism_each_have_a_disk_tier(tmp_path) -> None:
    """SGLang's storage configuration gives dp_rank 0 to all replicas."""
    pool, hashes, replicas = host_pool(4), page_hashes("a", 2), []
    for rank in range(3):
        with get_parallel().override(dp_rank=rank):
            replicas.append(open_storage(tmp_path, pool))
    for replica in replicas:
        assert replica.status()["unavailable"] is None
        assert replica.batch_exists(hashes) == 0
        write_pages(replica, hashes)
    assert [replica.batch_exists(hashes) for replica in replicas] == [2, 2, 2]
    for replica in replicas:
        replica.close()


def test_the_sweeper_uses_a_folder_once_it_is_free(tmp_path) -> None:
    pool = host_pool(4)
    first_server = open_storage(tmp_path, pool)
    write_pages(first_server, page_hashes("a", 2))
    second_server = open_storage(tmp_path, pool, {"sweep_s": 0.01})
    first_server.close()
    for _ in range(3000):
        if second_server.status()["unavailable"] is None:
            break
        second_server.sweeper._stopping.wait(0.01)
    assert second_server.batch_exists(page_hashes("a", 2)) == 2
    second_server.close()
