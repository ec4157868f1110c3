"""Every way to evict, tried: the exact optimum of small cases."""

from __future__ import annotations

from functools import cache
from itertools import combinations


def best(paths, capacity, cost, optional=False):
    """Least total cost of serving ``paths`` (tuples of chained block ids) from an empty cache.

    ``cost(index, hit)`` is what request ``index`` costs when ``hit`` leading blocks are cached.
    As in the tree: each request is cached whole, or its first ``capacity`` blocks, what is
    evicted are ends of paths, and a request cannot evict its own blocks. With ``optional`` what
    is kept after a request is any choice of its blocks and of those that were cached.
    """
    parent = {}
    for path in paths:
        for above, block in zip((None, *path), path):
            assert parent.setdefault(block, above) == above, f"block {block} is not chained"

    def closed(blocks):
        return all(parent[b] is None or parent[b] in blocks for b in blocks)

    @cache
    def serve(index, cached):
        if index == len(paths):
            return 0
        path = paths[index]
        hit = 0
        while hit < len(path) and path[hit] in cached:
            hit += 1
        kept = frozenset() if optional else frozenset(path[:capacity])
        others = (cached | frozenset(path) if optional else cached) - kept
        room = min(capacity - len(kept), len(others))
        after = (
            kept | frozenset(chosen)
            for size in range(room + 1)
            for chosen in combinations(sorted(others), size)
        )
        return cost(index, hit) + min(
            serve(index + 1, blocks) for blocks in after if closed(blocks)
        )

    return serve(0, frozenset())
