"""Host copies ahead of eviction: no page lost or freed twice, no KV mixed up, no wait."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_canopy.config.tiers import TierOptions
from sglang_canopy.policy.registry import live_names
from support.live_tree import LiveTree, check
from support.slow_link import SlowLink

ONE_TOKEN = {"quantum_tokens": 1}


class Running(LiveTree):
    """Copies to the host stay under way until a step hears that they are finished."""

    def settle(self) -> None:
        if self.cache.cache_controller is not None:
            self.cache.loading_check()


def copying(
    tokens: int = 32,
    host: int = 64,
    ahead: int | str | None = 8,
    policy: str = "canopy-lru",
    **more,
) -> LiveTree:
    """A tree that copies ahead, or with ``ahead=None`` SGLang's ``write_back`` as it is."""
    options = {"config": ONE_TOKEN, "write_policy": "write_back", **more}
    tiers = TierOptions(copy_ahead=ahead)
    return Running(tokens, policy, host_tokens=host, tiers=tiers, **options)


def step(tree: LiveTree) -> None:
    """What a scheduler does before each batch: hear what is finished, begin what is due."""
    tree.cache.check_hicache_events()


def path(name: int, count: int) -> list[int]:
    """KV is stored in half precision, which is exact for integers up to 2,048."""
    return [name * 100 + i for i in range(count)]


def check_copies(tree: LiveTree) -> None:
    """What is counted of the copies, recounted over the tree."""
    ahead, core = tree.core.ahead, tree.core
    assert ahead._covered == sum(len(node.key) for node in ahead._window)
    for node in ahead._window:
        assert core.contains(node)
        assert node.backuped
        assert not node.evicted
    outstanding = sum(
        len(n.key) for n in core._node_arena.values() if n.key and n.canopy.copied_ahead
    )
    counts = ahead.counts
    assert counts.copied == counts.used + counts.wasted + outstanding


def test_the_next_to_go_have_their_copy_and_go_without_a_wait() -> None:
    tree = copying(32, ahead=8)
    for name in range(1, 5):
        tree.serve(path(name, 8), time=name)
    step(tree)
    step(tree)
    step(tree)
    pool = tree.cache.cache_controller.mem_pool_host
    assert pool.size - pool.available_size() == 8  # the window, and nothing more
    tree.evict(8)
    assert tree.core.ahead.counts.stalls == 0
    assert tree.core.ahead.counts.used == 8
    assert tree.match(path(1, 8)) == 0
    assert tree.load_back(path(1, 8)) == 8
    assert tree.kv(path(1, 8)) == path(1, 8)
    check(tree)
    check_copies(tree)


def test_nothing_is_copied_while_the_device_has_room() -> None:
    tree = copying(64, ahead=8)
    for name in range(1, 5):
        tree.serve(path(name, 8), time=name)
        step(tree)
    assert tree.core.ahead.counts.copied == 0


def test_the_host_gives_up_copies_of_what_the_device_ranks_well_first() -> None:
    """Both tiers together hold as many different tokens as they have room for."""

    def held(ahead: int | None, write_policy: str) -> int:
        tree = copying(32, host=32, ahead=ahead, write_policy=write_policy)
        for turn in range(40):
            tree.serve(path(1 + turn % 12, 8), time=turn)
            for _ in range(4):
                step(tree)
        check(tree)
        full = ComponentType.FULL
        data = [n.component_data[full] for n in tree.core._node_arena.values() if n.key]
        return sum(len(d.value if d.value is not None else d.host_value) for d in data)

    assert held(None, "write_through") <= 40
    assert held(8, "write_back") >= 32 + 32 - 8


def test_an_eviction_that_overtakes_its_copy_waits_and_loses_nothing() -> None:
    tree = copying(16, ahead=16)
    link = SlowLink(tree.cache)
    tree.serve(path(1, 16), time=1)
    step(tree)
    assert tree.cache.ongoing_write_through
    tree.evict(16)
    assert tree.allocator.available_size() == 16
    assert tree.core.ahead.counts.stalls >= 1
    tree.compute(tree.allocator.alloc(16), path(9, 16))  # another's KV in the same slots
    link.carry()
    tree.allocator.clear()
    assert tree.load_back(path(1, 16)) == 16
    assert tree.kv(path(1, 16)) == path(1, 16)


def test_an_allocation_does_not_wait_for_copies_that_it_does_not_need() -> None:
    tree = copying(32, ahead=16)
    link = SlowLink(tree.cache)
    for name in range(1, 5):
        tree.serve(path(name, 8), time=name)
    step(tree)
    link.carry()
    step(tree)  # the first copies are there, more are on their way
    assert tree.cache.ongoing_write_through
    tree.cache.evict(EvictParams(num_tokens=4))
    assert tree.cache.ongoing_write_through
    assert tree.core.ahead.counts.stalls == 0
    assert link.waits == 0


def test_write_back_as_it_is_waits_at_every_eviction() -> None:
    tree = copying(32, ahead=None)
    link = SlowLink(tree.cache)
    for name in range(1, 5):
        tree.serve(path(name, 8), time=name)
    step(tree)
    tree.evict(8)
    assert link.waits >= 1


def test_a_leaf_without_a_copy_is_passed_over_for_the_next_that_has_one() -> None:
    tree = copying(32, ahead=8)
    for name in range(1, 5):
        tree.serve(path(name, 8), time=name)
    for _ in range(3):
        step(tree)
    assert next(n.key.raw_token_ids()[0] for n in tree.core.ahead._window) == 104
    # The policy changes its mind: another leaf is the next to go now.
    other = next(n for n in tree.core.evictable_device_leaves if n.key.raw_token_ids()[0] == 400)
    tree.core.readmit(other)
    other.canopy.created = other.canopy.last_access = 0.0
    tree.evict(4)
    assert tree.core.ahead.counts.stalls == 0
    assert tree.core.ahead.counts.passed_over == 1
    assert tree.match(path(4, 8)) == 8
    check(tree)
    check_copies(tree)


def test_a_full_host_that_may_give_up_nothing_leaves_eviction_as_it_was() -> None:
    tree = copying(32, host=8, ahead=16)
    locks = []
    for name in range(1, 9):
        tree.serve(path(name, 8), time=name)
        for _ in range(4):
            step(tree)
        check(tree)
        check_copies(tree)
    for node in list(tree.core.evictable_host_leaves):
        locks.append((node.id, tree.cache.inc_host_lock_ref(node.id).to_dec_params()))
    tree.evict(24)
    assert tree.allocator.available_size() >= 24
    for node_id, params in locks:
        tree.cache.dec_host_lock_ref(node_id, params)
    check(tree)
    check_copies(tree)


def test_a_full_host_keeps_the_copies_that_are_needed_next() -> None:
    tree = copying(32, host=32, ahead=8)
    for name in range(1, 17):
        tree.serve(path(name, 8), time=name)
        for _ in range(4):
            step(tree)
    counts = tree.core.ahead.counts
    assert (counts.stalls, counts.wasted) == (0, 0)
    assert counts.used >= 8 * 10
    check(tree)
    check_copies(tree)


@pytest.mark.parametrize("policy", ["canopy-lru", "wa", "s3fifo", "canopy-tlru"])
def test_looking_ahead_names_the_victims_that_come(policy: str) -> None:
    """Whole nodes, so that no cut changes the leaves; against the evictions themselves."""
    rng = random.Random(5)
    config = {"whole_nodes": True, "quantum_tokens": 1}
    tree = LiveTree(256, policy, config, host_tokens=512, write_policy="write_back")
    for turn in range(60):
        who = rng.randrange(10)
        prompt = path(who, 3) + path(10 + rng.randrange(5), rng.randrange(1, 9))
        tree.serve(prompt, time=turn, category=f"c{who % 2}")
    leaves = tree.core.evictable_device_leaves
    expected = [tuple(n.key.raw_token_ids()) for n, keep in leaves.lowest_ranked(120) if not keep]
    again = [tuple(n.key.raw_token_ids()) for n, keep in leaves.lowest_ranked(120) if not keep]
    assert expected == again
    check(tree)
    went = []
    demote = tree.core._demote

    def noted(node, *args, **kwargs):
        went.append(tuple(node.key.raw_token_ids()))
        demote(node, *args, **kwargs)

    tree.core._demote = noted
    tree.evict(100)
    assert len(went) > 5
    assert went == expected[: len(went)]


def served(
    tree: LiveTree, link: SlowLink, prompts: list[list[int]], known: bool, since: int = 0
) -> None:
    """Prompts one after the other. Between two the link has the time to carry what was begun.

    ``known``: each waits in the queue while the one before it is computed.
    """
    for time, prompt in enumerate(prompts, since):
        request = tree.request(time, prompt_tokens=len(prompt))
        if known:
            key = RadixKey(array("q", prompt), None)
            hit = tree.cache.match_prefix(MatchPrefixParams(key=key))
            tree.core.protect_awaited(tree.core.node_by_id(hit.best_match_node), request)
            tree.core.ahead.expect(len(prompt) - hit.device_prefix_len)
        step(tree)
        link.carry()
        step(tree)
        request.cached_tokens = tree.match(prompt)
        tree.core.finish(request)
        tree.insert(prompt, request)
        check_copies(tree)


def test_the_first_evictions_find_their_copies() -> None:
    """The size of a step shows while the device fills, before any eviction."""
    tree = copying(64, host=64, ahead="auto")
    link = SlowLink(tree.cache)
    served(tree, link, [path(1 + name, 5) for name in range(19)], known=False)
    counts = tree.core.ahead.counts
    assert counts.used > 0
    assert (counts.stalls, link.waits) == (0, 0)
    check(tree)


def test_a_long_prompt_that_waits_has_its_room_ready() -> None:
    """Short prompts for long, then one of a fifth of the device."""
    tree = copying(80, host=80, ahead="auto")
    link = SlowLink(tree.cache)
    short = [path(1 + i % 15, 2) for i in range(60)]
    served(tree, link, [*(path(30 + i, 2) for i in range(40)), *short, path(16, 16)], known=True)
    assert (tree.core.ahead.counts.stalls, link.waits) == (0, 0)
    check(tree)


def test_steps_of_one_token_do_not_make_the_window_forget_the_prompts() -> None:
    """Between two prompts a server decodes: many steps that each take a token."""
    tree = copying(128, host=128, ahead="auto")
    link = SlowLink(tree.cache)
    for turn in range(16):
        served(tree, link, [path(1 + turn, 14)], known=False, since=turn)
        slots = []
        for _ in range(40):
            step(tree)
            if tree.allocator.available_size() < 1:
                tree.evict(1)
            if len(slots) > 3:
                tree.allocator.free(slots.pop(0))
            slots.append(tree.allocator.alloc(1))
            link.carry()
        for slot in slots:
            tree.allocator.free(slot)
    assert (tree.core.ahead.counts.stalls, link.waits) == (0, 0)


@pytest.mark.parametrize("policy", ["canopy-lru", "wa"])
def test_no_stall_on_prompts_of_up_to_a_fifth_of_the_device(policy: str) -> None:
    """Conversations that grow, on a host of the device's size, with a link that has the time."""
    rng = random.Random(11)
    tree = copying(200, host=200, ahead="auto", policy=policy)
    link = SlowLink(tree.cache)
    conversations: list[list[int]] = []
    prompts = []
    for turn in range(300):
        if len(conversations) < 12 or rng.random() < 0.2:
            conversations.append(path(turn, 1 + rng.randrange(20)))
        chosen = rng.choice(conversations[-12:])
        prompts.append(list(chosen))
        chosen += path(300 + turn, 1 + rng.randrange(8))
        del chosen[40:]
    served(tree, link, prompts, known=True)
    assert tree.core.ahead.counts.used > 1000
    assert (tree.core.ahead.counts.stalls, link.waits) == (0, 0)
    check(tree)


def test_two_runs_decide_alike() -> None:
    def run() -> tuple:
        rng = random.Random(3)
        tree = copying(64, host=96, ahead="auto", policy="wa")
        hits = []
        for i in range(150):
            who = rng.randrange(12)
            prompt = path(who, 4) + path(20 - who, rng.randrange(1, 20))
            hits.append(tree.load_back(prompt))
            hits.append(tree.serve(prompt, time=float(i), category=f"c{who % 3}"))
            for _ in range(rng.randrange(3)):
                step(tree)
        check(tree)
        check_copies(tree)
        return hits, tree.core.counters.victims.sum, tree.core.ahead.status()

    assert run() == run()


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=10)


def test_a_flush_counts_the_copies_that_nothing_will_use() -> None:
    tree = copying(16, ahead=6)
    for name in range(2):
        tree.serve(path(name, 8), time=name)
    step(tree)
    tree.settle()
    copied = tree.core.ahead.counts.copied
    tree.cache.reset()
    tree.allocator.clear()
    assert copied > 0
    assert tree.core.ahead.counts.wasted == copied
    check_copies(tree)


class Copies(RuleBasedStateMachine):
    """Serve, abort, evict, load, step and flush, over a link that carries when it likes."""

    @initialize(
        policy=st.sampled_from(live_names()),
        page=st.sampled_from([1, 64]),
        host=st.sampled_from([6, 16, 64]),
        ahead=st.sampled_from([1, 6, 24, "auto"]),
        whole=st.booleans(),
    )
    def start(self, policy, page, host, ahead, whole) -> None:
        config = {"quantum_tokens": 1, "whole_nodes": whole}
        window = ahead if ahead == "auto" else ahead * page
        self.page = page
        self.tree = copying(24 * page, host * page, window, policy, config=config, page_size=page)
        self.link = SlowLink(self.tree.cache)
        self.time = 0.0
        self.locks: list = []

    def tokens(self, names: list[int]) -> list[int]:
        """A page for each name; the first token says where in the path it is."""
        return [
            (at * 3 + name) * self.page % 2000 + i
            for at, name in enumerate(names)
            for i in range(self.page)
        ]

    def room(self, pages: int) -> bool:
        cache = self.tree.cache
        held = sum(
            len(one.component_data[ComponentType.FULL].value)
            for one in self.tree.core._node_arena.values()
            if one.key and one.write_through_pending_id is not None and not one.evicted
        )
        free = self.tree.allocator.available_size() + cache.evictable_size()
        return not self.locks or free - held >= pages * self.page

    @rule(
        names=prompts,
        wait=st.sampled_from([0.0, 0.5, 60.0]),
        category=st.sampled_from(["chat", "api"]),
        over=st.booleans(),
    )
    def serve(self, names, wait, category, over) -> None:
        if not self.room(len(names)):
            return
        self.time += wait
        tokens = self.tokens(names)
        tree = self.tree
        tree.serve(tokens, time=self.time, category=category, over=over)
        assert tree.match(tokens) == len(tokens)
        assert tree.kv(tokens) == tokens

    @rule(names=prompts)
    def begin(self, names) -> None:
        """A request that holds what it found; it may be aborted, and then inserts nothing."""
        key = RadixKey(array("q", self.tokens(names)), None)
        hit = self.tree.cache.match_prefix(MatchPrefixParams(key=key))
        if hit.device_prefix_len and not self.locks:
            self.locks.append(self.tree.cache.lock(hit.last_device_node))

    @rule()
    def abort(self) -> None:
        if self.locks:
            self.tree.cache.unlock(self.locks.pop())

    @rule(pages=st.integers(1, 24))
    def evict(self, pages) -> None:
        before = self.tree.allocator.available_size()
        could = self.tree.cache.evictable_size()
        self.tree.evict(pages * self.page)
        freed = self.tree.allocator.available_size() - before
        assert freed >= min(pages * self.page, could) // self.page * self.page

    @rule()
    def step(self) -> None:
        step(self.tree)

    @rule()
    def carry(self) -> None:
        self.link.carry()

    @rule(names=prompts)
    def load_back(self, names) -> None:
        if self.locks:
            return
        tokens = self.tokens(names)
        self.tree.load_back(tokens)
        found = self.tree.match(tokens)
        assert self.tree.kv(tokens) == tokens[:found]

    @rule()
    def flush(self) -> None:
        if not self.locks:
            self.link.carry()
            LiveTree.settle(self.tree)
            self.tree.cache.reset()
            self.tree.allocator.clear()

    @invariant()
    def everything_adds_up(self) -> None:
        if hasattr(self, "tree"):
            check(self.tree)
            check_copies(self.tree)


TestCopies = Copies.TestCase
TestCopies.settings = settings(
    max_examples=60,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestCopies = pytest.mark.timeout(300)(TestCopies)
