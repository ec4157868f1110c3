"""Every way to evict, tried: the exact optimum of small cases."""

from functools import cache
from itertools import combinations


def best(paths, capacity, cost, optional=False):
    """Return the least total cost of serving ``paths`` (tuples of chained block ids) from an empty cache.

    ``cost(index, hit)``: cost of request ``index`` with ``hit`` leading blocks cached. The rules are
    the tree's: a request is cached whole, or its first ``capacity`` blocks; only ends of paths are
    evicted; a request cannot evict its own blocks. With ``optional``, any subset of its blocks and
    the cached blocks may stay after a request.
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
