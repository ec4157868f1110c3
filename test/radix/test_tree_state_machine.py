"""Random operations on a live tree: everything is recounted after each one."""

from array import array

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_canopy.policy.registry import live_names
from support.live_tree import LiveTree, check
from support.policy_rules import PolicyRules

prompts = st.lists(st.integers(0, 2), min_size=1, max_size=14)


class Tree(PolicyRules):
    """Serve, look up, pin, evict, move between the tiers, flush."""

    @initialize(
        policy=st.sampled_from(live_names()),
        page=st.sampled_from([1, 2]),
        host=st.sampled_from([0, 64]),
        write=st.sampled_from(["write_through", "write_back"]),
        whole=st.booleans(),
    )
    def start(self, policy: str, page: int, host: int, write: str, whole: bool) -> None:
        config = {"quantum_tokens": 1, "whole_nodes": whole}
        self.tree = LiveTree(
            32, policy, config, page, host_tokens=host, write_policy=write, floor=True
        )
        self.time = 0.0
        self.locks: list = []
        self.pinned: dict = {}

    def _room(self) -> bool:
        free = self.tree.allocator.available_size() + self.tree.cache.evictable_size()
        return free >= 16

    @rule(
        tokens=prompts,
        wait=st.sampled_from([0.0, 0.5, 3.0, 60.0]),
        category=st.sampled_from(["chat", "api"]),
        turn=st.integers(1, 3),
        stop=st.sampled_from([None, "tool", "end"]),
        over=st.booleans(),
        back=st.sampled_from([None, 1.0, 30.0]),
    )
    def serve(self, tokens, wait, category, turn, stop, over, back) -> None:
        if not self._room():
            return
        self.time += wait
        self.tree.serve(
            tokens,
            time=self.time,
            category=category,
            turn=turn,
            stop=stop,
            over=over,
            return_in_s=back,
        )
        assert self.tree.match(tokens) == len(tokens) // self.tree.page_size * self.tree.page_size

    @rule(tokens=prompts)
    def look_up(self, tokens) -> None:
        assert 0 <= self.tree.match(tokens) <= len(tokens)

    @rule(tokens=prompts)
    def pin(self, tokens) -> None:
        key = RadixKey(array("q", tokens), None)
        hit = self.tree.cache.match_prefix(MatchPrefixParams(key=key))
        if hit.device_prefix_len and len(self.locks) < 2:
            self.locks.append(self.tree.cache.lock(hit.last_device_node))
            self.pinned[tuple(tokens[: hit.device_prefix_len])] = self.locks[-1]

    @rule()
    def unpin(self) -> None:
        if self.locks:
            lock = self.locks.pop()
            self.tree.cache.unlock(lock)
            self.pinned = {k: v for k, v in self.pinned.items() if v is not lock}

    @rule(tokens=st.integers(1, 40))
    def evict(self, tokens) -> None:
        self.tree.evict(tokens)
        self.tree.settle()

    @rule(tokens=prompts)
    def load_back(self, tokens) -> None:
        if self.tree.cache.cache_controller is not None:
            self.tree.load_back(tokens)

    @rule()
    def flush(self) -> None:
        if not self.locks:
            self.tree.cache.reset()
            self.tree.allocator.clear()

    @invariant()
    def pinned_prefixes_stay(self) -> None:
        for tokens in getattr(self, "pinned", {}):
            assert self.tree.match(list(tokens)) == len(tokens)

    @invariant()
    def everything_adds_up(self) -> None:
        if hasattr(self, "tree"):
            check(self.tree)


TestTree = Tree.TestCase
TestTree.settings = settings(
    max_examples=settings.default.max_examples,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestTree = pytest.mark.timeout(300)(TestTree)
