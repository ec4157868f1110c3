"""The drain at shutdown writes KV that only memory holds to disk, prefixes first."""

import errno
import json
import multiprocessing
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_canopy.config.tiers import PolicyChoice, TierOptions
from sglang_canopy.disk import segments
from sglang_canopy.storage import drain
from sglang_canopy.storage.disk_retry import MIN_ROUND_S
from sglang_canopy.storage.learnt_state import restore_learnt
from sglang_canopy.storage.page_table import PAGES
from sglang_canopy.tenant import documents_key
from support.disk_recount import count_bad_pages
from support.disk_tree import DiskTree, prompt

WRITE_BACK = {"write_policy": "write_back", "config": {"quantum_tokens": 1}}
EACH_POLICY = pytest.mark.parametrize("policy", ["canopy-lru", "wa"])


def terminate(tree: DiskTree) -> None:
    """Close the cache as SGLang's scheduler does once it has left its loop."""
    tree.cache.release_host_resources()


def open_tree(folder: Path, **options) -> DiskTree:
    return DiskTree(folder / "disk", **{**WRITE_BACK, **options})


@EACH_POLICY
def test_kv_of_the_device_alone_is_served_from_disk_after_a_restart(tmp_path: Path, policy) -> None:
    tree = open_tree(tmp_path, policy=policy)
    tree.serve(prompt(1, 8), 1.0, category="chat", conversation="c", tenant="t")
    tree.serve(prompt(1, 8) + prompt(2, 4), 2.0, category="chat", conversation="c", tenant="t")
    assert tree.disk_tokens(prompt(1, 8)) == 0
    terminate(tree)
    reopened = open_tree(tmp_path, policy=policy)
    path = prompt(1, 8) + prompt(2, 4)
    page_metas = reopened.store.meta(reopened.keys(path))
    assert {(m.conversation, m.tenant) for m in page_metas} == {("c", "t")}
    assert reopened.serve(path, 3.0) == 12
    assert reopened.kv(path) == path
    reopened.close()


def test_with_drain_s_0_nothing_is_written(tmp_path: Path) -> None:
    tree = open_tree(tmp_path, tiers=TierOptions(drain_s=0.0))
    tree.serve(prompt(1, 8), 1.0)
    terminate(tree)
    reopened = open_tree(tmp_path)
    assert reopened.disk_tokens(prompt(1, 8)) == 0
    reopened.close()


def test_prefixes_are_written_before_what_extends_them(tmp_path, monkeypatch):
    tree = open_tree(tmp_path)
    head = prompt(1, 4)
    tree.serve(prompt(3, 6), 1.0)  # the oldest
    tree.serve(head + prompt(2, 4), 2.0)
    tree.serve(head + prompt(4, 4), 3.0)
    written_keys: list[str] = []
    original = tree.storage.batch_set_v1
    tree.storage.batch_set_v1 = lambda keys, *_: written_keys.extend(keys) or original(keys, *_)
    tree.cache.cache_controller.page_set_func = tree.cache.cache_controller._page_set_zero_copy
    terminate(tree)
    paths = (prompt(3, 6), head + prompt(2, 4), head + prompt(4, 4))
    single, *branches = (tree.keys(path) for path in paths)
    head_keys, tail_keys = {*single, *branches[0][:2]}, {*branches[0][2:], *branches[1][2:]}
    assert {*written_keys[: len(head_keys)]} == head_keys
    assert {*written_keys[len(head_keys) :]} == tail_keys


@EACH_POLICY
def test_leaves_of_the_host_below_a_node_of_the_device_are_written(tmp_path, policy):
    """Their parent on the device is no victim of the host."""
    tree = open_tree(tmp_path, policy=policy)
    head = prompt(1, 4)
    for name in (2, 3, 4):
        tree.serve(head + prompt(name, 4), name)
    tree.serve(head, 5.0)
    tree.serve(prompt(9, 28), 6.0)  # their tails leave the device
    leaves = list(tree.core.evictable_host_leaves)
    assert len(leaves) == 3
    ranked = tree.core.evictable_host_leaves.lowest_ranked(100, 10)
    assert sorted(node.id for node, _ in ranked) == sorted(node.id for node in leaves)
    terminate(tree)
    reopened = open_tree(tmp_path)
    assert reopened.disk_tokens(prompt(9, 28)) == 28
    assert [reopened.disk_tokens(head + prompt(name, 4)) for name in (2, 3, 4)] == [8, 8, 8]
    reopened.close()


@pytest.mark.parametrize("pages_allowed", [1, 2, 3, 4, 5, 6])
def test_a_drain_that_runs_out_of_time_has_whole_prefixes_of_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pages_allowed: int
) -> None:
    """The time is over after ``pages_allowed`` pages."""
    tree = open_tree(tmp_path)
    tree.serve(prompt(3, 6), 1.0)
    tree.serve(prompt(1, 8), 2.0)

    def pages_in_time(self, wanted: int) -> int:
        return max(0, min(wanted, pages_allowed - sum(self._passed_pages.values())))

    monkeypatch.setattr(drain.Drain, "_own_pages_in_time", pages_in_time)
    terminate(tree)
    reopened = open_tree(tmp_path)
    assert reopened.disk_tokens(prompt(1, 8)) == 2 * min(pages_allowed, 4)
    assert reopened.disk_tokens(prompt(3, 6)) == 2 * max(0, pages_allowed - 4)
    reopened.close()


def test_a_device_larger_than_the_host_is_drained_through_it(tmp_path: Path) -> None:
    tree = open_tree(tmp_path, tokens=128, host_tokens=16)
    for name in range(4):
        tree.serve(prompt(name, 30), 1.0 + name)
    terminate(tree)
    reopened = open_tree(tmp_path, tokens=128, host_tokens=64)
    assert [reopened.disk_tokens(prompt(name, 30)) for name in range(4)] == [30] * 4
    reopened.close()


@EACH_POLICY
def test_a_full_host_is_written_before_the_device_is_drained_through_it(tmp_path, policy):
    """Both tiers are full of pages that the disk lacks, as it was attached last."""
    tree = open_tree(tmp_path / "first", policy=policy, host_tokens=32)
    for name in range(1, 9):
        tree.serve(prompt(name, 8), name)
    assert len(tree.core.evictable_host_leaves) == 4
    assert tree.cache.cache_controller.mem_pool_host.available_size() < 8
    tree.detach()
    assert tree.attach(tmp_path / "disk") is None
    terminate(tree)
    reopened = open_tree(tmp_path)
    assert [reopened.disk_tokens(prompt(name, 8)) for name in range(1, 9)] == [8] * 8
    reopened.close()


def test_pages_that_the_disk_has_of_a_longer_node_are_not_counted_as_lost(tmp_path, caplog):
    tree = open_tree(tmp_path)
    tree.serve(prompt(1, 8), 1.0)
    tree.evict(32)
    tree.settle()
    assert tree.cache.evict_host(64) == 8
    tree.insert(prompt(1, 16), tree.request(2.0, prompt_tokens=16))
    assert tree.disk_tokens(prompt(1, 16)) == 8
    with caplog.at_level("INFO"):
        terminate(tree)
    assert "drained 4 pages" in caplog.text
    assert "; 0 pages are lost" in caplog.text


def test_a_tenant_at_its_quota_keeps_to_it_and_others_are_drained(tmp_path: Path) -> None:
    page_bytes = open_tree(tmp_path).storage.layout.page_bytes
    quota = {"quota_bytes": {"large": 2 * page_bytes}}
    tree = open_tree(tmp_path / "b", disk=quota)
    tree.serve(prompt(1, 8), 1.0, tenant="small")
    tree.serve(prompt(2, 8), 2.0, tenant="large")
    terminate(tree)
    reopened = open_tree(tmp_path / "b", disk=quota)
    assert reopened.disk_tokens(prompt(1, 8)) == 8
    assert reopened.disk_tokens(prompt(2, 8)) == 4
    reopened.close()


def test_pages_already_on_disk_are_not_written_again(tmp_path: Path) -> None:
    tree = open_tree(tmp_path, write_policy="write_through")
    tree.serve(prompt(1, 8), 1.0)
    assert tree.disk_tokens(prompt(1, 8)) == 8
    written_pages = tree.store.counters.written_pages
    terminate(tree)
    assert tree.store.counters.written_pages == written_pages


def drain_slowly(folder: Path, writes: Any) -> None:
    """Drain in a process of its own; report each write."""
    tree = open_tree(folder, tokens=128, host_tokens=256)
    for name in range(8):
        tree.serve(prompt(name, 12), 1.0 + name)
    write = tree.store._writer.write

    def write_slowly(*batch):
        result = write(*batch)
        writes.send(".")
        time.sleep(0.05)
        return result

    tree.store._writer.write = write_slowly  # type: ignore[method-assign]
    terminate(tree)


@pytest.mark.long
def test_a_drain_killed_in_the_middle_leaves_whole_and_right_prefixes(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads may block
    reads, writes = context.Pipe(duplex=False)
    child = context.Process(target=drain_slowly, args=(tmp_path, writes), daemon=True)
    child.start()
    for _ in range(3):
        assert reads.poll(200)
        reads.recv()
    child.kill()
    child.join()
    reopened = open_tree(tmp_path, tokens=128, host_tokens=256)
    assert count_bad_pages(reopened.store) == 0
    tokens_by_prompt = [reopened.disk_tokens(prompt(name, 12)) for name in range(8)]
    assert tokens_by_prompt[7] == tokens_by_prompt[6] == 12
    assert tokens_by_prompt[:2] == [0, 0]
    for name in (7, 6):
        assert reopened.serve(prompt(name, 12), 20.0 + name) == 12
        assert reopened.kv(prompt(name, 12)) == prompt(name, 12)
    reopened.close()


def serve_requests(tree: DiskTree) -> None:
    for i in range(60):
        tree.serve([i % 5] * 8, 2.0 * i, category="chat", path=list(range(i % 5, 400, 5))[: i + 1])


def test_learnt_state_survives_a_restart_on_device_and_disk(tmp_path: Path) -> None:
    tree = open_tree(tmp_path, policy="wa", disk={"policy": "wa"})
    restore_learnt(tree.cache, ())
    assert not tree.core.live.device_policy.state()["categories"]
    serve_requests(tree)
    learnt = tree.core.live.device_policy.state()["categories"]
    file = tree.store.path / "learnt.json"
    terminate(tree)
    assert file.stat().st_mode & 0o777 == 0o600
    reopened = open_tree(tmp_path, policy="wa", disk={"policy": "wa"})
    restore_learnt(reopened.cache, ())
    assert reopened.core.live.device_policy.state()["categories"].keys() == learnt.keys()
    assert reopened.store.policy.state()["categories"].keys() == learnt.keys()
    reopened.close()


@pytest.mark.parametrize("device_policy", ["wa", "canopy-lru"])
def test_learnt_state_is_restored_once_the_old_server_of_a_rolling_update_ends(
    tmp_path: Path, device_policy: str
) -> None:
    options = {"policy": device_policy, "tiers": TierOptions(disk=PolicyChoice("wa", {}))}
    old_tree = open_tree(tmp_path, disk={"policy": "wa"}, **options)
    restore_learnt(old_tree.cache, ())
    serve_requests(old_tree)
    new_tree = open_tree(tmp_path, disk={"policy": "wa"}, **options)
    restore_learnt(new_tree.cache, ())
    new_tree.serve([1] * 8, 1.0, category="chat")
    assert new_tree.core.live.profile is None
    learnt = old_tree.core.live.learner.state()["categories"]
    terminate(old_tree)
    assert new_tree.store.open()
    new_tree.serve([2] * 8, 1.0 + MIN_ROUND_S, category="chat")
    assert new_tree.core.live.learner.state()["categories"].keys() >= learnt.keys()
    assert new_tree.core.live.profile is not None
    new_tree.close()


@pytest.mark.parametrize("change", ["flags", "version", "damage"])
def test_learnt_state_of_other_flags_or_another_version_is_ignored_with_a_sentence(
    tmp_path: Path, caplog, change: str
) -> None:
    tree = open_tree(tmp_path, policy="wa")
    restore_learnt(tree.cache, ())
    serve_requests(tree)
    file = tree.store.path / "learnt.json"
    terminate(tree)
    config = {"quantum_tokens": 1}
    if change == "flags":
        config |= {"categories": "type-turn"}
    elif change == "version":
        file.write_text(json.dumps({**json.loads(file.read_text()), "version": 999}))
    else:
        file.write_text("{")
    reopened = open_tree(tmp_path, policy="wa", config=config)
    restore_learnt(reopened.cache, ())
    assert not reopened.core.live.device_policy.state()["categories"]
    assert "not used" in caplog.text or "cannot be used" in caplog.text
    reopened.close()


def test_kv_of_fused_documents_is_not_drained(tmp_path: Path) -> None:
    tree = open_tree(tmp_path)
    documents_extra_key = documents_key(None, "d")
    tree.insert(prompt(1, 8), tree.request(1.0, prompt_tokens=8), extra_key=documents_extra_key)
    tree.insert(prompt(2, 8), tree.request(2.0, prompt_tokens=8))
    terminate(tree)
    reopened = open_tree(tmp_path)
    assert reopened.disk_tokens(prompt(1, 8), documents_extra_key) == 0
    assert reopened.disk_tokens(prompt(2, 8)) == 8
    reopened.close()


def test_a_shared_store_is_neither_drained_nor_given_learnt_state(tmp_path: Path) -> None:
    """Mooncake's backend takes our metadata, and its ``store`` is Mooncake's client."""
    tree = open_tree(tmp_path)
    storage = tree.storage
    shared_backend = SimpleNamespace(pages=PAGES, store=object())
    tree.cache.cache_controller.storage_backend = shared_backend
    restore_learnt(tree.cache, ())
    tree.core.disk._backend = shared_backend
    assert not tree.core.disk.holds("page")
    terminate(tree)
    assert tree.core.live.profile is None
    storage.close()


@pytest.mark.parametrize("fault", ["full disk", "order", "state", "close"])
def test_a_fault_ends_the_drain_and_still_frees_the_host_and_closes_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    tree = open_tree(tmp_path, policy="wa")
    restore_learnt(tree.cache, ())
    tree.serve(prompt(1, 8), 1.0)

    def raise_fault(*_) -> None:
        raise OSError(errno.ENOSPC, "no space left") if fault == "full disk" else RuntimeError

    owner, name = {
        "full disk": (segments, "_write_all"),
        "order": (drain.Drain, "_find_absent"),
        "state": (type(tree.core.live.device_policy), "state"),
        "close": (type(tree.storage), "close"),
    }[fault]
    monkeypatch.setattr(owner, name, raise_fault)
    frees: list[bool] = []
    monkeypatch.setattr(tree.cache.host_pool_group, "destroy", lambda: frees.append(True))
    terminate(tree)
    monkeypatch.undo()
    assert frees == [True]
    if fault != "close":
        reopened = open_tree(tmp_path, policy="wa")
        assert reopened.store.unavailable is None
        assert reopened.disk_tokens(prompt(1, 8)) == (8 if fault == "state" else 0)
        reopened.close()
