from hypothesis import given
from hypothesis import strategies as st

from sglang_canopy.policy.structures.cells import EndQueue
from sglang_canopy.records import Leaf


def leaf_at(offset=0, number=0):
    return Leaf(offset, 1, number=number)


def test_a_leaf_may_be_removed_and_pushed_again_with_the_same_key():
    queue, leaf = EndQueue(), leaf_at()
    for _ in range(5):
        queue.remove(queue.push(leaf, 1.0))
    queue.push(leaf, 1.0)
    assert queue.oldest()[-1] is leaf
    assert queue.youngest()[-1] is leaf


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
    assert queue.oldest()[-1] is stays


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
    live = []  # (stamp, -offset, number, leaf, entry)
    for step, operation in enumerate(operations):
        if operation[0] == "push":
            leaf = leaf_at(operation[2], number=step * 7 % 83)  # not in the order of pushes
            live.append(
                (operation[1], -leaf.offset, leaf.number, leaf, queue.push(leaf, operation[1]))
            )
        elif live:
            queue.remove(live.pop(operation[1] % len(live))[4])
        assert len(queue) == len(live)
        assert {id(leaf) for leaf in queue} == {id(item[3]) for item in live}
        if live:
            assert queue.oldest()[-1] is min(live, key=lambda i: i[:3])[3]
            assert queue.youngest()[-1] is min(live, key=lambda i: (-i[0], i[1], i[2]))[3]
