"""What an order costs on the scheduler's thread, by the number of waiting requests.

    PYTHONPATH=test python benchmark/latency/queue_cost.py

A pass is what SGLang does before it lets requests in: ``SchedulePolicy.calc_priority``. The tree is
the real one on CPU tensors, with conversations whose next turns wait; milliseconds of
CPU time, the median of the passes and the slowest of a hundred.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from array import array
from types import SimpleNamespace
from typing import Any

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import SchedulePolicy
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_canopy.config.queue import BOUNDED_SHORTEST, SGLANG, QueueFlags
from sglang_canopy.server.scheduler import queue
from sglang_canopy.server.scheduler.live_queue import LiveQueue
from support.live_tree import LiveTree

PASSES = 100
KINDS = {"sglang hrrn": "hrrn", "sglang shortest": "shortest-prefill-first"}
"""``--schedule-policy`` of the orders that are SGLang's."""


def waiting(tree: LiveTree, count: int, tokens: int, tenants: int) -> list[Req]:
    """Requests that continue what is in the tree, as far as it has room."""
    draw, made = random.Random(1), []
    for number in range(count):
        ids = [draw.randrange(1, 30_000) for _ in range(tokens)]
        if number % 4 == 0:
            tree.serve(ids[: tokens // 2], number / 1e4)
        params = SamplingParams(max_new_tokens=4, custom_params={"canopy": {"time": 1 + number}})
        salt = f"t{number % tenants}" if tenants > 1 else None
        req = Req(f"r{number}", "", array("q", ids), params, cache_salt=salt)
        tree.core.requests.of(req)
        made.append(req)
    return made


def passes(tree: LiveTree, requests: list[Req], policy: SchedulePolicy) -> list[float]:
    """Milliseconds of each of ``PASSES`` passes, two requests being let in after each."""
    took, left = [], list(requests)
    for _ in range(PASSES):
        began = time.process_time()
        queue.priorities_calculated(SchedulePolicy.calc_priority, policy, left, None, 0)
        took.append(1e3 * (time.process_time() - began))
        left = left[2:] + requests[:2]
    return took


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--waiting", type=lambda t: [*map(int, t.split(","))], default="100,1000")
    parser.add_argument("--tokens", type=int, default=2000, help="of each prompt")
    args = parser.parse_args()
    print("| waiting | tenants | order | median, ms | slowest, ms | lookup at arrival, ms |")
    print("|---:|---:|---|---:|---:|---:|")
    for count in args.waiting:
        for tenants in (1, 100):
            tree = LiveTree(200_000, "wa", page_size=64)
            requests = waiting(tree, count, args.tokens, tenants)
            scheduler: Any = SimpleNamespace(tree_cache=tree.cache, waiting_queue=requests)
            for name, options in (
                ("sglang fcfs", QueueFlags(protect_waiting="off")),
                ("sglang fcfs, protected", QueueFlags()),
                ("bounded-shortest", QueueFlags(queue_order=BOUNDED_SHORTEST)),
                ("sglang hrrn", QueueFlags(queue_order=SGLANG, protect_waiting="off")),
                ("sglang shortest", QueueFlags(queue_order=SGLANG, protect_waiting="off")),
            ):
                tree.cache.canopy_queue = LiveQueue(tree.cache, options)
                kind = KINDS.get(name, "fcfs")
                policy = SchedulePolicy(kind, tree.cache, False, False, False)
                began = time.process_time()
                for req in requests:
                    queue.request_queued(scheduler, req)
                arrival = 1e3 * (time.process_time() - began) / count
                took = passes(tree, requests, policy)
                print(
                    f"| {count} | {tenants} | {name} | {statistics.median(took):.2f} "
                    f"| {max(took):.2f} | {arrival:.3f} |",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
