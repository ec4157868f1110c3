"""SGLang's KV events with our tree: a listener can track the cached prefixes and their tiers."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from sglang.srt.disaggregation.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    StorageMedium,
)
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_canopy.config.tiers import TierOptions
from sglang_canopy.radix.live_request import RequestPhase
from sglang_canopy.ttl.table import TTLTable
from support.live_tree import LiveTree, check_tree
from support.tier_books import TierBooks

PAGE_TOKENS = 2
GPU, CPU = StorageMedium.GPU.value, StorageMedium.CPU.value
Prefixes = set[tuple[str | None, tuple[int, ...]]]


def cached_prefixes(tree: LiveTree, medium: str) -> Prefixes:
    """Every cached prefix that ends at a page, with its salt."""
    prefixes: Prefixes = set()

    def visit(node: Any, prefix: tuple[int, ...]) -> None:
        tokens = prefix + tuple(node.key.raw_token_ids() if node.parent is not None else ())
        component_data = node.component_data[ComponentType.FULL]
        slots = component_data.value if medium == GPU else component_data.host_value
        if node.parent is not None and slots is not None:
            ends = range(len(prefix) + PAGE_TOKENS, len(tokens) + 1, PAGE_TOKENS)
            prefixes.update((node.key.cache_salt, tokens[:end]) for end in ends)
        for child in node.children.values():
            visit(child, tokens)

    visit(tree.core.root_node, ())
    return prefixes


def serve(tree: LiveTree, tokens: list[int], time: float, salt: str | None, **fields: Any) -> None:
    request = tree.request(time, prompt_tokens=len(tokens), tenant=salt, **fields)
    tree.core.requests.finish(request)
    request.phase = RequestPhase.DONE
    tree.insert(tokens, request, salt)


def path_tokens(numbers: list[int]) -> list[int]:
    """Tokens of a path: equal beginnings are shared."""
    return [100 * i + token for i, token in enumerate(numbers) for _ in range(PAGE_TOKENS)]


class Listener:
    """The cached blocks of a server, as a router computes them from events alone."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, tuple[int, ...], str | None]] = {}
        """Block's hash -> its parent's hash, its tokens, its salt."""
        self.blocks_by_medium: dict[str, set[int]] = {GPU: set(), CPU: set()}

    def apply(self, event: Any) -> None:
        if isinstance(event, AllBlocksCleared):
            self.blocks.clear()
            for blocks in self.blocks_by_medium.values():
                blocks.clear()
        elif isinstance(event, BlockStored):
            parent, block_size = event.parent_block_hash, event.block_size
            assert parent is None or parent in self.blocks, "stored below an unknown block"
            for i, block in enumerate(event.block_hashes):
                tokens = tuple(event.token_ids[i * block_size : (i + 1) * block_size])
                self.blocks[block] = (parent, tokens, event.cache_salt)
                self.blocks_by_medium[event.medium or GPU].add(block)
                parent = block
        elif isinstance(event, BlockRemoved):
            blocks = self.blocks_by_medium[event.medium or GPU]
            assert blocks >= set(event.block_hashes), "removed an unknown block"
            blocks -= set(event.block_hashes)
            for block in set(event.block_hashes) - set().union(*self.blocks_by_medium.values()):
                del self.blocks[block]

    def cached(self, medium: str) -> Prefixes:
        """Every cached prefix that ends at a page, with its salt."""
        return {self._path(block) for block in self.blocks_by_medium[medium]}

    def _path(self, block: int) -> tuple[str | None, tuple[int, ...]]:
        parent, tokens, salt = self.blocks[block]
        return salt, tokens if parent is None else self._path(parent)[1] + tokens


NUMBERS = st.lists(st.integers(0, 2), min_size=1, max_size=7)
PAUSE_S = st.sampled_from([0.5, 20.0])


class EventsMachine(RuleBasedStateMachine):
    """After each serve, cut, demotion, load, expiry and flush, the listener's state equals the tree."""

    @initialize(
        policy=st.sampled_from(["canopy-lru", "wa", "threshold-lru", "canopy-tlru"]),
        host_tokens=st.sampled_from([0, 48]),
        write_policy=st.sampled_from(["write_through", "write_back"]),
        ttl_s=st.sampled_from([None, 5.0]),
    )
    def start(self, policy, host_tokens, write_policy, ttl_s) -> None:
        table = TTLTable(residual_ttl_s=ttl_s) if ttl_s and host_tokens else None
        self.tree = LiveTree(
            32,
            policy,
            {"quantum_tokens": 1},
            PAGE_TOKENS,
            host_tokens=host_tokens,
            write_policy=write_policy,
            tiers=TierOptions(host_ttl=table),
            emits_kv_events=True,
        )
        self.books, self.listener, self.time = TierBooks(self.tree.core), Listener(), 0.0

    @rule(numbers=NUMBERS, salt=st.sampled_from([None, None, "a"]), pause_s=PAUSE_S)
    def serve(self, numbers, salt, pause_s) -> None:
        self.time += pause_s
        serve(self.tree, path_tokens(numbers), self.time, salt)

    @rule(tokens=st.integers(1, 40))
    def evict(self, tokens) -> None:
        self.tree.evict(tokens)

    @rule(numbers=NUMBERS)
    def look_up(self, numbers) -> None:
        self.tree.match(path_tokens(numbers))

    @rule(numbers=NUMBERS)
    def load_back(self, numbers) -> None:
        self.tree.load_back(path_tokens(numbers))

    @rule()
    def flush(self) -> None:
        self.tree.settle()
        self.tree.cache.reset()
        self.tree.allocator.clear()

    @invariant()
    def the_listener_equals_the_tree(self) -> None:
        if not hasattr(self, "tree"):
            return
        self.tree.settle()
        for event in self.tree.cache.take_events():
            self.listener.apply(event)
        for medium in (GPU, CPU):
            assert self.listener.cached(medium) == cached_prefixes(self.tree, medium)
        check_tree(self.tree)
        self.books.check()


TestEvents = EventsMachine.TestCase
TestEvents.settings = settings(stateful_step_count=20)
