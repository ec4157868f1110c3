"""The disk tier below a live tree: writes, reads, and contents after a restart."""

import errno
from pathlib import Path

import pytest

from sglang_canopy.config.tiers import TierOptions
from sglang_canopy.disk import segments
from sglang_canopy.radix.counters import HOST
from sglang_canopy.records import GATEWAY, RECORD_FIELDS
from sglang_canopy.storage import disk_link, disk_retry
from sglang_canopy.storage.page_table import PAGES, PageTable
from sglang_canopy.ttl.table import Group, TTLTable
from support.disk_tree import DiskTree, prompt
from support.live_tree import check_tree

ONE_TOKEN = {"quantum_tokens": 1}
KEEPS_WITHOUT_LIMIT = {**ONE_TOKEN, "keep_tenant_share": 1.0, "keep_total_share": 1.0}
EACH_WRITE_POLICY = pytest.mark.parametrize("write_policy", ["write_through", "write_back"])


@pytest.fixture
def report_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report every use to the disk tier at once, not after a second."""
    monkeypatch.setattr(disk_link, "REPORT_INTERVAL_S", 0.0)


@pytest.fixture
def start(tmp_path: Path):
    """``start(...)``: a new tree on the test's folder, as of a server that starts; the previous tree is closed first."""
    open_trees: list[DiskTree] = []

    def build(**options) -> DiskTree:
        while open_trees:
            open_trees.pop().close()
        options.setdefault("config", ONE_TOKEN)
        open_trees.append(DiskTree(tmp_path / "disk", **options))
        return open_trees[0]

    yield build
    while open_trees:
        open_trees.pop().close()


def leaves_of_path(tree: DiskTree, first_token: int) -> list:
    """Return the leaves of the nodes on the path with that first token, shallowest first."""
    node, path = tree.core.root_node, []
    while True:
        children = node.children.values()
        node = next((c for c in children if path or c.key.raw_token_ids()[0] == first_token), None)
        if node is None:
            return path
        path.append(node.canopy)


TIME_FIELDS = ("created", "last_access", "keep_until")


def record_of(leaf) -> dict:
    return {name: getattr(leaf, name) for name in RECORD_FIELDS if name not in TIME_FIELDS}


@pytest.fixture
def tree(start):
    return start()


def test_pages_that_are_read_count_under_their_own_category(tree) -> None:
    tree.serve(prompt(1, 8), 1.0, category="chat")
    tree.evict(1000)
    tree.settle()
    tree.cache.evict_host(1000)
    row = tree.core.live.counters.category_counts
    entered_tokens = row("chat", None).tiers[HOST].entered_tokens
    assert tree.fetch(prompt(1, 8)) == 8
    assert row("chat", None).tiers[HOST].entered_tokens == entered_tokens + 8
    assert row("default", None).tiers[HOST].entered_tokens == 0


def test_times_on_disk_are_seconds_since_1970(start) -> None:
    tree = start(config=KEEPS_WITHOUT_LIMIT)
    tree.epoch = 1_000_000.0
    tree.serve(prompt(1, 4), 5.0, keep_until=9.0)
    (meta, _) = tree.store.meta(tree.keys(prompt(1, 4)))
    assert (meta.created, meta.last_access, meta.keep_until) == (1_000_005, 1_000_005, 1_000_009)


@EACH_WRITE_POLICY
def test_a_restart_serves_pages_on_disk_with_their_metadata(start, report_at_once, write_policy):
    tree = start(write_policy=write_policy)
    tree.serve(prompt(1, 8), 1.0, category="chat", conversation="a", turn=2)
    tree.serve(prompt(1, 4) + prompt(2, 4), 3.0, category="api", conversation="b")
    names = {"category": "chat", "conversation": "a"}
    tree.serve(prompt(1, 8), 7.0, **names, turn=3, over=True, source=GATEWAY)
    tree.evict(1000)  # under write_back, that is when copies are made
    tree.settle()
    leaves = leaves_of_path(tree, 100)
    records_before = {leaf.offset: record_of(leaf) for leaf in leaves}
    times_before = {leaf.offset: (leaf.created, leaf.last_access) for leaf in leaves}

    tree = start(write_policy=write_policy)
    tree.epoch = -100.0  # another boot: the requests' clock began at another time
    request = tree.request(120.0)
    assert tree.fetch(prompt(1, 8)) == 8
    read_leaves = leaves_of_path(tree, 100)
    assert {leaf.offset: record_of(leaf) for leaf in read_leaves} == records_before
    for offset, (hits, shared, over) in {0: (3, True, False), 4: (2, False, True)}.items():
        expected = {"category": "chat", "conversation": "a", "turn": 3, "source": GATEWAY}
        expected |= {"hits": hits, "shared": shared, "over": over}
        assert expected.items() <= records_before[offset].items()
    times = [(leaf.offset, leaf.created - 100, leaf.last_access - 100) for leaf in read_leaves]
    times_after = {offset: (created, last_access) for offset, created, last_access in times}
    assert times_after == times_before
    tree.core.requests.finish(request)
    assert tree.load_back(prompt(1, 8)) == 8
    assert tree.kv(prompt(1, 8)) == prompt(1, 8)
    check_tree(tree)


def test_a_node_with_differing_pages_is_loaded_as_several(tree, report_at_once) -> None:
    tree.serve(prompt(1, 4), 1.0, category="system")
    tree.serve(prompt(1, 8), 2.0, category="chat", conversation="c")
    tree.cache.reset()
    tree.allocator.clear()
    tree.request(3.0)
    assert tree.fetch(prompt(1, 8)) == 8
    leaves = leaves_of_path(tree, 100)
    spans = [(leaf.offset, leaf.length, leaf.hits, leaf.category) for leaf in leaves]
    assert spans == [(0, 4, 2, "chat"), (4, 4, 1, "chat")]
    check_tree(tree)


def test_a_prefix_in_use_above_does_not_expire_on_disk(start, report_at_once) -> None:
    now_s = 0.0
    tree = start(disk={"ttl": 10.0})
    tree.store.state.clock = lambda: now_s
    tree.serve(prompt(1, 4), 0.0)
    tree.serve(prompt(2, 4), 0.0)
    for time in (4.0, 8.0, 12.0):
        now_s = time
        tree.serve(prompt(1, 4), time)  # a hit on the device
    tree.settle()
    assert tree.store.sweep(12.0) == 2
    assert tree.disk_tokens(prompt(1, 4)) == 4
    assert tree.disk_tokens(prompt(2, 4)) == 0


def test_a_node_in_use_all_the_time_is_reported_once_a_second(tree) -> None:
    tree.serve(prompt(1, 4), 0.0)
    tree.delivers_reports = False
    PAGES.take_uses()
    for step in range(100):
        tree.serve(prompt(1, 4), 2.0 + step / 100)
    assert 1 <= len(PAGES.take_uses()) <= 3
    tree.request(9.0)  # the rest follows with a later request
    (keys, meta) = PAGES.take_uses()[-1]
    assert list(keys) == tree.keys(prompt(1, 4))
    assert meta.hits == 101


def test_a_request_may_ask_for_a_ttl_on_disk(tree, report_at_once) -> None:
    tree.store.state.clock = lambda: 1.0
    tree.serve(prompt(1, 4), 1.0, ttl_s=30.0)
    tree.serve(prompt(2, 4), 1.0)
    tree.store.sweep(32.0)
    assert (tree.disk_tokens(prompt(1, 4)), tree.disk_tokens(prompt(2, 4))) == (0, 4)


def test_nodes_are_stored_with_the_group_of_their_subtree(start) -> None:
    table = TTLTable((Group(7, 60.0),), block_tokens=4)
    tree = start(tiers=TierOptions(ttl=table), disk={"ttl": table.to_json()})
    tree.serve(prompt(1, 8), 1.0, path=[7, 8], block_tokens=4)
    tree.serve(prompt(2, 8), 2.0, path=[5, 6], block_tokens=4)
    assert [tree.store.meta(tree.keys(prompt(number, 8)))[0].group for number in (1, 2)] == [0, -1]


def test_a_storage_backend_that_is_not_canopys_receives_no_reports(tree) -> None:
    tree.storage.pages = PageTable()
    tree.serve(prompt(1, 8), 1.0)
    tree.serve(prompt(1, 8), 9.0)
    assert not tree.core.disk.active
    assert len(PAGES) == 0
    assert not PAGES.take_uses()


@pytest.fixture
def retry_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_retry, "MIN_ROUND_S", 0.0)


@EACH_WRITE_POLICY
def test_pages_below_a_cleared_prefix_are_written_once_it_is_used(
    start, retry_at_once, write_policy
) -> None:
    tree = start(write_policy=write_policy)
    system = prompt(1, 8)
    tree.serve(system, 1.0)
    tree.evict(8)
    tree.settle()
    tree.storage.clear()
    assert tree.disk_tokens(system) == 0
    for turn in range(4):
        tree.serve(system + prompt(2 + turn, 4), 2.0 + turn)
        tree.settle()
        tree.evict(12)
    tree.request(9.0)
    tree.settle()
    assert tree.disk_tokens(system + prompt(5, 4)) == 12
    check_tree(tree)


def test_a_prefix_refused_by_a_full_disk_is_written_later(tree, retry_at_once, monkeypatch):
    system = prompt(1, 8)
    with monkeypatch.context() as patch:
        patch.setattr(segments.os, "pwritev", raise_disk_full)
        tree.serve(system, 1.0)
    tree.store._writer._monotonic = lambda: float("inf")
    assert tree.disk_tokens(system) == 0
    tree.serve(system + prompt(2, 4), 2.0)
    tree.serve(system + prompt(3, 4), 3.0)
    assert tree.disk_tokens(system + prompt(3, 4)) == 12
    tree.serve(system + prompt(2, 4), 4.0)
    tree.request(5.0)
    tree.settle()
    for number in (2, 3):
        assert tree.disk_tokens(system + prompt(number, 4)) == 12
    check_tree(tree)


def test_a_page_that_is_described_again_was_not_written_again(tree, report_at_once, monkeypatch):
    tree.serve(prompt(1, 8), 1.0)
    (leaf,) = leaves_of_path(tree, 100)
    monkeypatch.setattr(PAGES, "description", lambda _key: True)  # as after a put that was refused
    tree.serve(prompt(1, 8), 5.0)
    assert (leaf.reported_at, leaf.disk_written_at) == (5.0, 1.0)


def test_a_prefix_without_a_host_copy_is_copied_down_and_written_again(start, retry_at_once):
    tree = start(tokens=64)
    system = prompt(1, 8)
    tree.serve(system, 1.0)
    tree.cache.evict_host(8)
    tree.storage.clear()
    tree.serve(system + prompt(2, 4), 2.0)
    tree.serve(system + prompt(3, 4), 3.0)
    tree.request(4.0)
    tree.settle()
    assert tree.disk_tokens(system + prompt(3, 4)) == 12
    check_tree(tree)


def test_a_broken_disk_is_offered_few_pages_at_a_time(start, retry_at_once, monkeypatch) -> None:
    monkeypatch.setattr(disk_retry, "MAX_PAGES_PER_REQUEST", 4)
    monkeypatch.setattr(segments.os, "pwritev", raise_disk_full)
    tree = start(tokens=64, host_tokens=128)
    for number in range(5):
        tree.serve(prompt(number, 8), 1.0 + number)
    for number in range(5):
        tree.serve(prompt(number, 8), 10.0)
    refused_before = tree.store.counters.refused_pages.total()
    tree.request(11.0)
    tree.settle()
    assert 0 < tree.store.counters.refused_pages.total() - refused_before <= 4
    check_tree(tree)


def test_a_healthy_disk_is_offered_each_page_once(tree, retry_at_once) -> None:
    for time in range(1, 6):
        tree.serve(prompt(1, 8), float(time))
    assert tree.store.counters.written_pages == 4
    assert tree.store.counters.present_pages == 0


def raise_disk_full(*_: object) -> int:
    raise OSError(errno.ENOSPC, "no space left on device")
