from hypothesis import given
from hypothesis import strategies as st

from sglang_canopy.policy.structures.end_queue import EndQueue
from sglang_canopy.records import Leaf


def leaf_at(offset=0):
    return Leaf(offset, 1)


def test_orders_by_stamp_whatever_the_order_of_arrival():
    queue = EndQueue()
    late, early = leaf_at(), leaf_at()
    queue.push(late, 5.0)
    queue.push(early, 2.0)
    assert queue.oldest()[3] is early
    assert queue.youngest()[3] is late


def test_the_deeper_leaf_comes_first_at_both_ends_when_stamps_are_equal():
    queue = EndQueue()
    shallow, deep = leaf_at(0), leaf_at(64)
    queue.push(shallow, 1.0)
    queue.push(deep, 1.0)
    assert queue.oldest()[3] is deep
    assert queue.youngest()[3] is deep


def test_full_ties_are_first_come():
    queue = EndQueue()
    first, second = leaf_at(), leaf_at()
    queue.push(first, 1.0)
    queue.push(second, 1.0)
    assert queue.oldest()[3] is first


def test_an_empty_queue_has_no_ends():
    queue = EndQueue()
    queue.remove(queue.push(leaf_at(), 1.0))
    assert queue.oldest() is None
    assert queue.youngest() is None
    assert len(queue) == 0


def test_removed_entries_do_not_pile_up():
    queue = EndQueue()
    stays = leaf_at()
    queue.push(stays, 0.0)
    for time in range(10_000):
        queue.remove(queue.push(leaf_at(), float(time)))
    assert len(queue._low) < 100
    assert len(queue._high) < 100
    assert queue.oldest()[3] is stays


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.integers(0, 6), st.integers(0, 3)),
        st.tuples(st.just("remove"), st.integers(0, 50)),
    ),
    max_size=80,
)


@given(OPERATIONS)
def test_both_ends_equal_those_of_a_sorted_list(operations):
    queue = EndQueue()
    live = []  # (stamp, -offset, sequence, leaf, entry)
    for sequence, operation in enumerate(operations):
        if operation[0] == "push":
            leaf = leaf_at(operation[2])
            live.append(
                (operation[1], -leaf.offset, sequence, leaf, queue.push(leaf, operation[1]))
            )
        elif live:
            queue.remove(live.pop(operation[1] % len(live))[4])
        assert len(queue) == len(live)
        assert {id(leaf) for leaf in queue} == {id(item[3]) for item in live}
        if live:
            assert queue.oldest()[3] is min(live, key=lambda i: i[:3])[3]
            assert queue.youngest()[3] is min(live, key=lambda i: (-i[0], i[1], i[2]))[3]
