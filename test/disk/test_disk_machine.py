"""Random uses of the store against a plain dict that does the same the slow way.

With LRU and a clock that moves before every step no two tips were used at the same time, so the
dict knows exactly which page is to go.
"""

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
from support.disk_pages import PAGE, TOKENS, Clock, content, get, page_key, store_at
from support.disk_recount import bad_pages

PAGES = 7
QUOTA_PAGES = 3
TTL_S = 40.0

PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple)


@dataclass
class Page:
    parent: tuple | None
    last: float
    ttl_s: float
    tenant: str | None


class ReferenceStore:
    """The store as a dict."""

    def __init__(self) -> None:
        self.pages: dict[tuple, Page] = {}

    def tips(self, held: set[tuple]) -> list[tuple]:
        parents = {p.parent for p in self.pages.values()}
        return [path for path in self.pages if path not in parents and path not in held]

    def expires(self, path: tuple) -> float:
        page = self.pages[path]
        return page.last + page.ttl_s

    def expire(self, now: float, held: set[tuple]) -> int:
        gone = 0
        while expired := [p for p in self.tips(held) if self.expires(p) <= now]:
            for path in expired:
                del self.pages[path]
                gone += 1
        return gone

    def evict(self, held: set[tuple], now: float, tenant: str | None = None) -> bool:
        tips = [p for p in self.tips(held) if tenant in (None, self.pages[p].tenant)]
        if not tips:
            return False
        del self.pages[min(tips, key=lambda p: self.pages[p].last)]
        return True

    def write(self, path: tuple, now: float, ttl_s: float, tenant: str | None) -> list[bool]:
        ok, coming, held, expired_once = [], [], set(), False
        for depth in range(1, len(path) + 1):
            part, parent = path[:depth], path[: depth - 1] or None
            page = self.pages.get(part)
            if page is not None:
                page.last, page.ttl_s = now, ttl_s
                ok.append(True)
                continue
            if parent is not None and parent not in self.pages and parent not in coming:
                ok.append(False)
                continue
            if parent in self.pages:
                held.add(parent)
            mine = sum(p.tenant == tenant for p in self.pages.values()) + len(coming)
            fits = True
            while fits and tenant is not None and mine + 1 > QUOTA_PAGES:
                fits = self.evict(held, now, tenant)
                mine -= 1
            if fits and len(self.pages) + len(coming) >= PAGES and not expired_once:
                self.expire(now, held)
                expired_once = True
            while fits and len(self.pages) + len(coming) >= PAGES:
                fits = self.evict(held, now)
            if fits:
                coming.append(part)
            ok.append(fits)
        for part in coming:
            self.pages[part] = Page(part[:-1] or None, now, ttl_s, tenant)
        return ok

    def leading_pages(self, path: tuple) -> list[tuple]:
        """Return the leading pages of ``path`` that are stored."""
        prefix = []
        for depth in range(1, len(path) + 1):
            if path[:depth] not in self.pages:
                break
            prefix.append(path[:depth])
        return prefix


def keys_of(path: tuple) -> list[str]:
    return [page_key(path[:depth]) for depth in range(1, len(path) + 1)]


class DiskMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.clock = Clock()
        self.reference = ReferenceStore()
        self.open()

    def open(self) -> None:
        self.store = store_at(
            self.folder,
            pages=PAGES,
            now=self.clock,
            ttl=TTLTable(residual_ttl_s=TTL_S),
            quotas={"t": QUOTA_PAGES * PAGE},
        )

    def step(self) -> float:
        self.clock.now += 1.5
        return self.clock.now

    @rule(path=PATHS, ttl_s=st.sampled_from([None, 5.0, 500.0]))
    def write(self, path, ttl_s):
        now, tenant = self.step(), "t" if path[0] else None
        keys = keys_of(path)
        meta = [
            PageMeta(i * TOKENS, TOKENS, tenant=tenant, last_access=now, hits=1, ttl_s=ttl_s)
            for i in range(len(keys))
        ]
        ok = self.store.write(keys, [content(k) for k in keys], meta, [None, *keys[:-1]])
        expected = self.reference.write(path, now, TTL_S if ttl_s is None else ttl_s, tenant)
        assert ok == expected

    @rule(path=PATHS)
    def read(self, path):
        now = self.step()
        run = self.reference.leading_pages(path)
        assert get(self.store, keys_of(path)) == [i < len(run) for i in range(len(path))]
        for part in run:
            self.reference.pages[part].last = now

    @rule(path=PATHS)
    def look(self, path):
        now = self.step()
        run = self.reference.leading_pages(path)
        alive = [i for i, part in enumerate(run, 1) if self.reference.expires(part) > now]
        assert self.store.leading(keys_of(path)) == max(alive, default=0)

    @rule(path=PATHS)
    def touch(self, path):
        now = self.step()
        run = self.reference.leading_pages(path)
        meta = PageMeta(last_access=now)
        assert self.store.touch(keys_of(path), meta) == len(run)
        for part in run:
            page = self.reference.pages[part]
            page.last, page.ttl_s = now, TTL_S

    @rule()
    def sweep(self):
        now = self.step()
        assert self.store.sweep() == self.reference.expire(now, set())

    @rule(seconds=st.sampled_from([10.0, 100.0]))
    def wait(self, seconds):
        self.clock.now += seconds

    @rule()
    def clear(self):
        self.step()
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
        stored_keys = set(self.store.state.index.rows)
        assert stored_keys == {raw_key(page_key(path)) for path in self.reference.pages}
        for path, page in self.reference.pages.items():
            assert page.parent is None or page.parent in self.reference.pages
            assert self.store.meta([page_key(path)])[0].last_access == page.last
        assert bad_pages(self.store) == 0

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.folder)


TestDiskMachine = DiskMachine.TestCase
TestDiskMachine.settings = settings(
    max_examples=settings.default.max_examples // 2, stateful_step_count=25
)
