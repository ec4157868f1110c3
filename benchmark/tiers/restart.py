"""Hits before and after a restart: with the drain at SIGTERM, without it, and SGLang's ``file``.

    python benchmark/tiers/restart.py --data DATA --out benchmark/tiers/results/restart.json

Each run serves twelve minutes of a trace through SGLang's cache, HiCache's controller and a disk, without
a model: one token stands for a block of the trace. After seven minutes the server ends as on SIGTERM, and
another starts on the same disk. Sizes are shares of the run's distinct blocks. ``bounded`` drains have time
for a quarter of the device's blocks; ``random`` is the placebo: as many blocks, in random order, heads
before tails. ``load`` reads what ranked highest into the free host memory before the first request,
``load random`` as much at random. ``disk`` is the share of prompt tokens that requests waited for the disk to read.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "test"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "traces"))

import torch
from overlays import overlay
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_parallel
from tqdm import tqdm

from canopy_lab.sim.requests import to_requests
from canopy_lab.trace.open import open_trace
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.config.tiers import TierOptions
from sglang_canopy.records import Request
from sglang_canopy.server.scheduler.cache_factory import keep_learnt
from sglang_canopy.storage import drain
from support.disk_tree import _RANKS, DiskTree
from support.live_tree import LiveTree

DEVICE, HOST, DISK = 0.08, 0.16, 0.5
BOUND = 0.25
BEGIN_S, RESTART_S, END_S = 120.0, 420.0, 720.0
PAIRS = 3
ARMS = ("drain", "bounded", "random", "no drain", "lru, file", "cold", "load", "load random")
_PAGE_BYTES = 32
_in_time, _ranked = drain.Drain._own_pages_in_time, drain.ranked


class FileTree(DiskTree):
    """SGLang's ``lru`` above HiCache's ``file`` backend, which is given as many bytes."""

    def __init__(self, folder: Path, tokens: int, host_tokens: int, disk_bytes: int) -> None:
        self.passes_on, self.storage = False, None
        storage = {
            "hicache_storage_backend": "file",
            "hicache_storage_backend_extra_config": json.dumps(
                {"prefetch_threshold": 1, "max_size": disk_bytes}
            ),
            "hicache_storage_prefetch_policy": "wait_complete",
        }
        with (
            get_parallel().override(**dict.fromkeys(_RANKS, 0)),
            envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.override(str(folder)),
        ):
            LiveTree.__init__(
                self,
                tokens,
                "lru",
                page_size=1,
                core="python",
                host_tokens=host_tokens,
                storage=storage,
            )
        self.count = 0

    @property
    def number(self) -> int:
        self.count += 1
        return self.count


def traces(data: Path) -> Iterator[tuple[str, int, list[TraceRequest]]]:
    """Twelve minutes each: a sixth of the conversations of three parts of an hour, and three overlays of
    agents."""
    hour = list(open_trace(data / "mooncake" / "conversation_first60.jsonl", "mooncake"))
    for pair in range(PAIRS):
        since = pair * 1200.0
        part = [r for r in hour if since <= r.time_s < since + END_S]
        yield "conversation", pair, [r for r in part if len(r.blocks) > 1 and r.blocks[1] % 6 == 0]
    archive = data / "agentic_coding" / "traces_500.tar.xz"
    for pair in range(PAIRS):
        found = overlay(archive, 24, END_S, pair + 1)
        yield "agents", pair, [r for r in found if r.time_s <= END_S]


def requests(trace: list[TraceRequest]) -> tuple[list[Request], int]:
    """The requests from time 0 on, with blocks numbered from 1, and the number of distinct blocks."""
    numbers: dict[Any, int] = {}
    found = []
    first = trace[0].time_s
    for request in to_requests(trace):
        blocks = [numbers.setdefault(b, len(numbers) + 1) for b in request.path]
        found.append(
            request.copy(
                time=request.time - first,
                path=blocks,
                prompt_tokens=len(blocks),
                output_tokens=0,
                block_tokens=1,
            )
        )
    return found, len(numbers)


def started(arm: str, folder: Path, distinct: int) -> DiskTree:
    device, host = int(distinct * DEVICE), int(distinct * HOST)
    size = int(distinct * DISK) * _PAGE_BYTES
    if arm == "lru, file":
        return FileTree(folder, device, host, size)
    tree = DiskTree(
        folder,
        tokens=device,
        host_tokens=host,
        page_size=1,
        policy="wa",
        config={"block_tokens": 1},
        write_policy="write_back",
        tiers=TierOptions(drain_s=0.0 if arm in ("no drain", "cold") else 25.0),
        disk={"policy": "wa", "capacity_bytes": size},
    )
    if arm != "cold":
        keep_learnt(tree.cache, None)
    return tree


def serve(tree: DiskTree, request: Request) -> tuple[int, int]:
    """One whole request. Returns the blocks found in any tier, and those read from disk for it."""
    tokens = list(request.path)
    live = None
    if not isinstance(tree, FileTree):
        names = (
            "category",
            "turn",
            "conversation",
            "stop",
            "prompt_tokens",
            "block_tokens",
            "path",
        )
        live = tree.request(request.time, **{name: getattr(request, name) for name in names})
    if isinstance(tree, FileTree):
        tree.core.clock = argparse.Namespace(now=tree.number)  # names the read
    read = tree.fetch(tokens)
    tree.load_back(tokens)
    hit = tree.match(tokens)
    if live is not None:
        live.cached_tokens = hit
        tree.core.requests.finish(live)
        live.done = True
    tree.insert(tokens, live)
    return hit, read


def paths(tree: DiskTree) -> list[list[int]]:
    """The tokens of every node in memory from the root on, the highest-ranked first."""
    found = []
    for node in _ranked(tree.core):
        path: list[int] = []
        while node is not tree.core.root_node:
            path[:0] = node.key.raw_token_ids()
            node = node.parent
        found.append(path)
    return found


def load(tree: DiskTree, wanted: list[list[int]]) -> None:
    """Read paths into the host's free memory, in order."""
    pool = tree.cache.cache_controller.mem_pool_host
    for number, path in enumerate(wanted):
        if pool.available_size() < len(path):
            return
        tree.core.clock.advance(tree.core.clock.now + 1e-9 * (number + 1))  # names the read
        tree.fetch(path)


def end(tree: DiskTree, arm: str, seed: int) -> None:
    """What SIGTERM does to the scheduler's cache."""
    allowed = int(BOUND * tree.allocator.size)
    if arm in ("bounded", "random"):

        def in_time(self: Any, wanted: int) -> int:
            return max(0, min(wanted, allowed - sum(self._pages_of.values())))

        drain.Drain._own_pages_in_time = in_time  # type: ignore[method-assign]
    if arm == "random":
        drain.ranked = lambda tree: shuffled(tree, seed)
    try:
        tree.settle()
        if isinstance(tree, FileTree):
            tree.cache.shutdown()
        else:
            tree.cache.release_host_resources()
    finally:
        drain.Drain._own_pages_in_time, drain.ranked = _in_time, _ranked  # type: ignore[method-assign]


def shuffled(tree: Any, seed: int) -> list[Any]:
    """The nodes in memory in random order, each after its prefix."""
    nodes = _ranked(tree)
    random.Random(seed).shuffle(nodes)
    order: dict[Any, None] = {}
    for node in nodes:
        path = []
        while node is not tree.root_node and node not in order:
            path.append(node)
            node = node.parent
        order.update(dict.fromkeys(reversed(path)))
    return list(order)


def run(arm: str, asked: list[Request], distinct: int, seed: int) -> dict[str, float]:
    """The token hit ratio of the five minutes before the restart and of the five after it."""
    spans = {"before": [0, 0, 0], "after": [0, 0, 0]}
    with tempfile.TemporaryDirectory() as folder:
        tree, restarts = started(arm, Path(folder) / "disk", distinct), 0
        for request in asked:
            if request.time >= RESTART_S and not restarts:
                wanted = paths(tree) if arm.startswith("load") else []
                if arm == "load random":
                    random.Random(seed).shuffle(wanted)
                end(tree, arm, seed)
                restarts = 1
                place = Path(folder) / ("other" if arm == "cold" else "disk")
                tree = started(arm, place, distinct)
                if wanted:
                    tree.request(request.time)
                    load(tree, wanted)
            hit, read = serve(tree, request)
            if request.time >= BEGIN_S:
                span = spans["after" if restarts else "before"]
                span[0] += hit
                span[1] += read
                span[2] += len(request.path)
        end(tree, "no drain", seed) if arm == "lru, file" else tree.close()
    found = {}
    for name, (hits, read, total) in spans.items():
        found |= {
            name: round(hits / max(1, total), 4),
            f"{name}, disk": round(read / max(1, total), 4),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--only", help="one trace, to run the two side by side")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, pair, trace in traces(options.data):
        if pair >= options.pairs or options.only not in (None, name):
            continue
        asked, distinct = requests(trace)
        for arm in tqdm(ARMS, desc=f"{name} {pair}"):
            found = run(arm, asked, distinct, pair)
            rows.append({"trace": name, "pair": pair, "arm": arm, **found})
            print(json.dumps(rows[-1]), len(asked), distinct, flush=True)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
