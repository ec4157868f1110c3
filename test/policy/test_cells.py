"""The cells' victim equals that of a scan over all queue ends, for any times and curves."""

from hypothesis import given
from hypothesis import strategies as st

from sglang_canopy.policy.structures.cells import LEAF, Cells, EndQueue
from sglang_canopy.records import Leaf
from sglang_canopy.reuse.category import Category
from sglang_canopy.reuse.survival import BINS, age_bin


def make_category(label, rank):
    category = Category(label, None)
    category.rank = [float(r) for r in rank] + [0.0] * (BINS - len(rank))
    return category


def scan_ends(live, now):
    """Return (rank, last access, -offset, number, leaf) of both ends of each category's queue."""
    ends = []
    for category in {id(c): c for c, _ in live}.values():
        leaves = [
            (leaf.last_access, -leaf.offset, leaf.number, leaf) for c, leaf in live if c is category
        ]
        for oldest_first in (1, -1):
            end = min(leaves, key=lambda keys: (oldest_first * keys[0], *keys[1:3]))
            ends.append((category.rank[age_bin(now - end[0])], *end))
    return ends


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.integers(0, 2), st.integers(0, 20), st.integers(0, 3)),
        st.tuples(st.just("remove"), st.integers(0, 50)),
        st.tuples(st.just("wait"), st.floats(0, 30)),
        st.tuples(st.just("refit"), st.integers(0, 2), st.lists(st.integers(0, 4), max_size=20)),
    ),
    max_size=60,
)


@given(STEPS)
def test_the_least_leaf_equals_a_full_scan_of_the_queue_ends(steps):
    ranks = {"a": [3, 1, 2], "b": [1, 1, 4, 0], "c": []}
    categories = [make_category(label, rank) for label, rank in ranks.items()]
    cells, live, now = Cells(), [], 20.0
    for number, step in enumerate(steps):
        if step[0] == "push":
            leaf = Leaf(step[3], 1, number=number * 7 % 61)  # not in the order of pushes
            leaf.last_access = float(step[2])
            category = categories[step[1]]
            cells.push(category.label, leaf, lambda category=category: (category, 1.0))
            live.append((category, leaf))
        elif step[0] == "remove" and live:
            cells.remove(live.pop(step[1] % len(live))[1])
        elif step[0] == "wait":
            now += step[1]
        elif step[0] == "refit":
            categories[step[1]].rank = [float(r) for r in step[2]] + [0.0] * (BINS - len(step[2]))
            cells.reweigh()
        least = cells.least(now)
        if not live:
            assert least is None
            continue
        ends = scan_ends(live, now)
        assert (*least.order, least.entry[LEAF]) == min(ends, key=lambda end: end[:4])


def test_weights_scale_a_cell():
    category = make_category("k", [2])
    cells = Cells()
    heavy, light = Leaf(), Leaf()
    cells.push("heavy", heavy, lambda: (category, 3.0))
    cells.push("light", light, lambda: (category, 1.0))
    assert cells.least(0.0).entry[LEAF] is light
    cells.reweigh(lambda cell: 1.0 if cell.key == "heavy" else 2.0)
    assert cells.least(0.0).entry[LEAF] is heavy


def test_removed_entries_do_not_accumulate():
    queue = EndQueue()
    stays = Leaf(0, 1)
    queue.push(stays, 0.0)
    for time in range(10_000):
        queue.remove(queue.push(Leaf(0, 1), float(time)))
    assert len(queue._low) < 100
    assert len(queue._high) < 100
    assert queue.oldest()[LEAF] is stays
