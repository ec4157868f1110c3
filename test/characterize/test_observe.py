"""Counts of the single pass, by hand on tiny traces and against a slow recount."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from canopy_lab.characterize.observe import FINE_EDGES, TOP_TURN, edges_within, observe
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.errors import CanopyError
from sglang_canopy.reuse.survival import AGE_EDGES_S
from support.tiny_traces import THREE_CONVERSATIONS, request_of


def test_a_block_behind_a_miss_is_stranded_and_not_a_hit() -> None:
    counts = observe([request_of(0, [1, 2, 3]), request_of(5, [7, 2, 3])])
    assert counts.hits.tolist() == [0, 0]
    assert counts.stranded == 2
    assert counts.distinct_blocks == 4


def test_a_block_twice_in_one_prompt_is_no_reuse() -> None:
    counts = observe([request_of(0, [1, 1]), request_of(5, [2])])
    assert counts.hits.tolist() == [0, 0]
    assert counts.distinct_blocks == 2


def test_reuse_ages_are_counted_for_the_category_that_used_the_block_last() -> None:
    counts = observe(THREE_CONVERSATIONS)
    text_row, file_row = (counts.labels.index(label) * TOP_TURN for label in ("text", "file"))
    blocks = counts.reused_blocks
    reused_blocks_by_category = np.bincount(counts.category[counts.reused_from], blocks)
    age_sums_s = np.bincount(counts.category[counts.reused_from], blocks * counts.reuse_age_s)
    # b hits 1 after a's first turn; a's turn 2 hits 1 after b, 2 after itself.
    assert reused_blocks_by_category[text_row] == 2
    assert reused_blocks_by_category[file_row] == 1
    assert reused_blocks_by_category[text_row + 1] == 3
    assert age_sums_s[[text_row, file_row, text_row + 1]].tolist() == [40.0, 20.0, 210.0]


def test_a_request_refers_to_its_continuation() -> None:
    assert observe(THREE_CONVERSATIONS).next_request.tolist() == [2, -1, 4, -1, -1]


def test_a_trace_without_ids_has_none() -> None:
    counts = observe([request_of(0, [1]), request_of(1, [1])])
    assert not counts.has_turns
    assert not counts.has_users
    assert not counts.has_conversations
    assert counts.category_name(0) == "text"


def test_an_empty_trace_and_mixed_block_sizes_are_refused() -> None:
    with pytest.raises(CanopyError, match="no requests"):
        observe([])
    with pytest.raises(CanopyError, match="one block size"):
        observe([request_of(0, [1]), request_of(1, [2], block_tokens=16)])


def test_the_fine_bins_refine_those_of_the_policies() -> None:
    assert set(AGE_EDGES_S) <= set(FINE_EDGES.tolist())
    assert (np.diff(FINE_EDGES) > 0).all()
    assert edges_within(0.0) == 2
    assert FINE_EDGES[edges_within(60.0) - 1] <= 60.0 < FINE_EDGES[edges_within(60.0)]


@st.composite
def tree_traces(draw: st.DrawFn) -> list[TraceRequest]:
    """Prompts that are paths of one random tree, with conversations and users at will."""
    time_s, trace = 0.0, []
    for _ in range(draw(st.integers(1, 30))):
        time_s += draw(st.floats(0.0, 50.0))
        path, node = [], 1
        for _ in range(draw(st.integers(0, 6))):
            node = node * 3 + draw(st.integers(0, 2))
            path.append(node)
        trace.append(
            request_of(
                time_s,
                path,
                category=draw(st.sampled_from("xy")),
                turn=draw(st.integers(1, 12)),
                conversation=draw(st.sampled_from((None, "a", "b"))),
                user=draw(st.sampled_from((None, "u", "v"))),
            )
        )
    return trace


@given(tree_traces())
def test_the_pass_agrees_with_a_recount(trace: list[TraceRequest]) -> None:
    counts = observe(trace)
    last_request: dict[int, int] = {}
    first_use_s: dict[int, float] = {}
    use_counts: dict[int, int] = {}
    hits = []
    total_age_s = conversation_hits = user_hits = 0
    for index, request in enumerate(trace):
        hit_blocks = 0
        while hit_blocks < len(request.blocks) and request.blocks[hit_blocks] in last_request:
            hit_blocks += 1
        hits.append(hit_blocks)
        for block in request.blocks[:hit_blocks]:
            earlier = trace[last_request[block]]
            total_age_s += request.time_s - earlier.time_s
            conversation_hits += earlier.conversation == request.conversation is not None
            user_hits += request.user is not None and earlier.user == request.user
        for block in request.blocks:
            first_use_s.setdefault(block, request.time_s)
            last_request[block] = index
            use_counts[block] = use_counts.get(block, 0) + 1
    assert counts.hits.tolist() == hits
    assert counts.reused_blocks.sum() == sum(hits)
    assert (counts.reused_blocks * counts.reuse_age_s).sum() == pytest.approx(total_age_s)
    assert (counts.same_conversation_hits, counts.same_user_hits) == (conversation_hits, user_hits)
    assert sorted(counts.uses.tolist()) == sorted(use_counts.values())
    assert sorted(counts.first_s.tolist()) == pytest.approx(sorted(first_use_s.values()))
    assert sorted(counts.last_request.tolist()) == sorted(last_request.values())
    assert counts.stranded == 0


def test_memory_does_not_grow_with_repeated_requests() -> None:
    """100,000 more accesses of 1,050 distinct blocks: memory is O(blocks + requests)."""
    chains = [tuple(range(50 * i, 50 * i + 50)) for i in range(21)]
    peak_bytes = []
    for request_count in (500, 2_500):
        trace = (request_of(float(i), chains[i % 21]) for i in range(request_count))
        tracemalloc.start()
        counts = observe(trace)
        peak_bytes.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert counts.distinct_blocks == 1050
        assert counts.hits.sum() == request_count * 50 - 1050
    assert peak_bytes[1] - peak_bytes[0] < 2_000 * 250
