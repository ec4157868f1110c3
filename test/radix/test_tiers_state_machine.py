"""Random operations on three tiers: no token's KV is ever another's, nothing known is lost."""

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from sglang_canopy.config.tiers import PolicyChoice, TierOptions
from sglang_canopy.storage import disk_link
from sglang_canopy.storage.page_table import PAGES
from sglang_canopy.ttl.table import TTLTable
from support.disk_tree import DiskTree
from support.live_tree import check
from support.policy_rules import PolicyRules
from support.tier_books import TierBooks

PAGE = 2
POLICIES = ("canopy-lru", "wa", "threshold-lru", "canopy-tlru")
runs = st.lists(st.integers(0, 2), min_size=1, max_size=8)


class Tiers(PolicyRules):
    """Serve, evict, read from disk, flush, restart; a model records each page's history."""

    @initialize(
        device=st.sampled_from(POLICIES),
        host=st.sampled_from([None, "lfu", "wa"]),
        write=st.sampled_from(["write_through", "write_back"]),
        host_ttl=st.sampled_from([None, 5.0]),
        pages_on_disk=st.sampled_from([12, 1000]),
    )
    def start(self, device, host, write, host_ttl, pages_on_disk) -> None:
        self.folder = Path(tempfile.mkdtemp())
        table = None if host_ttl is None else TTLTable(residual_ttl_s=host_ttl)
        choice = None if host is None else PolicyChoice(host)
        self.options = {
            "policy": device,
            "write_policy": write,
            "config": {"quantum_tokens": 1},
            "tiers": TierOptions(host=choice, host_ttl=table),
        }
        self.bounded = pages_on_disk < 1000
        self.disk = {"capacity_bytes": pages_on_disk * 4096}
        self.time = 0.0
        self.history: dict[tuple[int, ...], tuple[int, float, float, str]] = {}
        """A path up to the end of a page -> hits, created, last access, category."""
        self.fetched: set[tuple[int, ...]] = set()
        """Pages read from disk and not used since. The disk counts the read as an access."""
        self.tree = self.begin()

    def begin(self) -> DiskTree:
        tree = DiskTree(self.folder / "disk", disk=self.disk, floor=True, **self.options)
        self.books = TierBooks(tree.core)
        return tree

    @rule(
        run=runs,
        wait=st.sampled_from([0.5, 3.0, 60.0]),
        category=st.sampled_from(["chat", "api"]),
        conversation=st.sampled_from([None, "a", "b"]),
    )
    def serve(self, run, wait, category, conversation) -> None:
        tokens = _tokens(run)
        self.time += wait
        hit = self.tree.serve(tokens, self.time, category=category, conversation=conversation)
        assert hit % PAGE == 0
        assert self.tree.kv(tokens) == tokens
        for end in range(PAGE, len(tokens) + 1, PAGE):
            page = tuple(tokens[:end])
            if end <= hit:
                hits, created, _, _ = self.history[page]
            else:
                hits, created = 0, self.time
            self.history[page] = (hits + 1, created, self.time, category)
            self.fetched.discard(page)

    @rule(tokens=st.integers(1, 40))
    def evict(self, tokens) -> None:
        self.tree.evict(tokens)
        self.tree.settle()

    @rule(run=runs)
    def read_from_disk(self, run) -> None:
        tokens = _tokens(run)
        self.tree.fetch(tokens)
        self.fetched.update(tuple(tokens[:end]) for end in range(PAGE, len(tokens) + 1, PAGE))

    @rule(run=runs)
    def load_back(self, run) -> None:
        tokens = _tokens(run)
        self.tree.load_back(tokens)
        assert self.tree.kv(tokens) == tokens[: self.tree.match(tokens)]

    @rule()
    def flush(self) -> None:
        self.tree.settle()
        self.tree.cache.reset()
        self.tree.allocator.clear()

    @rule()
    def restart(self) -> None:
        self.tree.close()
        self.tree = self.begin()
        self.tree.request(self.time)

    @invariant()
    def everything_adds_up(self) -> None:
        if hasattr(self, "tree"):
            check(self.tree)
            self.books.check()
            self.tree.store.verify()

    @invariant()
    def what_is_known_of_a_node_is_its_history(self) -> None:
        if not hasattr(self, "tree"):
            return
        core = self.tree.core
        for node in core._node_arena.values():
            leaf = node.canopy
            if node is core.root_node or not leaf.hits:
                continue
            path = _path(core, node)
            for end in range(leaf.offset + PAGE, len(path) + 1, PAGE):
                page = tuple(path[:end])
                hits, created, last, category = self.history[page]
                known = (leaf.hits, leaf.created, leaf.category.partition("|")[0])
                assert known == (hits, created, category), (page, known)
                latest = self.time if page in self.fetched else last
                assert last <= leaf.last_access <= latest, (page, leaf.last_access)

    @invariant()
    def the_disk_has_the_same_history(self) -> None:
        if not hasattr(self, "tree"):
            return
        for path, (hits, *_) in self.history.items():
            (meta,) = self.tree.store.meta(self.tree.keys(list(path))[-1:])
            if meta is not None:
                assert meta.hits <= hits
                assert meta.created <= meta.last_access

    def teardown(self) -> None:
        if hasattr(self, "tree"):
            self.tree.close()
            shutil.rmtree(self.folder)
        PAGES.clear()


def _tokens(run: list[int]) -> list[int]:
    """Each element is a page; its tokens encode its position in the path, to detect mixed-up KV."""
    return [100 * at + 10 * name + i for at, name in enumerate(run) for i in range(PAGE)]


def _path(core, node) -> list[int]:
    parts = []
    while node is not core.root_node:
        parts.append(list(node.key.raw_token_ids()))
        node = node.parent
    return [token for part in reversed(parts) for token in part]


@pytest.fixture(autouse=True, scope="module")
def reported_at_once():
    before, disk_link.REPORT_INTERVAL_S = disk_link.REPORT_INTERVAL_S, 0.0
    yield
    disk_link.REPORT_INTERVAL_S = before


TestTiers = Tiers.TestCase
TestTiers.settings = settings(
    max_examples=settings.default.max_examples // 2,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestTiers = pytest.mark.timeout(300)(TestTiers)
