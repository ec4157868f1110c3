"""Clearing the store: at once, permanently, under readers and writers; and no thread waits for a commit."""

import dataclasses
import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest

from sglang_canopy.disk.units import UnitAllocator
from sglang_canopy.policy.lru import LRU
from sglang_canopy.policy.registry import make_policy
from sglang_canopy.records import Request
from support.disk_pages import PAGE_BYTES, chain, get, put, store_at
from support.disk_recount import count_bad_pages, recount

WAIT_S = 5.0


def test_a_running_reader_and_writer_see_an_empty_store(tmp_path) -> None:
    store = store_at(tmp_path, pages=8)
    put(store, chain("a", 4))
    segments = store.state.segments
    original_read, original_write = segments.read, segments.write

    def clear_before(method: Callable) -> Callable:
        def clear_and_call(pieces):
            segments.read, segments.write = original_read, original_write
            store.clear()
            assert all(put(store, chain("b", 3)))
            return method(pieces)

        return clear_and_call

    segments.read = clear_before(original_read)
    get(store, chain("a", 4))  # asserts that the bytes are correct
    assert count_bad_pages(store) == 0
    put(store, chain("c", 3))
    original_write = store.state.segments.write
    store.state.segments.write = clear_before(original_write)
    assert not any(put(store, chain("c", 5)[3:], parent=chain("c", 3)[-1]))
    assert [store.count_leading(chain(name, 5)) for name in "abc"] == [0, 3, 0]
    assert count_bad_pages(store) == 0


class SignallingLock:
    """A lock that signals when a thread waits for it."""

    def __init__(self, lock) -> None:
        self.lock, self.is_awaited = lock, threading.Event()

    def __enter__(self):
        self.is_awaited.set()
        return self.lock.__enter__()

    def __exit__(self, *error):
        return self.lock.__exit__(*error)


@pytest.mark.parametrize("method_name", ["close", "flush", "sweep"])
def test_the_store_is_not_locked_while_its_index_file_is_busy(tmp_path, method_name) -> None:
    """A commit holds the file's lock and then reads the store, as ``flush`` does."""
    store = store_at(tmp_path)
    put(store, chain("a", 2))
    store.state.journal.lock = lock = SignallingLock(store.state.journal.lock)
    thread = threading.Thread(target=getattr(store, method_name))
    with lock.lock:
        thread.start()
        assert lock.is_awaited.wait(WAIT_S)
        is_lockable = store.state.lock.acquire(timeout=WAIT_S)
        if is_lockable:
            store.state.lock.release()
    thread.join()
    assert is_lockable, f"{method_name} and a commit would wait for each other"


class RecordingPolicy(LRU):
    """Records the tenants of requests that it and its copies for tenants receive."""

    received: ClassVar[list[str | None]] = []

    def arrive(self, request: Request) -> str:
        self.received.append(request.tenant)
        return super().arrive(request)


def test_a_request_reaches_the_policy_and_its_tenants_copy_alone(tmp_path) -> None:
    RecordingPolicy.received.clear()
    policy = RecordingPolicy(LRU.Config())
    store = store_at(tmp_path, pages=64, policy=policy, quotas={"*": 1 << 20})
    for i in range(30):
        put(store, chain(i, 1), tenant=f"t{i}")
    request = Request(time=1.0, path=(1,), block_tokens=16, prompt_tokens=16, tenant="t3")
    store.arrive(request)
    assert RecordingPolicy.received == ["t3", "t3"]  # the policy, and one copy of 30
    store.arrive(dataclasses.replace(request, tenant="new"))
    assert RecordingPolicy.received == ["t3", "t3", "new"]


def test_clearing_visits_no_page_and_no_tenant(tmp_path, monkeypatch) -> None:
    store = store_at(tmp_path, pages=64, quotas={"*": 1 << 20})
    for i in range(30):
        put(store, chain(i, 1), tenant=f"t{i}")
    store.clock.now += 20
    visits = []
    for owner in (LRU, type(store.state.evictable_pages), type(store.state.index), UnitAllocator):
        for name in ("drop", "refund_tenant", "withdraw", "remove", "free"):
            if hasattr(owner, name):
                monkeypatch.setattr(owner, name, lambda *arguments, **_: visits.append(arguments))
    store.clear()
    assert not visits
    assert len(store) == store.state.units.used_units == 0
    assert store.counters.evicted_pages == {"cleared": 30}
    assert not store.state.evictable_pages.tenant_bytes
    recount(store)


def test_clearing_waits_for_no_commit(tmp_path) -> None:
    store = store_at(tmp_path)
    put(store, chain("a", 2))
    thread = threading.Thread(target=store.clear)
    with store.state.journal.lock:  # as a commit holds it
        thread.start()
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert len(store) == 0


def test_the_policy_keeps_its_learnt_state(tmp_path) -> None:
    store = store_at(tmp_path, policy=make_policy("wa"))
    put(store, chain("a", 2))
    model = store.policy.model
    store.clear()
    assert store.policy.model is model
    assert store.policy.learns
    assert not list(store.policy.leaves())


def test_tenants_at_their_quota_are_counted_as_pages_change(tmp_path) -> None:
    store = store_at(tmp_path, pages=8, quotas={"a": 2 * PAGE_BYTES, "b": 100 * PAGE_BYTES})
    put(store, chain(0, 1), tenant="a")
    put(store, chain(1, 1), tenant="b")
    assert store.state.evictable_pages.count_tenants_at_quota() == 0
    put(store, chain(2, 1), tenant="a")
    assert store.state.evictable_pages.count_tenants_at_quota() == 1
    store.clear()
    assert store.state.evictable_pages.count_tenants_at_quota() == 0


def test_a_folder_that_could_not_be_created_is_created_later(tmp_path, monkeypatch) -> None:
    store = store_at(tmp_path)
    put(store, chain("old", 3))
    store.clear()

    def raise_full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", raise_full)
        assert not any(put(store, chain("a", 2)))
        assert "No space left" in store.unavailable
        store.close()
    assert store.open()
    assert all(put(store, chain("new", 2)))
    store.close()
    reopened = store_at(tmp_path)
    assert (len(reopened), reopened.count_leading(chain("old", 3))) == (2, 0)
    assert len(list(tmp_path.glob("*/pages-*"))) == 1


def test_a_store_cleared_while_it_does_not_respond_is_empty_afterwards(tmp_path) -> None:
    store = store_at(tmp_path)
    put(store, chain("a", 3))
    assert store.suspend("the storage does not respond")
    store.clear()
    assert store.open()
    assert len(store) == 0
    assert store.suspend("the storage does not respond")
    store.close()
    assert store.state.segments._folder_fd == -1
