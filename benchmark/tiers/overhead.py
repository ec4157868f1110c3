"""Cost of the tiers' metadata on the scheduler's thread, per request.

    python benchmark/tiers/overhead.py

One thread makes a scheduler's calls to its cache: match, read from disk, load, evict, insert, for
conversations over pools that are far too small, with the real disk store. Every call that only the
tiers' metadata needs is timed: recording pages, reporting uses, groups, restoring metadata of loaded
pages. ``scheduler_us`` is the thread's whole work for a request in the cache, metadata included, without
a model's forward passes.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import tempfile
import time
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

from tqdm import tqdm  # noqa: E402

from sglang_canopy.config.tiers import TierOptions  # noqa: E402
from sglang_canopy.radix.ttl_groups import LiveGroups  # noqa: E402
from sglang_canopy.storage.disk_link import DiskLink  # noqa: E402
from sglang_canopy.ttl.table import Group, TTLTable  # noqa: E402
from support.disk_tree import DiskTree  # noqa: E402

TIMED = (
    *((DiskLink, name) for name in ("request_arrived", "before_write", "node_used")),
    *((DiskLink, name) for name in ("request_finished", "pages_read", "unwritten_ancestors")),
    (LiveGroups, "assign"),
)


class Clock:
    """Seconds in the timed calls; nested calls count once."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside = False

    def wrap(self, owner: type, name: str) -> None:
        original, label = getattr(owner, name), f"{owner.__name__}.{name}"

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return original(*args, **kwargs)
            self._inside = True
            begin = time.thread_time()
            try:
                return original(*args, **kwargs)
            finally:
                self.seconds[label] += time.thread_time() - begin
                self._inside = False

        setattr(owner, name, timed)


def paths(requests: int, turns: int, page: int, seed: int) -> list[dict[str, Any]]:
    """Growing conversations, mixed: 500 to 1,500 new tokens a turn, a system prompt each."""
    draw = random.Random(seed)
    heads = [[draw.randrange(2000) for _ in range(640)] for _ in range(4)]
    open_talks: list[tuple[int, list[int]]] = []
    made, name = [], 0
    while len(made) < requests:
        if len(open_talks) < 16:
            open_talks.append((name, list(draw.choice(heads))))
            name += 1
        at = draw.randrange(len(open_talks))
        who, tokens = open_talks[at]
        tokens = tokens + [draw.randrange(2000) for _ in range(draw.randrange(500, 1500))]
        made.append({"who": who, "tokens": tokens[: len(tokens) // page * page]})
        open_talks[at] = (who, tokens)
        if len(tokens) > 700 + turns * 1000:
            open_talks.pop(at)
    return made


def measure(requests: int = 400, page: int = 64, seed: int = 1) -> dict[str, Any]:
    clock = Clock()
    for owner, name in TIMED:
        clock.wrap(owner, name)
    asked = paths(requests, 5, page, seed)
    roots = [hash((0, i)) & ((1 << 64) - 1) for i in range(64)]
    table = TTLTable(tuple(Group(root, 600.0) for root in roots))
    busy, tokens = 0.0, 0
    with tempfile.TemporaryDirectory() as scratch:
        tree = DiskTree(
            Path(scratch) / "disk",
            tokens=64 * 1024,
            host_tokens=128 * 1024,
            page_size=page,
            policy="wa",
            config={},
            tiers=TierOptions(ttl=table),
            disk={"capacity_bytes": 4 << 30, "policy": "wa", "sweep_s": 1.0},
        )
        for number, request in enumerate(tqdm(asked, unit="request")):
            path = _ids(request)
            begin = time.thread_time()
            tree.serve(
                request["tokens"],
                float(number),
                path=path,
                block_tokens=64,
                category="chat",
                conversation=f"c{request['who']}",
            )
            busy += time.thread_time() - begin
            tokens += len(request["tokens"])
        on_disk = len(tree.store)
        tree.close()
    each = {name: round(s / requests * 1e6, 2) for name, s in sorted(clock.seconds.items())}
    total = sum(clock.seconds.values())
    return {
        "requests": requests,
        "tokens_a_request": tokens // requests,
        "pages_on_disk": on_disk,
        "metadata_us_a_request": round(total / requests * 1e6, 1),
        "by_call_us": each,
        "scheduler_us_a_request": round(busy / requests * 1e6, 1),
        "share_of_the_cache_work": round(total / busy, 4),
    }


def _ids(request: dict[str, Any]) -> list[int]:
    """Block ids of a path, as the server's hashes would be."""
    return [
        hash((request["who"], i)) & ((1 << 64) - 1) for i in range(len(request["tokens"]) // 64)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=400)
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.requests), indent=2))


if __name__ == "__main__":
    main()
