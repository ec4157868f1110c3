"""Random operations on one, two and three tiers: KV is never mixed up, and metadata is never lost."""

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from sglang_canopy.config.tiers import PolicyChoice, TierOptions
from sglang_canopy.policy.registry import live_names
from sglang_canopy.storage import disk_link
from sglang_canopy.storage.page_table import PAGES
from sglang_canopy.ttl.table import TTLTable
from support.disk_recount import recount
from support.disk_tree import DiskTree
from support.live_tree import LiveTree, check_tree
from support.policy_rules import PolicyRules
from support.tier_books import TierBooks

ELEMENT_TOKENS, MAX_ELEMENTS = 2, 8
"""Tokens of an element of a run, and elements of a run."""
RUNS = st.lists(st.integers(0, 2), min_size=1, max_size=MAX_ELEMENTS)


class LiveTreeMachine(PolicyRules):
    """Serve, look up, lock, evict, move between the tiers, flush, restart; a model records each page's history."""

    @initialize(
        policy=st.sampled_from(live_names()),
        host_policy=st.sampled_from([None, "lfu", "wa"]),
        write_policy=st.sampled_from(["write_through", "write_back"]),
        host_ttl_s=st.sampled_from([None, 5.0]),
        disk_pages=st.sampled_from([0, 0, 12, 1000]),
        host_tokens=st.sampled_from([0, 64]),
        page_tokens=st.sampled_from([1, 2]),
        whole=st.booleans(),
        pairs=st.booleans(),
    )
    def start(
        self, policy, host_policy, write_policy, host_ttl_s, disk_pages, host_tokens, page_tokens, whole, pairs,
    ) -> None:  # fmt: skip
        self.folder = Path(tempfile.mkdtemp())
        table = None if host_ttl_s is None else TTLTable(residual_ttl_s=host_ttl_s)
        host_choice = None if host_policy is None else PolicyChoice(host_policy)
        self.page_tokens, self.disk_bytes = page_tokens, disk_pages * 4096
        self.has_pairs = pairs and not self.disk_bytes
        """Whether keys are of token pairs, as in EAGLE; 1 token more than pairs is in a path."""
        self.options = {
            "policy": policy,
            "write_policy": write_policy,
            "config": {"quantum_tokens": 1, "whole_nodes": whole},
            "page_size": page_tokens,
            "has_floor": True,
            "has_pairs": self.has_pairs,
        }
        self.has_host = host_tokens or self.disk_bytes
        if self.has_host:
            self.options["tiers"] = TierOptions(host=host_choice, host_ttl=table)
        self.time = 0.0
        self.history: dict[tuple[int, ...], tuple[int, float, float, str]] = {}
        """A path up to the end of a page -> hits, created, last access, category."""
        self.fetched: set[tuple[int, ...]] = set()
        """Pages read from disk and not used since. The disk counts the read as an access."""
        self.locks: list = []
        self.lock_by_path: dict = {}
        self.tree = self.open_tree()

    def open_tree(self) -> LiveTree:
        if self.disk_bytes:
            disk = {"capacity_bytes": self.disk_bytes}
            tree: LiveTree = DiskTree(self.folder / "disk", disk=disk, **self.options)
        else:
            tree = LiveTree(32, host_tokens=64 if self.has_host else 0, **self.options)
        self.books = TierBooks(tree.core)
        return tree

    def pages(self, tokens: list[int]) -> list[tuple[int, ...]]:
        ends = range(self.page_tokens, len(tokens) + 1 - self.has_pairs, self.page_tokens)
        return [tuple(tokens[: end + self.has_pairs]) for end in ends]

    @rule(
        run=RUNS,
        pause_s=st.sampled_from([0.0, 0.5, 3.0, 60.0]),
        category=st.sampled_from(["chat", "api"]),
        conversation=st.sampled_from([None, "a", "b"]),
        turn=st.integers(1, 3),
        stop=st.sampled_from([None, "tool", "end"]),
        over=st.booleans(),
        return_in_s=st.sampled_from([None, 1.0, 30.0]),
    )
    def serve(self, run, pause_s, category, conversation, turn, stop, over, return_in_s) -> None:
        self.serve_run(
            run, pause_s, category=category, conversation=conversation, turn=turn, stop=stop, over=over,
            return_in_s=return_in_s,
        )  # fmt: skip

    def serve_run(self, run, pause_s=0.5, category="chat", **fields) -> None:
        tokens, tree = _tokens(run), self.tree
        free_tokens = tree.allocator.available_size() + tree.cache.evictable_size()
        if free_tokens < ELEMENT_TOKENS * MAX_ELEMENTS:
            return
        self.time += pause_s
        if self.has_host and not self.disk_bytes:
            tree.load_back(tokens)
        hit_tokens = tree.serve(tokens, self.time, category=category, **fields)
        assert hit_tokens % self.page_tokens == 0
        pages = self.pages(tokens)
        full_tokens = len(pages) * self.page_tokens
        assert tree.match(tokens) == full_tokens
        assert tree.kv(tokens) == tokens[:full_tokens]
        for page in pages:
            if len(page) - self.has_pairs <= hit_tokens:
                hits, created, _, _ = self.history[page]
            else:
                hits, created = 0, self.time
            self.history[page] = (hits + 1, created, self.time, category)
            self.fetched.discard(page)

    @rule(run=RUNS)
    def look_up(self, run) -> None:
        assert 0 <= self.tree.match(_tokens(run)) <= len(_tokens(run))

    @rule(run=RUNS)
    def lock(self, run) -> None:
        tokens, cache = _tokens(run), self.tree.cache
        match = cache.match_prefix(self.tree.match_params(tokens))
        if match.device_prefix_len and len(self.locks) < 2:
            self.locks.append(cache.lock(match.last_device_node))
            length = match.device_prefix_len + self.has_pairs
            self.lock_by_path[tuple(tokens[:length])] = self.locks[-1]
            self.locked_run = run[: match.device_prefix_len // ELEMENT_TOKENS]

    @rule(run=RUNS)
    def evict_below_a_lock(self, run) -> None:
        if self.locks:
            self.serve_run((self.locked_run + run)[:MAX_ELEMENTS])
            self.tree.evict(40)
            self.tree.settle()

    @rule()
    def unlock(self) -> None:
        if self.locks:
            lock = self.locks.pop()
            self.tree.cache.unlock(lock)
            locked = self.lock_by_path.items()
            self.lock_by_path = {path: other for path, other in locked if other is not lock}

    @rule(tokens=st.integers(1, 40))
    def evict(self, tokens) -> None:
        self.tree.evict(tokens)
        self.tree.settle()

    @rule(tokens=st.integers(1, 12))
    def evict_host(self, tokens) -> None:
        if self.has_host:
            self.tree.cache.evict_host(tokens)
            self.tree.settle()

    @rule(run=RUNS)
    def read_from_disk(self, run) -> None:
        if self.disk_bytes:
            self.tree.fetch(_tokens(run))
            self.fetched.update(self.pages(_tokens(run)))

    @rule(run=RUNS)
    def load_back(self, run) -> None:
        tokens = _tokens(run)
        if self.has_host:
            self.tree.load_back(tokens)
        assert self.tree.kv(tokens) == tokens[: self.tree.match(tokens)]

    @rule()
    def flush(self) -> None:
        if not self.locks:
            self.tree.settle()
            self.tree.cache.reset()
            self.tree.allocator.clear()

    @rule()
    def restart(self) -> None:
        if self.disk_bytes and not self.locks:
            self.tree.close()
            self.tree = self.open_tree()
            self.tree.request(self.time)

    @invariant()
    def locked_prefixes_stay(self) -> None:
        for tokens in getattr(self, "lock_by_path", {}):
            assert self.tree.match(list(tokens)) == len(tokens) - self.has_pairs

    @invariant()
    def recounts_are_equal(self) -> None:
        if hasattr(self, "tree"):
            check_tree(self.tree)
            self.books.check()
            if self.disk_bytes:
                recount(self.tree.store)

    @invariant()
    def the_metadata_of_a_node_is_its_history(self) -> None:
        if not hasattr(self, "tree"):
            return
        core = self.tree.core
        for node in core._node_arena.values():
            leaf = node.canopy
            if node is core.root_node or not leaf.hits:
                continue
            for page in self.pages(_path(core, node))[leaf.offset // self.page_tokens :]:
                hits, created, last_access, category = self.history[page]
                metadata = (leaf.hits, leaf.created, leaf.category.partition("|")[0])
                assert metadata == (hits, created, category), (page, metadata)
                latest = self.time if page in self.fetched else last_access
                assert last_access <= leaf.last_access <= latest, (page, leaf.last_access)

    @invariant()
    def the_disk_has_the_same_history(self) -> None:
        for path, (hits, *_) in self.history.items() if getattr(self, "disk_bytes", 0) else ():
            (meta,) = self.tree.store.meta(self.tree.keys(list(path))[-1:])
            if meta is not None:
                assert meta.hits <= hits
                assert meta.created <= meta.last_access

    def teardown(self) -> None:
        if hasattr(self, "tree"):
            if self.disk_bytes:
                self.tree.close()
            shutil.rmtree(self.folder)
        PAGES.clear()


def _tokens(run: list[int]) -> list[int]:
    """Return tokens that encode their position in the path, to detect mixed-up KV."""
    starts = [100 * depth + 10 * element for depth, element in enumerate(run)]
    return [start + i for start in starts for i in range(ELEMENT_TOKENS)]


def _path(core, node) -> list[int]:
    parts = [list(node.key.raw_token_ids())[len(node.key) :]]  # a last token of a path of pairs
    while node is not core.root_node:
        parts.append(list(node.key.raw_token_ids())[: len(node.key)])
        node = node.parent
    return [token for part in reversed(parts) for token in part]


@pytest.fixture(autouse=True, scope="module")
def report_at_once():
    original_s, disk_link.REPORT_INTERVAL_S = disk_link.REPORT_INTERVAL_S, 0.0
    yield
    disk_link.REPORT_INTERVAL_S = original_s


TestTree = LiveTreeMachine.TestCase
TestTree.settings = settings(stateful_step_count=30, suppress_health_check=list(HealthCheck))
