"""The simulator of hybrid models against SGLang's cache on real pools: the same requests, the same hits.

States are scarce and KV is not, so the choice of the evicted state decides. If KV is scarce too, the
simulator frees memory for the new tokens of a prompt, and SGLang for all tokens it computes.
"""

import itertools
from array import array

import pytest
from hybrid.tree import HybridTree as SimulatedTree
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_canopy.policy.registry import make_policy
from sglang_canopy.policy.states import ORDERS
from sglang_canopy.radix.live_request import LiveRequest, extend_path
from support.hybrid_tree import MAMBA, HybridTree
from support.readmission import Readmission

BLOCK = 64
"""Tokens; SGLang's grid of branching points."""
BLOCKS = 160
steps = st.lists(
    st.tuples(st.text("ab", min_size=1, max_size=5), st.sampled_from([1.0, 30.0])),
    min_size=1,
    max_size=24,
)


def tokens_of(names: str) -> list[int]:
    """A block's tokens encode its position in the prompt."""
    return [
        1000 * place + 100 * (name == "b") + token
        for place, name in enumerate(names)
        for token in range(BLOCK)
    ]


def request_of(tokens: list[int], time: float) -> LiveRequest:
    request = LiveRequest(time=time, prompt_tokens=len(tokens), category="chat")
    request.block_tokens, request.path = BLOCK, []
    extend_path(request, tokens)
    return request


def serve(tree: HybridTree, tokens: list[int], request: LiveRequest | None) -> int:
    """Serve as the scheduler does: a state at SGLang's branching point, and a state at the end."""
    core, cache = tree.core, tree.cache
    if request is not None:
        core.requests.arrive(request)
    found = tree.match(tokens)
    if request is not None:
        request.cached_tokens = found.device_prefix_len
        core.requests.finish(request)
    lock = None if not found.device_prefix_len else cache.lock(found.last_device_node)
    ends = {found.mamba_branching_seqlen or len(tokens), len(tokens)}
    for end in sorted(ends - {found.device_prefix_len}):
        tree.evict(mamba=1 - tree.available(MAMBA))
        value = tree.steps._alloc(tree.allocator, end)
        params = InsertParams(key=RadixKey(array("q", tokens[:end])), value=value)
        params.mamba_value = tree.pool.mamba_allocator.alloc(1)
        core.inserting = request
        result = cache.insert(params)
        core.inserting = None
        if result.mamba_exist:
            tree.pool.mamba_allocator.free(params.mamba_value)
    if lock is not None:
        cache.unlock(lock)
    return found.device_prefix_len


@pytest.mark.parametrize(
    ("core", "states"), [("sglang", "lru"), ("canopy-lru", "lru"), ("wa", "lru"), ("wa", "worth")]
)
@given(prompts=steps, slots=st.integers(3, 6), seed=st.integers(0, 99))
@settings(max_examples=20)
def test_hits_are_those_of_sglangs_cache(core, states, prompts, slots, seed) -> None:
    """Leaves are re-admitted at random between the requests, which decides nothing."""
    live = HybridTree("mamba", core, states, kv_size=BLOCKS * BLOCK, mamba_cache_size=slots)
    simulated = SimulatedTree(
        make_policy("wa" if core == "wa" else "lru"), ORDERS[states](), BLOCKS, slots, BLOCK
    )
    times = itertools.accumulate(wait for _, wait in prompts)
    readmission = None if core == "sglang" else Readmission(live.core, seed, seed)
    for (names, _), time in zip(prompts, times):
        if readmission is not None:
            readmission()
        tokens = tokens_of(names)
        hit = serve(live, tokens, None if core == "sglang" else request_of(tokens, time))
        assert simulated.access(request_of(tokens, time)) * BLOCK == hit, names
        assert len(simulated.states) == len(live.values(MAMBA))
        simulated.verify()
    live.recount()
