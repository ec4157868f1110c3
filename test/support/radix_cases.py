"""Hand-made radix cases: the evicted blocks after each request."""

from canopy_lab.sim.requests import to_requests
from sglang_canopy.policy.block_tree import RadixTree
from sglang_canopy.policy.registry import make_policy
from support.trace_samples import record
from support.tree_recount import recount

BLOCK_TOKENS = 10


def serve_paths(policy, capacity, paths, *, output_tokens=1, **options):
    """Serve ``paths`` (tuples of block ids), one a second, from a cache of ``capacity`` blocks. Return the
    evicted runs of blocks, in order.

    A block id must stand for one place in the tree. The tree is recounted after each request."""
    cuts = []
    if isinstance(policy, str):
        policy = make_policy(policy, options)
    tree = RadixTree(policy, capacity, BLOCK_TOKENS, on_evict=cuts.append)
    trace = [record(time, path, output_tokens=output_tokens) for time, path in enumerate(paths)]
    for request in to_requests(trace):
        tree.access(request)
        recount(tree)
    return [cut.blocks for cut in cuts]
