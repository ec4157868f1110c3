"""The cells' victim equals that of a scan over all queue ends, for any times and curves."""

from hypothesis import given
from hypothesis import strategies as st

from sglang_canopy.policy.structures.cells import LEAF, Cells, EndQueue
from sglang_canopy.records import Leaf
from sglang_canopy.reuse.category import Category
from sglang_canopy.reuse.survival import AGE_BINS, age_bin


def ranks_of(first_ranks):
    """Return the ranks of all age bins; 0 after ``first_ranks``."""
    return [float(rank) for rank in first_ranks] + [0.0] * (AGE_BINS - len(first_ranks))


def make_category(label, first_ranks):
    category = Category(label, None)
    category.rank = ranks_of(first_ranks)
    return category


def scan_ends(admitted, now):
    """Return (rank, last access, -offset, number, leaf) of both ends of each category's queue."""
    ends = []
    for category in {id(category): category for category, _ in admitted}.values():
        leaves = [leaf for owner, leaf in admitted if owner is category]
        for sign in (1, -1):  # the oldest, the youngest
            end = min(leaves, key=lambda leaf: (sign * leaf.last_access, -leaf.offset, leaf.number))
            rank = category.rank[age_bin(now - end.last_access)]
            ends.append((rank, end.last_access, -end.offset, end.number, end))
    return ends


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.integers(0, 2), st.integers(0, 20), st.integers(0, 3)),
        st.tuples(st.just("remove"), st.integers(0, 50)),
        st.tuples(st.just("wait"), st.floats(0, 30)),
        st.tuples(st.just("refit"), st.integers(0, 2), st.lists(st.integers(0, 4), max_size=20)),
    ),
    max_size=60,
)


@given(OPERATIONS)
def test_the_least_leaf_equals_a_full_scan_of_the_queue_ends(operations):
    ranks = {"a": [3, 1, 2], "b": [1, 1, 4, 0], "c": []}
    categories = [make_category(label, first_ranks) for label, first_ranks in ranks.items()]
    cells, admitted, now = Cells(), [], 20.0
    for number, (operation, argument, *others) in enumerate(operations):
        if operation == "push":
            last_access, offset = others
            leaf = Leaf(offset, 1, number=number * 7 % 61)  # not in the order of pushes
            leaf.last_access = float(last_access)
            category = categories[argument]
            cells.push(category.label, leaf, lambda category=category: (category, 1.0))
            admitted.append((category, leaf))
        elif operation == "remove" and admitted:
            _, leaf = admitted.pop(argument % len(admitted))
            cells.remove(leaf)
        elif operation == "wait":
            now += argument
        elif operation == "refit":
            categories[argument].rank = ranks_of(*others)
            cells.reweigh()
        least = cells.least(now)
        if not admitted:
            assert least is None
            continue
        expected = min(scan_ends(admitted, now), key=lambda end: end[:4])
        assert (*least.order, least.entry[LEAF]) == expected


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
    kept_leaf = Leaf(0, 1)
    queue.push(kept_leaf, 0.0)
    for time in range(10_000):
        queue.remove(queue.push(Leaf(0, 1), float(time)))
    assert len(queue._low) < 100
    assert len(queue._high) < 100
    assert queue.oldest()[LEAF] is kept_leaf
