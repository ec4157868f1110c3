"""The disk store: stored pages, the order of eviction, and pages after a restart."""

import os
import shutil
import stat

import pytest

from sglang_canopy.disk.page import PageMeta
from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.registry import make_policy, policy_names
from sglang_canopy.tenant import tenant_digest
from sglang_canopy.ttl.table import Group, TTLTable
from support.disk_pages import PAGE_BYTES, Clock, chain, content, get, key_of, put, store_at
from support.disk_recount import count_bad_pages, recount


def test_a_sweep_does_bounded_work_and_resumes(tmp_path):
    store = store_at(tmp_path, pages=16, ttl=TTLTable(residual_ttl_s=10.0))
    put(store, chain("a", 10))
    store.clock.now += 20
    assert [store.sweep(max_pages=4) for _ in range(3)] == [4, 4, 2]


def test_pages_expire_by_their_groups_ttl_and_find_their_group_in_another_table(tmp_path):
    table = TTLTable(groups=(Group(7, 1000.0), Group(9, 10.0)), residual_ttl_s=100.0)
    store = store_at(tmp_path, pages=16, ttl=table)
    long_lived, short_lived, ungrouped = chain("a", 2), chain("b", 2), chain("c", 2)
    put(store, long_lived, group=0)
    put(store, short_lived, group=1)
    put(store, ungrouped)
    store.clock.now += 200
    assert [store.count_leading(k) for k in (long_lived, short_lived, ungrouped)] == [2, 0, 0]
    store.close()
    table = TTLTable((Group(3, 1.0), Group(9, 500.0)))
    reopened = store_at(tmp_path, pages=16, clock=Clock(1200.0), ttl=table)
    assert reopened.meta(short_lived)[0].group == 1


@pytest.mark.parametrize("quota_name", ["small", tenant_digest("small")])
def test_a_tenant_over_its_quota_loses_its_own_pages(tmp_path, quota_name):
    store = store_at(tmp_path, pages=16, quotas={quota_name: 3 * PAGE_BYTES, "*": 4 * PAGE_BYTES})
    other_keys = chain("z", 4)
    put(store, other_keys)
    put(store, chain("a", 3), tenant="small")
    store.clock.now += 1
    assert put(store, chain("b", 2), tenant="small") == [True, True]
    assert store.count_leading(chain("a", 3)) == 1
    assert store.count_leading(other_keys) == 4
    assert store.counters.evicted_pages == {"quota": 2}
    assert put(store, chain("c", 5), tenant="large") == [True] * 4 + [False]
    recount(store)


def test_a_tenant_at_its_quota_loses_expired_pages_before_older_live_ones(tmp_path):
    table = TTLTable(groups=(Group(7, 1000.0), Group(9, 10.0)), residual_ttl_s=100.0)
    store = store_at(tmp_path, pages=16, quotas={"t": 3 * PAGE_BYTES}, ttl=table)
    put(store, chain("a", 1), tenant="t", group=0)
    store.clock.now += 1
    put(store, chain("b", 2), tenant="t", group=1)
    store.clock.now += 20
    assert put(store, chain("c", 1), tenant="t", group=0) == [True]
    assert store.count_leading(chain("a", 1)) == 1
    assert store.counters.evicted_pages == {"ttl": 2}


@pytest.mark.parametrize("policy", policy_names())
def test_every_policy_runs_on_disk(tmp_path, policy):
    store = store_at(tmp_path, pages=16, policy=make_policy(policy), quotas={"*": 8 * PAGE_BYTES})
    for i in range(12):
        store.clock.now += 1
        put(store, chain(i % 5, 6), tenant=f"t{i % 2}")
        get(store, chain((i + 1) % 5, 6))
    assert count_bad_pages(store) == 0


def test_a_page_may_be_written_in_parts(tmp_path):
    store = store_at(tmp_path)
    key = key_of("a")
    page = content(key)
    assert store.write([key], [(page[:100], page[100:])], [PageMeta()], [None]) == [True]
    buffers = [bytearray(300), bytearray(PAGE_BYTES - 300)]
    assert store.read([key], [buffers]) == [True]
    assert b"".join(buffers) == page


def test_files_are_private(tmp_path):
    store = store_at(tmp_path / "new")
    put(store, chain("a", 2))
    for folder, _, files in os.walk(tmp_path / "new"):
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
        for name in files:
            assert stat.S_IMODE(os.stat(os.path.join(folder, name)).st_mode) == 0o600, name


def test_another_model_never_reads_the_pages(tmp_path):
    store = store_at(tmp_path, namespace="model-a")
    put(store, chain("a", 2))
    other_store = store_at(tmp_path, namespace="model-b")
    assert other_store.unavailable is None
    assert other_store.count_leading(chain("a", 2)) == 0


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "letters.txt").write_text("dear")
    with pytest.raises(CanopyError, match="holds other files"):
        store_at(tmp_path)
    assert (tmp_path / "letters.txt").read_text() == "dear"


def test_a_smaller_capacity_keeps_the_pages_that_fit(tmp_path):
    store = store_at(tmp_path, pages=16)
    put(store, chain("a", 8))
    store.clock.now += 1
    put(store, chain("b", 8))
    store.close()
    reopened = store_at(tmp_path, pages=6, clock=Clock(1002.0))
    assert reopened.count_leading(chain("b", 8)) == 6
    assert get(reopened, chain("b", 6)) == [True] * 6
    assert sum(file.stat().st_size for file in reopened.path.rglob("segment-*")) <= 6 * PAGE_BYTES
    assert count_bad_pages(reopened) == 0


def test_impossible_sizes_are_refused(tmp_path):
    with pytest.raises(CanopyError, match="holds no page"):
        store_at(tmp_path, capacity_bytes=10)
    with pytest.raises(CanopyError, match="quota"):
        store_at(tmp_path, quotas={"t": -1})


def test_a_crash_loses_no_use_that_a_sweep_recorded(tmp_path):
    """A sweep records the use of a path at its last page; an opening store applies it to the pages above."""
    store = store_at(tmp_path / "a", pages=400)
    keys = chain("a", 300)
    put(store, keys)
    store.clock.now += 50
    store.touch(keys, PageMeta(last_access=store.clock()))
    store.sweep()
    shutil.copytree(tmp_path / "a", tmp_path / "b")  # as after a kill
    reopened = store_at(tmp_path / "b", pages=400, clock=Clock(1060.0))
    assert {meta.last_access for meta in reopened.meta(keys)} == {1050.0}
