"""Hits before and after a restart: with the drain at SIGTERM, without it, and SGLang's ``file``.

    python benchmark/tiers/restart.py --data DATA --out benchmark/tiers/results/restart.json

Simulated: twelve minutes of a trace through a device under the server's own policy, above a disk that keeps
what was written. After seven minutes the server ends and another starts on the same disk. Under
``write_back`` a block is written when the device evicts it, under ``write_through`` at once. A drain writes
the device's blocks in the reversed order of eviction, heads before tails; ``quarter`` has time for a quarter
of them, and ``random`` is its placebo: as many, in random order, heads before tails. Host memory is left out:
under ``write_back`` it only holds blocks that are on disk too.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "traces"))
from overlays import overlay

from canopy_lab.sim.requests import to_requests
from canopy_lab.trace.open import open_trace
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.policy.block_tree import Node, RadixTree
from sglang_canopy.policy.next_victims import lowest_ranked
from sglang_canopy.policy.registry import make_policy
from sglang_canopy.records import Request

DEVICES = (0.1, 0.25)
"""Device, as a share of the run's distinct blocks."""
BEGIN_S, RESTART_S, END_S = 120.0, 420.0, 720.0
PAIRS = 3
SEEDS = (1, 2, 3, 4, 5)
"""Seeds of the random order; the other arms have no randomness."""
ARMS = ("drain", "quarter", "random", "no drain", "lru, file", "cold")
_ALL = 1 << 60


def traces(data: Path) -> Iterator[tuple[str, int, list[TraceRequest]]]:
    """Three parts of a trace of conversations, a third of them, and three overlays of agents."""
    hour = list(open_trace(data / "mooncake" / "conversation_first60.jsonl", "mooncake"))
    for pair in range(PAIRS):
        since = pair * 690.0
        part = [r for r in hour if since <= r.time_s < since + END_S]
        yield "conversation", pair, [r for r in part if len(r.blocks) > 1 and r.blocks[1] % 3 == 0]
    archive = data / "agentic_coding" / "traces_500.tar.xz"
    for pair in range(PAIRS):
        found = overlay(archive, 40, END_S, pair + 1)
        yield "agents", pair, [r for r in found if r.time_s <= END_S]


class Server:
    """A device above a disk. ``disk``: blocks written so far; a block's id stands for its whole path."""

    def __init__(self, policy: str, blocks: int, disk: set[int], parents: dict[int, int]) -> None:
        self.policy, self.disk, self.parents = make_policy(policy), disk, parents
        self.through = policy == "lru"
        self.tree = RadixTree(self.policy, blocks, 1, on_evict=lambda cut: self.write(cut.blocks))

    def write(self, blocks: Sequence[int]) -> None:
        """Write blocks, and their ancestors that are not on disk."""
        for block in blocks:
            above: int | None = block
            while above is not None and above not in self.disk:
                self.disk.add(above)
                above = self.parents.get(above)

    def serve(self, request: Request) -> int:
        """Serve a request. Returns its leading blocks on device or disk."""
        path = request.path
        hit = self.tree.match(path)[1]
        while hit < len(path) and path[hit] in self.disk:
            hit += 1
        self.tree.access(request)
        if self.through:
            self.write(path)
        return hit

    def ranked(self) -> list[Node]:
        """The device's nodes by rank, highest first, each after its prefix."""
        root = self.tree.root

        def exposed(leaf: Any, gone: Container[Any]) -> Node | None:
            above = leaf.parent
            if above is root or any(child not in gone for child in above.children.values()):
                return None
            return above

        victims = lowest_ranked(self.policy, self.tree.now, _ALL, _ALL, exposed)
        return heads_first([victim.leaf for victim in reversed(victims)], root)


def heads_first(nodes: Sequence[Any], root: Node) -> list[Any]:
    """Return the nodes in order, each after the nodes above it."""
    order: dict[Any, None] = {}
    for node in nodes:
        path = []
        while node is not root and node not in order:
            path.append(node)
            node = node.parent
        order.update(dict.fromkeys(reversed(path)))
    return list(order)


def run(arm: str, asked: list[Request], device: int, seed: int) -> dict[str, float]:
    """Token hit ratios of the five minutes before the restart and of the five after it."""
    parents = {b: a for request in asked for a, b in zip(request.path, request.path[1:])}
    name = "lru" if arm == "lru, file" else "wa"
    server, drained, restarted = Server(name, device, set(), parents), 0, False
    spans = {"before": [0, 0], "after": [0, 0]}
    for request in asked:
        if request.time >= RESTART_S and not restarted:
            restarted = True
            if arm in ("drain", "quarter", "random"):
                drained = end(server, arm, seed)
            disk = set() if arm == "cold" else server.disk
            after = Server(name, device, disk, parents)
            if arm in ("drain", "quarter", "random"):
                after.policy.restore(server.policy.state())
            server = after
        hit = server.serve(request)
        if request.time >= BEGIN_S:
            span = spans["after" if restarted else "before"]
            span[0] += hit
            span[1] += len(request.path)
    found = {name: round(hits / max(1, total), 4) for name, (hits, total) in spans.items()}
    return found | {"drained": drained}


def end(server: Server, arm: str, seed: int) -> int:
    """Drain. Returns the blocks written."""
    nodes = server.ranked()
    if arm == "random":
        random.Random(seed).shuffle(nodes)
        nodes = heads_first(nodes, server.tree.root)
    blocks = [block for node in nodes for block in node.blocks if block not in server.disk]
    if arm != "drain":
        blocks = blocks[: len(blocks) // 4]
    server.write(blocks)
    return len(blocks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = []
    for name, pair, trace in traces(options.data):
        first = trace[0].time_s
        asked = [
            r.copy(
                time=r.time - first, path=tuple(r.path), prompt_tokens=len(r.path), output_tokens=0
            )
            for r in to_requests(trace)
        ]
        for r in asked:
            r.block_tokens = 1
        distinct = len({block for request in asked for block in request.path})
        for share in DEVICES:
            for arm in ARMS:
                seeds = SEEDS if arm == "random" else SEEDS[:1]
                runs = [
                    run(arm, [r.copy() for r in asked], int(distinct * share), s) for s in seeds
                ]
                found = {key: round(mean(one[key] for one in runs), 4) for key in runs[0]}
                row = {"trace": name, "pair": pair, "device": share, "arm": arm, **found}
                rows.append(row | {"requests": len(asked), "blocks": distinct})
                print(json.dumps(rows[-1]), flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
