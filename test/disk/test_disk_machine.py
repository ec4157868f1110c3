"""Random operations on the store, compared with a slow reference store.

The policy is LRU and the clock advances before every operation, so that no two leaves have the same
time and only one victim is right."""

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sglang_canopy.disk.content import raw_key
from sglang_canopy.disk.page import PageMeta
from sglang_canopy.ttl.table import TTLTable
from support.disk_pages import PAGE_BYTES, PAGE_TOKENS, Clock, content, get, key_of, store_at
from support.disk_recount import count_bad_pages

CAPACITY_PAGES = 7
QUOTA_PAGES = 3
TTL_S = 40.0

PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple)


@dataclass
class Page:
    parent: tuple | None
    last_access: float
    ttl_s: float
    tenant: str | None


class ReferenceStore:
    """A simple disk store: pages by path, as tuples of numbers from the root."""

    def __init__(self) -> None:
        self.pages: dict[tuple, Page] = {}

    def leaf_paths(self, protected: set[tuple]) -> list[tuple]:
        parents = {page.parent for page in self.pages.values()}
        return [path for path in self.pages if path not in parents and path not in protected]

    def expiry_s(self, path: tuple) -> float:
        page = self.pages[path]
        return page.last_access + page.ttl_s

    def expire(self, now: float, protected: set[tuple]) -> int:
        expired_count = 0
        while expired := [p for p in self.leaf_paths(protected) if self.expiry_s(p) <= now]:
            for path in expired:
                del self.pages[path]
                expired_count += 1
        return expired_count

    def evict(self, protected: set[tuple], now: float, tenant: str | None = None) -> bool:
        leaves = self.leaf_paths(protected)
        leaves = [path for path in leaves if tenant in (None, self.pages[path].tenant)]
        if not leaves:
            return False
        del self.pages[min(leaves, key=lambda path: self.pages[path].last_access)]
        return True

    def is_over_quota(self, tenant: str | None, new_pages: list[tuple]) -> bool:
        """Return whether ``new_pages`` and one more page would exceed the quota."""
        pages = sum(page.tenant == tenant for page in self.pages.values()) + len(new_pages)
        return tenant is not None and pages + 1 > QUOTA_PAGES

    def write(self, path: tuple, now: float, ttl_s: float, tenant: str | None) -> list[bool]:
        accepted, new_pages, protected, has_expired = [], [], set(), False
        for depth in range(1, len(path) + 1):
            prefix, parent = path[:depth], path[: depth - 1] or None
            page = self.pages.get(prefix)
            if page is not None:
                page.last_access, page.ttl_s = now, ttl_s
                accepted.append(True)
                continue
            if parent is not None and parent not in self.pages and parent not in new_pages:
                accepted.append(False)
                continue
            if parent in self.pages:
                protected.add(parent)
            if self.is_over_quota(tenant, new_pages) and not has_expired:
                self.expire(now, protected)
                has_expired = True
            has_space = True
            while has_space and self.is_over_quota(tenant, new_pages):
                has_space = self.evict(protected, now, tenant)
            if has_space and len(self.pages) + len(new_pages) >= CAPACITY_PAGES and not has_expired:
                self.expire(now, protected)
                has_expired = True
            while has_space and len(self.pages) + len(new_pages) >= CAPACITY_PAGES:
                has_space = self.evict(protected, now)
            if has_space:
                new_pages.append(prefix)
            accepted.append(has_space)
        for prefix in new_pages:
            self.pages[prefix] = Page(prefix[:-1] or None, now, ttl_s, tenant)
        return accepted

    def leading_pages(self, path: tuple) -> list[tuple]:
        """Return the leading pages of ``path`` that are stored."""
        leading = []
        for depth in range(1, len(path) + 1):
            if path[:depth] not in self.pages:
                break
            leading.append(path[:depth])
        return leading


def keys_of(path: tuple) -> list[str]:
    return [key_of(path[:depth]) for depth in range(1, len(path) + 1)]


class DiskMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.clock = Clock()
        self.reference = ReferenceStore()
        self.open()

    def open(self) -> None:
        self.store = store_at(
            self.folder,
            pages=CAPACITY_PAGES,
            clock=self.clock,
            ttl=TTLTable(residual_ttl_s=TTL_S),
            quotas={"t": QUOTA_PAGES * PAGE_BYTES},
        )

    def advance_clock(self) -> float:
        self.clock.now += 1.5
        return self.clock.now

    @rule(path=PATHS, ttl_s=st.sampled_from([None, 5.0, 500.0]))
    def write(self, path, ttl_s):
        now, tenant = self.advance_clock(), "t" if path[0] else None
        keys = keys_of(path)
        metadata = [
            PageMeta(
                i * PAGE_TOKENS, PAGE_TOKENS, tenant=tenant, last_access=now, hits=1, ttl_s=ttl_s
            )
            for i in range(len(keys))
        ]
        contents = [content(key) for key in keys]
        accepted = self.store.write(keys, contents, metadata, [None, *keys[:-1]])
        expected = self.reference.write(path, now, TTL_S if ttl_s is None else ttl_s, tenant)
        assert accepted == expected

    @rule(path=PATHS)
    def read(self, path):
        now = self.advance_clock()
        leading = self.reference.leading_pages(path)
        assert get(self.store, keys_of(path)) == [i < len(leading) for i in range(len(path))]
        for prefix in leading:
            self.reference.pages[prefix].last_access = now

    @rule(path=PATHS)
    def look_up(self, path):
        now = self.advance_clock()
        leading = self.reference.leading_pages(path)
        unexpired = [len(prefix) for prefix in leading if self.reference.expiry_s(prefix) > now]
        assert self.store.count_leading(keys_of(path)) == max(unexpired, default=0)

    @rule(path=PATHS)
    def touch(self, path):
        now = self.advance_clock()
        leading = self.reference.leading_pages(path)
        assert self.store.touch(keys_of(path), PageMeta(last_access=now)) == len(leading)
        for prefix in leading:
            page = self.reference.pages[prefix]
            page.last_access, page.ttl_s = now, TTL_S

    @rule()
    def sweep(self):
        now = self.advance_clock()
        assert self.store.sweep() == self.reference.expire(now, set())

    @rule(pause_s=st.sampled_from([10.0, 100.0]))
    def wait(self, pause_s):
        self.clock.now += pause_s

    @rule()
    def clear(self):
        self.advance_clock()
        self.store.clear()
        self.reference.pages.clear()

    @rule()
    def reopen(self):
        self.store.close()
        self.open()

    @invariant()
    def the_same_pages_are_stored_unchanged(self):
        if not hasattr(self, "store"):
            return
        stored_keys = set(self.store.state.index.row_of)
        assert stored_keys == {raw_key(key_of(path)) for path in self.reference.pages}
        for path, page in self.reference.pages.items():
            assert page.parent is None or page.parent in self.reference.pages
            assert self.store.meta([key_of(path)])[0].last_access == page.last_access
        assert count_bad_pages(self.store) == 0

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.folder)


TestDiskMachine = DiskMachine.TestCase
examples = settings.default.max_examples // 2
TestDiskMachine.settings = settings(max_examples=examples, stateful_step_count=25)
