"""SGLang's storage interface around the disk store, on SGLang's own host pools."""

import tracemalloc
from pathlib import Path

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

from sglang_canopy.disk.page import PageMeta
from sglang_canopy.errors import CanopyError
from sglang_canopy.records import Request
from sglang_canopy.storage.backend import CanopyStorage
from sglang_canopy.storage.page_table import PAGES, PageTable
from sglang_canopy.storage.settings import DYNAMIC_BACKEND, StorageSettings
from sglang_canopy.ttl.table import Group, TTLTable
from support.store_pool import host_pool, page_hashes, storage_config, token_indices

LAYOUTS = ["layer_first", "page_first", "page_first_direct", "page_head"]


def open_storage(folder: Path, pool, **settings) -> CanopyStorage:
    """Return a backend as SGLang's controller makes it; the sweeper's thread stays idle."""
    settings = {"path": str(folder), "capacity_bytes": 1 << 20, "sweep_s": 3600, **settings}
    config = storage_config({**settings, **DYNAMIC_BACKEND})
    storage = StorageBackendFactory.create_backend("dynamic", config, pool)
    storage.register_mem_pool_host(pool)
    storage.register_mem_host_pool_v2(pool, "kv")
    getattr(storage, "on_host_pools_registered", lambda: None)()  # 0.5.22 has no such call
    assert isinstance(storage, CanopyStorage)
    return storage


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_are_read_bit_for_bit_into_other_slots(tmp_path, layout):
    pool = host_pool(16, layout)
    storage = open_storage(tmp_path, pool)
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape).to(pool.kv_buffer.dtype))
    written_kv = pool.kv_buffer.clone()
    source_pages, target_pages = [3, 0, 9], [11, 5, 1]
    hashes = page_hashes("a", 3)
    assert storage.batch_set_v1(hashes, token_indices(pool, source_pages)) == [True] * 3
    assert storage.batch_exists(hashes) == 3
    pool.kv_buffer.zero_()
    assert storage.batch_get_v1(hashes, token_indices(pool, target_pages)) == [True] * 3
    read_kv = pool.kv_buffer.clone()
    pool.kv_buffer.copy_(written_kv)
    written_pages = [pool.get_data_page(page * pool.page_size).clone() for page in source_pages]
    pool.kv_buffer.copy_(read_kv)
    for target, written in zip(target_pages, written_pages):
        assert torch.equal(pool.get_data_page(target * pool.page_size), written)
    other_starts = [page * pool.page_size for page in range(16) if page not in target_pages]
    assert all(pool.get_data_page(start).count_nonzero() == 0 for start in other_starts)
    storage.close()


def test_prefix_keys_name_the_parent_and_a_page_without_its_parent_is_refused(tmp_path):
    pool = host_pool(8)
    storage = open_storage(tmp_path, pool)
    hashes = page_hashes("a", 3)
    storage.batch_set_v1(hashes[:2], token_indices(pool, [0, 1]))
    extra_info = HiCacheStorageExtraInfo(prefix_keys=hashes[:2])
    storage.batch_set_v1(hashes[2:], token_indices(pool, [2]), extra_info)
    orphan_hashes = page_hashes("b", 2)
    extra_info = HiCacheStorageExtraInfo(prefix_keys=orphan_hashes[:1])
    storage.batch_set_v1(orphan_hashes[1:], token_indices(pool, [3]), extra_info)
    assert storage.batch_exists(hashes) == 3
    assert not storage.exists(orphan_hashes[1])
    assert storage.status()["refused_pages"] == {"no-prefix": 1}
    assert [page_meta.offset for page_meta in storage.store.meta(hashes)] == [0, 4, 8]
    storage.close()


def test_the_disk_policy_learns_from_announced_requests(tmp_path):
    storage = open_storage(tmp_path, host_pool(8), policy="wa")
    for i in range(50):
        for event in ("arrive", "finish"):
            PAGES.add_request(event, Request(time=float(i), path=(1, 2), block_tokens=4))
    storage.current.deliver_reports()
    assert storage.store.policy.model.reuse_count == 49
    assert PAGES.take_requests() == []
    storage.close()


def test_the_sweeper_removes_expired_pages_by_itself(tmp_path):
    pool = host_pool(8)
    storage = open_storage(tmp_path, pool, ttl=0.0, sweep_s=0.01)
    storage.batch_set_v1(page_hashes("a", 2), token_indices(pool, [0, 1]))
    storage.sweeper.thread.join(timeout=0)  # it is a thread, and it runs
    assert storage.sweeper.thread.is_alive()
    for _ in range(1000):
        if not len(storage.store):
            break
        storage.sweeper._stopping.wait(0.01)
    assert len(storage.store) == 0
    assert storage.status()["evicted_pages"] == {"ttl": 2}
    storage.close()
    assert not storage.sweeper.thread.is_alive()


def test_an_error_in_the_store_never_reaches_sglang(tmp_path, caplog):
    pool = host_pool(8)
    storage = open_storage(tmp_path, pool)
    storage.store.state.index = None
    for _ in range(3):
        assert storage.batch_exists(page_hashes("a", 2)) == 0
        assert storage.batch_get_v1(page_hashes("a", 2), token_indices(pool, [0, 1])) == [False] * 2
        assert storage.batch_set_v1(page_hashes("a", 2), token_indices(pool, [0, 1])) == [True] * 2
    assert storage.store.counters.faults["internal"] == 9
    assert len([record for record in caplog.records if "logged once" in record.getMessage()]) <= 2


def test_other_pools_than_plain_kv_are_refused(tmp_path):
    storage = open_storage(tmp_path, host_pool(4))
    with pytest.raises(CanopyError, match="mamba"):
        storage.register_mem_host_pool_v2(object(), "mamba")
    storage.close()


def test_wrong_settings_are_refused_with_the_reason():
    for settings, message in [
        ({"folder": "x"}, "unknown key 'folder'; allowed keys: path .str., capacity_bytes"),
        ({"capacity_gb": 1, "capacity_bytes": 5}, "not both"),
        ({"capacity_gb": -1}, "capacity_gb"),
        ({"capacity_bytes": 1.5}, "capacity_bytes"),
        ({"policy": "best"}, "unknown policy 'best'"),
        ({"policy": "wa", "policy_config": {"speed": 1}}, "unknown key 'speed'"),
        ({"ttl": -5}, "ttl"),
        ({"ttl": {"groups": 7}}, "ttl"),
        ({"quota_bytes": {"a": -1}}, "quota_bytes"),
        ({"sweep_s": 0}, "sweep_s"),
    ]:
        with pytest.raises(CanopyError, match=message):
            StorageSettings.from_extra(settings)


@pytest.mark.parametrize(
    ("variable", "key"), [("CANOPY_DISK_PATH", "path"), ("CANOPY_DISK_CAPACITY_GB", "capacity_gb")]
)
def test_a_variable_of_earlier_releases_stops_the_start(monkeypatch, variable, key):
    monkeypatch.setenv(variable, "5")
    with pytest.raises(CanopyError, match=f"{variable} is no longer read: .* give {key} in"):
        StorageSettings.from_extra({"path": "/kv", "capacity_gb": 1})


def test_a_ttl_is_a_number_of_seconds_or_a_table():
    settings = StorageSettings.from_extra({"prefetch_threshold": 1, **DYNAMIC_BACKEND, "ttl": 60})
    assert (settings.ttl.residual_ttl_s, settings.capacity_bytes) == (60.0, 10**10)
    table = TTLTable(groups=(Group(7, 10.0),))
    assert StorageSettings.from_extra({"ttl": table.to_json()}).ttl == table


def test_the_page_table_drops_the_oldest():
    pages = PageTable(max_pages=2, max_event_bytes=1400)
    page_metas = [PageMeta(offset=i) for i in range(3)]
    pages.describe(["a", "b", "c"], page_metas, [None, "a", "b"])
    assert pages.description("a") is None
    assert pages.description("c") is page_metas[2]
    assert pages.parent("c") == "b"
    assert pages.parent("a", default="?") == "?"
    for i in range(3):
        pages.add_use([str(i)], page_metas[i])
        pages.add_request("arrive", Request(time=i))
    assert [keys for keys, _ in pages.take_uses()] == [("1",), ("2",)]
    assert [request.time for _, request in pages.take_requests()] == [1, 2]


def test_unclaimed_requests_with_long_prompts_stay_within_the_bound():
    """The disk thread is blocked, and prompts have 32,768 tokens in pages of one."""
    pages = PageTable(max_event_bytes=4 << 20)
    tracemalloc.start()
    for i in range(64):
        path = tuple(range(i << 40, (i << 40) + 32_768))
        pages.add_request("finish", Request(time=float(i), path=path))
    traced_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert traced_bytes < 5 << 20
    assert [request.time for _, request in pages.take_requests()] == [61.0, 62.0, 63.0]
