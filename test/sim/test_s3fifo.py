import tracemalloc

import pytest

from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.registry import make_policy
from sglang_canopy.records import Leaf, Request
from support.radix_cases import play


def test_one_use_after_the_first_is_not_enough_to_stay():
    assert play("s3fifo", 2, [(1,), (1,), (2,), (3,)]) == [(1,)]


def test_two_uses_move_a_leaf_to_the_main_queue():
    assert play("s3fifo", 2, [(1,), (1,), (1,), (2,), (3,), (4,)]) == [(2,), (3,)]


def test_what_the_small_queue_lost_comes_back_into_the_main_queue():
    # 1 leaves the small queue and returns from the ghosts: new ones now go before it.
    paths = [(1,), (2,), (3,), (1,), (4,), (5,)]
    assert play("s3fifo", 2, paths, ghost_share=2.0) == [(1,), (2,), (3,), (4,)]


def test_without_ghosts_what_comes_back_is_new():
    paths = [(1,), (2,), (3,), (1,), (4,), (5,)]
    assert play("s3fifo", 2, paths, ghost_share=0.0) == [(1,), (2,), (3,), (1,)]


def test_a_use_in_the_main_queue_buys_another_round():
    # Room for 4 moves 1 and 2 to the main queue and evicts 1, the less recent; room for 5 evicts 3
    # from the small queue. For 6 the small queue moves 4 to the main queue and is then within its
    # half: 2 is the oldest there, and is evicted unless it was used again.
    ones, twos = [(1,)] * 3, [(2,)] * 3
    unused = [*ones, *twos, (3,), (4,), (4,), (4,), (5,), (6,)]
    used = [*ones, *twos, (3,), (4,), (4,), (4,), (5,), (2,), (6,)]
    assert play("s3fifo", 3, unused, small_share=0.5) == [(1,), (3,), (2,)]
    assert play("s3fifo", 3, used, small_share=0.5) == [(1,), (3,), (4,)]


def test_a_ghost_is_the_first_block_that_went_even_of_a_cut_node():
    # (1, 2, 3) is cut to (1, 2), then to (1,). When it returns, 2 is the first block missing:
    # the new node (2, 3) enters the main queue and 10 is evicted before it.
    paths = [(1, 2, 3), (7,), (8,), (9,), (1, 2, 3), (10,), (11,)]
    cuts = [(3,), (2,), (7,), (8,), (9,)]
    assert play("s3fifo", 4, paths, ghost_share=9.0) == [*cuts, (10,)]
    assert play("s3fifo", 4, paths, ghost_share=0.0) == [*cuts, (3,)]


def test_options_are_checked():
    with pytest.raises(CanopyError, match="promote_uses"):
        make_policy("s3fifo", {"promote_uses": 4})
    with pytest.raises(CanopyError, match="small_share"):
        make_policy("s3fifo", {"small_share": -0.1})


def test_long_paths_take_a_bounded_share_of_memory():
    policy = make_policy("s3fifo", {})
    tracemalloc.start()
    for number in range(300):
        start = (number + 1) << 32
        path = list(range(start, start + 8192))
        request = Request(time=float(number), path=path, block_tokens=16)
        policy.arrive(request)
        policy.finish(request)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 16 << 20


def test_an_answers_blocks_make_ghosts_too():
    policy = make_policy("s3fifo", {"ghost_share": 9.0})
    request = Request(time=1.0, path=[1], block_tokens=1)
    policy.arrive(request)
    request.path.append(2)
    policy.finish(request)
    leaf = Leaf()
    leaf.offset, leaf.length, leaf.hits, leaf.created, leaf.last_access = 1, 1, 1, 1.0, 1.0
    policy.admit(leaf, 1.0)
    assert policy.victim(1.0).leaf is leaf
    policy.evicted(leaf, 1)
    policy.drop(leaf)
    assert policy.stats()["ghost_tokens"] == 1
    policy.arrive(Request(time=2.0, path=[1, 2], block_tokens=1))
    assert policy.stats()["ghost_tokens"] == 0
