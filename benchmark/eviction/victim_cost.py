"""CPU microseconds that an eviction, an insert and a match cost, by number of evictable leaves.

The same tree (one leaf of eight tokens a request) in one process: a Canopy policy, SGLang's LRU
on its Python core and on its Rust core, rounds interleaved; CPU time
of the thread. ``evict`` is one whole call of the cache that frees one leaf; ``evict_many`` is a call
that frees 500, a leaf.
"""

from __future__ import annotations

import gc
import logging
import os
import statistics
import time
import warnings
from array import array
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402

from question import Question, RunContext  # noqa: E402
from support.disk_tree import DiskTree  # noqa: E402
from support.live_tree import LiveTree  # noqa: E402

LEAF = 8
SINGLE, MANY, CALLS, PROBES = 60, 500, 5, 300
NAMES = ("wa", "canopy-lru", "python", "rust")
LEAVES, ROUNDS = (5000, 20_000, 50_000), 3


def key(i: int) -> RadixKey:
    return RadixKey(array("q", [i, i + 1, i + 2, i + 3, 5, 6, 7, 8]), None)


def micros(call, times: int) -> float:
    taken = []
    for _ in range(times):
        start = time.thread_time()
        call()
        taken.append(time.thread_time() - start)
    return statistics.median(taken) * 1e6


def measure(name: str, leaves: int, singles: int) -> dict[str, float]:
    core = name if name in ("python", "rust") else None
    policy, config = ("lru", None) if core else (name, {"quantum_tokens": 1})
    tree = LiveTree(leaves * LEAF + 64, policy, config, core=core)
    gc.collect()
    gc.disable()
    numbers = iter(range(leaves))

    def insert() -> None:
        slots = tree.allocator.alloc(LEAF)
        tree.cache.insert(InsertParams(key=key(next(numbers)), value=slots))

    insert_us = micros(insert, leaves)
    tree.evict(LEAF)  # the first eviction takes in all that was inserted
    evict_us = micros(lambda: tree.evict(LEAF), singles)
    many_us = micros(lambda: tree.evict(LEAF * MANY), CALLS) / MANY
    last = iter(range(leaves - 1, 0, -7))
    match_us = micros(
        lambda: tree.cache.match_prefix(MatchPrefixParams(key=key(next(last)))), PROBES
    )
    gc.enable()
    return {"insert": insert_us, "evict": evict_us, "evict_many": many_us, "match": match_us}


def run(_: RunContext) -> list[dict[str, Any]]:
    rows: dict[tuple[str, int], list[dict[str, float]]] = {}
    for _ in range(ROUNDS):
        for leaves in LEAVES:
            for name in NAMES:
                singles = 15 if name == "python" else SINGLE
                rows.setdefault((name, leaves), []).append(measure(name, leaves, singles))
    return [
        {"core": name, "leaves": leaves}
        | {k: round(statistics.median(r[k] for r in runs), 1) for k in runs[0]}
        for (name, leaves), runs in sorted(rows.items(), key=lambda kv: (kv[0][1], kv[0][0]))
    ]


def checks(_: RunContext) -> dict[str, float]:
    """CPU milliseconds of the checks when a server starts: the first call, as there."""
    from sglang.srt.runtime_context import get_server_args

    from sglang_canopy.radix.overrides import check_overrides
    from sglang_canopy.radix.tier_self_test import run_host
    from sglang_canopy.server.scheduler.cache_factory import OURS, check_tree, new_cache
    from sglang_canopy.server.start.hooks import HOOKS
    from sglang_canopy.server.start.self_check import check_signature
    from sglang_canopy.storage.page_self_test import check_page

    for hook in HOOKS:  # imports what SGLang's server imports too
        hook.sglang_parameters()
    with TemporaryDirectory() as folder:
        tree = DiskTree(Path(folder), tokens=256, page_size=64, host_tokens=256)
    pool, arguments = tree.storage.mem_pool_host, get_server_args()

    def milliseconds(check: Callable[[], Any]) -> float:
        return round(micros(check, 1) / 1e3, 1)

    return {
        "hooks": milliseconds(lambda: [check_signature(hook) for hook in HOOKS]),
        "overrides": milliseconds(lambda: check_overrides(*OURS)),
        "tree": milliseconds(lambda: check_tree(64)),
        "host": milliseconds(lambda: run_host(new_cache, 64, arguments, "cpu")),
        "disk": milliseconds(lambda: check_page(pool)),
    }


QUESTIONS = (
    Question("victim_cost", "CPU microseconds of an eviction, insert and match", run, 5),
    Question("start_checks", "CPU milliseconds of the checks at a server's start", checks, 0.5),
)
