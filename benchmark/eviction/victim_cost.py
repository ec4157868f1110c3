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

from question import Question, QuestionRun  # noqa: E402
from support.disk_tree import DiskTree  # noqa: E402
from support.live_tree import LiveTree  # noqa: E402

LEAF_TOKENS = 8
EVICT_CALLS, PYTHON_EVICT_CALLS, MATCH_CALLS = 60, 15, 300
"""Timed calls; SGLang's Python core is slow to evict."""
EVICT_MANY_CALLS, LEAVES_PER_CALL = 5, 500
ARM_NAMES = ("wa", "canopy-lru", "python", "rust")
LEAF_COUNTS, ROUNDS = (5000, 20_000, 50_000), 3


def make_key(leaf: int) -> RadixKey:
    return RadixKey(array("q", [leaf, leaf + 1, leaf + 2, leaf + 3, 5, 6, 7, 8]), None)


def median_us(call: Callable[[], Any], repeats: int) -> float:
    times_s = []
    for _ in range(repeats):
        start_s = time.thread_time()
        call()
        times_s.append(time.thread_time() - start_s)
    return statistics.median(times_s) * 1e6


def measure(name: str, leaves: int) -> dict[str, float]:
    """Return the median microseconds of each call, on an arm's tree of ``leaves`` leaves."""
    core = name if name in ("python", "rust") else None
    policy, config = ("lru", None) if core else (name, {"quantum_tokens": 1})
    tree = LiveTree(leaves * LEAF_TOKENS + 64, policy, config, sglang_core=core)
    gc.collect()
    gc.disable()
    to_insert = iter(range(leaves))

    def insert() -> None:
        slots = tree.allocator.alloc(LEAF_TOKENS)
        tree.cache.insert(InsertParams(key=make_key(next(to_insert)), value=slots))

    insert_us = median_us(insert, leaves)
    tree.evict(LEAF_TOKENS)  # the first one also ranks all inserted leaves
    evict_calls = PYTHON_EVICT_CALLS if name == "python" else EVICT_CALLS
    evict_us = median_us(lambda: tree.evict(LEAF_TOKENS), evict_calls)
    many_tokens = LEAF_TOKENS * LEAVES_PER_CALL
    many_us = median_us(lambda: tree.evict(many_tokens), EVICT_MANY_CALLS) / LEAVES_PER_CALL
    to_match = iter(range(leaves - 1, 0, -7))
    match_us = median_us(
        lambda: tree.cache.match_prefix(MatchPrefixParams(key=make_key(next(to_match)))),
        MATCH_CALLS,
    )
    gc.enable()
    return {"insert": insert_us, "evict": evict_us, "evict_many": many_us, "match": match_us}


def run_costs(_: QuestionRun) -> list[dict[str, Any]]:
    runs_by_case: dict[tuple[str, int], list[dict[str, float]]] = {}
    for _ in range(ROUNDS):
        for leaves in LEAF_COUNTS:
            for name in ARM_NAMES:
                runs_by_case.setdefault((name, leaves), []).append(measure(name, leaves))
    return [
        {"core": name, "leaves": leaves}
        | {k: round(statistics.median(r[k] for r in runs), 1) for k in runs[0]}
        for (name, leaves), runs in sorted(runs_by_case.items(), key=lambda kv: kv[0][::-1])
    ]


def run_checks(_: QuestionRun) -> dict[str, float]:
    """Return the CPU milliseconds of each check at a server's start, as in a new process."""
    from sglang.srt.runtime_context import get_server_args

    from sglang_canopy.radix.overrides import check_overrides
    from sglang_canopy.radix.tier_self_test import check_host_tier
    from sglang_canopy.server.scheduler import cache_factory as factory
    from sglang_canopy.server.start.hooks import HOOKS
    from sglang_canopy.server.start.self_check import check_signature
    from sglang_canopy.storage.page_self_test import check_page

    for hook in HOOKS:  # imports what SGLang's server imports too
        hook.sglang_parameters()
    with TemporaryDirectory() as folder:
        tree = DiskTree(Path(folder), tokens=256, page_size=64, host_tokens=256)
    pool, arguments = tree.storage.mem_pool_host, get_server_args()

    def time_ms(check: Callable[[], Any]) -> float:
        return round(median_us(check, 1) / 1e3, 1)

    return {
        "hooks": time_ms(lambda: [check_signature(hook) for hook in HOOKS]),
        "overrides": time_ms(lambda: check_overrides(*factory.OVERRIDING_CLASSES)),
        "tree": time_ms(lambda: factory.check_tree(64)),
        "host": time_ms(lambda: check_host_tier(factory.new_cache, 64, arguments, "cpu")),
        "disk": time_ms(lambda: check_page(pool)),
    }


QUESTIONS = (
    Question("victim_cost", "CPU microseconds of an eviction, insert and match", run_costs, 5),
    Question("start_checks", "CPU milliseconds of the checks at a server's start", run_checks, 0.5),
)
