"""Compare a floor in tokens with the floor in prefill seconds.

    python benchmark/whatif/floor_seconds.py --data DIR --out benchmark/whatif/results/floor_seconds.json

Overlays of agents (``mixed`` of benchmark/eviction/depth_weight.py) under LRU, under a policy, and
under that policy with either floor. Seconds are those of every prompt alone under a profile.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).resolve().parents[1] / "eviction"))
from depth_weight import ARMS, MERGED, PROFILE, STEP_TOKENS, mixed

from canopy_lab.advise.sample import merged
from canopy_lab.sim.driver import distinct_blocks
from canopy_lab.sim.requests import to_requests
from canopy_lab.sim.sweep import PrefillSeconds
from canopy_lab.sim.system import load_profile
from sglang_canopy.policy.base import Policy, Victim
from sglang_canopy.policy.block_tree import RadixTree
from sglang_canopy.policy.registry import make_policy
from sglang_canopy.records import Leaf, Request
from sglang_canopy.reuse.depth_price import UNKNOWN
from sglang_canopy.whatif.floor import Floor

SHARES = (0.05, 0.1)
POLICIES = ("wa", "auto")


class Exchanged(Policy):
    """One policy learns; it or LRU ranks."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(None)
        self.ranker = self.wanted = policy
        self.lru = make_policy("lru")
        self._held: dict[int, Leaf] = {}

    def arrive(self, request: Request) -> str:
        return self.wanted.arrive(request)

    def finish(self, request: Request) -> str:
        return self.wanted.finish(request)

    def admit(self, leaf: Leaf, now: float) -> None:
        self._held[id(leaf)] = leaf
        self.ranker.admit(leaf, now)

    def drop(self, leaf: Leaf) -> None:
        self._held.pop(id(leaf), None)
        self.ranker.drop(leaf)

    def victim(self, now: float) -> Victim | None:
        return self.ranker.victim(now)

    def split(self, leaf: Leaf, head: Leaf) -> None:
        self.ranker.split(leaf, head)

    def rank_by(self, ranker: Policy, now: float) -> None:
        """Rank the cached leaves by another policy."""
        for leaf in self._held.values():
            self.ranker.drop(leaf)
        self.ranker = ranker
        for leaf in self._held.values():
            ranker.admit(leaf, now)


def served(
    trace: list[Any], blocks: int, make: Callable[[], Policy], seconds: PrefillSeconds
) -> dict[str, Any]:
    """One trace under LRU, a policy, and the policy with each floor: seconds, hits, falls."""
    size = trace[0].block_tokens
    scales = {"tokens": UNKNOWN, "seconds": seconds.depth_scale}
    floored = {name: Exchanged(make()) for name in scales}
    policies = {"lru": make_policy("lru"), "policy": make(), **floored}
    trees = {name: RadixTree(policy, blocks, size) for name, policy in policies.items()}
    floors = {name: Floor(blocks * size) for name in scales}
    left: dict[str, list[int]] = {name: [] for name in trees}
    for same in zip(*(to_requests(trace) for _ in trees)):
        had = {
            name: min(tree.access(request) * size, request.prompt_tokens)
            for (name, tree), request in zip(trees.items(), same)
        }
        prompt = same[0].prompt_tokens
        for name, hit in had.items():
            left[name].append(prompt - hit)
        for name, floor in floors.items():
            floor.compare(had["policy"], had["lru"], prompt, scale=scales[name])
            one = floored[name]
            ranker = one.lru if floor.behind else one.wanted
            if ranker is not one.ranker:
                one.rank_by(ranker, trees[name].now)
    prompts = sum(record.input_tokens for record in trace)
    return {
        "hits": {name: 100 * (1 - sum(rows) / prompts) for name, rows in left.items()},
        "seconds": {name: seconds.of(rows) for name, rows in left.items()},
        "falls": {name: floor.falls for name, floor in floors.items()},
    }


def policy(name: str, depth_scale: float) -> Policy:
    made = make_policy(*ARMS[name])
    made.set_depth_scale(depth_scale)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--minutes", type=float, default=1e6)
    args = parser.parse_args()
    until, rows = time.monotonic() + 60 * args.minutes, []
    for seed in range(args.seeds):
        if time.monotonic() > until:
            break
        trace = [merged(r, MERGED) for r in mixed(args.data, seed)]
        seconds = PrefillSeconds(load_profile(PROFILE), trace)
        assert seconds.depth_scale == load_profile(PROFILE).depth_scale(STEP_TOKENS)
        for share, name in itertools.product(SHARES, POLICIES):
            blocks = round(share * distinct_blocks(trace))
            make = partial(policy, name, seconds.depth_scale)
            rows.append(
                {"seed": seed, "share": share, "policy": name}
                | served(trace, blocks, make, seconds)
            )
            print(rows[-1], flush=True)
        lines = ",\n".join(json.dumps(row) for row in rows)
        args.out.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
