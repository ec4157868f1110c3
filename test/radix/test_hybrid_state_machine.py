"""Random operations on trees with windows and states: every pool is recounted after each one."""

from typing import NamedTuple

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule
from sglang.srt.mem_cache.base_prefix_cache import TreeLock

from sglang_canopy.policy.registry import live_names
from support.kit_tree import FULL, HYBRIDS, MAMBA, SWA, KitTree
from support.policy_rules import PolicyRules

NUMBERS = st.lists(st.integers(0, 2), min_size=1, max_size=5)


class HeldLock(NamedTuple):
    lock: TreeLock
    slots: list[int]


class HybridTreeMachine(PolicyRules):
    """Serve, look up, lock with and without the state, release windows early, evict KV, windows and states."""

    @initialize(
        hybrid=st.sampled_from(list(HYBRIDS)),
        policy=st.sampled_from(live_names()),
        write_policy=st.sampled_from([None, "write_through", "write_back"]),
        host_ratio=st.sampled_from([0.7, 2.0]),
    )
    def start(self, hybrid, policy, write_policy, host_ratio) -> None:
        self.tree = KitTree(hybrid, policy, write_policy, host_ratio)
        self.time = 0.0
        self.locks: list[HeldLock] = []

    def _tokens(self, numbers: list[int]) -> list[int]:
        """Return two pages of tokens for each number (three tokens if a page has one)."""
        page_tokens = self.tree.cache_config.page_size
        tokens_per_number = 3 if page_tokens == 1 else 2 * page_tokens
        return [100 * number + i for number in numbers for i in range(tokens_per_number)]

    @rule(
        numbers=NUMBERS,
        pause_s=st.sampled_from([0.0, 0.5, 60.0]),
        category=st.sampled_from(["chat", "api"]),
        turn=st.integers(1, 3),
        over=st.booleans(),
    )
    def serve(self, numbers, pause_s, category, turn, over) -> None:
        tokens, tree = self._tokens(numbers), self.tree
        if tree.obtainable_tokens() < len(tokens):
            return
        if tree.has_mamba and not tree.available_slots(MAMBA) + tree.core.mamba_evictable_size():
            return
        self.time += pause_s
        tree.serve(tokens, self.time, category=category, turn=turn, over=over)
        assert tree.match(tokens).device_prefix_len == len(tokens)

    @rule(numbers=NUMBERS)
    def load_back(self, numbers) -> None:
        if self.tree.write_policy is not None:
            self.tree.load_back(self._tokens(numbers))

    @rule(numbers=NUMBERS)
    def look_up(self, numbers) -> None:
        tokens = self._tokens(numbers)
        assert 0 <= self.tree.match(tokens).device_prefix_len <= len(tokens)

    @rule(numbers=NUMBERS, skips_state=st.booleans())
    def lock(self, numbers, skips_state) -> None:
        if len(self.locks) > 1:
            return
        tokens = self._tokens(numbers)
        match = self.tree.match(tokens)
        lock = self.tree.lock(tokens, skips_state)
        if lock is not None:
            slots = self.tree.cache.path_device_indices(match.last_device_node).tolist()
            self.locks.append(HeldLock(lock, slots))

    @rule()
    def unlock(self) -> None:
        if self.locks:
            self.tree.cache.unlock(self.locks.pop().lock)

    @rule()
    def release_window(self) -> None:
        if self.locks and self.tree.has_swa:
            lock = self.locks[-1].lock
            if lock.receipt.component_lock_uuids.get(SWA) is not None:
                self.tree.cache.release_swa(lock)

    @rule(full=st.integers(0, 30), swa=st.integers(0, 30), mamba=st.integers(0, 3))
    def evict(self, full, swa, mamba) -> None:
        self.tree.evict(full, swa if self.tree.has_swa else 0, mamba if self.tree.has_mamba else 0)

    @invariant()
    def locked_slots_stay(self) -> None:
        for held in getattr(self, "locks", ()):
            assert set(held.slots) <= set(self.tree.slots(FULL))

    @invariant()
    def recounts_are_equal(self) -> None:
        if hasattr(self, "tree"):
            self.tree.recount()

    def teardown(self) -> None:
        if hasattr(self, "tree"):
            self.tree.close()


TestHybridTree = HybridTreeMachine.TestCase
TestHybridTree.settings = settings(
    max_examples=settings.default.max_examples // 2,
    stateful_step_count=25,
    suppress_health_check=list(HealthCheck),
)
