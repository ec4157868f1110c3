"""A policy of your own beside LRU and `wa`, on a trace or a log. No server, no GPU.

python examples/own_policy.py benchmark/quickstart/mixed_synthetic.jsonl
"""

import sys

from canopy_lab.sim.driver import simulate
from canopy_lab.trace import open_trace
from canopy_lab.trace.guess import guess_format
from sglang_canopy.policy.ranked import NoOptions, RankedPolicy
from sglang_canopy.policy.registry import make_policy
from sglang_canopy.records import Leaf


class HeadsLast(RankedPolicy):
    """LRU, but the first 256 tokens of prompts are evicted last."""

    name = "heads-last"
    Config = NoOptions

    def rank(self, leaf: Leaf) -> tuple[bool, float]:
        return leaf.offset < 256, leaf.last_access  # the least is evicted first


def main(path: str) -> None:
    trace = list(open_trace(path, guess_format(path)))
    capacity = len({block for request in trace for block in request.blocks}) // 20
    for policy in (make_policy("lru"), make_policy("wa"), HeadsLast(NoOptions())):
        hits = simulate(trace, policy, capacity).token_hit_ratio
        print(f"{policy.name:12} {100 * hits:5.1f} % of the prompt tokens hit")


if __name__ == "__main__":
    main(sys.argv[1])
