"""Cost of group TTLs: the allocator's time and its distance from a bound, and the window's share.

    python benchmark/tiers/allocator.py --out OUT

Makes two-hour traces of `trace-a` and `trace-b` and measures, for 64 groups: the time to make
a table, best in hindsight and learnt; the hits that the allocation lacks to a linear bound, and the
winning solution; the cost of recording requests and of snapshots on the scheduler's thread, as a share
of the trace's time; and the cost of a table on its own thread. All in processor seconds. Writes OUT/allocator.json. About three minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from canopy_lab.group_ttl.allocate import allocate
from canopy_lab.group_ttl.groups import GroupSelection, choose_groups
from canopy_lab.group_ttl.learn import Learning, in_hindsight, learn
from canopy_lab.group_ttl.path_log import PathLog
from canopy_lab.group_ttl.path_segments import segments_of
from canopy_lab.group_ttl.replay import fixed_ttls
from canopy_lab.sim.ttl import observe, path_snapshot
from canopy_lab.trace.open import open_trace
from canopy_lab.trace.record import TraceRequest
from support.linear_bound import linear_bound

sys.path.append(str(Path(__file__).resolve().parents[1] / "traces"))
from synthetic.presets import get_preset
from synthetic.trace import write_trace

GROUPS = 64
TTLS_S = (10.0, 60.0, 300.0)


def allocations(trace: list[TraceRequest]) -> list[dict[str, Any]]:
    log = path_snapshot(trace)
    segments = segments_of(log)
    rows = []
    for ttl_s in TTLS_S:
        budget = fixed_ttls(segments, [ttl_s])[0].mean_tokens
        began = time.process_time()
        in_hindsight(log, budget, GROUPS)
        hindsight_s = time.process_time() - began
        began = time.process_time()
        learn(log, budget, Learning(groups=GROUPS))
        learn_s = time.process_time() - began
        chosen = choose_groups(segments, budget, GroupSelection(GROUPS))
        began = time.process_time()
        found = allocate(chosen.curves, budget)
        allocate_s = time.process_time() - began
        bound = linear_bound(chosen.curves, budget)
        rows.append(
            {
                "ttl_s": ttl_s,
                "groups": len(chosen.roots),
                "hindsight_s": hindsight_s,
                "learn_s": learn_s,
                "allocate_s": allocate_s,
                "below_bound": 1 - found.hits / bound,
                "found_by": found.found_by,
                "below_bound_by": {k: 1 - v / bound for k, v in found.candidates.items()},
            }
        )
    return rows


def window_cost(trace: list[TraceRequest], window_s: float, every_s: float) -> dict[str, Any]:
    """Time in ``observe`` and ``snapshot``, as a share of the time the trace takes."""
    log = PathLog(block_tokens=trace[0].block_tokens, window_s=window_s)
    noted = copied = worst = 0.0
    due = trace[0].time_s + every_s
    snapshots = 0
    for record in trace:
        began = time.process_time()
        observe(log, record)
        noted += time.process_time() - began
        if record.time_s >= due:
            began = time.process_time()
            log.snapshot()
            took = time.process_time() - began
            copied, worst = copied + took, max(worst, took)
            snapshots += 1
            due += every_s
    whole = trace[-1].time_s - trace[0].time_s
    return {
        "requests_per_s": len(trace) / whole,
        "observe_us": 1e6 * noted / len(trace),
        "snapshots": snapshots,
        "snapshot_worst_ms": 1e3 * worst,
        "share": (noted + copied) / whole,
        "distinct_blocks": log.distinct_blocks,
    }


def table_cost(trace: list[TraceRequest], budget: float) -> dict[str, Any]:
    """Processor time of one table from the last half hour, in a thread of its own.

    A thread that serves loses at most that much to it, if it waited for every bit of it.
    """
    log = PathLog(block_tokens=trace[0].block_tokens, window_s=1800.0)
    for record in trace:
        observe(log, record)
    snapshot = log.snapshot()
    began = time.process_time()
    learn(snapshot, budget, Learning(groups=GROUPS))
    took = time.process_time() - began
    return {"requests": len(snapshot), "table_s": took, "share_every_600_s": took / 600}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for allocator.json")
    parser.add_argument("--seconds", type=float, default=7200.0, help="length of the traces")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {}
    for name in ("trace-a", "trace-b"):
        path = args.out / f"{name}-allocator.jsonl"
        write_trace(path, get_preset(name), args.seconds, 1)
        trace = list(open_trace(path, "bailian"))
        path.unlink()
        path.with_name(f"{path.stem}.meta.json").unlink()
        budget = fixed_ttls(segments_of(path_snapshot(trace)), [60.0])[0].mean_tokens
        result[name] = {
            "allocations": allocations(trace),
            "window": window_cost(trace, 1800.0, 600.0),
            "table": table_cost(trace, budget),
        }
        print(name, json.dumps(result[name], indent=1))
    (args.out / "allocator.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
