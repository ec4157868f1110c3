"""Stamps of several HTTP processes reach the ranks of a replica as one order of time."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from support.live_tree import LiveTree, check

TOKENS = 24
PATHS = [[p * 100 + i for i in range(8)] for p in range(6)]
ARRIVALS = st.lists(
    st.tuples(st.integers(0, 5), st.floats(0.0, 3.0), st.sampled_from(["chat", "agent"])),
    min_size=4,
    max_size=30,
)


@settings(max_examples=25)
@given(ARRIVALS)
def test_ranks_agree_and_time_never_goes_back(arrivals) -> None:
    """``late``: how long a request took from its stamp to the scheduler, up to seconds."""
    ranks = [LiveTree(TOKENS, "wa", {"block_tokens": 4}) for _ in range(2)]
    for tree in ranks:
        heard = []
        for number, (path, late, category) in enumerate(arrivals):
            request = tree.request(
                number - late + 10.0, category=category, prompt_tokens=len(PATHS[path])
            )
            heard.append(request.time)
            tree.core.requests.finish(request)
            tree.insert(PATHS[path], request)
        assert heard == sorted(heard)
        assert heard[-1] == tree.core.clock.now
        check(tree)
    assert len({tree.core.live.counters.victims.sum for tree in ranks}) == 1
    assert len({tuple(tree.match(path) for path in PATHS) for tree in ranks}) == 1
