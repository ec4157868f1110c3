import tracemalloc

import pytest

from sglang_canopy.policy.registry import make_policy
from sglang_canopy.records import Leaf, Request


@pytest.mark.long
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
    assert policy._ghost_tokens == 1
    policy.arrive(Request(time=2.0, path=[1, 2], block_tokens=1))
    assert policy._ghost_tokens == 0
