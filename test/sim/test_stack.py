"""One pass computes LRU at every capacity; it equals simulation exactly."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from canopy_lab.sim.driver import simulate
from canopy_lab.sim.stack import lru_curve
from sglang_canopy.policy.registry import make_policy
from support.trace_samples import random_trace, single_block_trace


@pytest.mark.parametrize("batch_accesses", [1 << 19, 7])
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 6))]
)
def test_every_capacity_equals_the_simulation(seed, batch_accesses):
    trace = random_trace(seed)
    curve = lru_curve(trace, batch_accesses=batch_accesses)
    for capacity in range(1, curve.distinct_blocks + 2):
        lru = simulate(trace, make_policy("lru"), capacity)
        assert curve.block_hits(capacity) == lru.block_hits
        assert curve.token_hits(capacity) == lru.token_hits


@settings(max_examples=settings.default.max_examples // 2)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=80), st.integers(1, 14))
def test_flat_traces_equal_a_list_that_moves_to_front(ids, capacity):
    recent_blocks, hits = [], 0
    for block in ids:
        hits += block in recent_blocks[:capacity]
        if block in recent_blocks:
            recent_blocks.remove(block)
        recent_blocks.insert(0, block)
    assert lru_curve(single_block_trace(ids), batch_accesses=9).block_hits(capacity) == hits
