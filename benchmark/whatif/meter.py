"""The what-if meter against the full simulation, and its cost.

    python benchmark/whatif/meter.py --data DIR [--out FILE]
    python benchmark/whatif/meter.py --cost

A trace is simulated in full under the running policy (LRU) at one capacity; the meter receives every
request with its hits, as in a server. Its arms are compared with full simulations of
the same policies and capacities. Block ids are hashed, as a server's are; a seed is another hash and
so another sample. Printed in % of prompt tokens, over the whole trace: for each arm `error`, the
meter's minus the simulation's, and `stated`, the standard error that the meter gives itself. `us` is
what the meter took per request of the trace, on the thread that serves; `share` is that at the
trace's own rate.

``--cost`` needs no data: conversations of 2,000 to 8,000 tokens at several rates, through all work of
``--canopy-observe`` for an ended request (including hashes of tokens). `share` is in % of the
scheduler's thread, over the run and, with the final sample, at its end.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import sys
import time
from array import array
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from canopy_lab.sim.driver import distinct_blocks, simulate
from canopy_lab.trace.open import open_trace
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.policy.registry import make_policy
from sglang_canopy.records import Request
from sglang_canopy.whatif.meter import LRU, NOW, Memory, Meter, MeterSetup, Question

sys.path.append(str(Path(__file__).resolve().parents[1] / "traces"))
from overlays import overlay

TRACES = ("conversation", "synthetic", "agentic-60")
CAPACITIES = (0.02, 0.05, 0.1)
SAMPLES = (None, 4, 8, 16, 32)
SEEDS = (1, 2, 3)
_MASK = (1 << 64) - 1
POLICIES = (LRU, "wa")


@lru_cache(1)
def trace(data: Path, name: str) -> tuple[list[TraceRequest], int]:
    """A trace's requests and its distinct blocks."""
    kind, _, users = name.partition("-")
    if kind == "agentic":
        archive = data / "agentic_coding" / "traces_500.tar.xz"
        requests = list(overlay(archive, int(users), 7200.0, 1))
    else:
        files = {"conversation": "conversation_first60.jsonl", "synthetic": "synthetic_trace.jsonl"}
        requests = list(open_trace(data / "mooncake" / files[kind], "mooncake"))
    return requests, distinct_blocks(requests)


def hashed(block: int, seed: int) -> int:
    """SplitMix64: a block's id as the hash of its tokens is one."""
    z = block + seed * 0x9E3779B97F4A7C15 & _MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK
    return z ^ z >> 31


def measured(requests: list[TraceRequest], blocks: int, one_in: int | None, seed: int) -> Meter:
    """Return a meter that received the whole trace, served under LRU."""
    memory = Memory(blocks * requests[0].block_tokens)
    meter = Meter(MeterSetup(POLICIES, (1.0, 2.0), one_in, memory_s=math.inf), memory, LRU)
    ids: dict[int, int] = {}

    def ended(request: Request, hit_tokens: int) -> None:
        heard = copy.copy(request)
        heard.path = tuple(ids.get(b) or ids.setdefault(b, hashed(b, seed)) for b in request.path)
        meter.ended(heard, hit_tokens)

    simulate(requests, make_policy("lru"), blocks, on_request=ended)
    return meter


def rows(
    data: Path, name: str, share: float, samples: tuple[int | None, ...], seeds: tuple[int, ...]
) -> list[dict[str, Any]]:
    requests, distinct = trace(data, name)
    blocks = max(1, int(distinct * share))
    truth = {
        Question(policy, capacity): 100
        * simulate(requests, make_policy(policy), factor * blocks).token_hit_ratio
        for policy in POLICIES
        for capacity, factor in ((NOW, 1), ("device x2", 2))
    }
    span_s = requests[-1].time_s - requests[0].time_s
    found = []
    for one_in in samples:
        for seed in seeds if one_in else seeds[:1]:
            meter = measured(requests, blocks, one_in, seed)
            row: dict[str, Any] = {
                "trace": name,
                "capacity": share,
                "one_in": "auto" if one_in is None else one_in,
                "seed": seed,
                "sampled": meter.caches.seen,
                "us": round(1e6 * meter.spent_s / len(requests), 1),
                "share": round(100 * meter.spent_s / span_s, 3),
            }
            for arm in meter.rows():
                question = Question(arm["policy"], arm["capacity"])
                if question != (LRU, NOW):
                    label = f"{question.policy} {question.capacity}"
                    row[label] = round(truth[question], 2)
                    row[f"{label} error"] = round(100 * arm["hit_ratio"] - truth[question], 2)
                    row[f"{label} stated"] = round(100 * arm["sampling_error"], 2)
            found.append(row)
    return found


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return rows by trace, capacity and sample: the errors' root mean square and worst over arms and
    seeds, the stated errors', and the share of errors within two stated errors."""
    lines = [
        "| trace | capacity | one in | sampled | error, RMS | worst | stated, RMS | within 2 |"
    ]
    lines.append("|---|---:|---:|---:|---:|---:|---:|---:|")
    for key in dict.fromkeys((r["trace"], r["capacity"], r["one_in"]) for r in rows):
        own = [r for r in rows if (r["trace"], r["capacity"], r["one_in"]) == key]
        arms = [k.removesuffix(" error") for k in own[0] if k.endswith(" error")]
        pairs = [(r[f"{arm} error"], r[f"{arm} stated"]) for r in own for arm in arms]
        off, said = (math.sqrt(sum(p[i] ** 2 for p in pairs) / len(pairs)) for i in (0, 1))
        within = sum(abs(error) <= 2 * stated + 0.01 for error, stated in pairs)
        worst = max((error for error, _ in pairs), key=abs)
        lines.append(
            f"| {key[0]} | {key[1]:.0%} | {key[2]} | {own[0]['sampled']:,} | {off:.2f} | "
            f"{worst:+.2f} | {said:.2f} | {within} of {len(pairs)} |"
        )
    return lines


def cost(rate: float, span_s: float = 300.0) -> dict[str, Any]:
    """Return the cost of observing at ``rate`` requests per second, with 300,000 tokens of KV."""
    from sglang_canopy.server.scheduler.observer import Observer

    draw, talks = random.Random(1), {}
    meter = Meter(MeterSetup(), Memory(300_000, 600_000), "lru")
    observer, spent, half = Observer(meter), 0.0, 0.0
    batches: list[Any] = []
    for step in range(int(rate * span_s)):
        who = draw.randrange(int(40 * rate))
        talk = talks.get(who)
        if talk is None or len(talk) > 8000:
            talk = talks[who] = array("q", (draw.randrange(10**5) for _ in range(2000)))
        else:
            talk.extend(draw.randrange(10**5) for _ in range(500))
        stamp = {"time": step / rate, "category": "chat"}
        req = SimpleNamespace(
            finished=lambda: True,
            origin_input_ids=talk[:],
            output_ids=array("q", [1] * 100),
            sampling_params=SimpleNamespace(custom_params={"canopy": stamp}),
            extra_key=None,
            cache_salt=None,
            cached_tokens=0,
            cached_tokens_device=0,
            cached_tokens_host=0,
            finished_reason=SimpleNamespace(),
        )
        batches.append(SimpleNamespace(reqs=[req]))
        # Many at a time: reading a thread's clock is not free.
        if len(batches) == 100 or step == int(rate * span_s) - 1:
            begin = time.thread_time()
            for batch in batches:
                observer.computed(batch)
            taken = time.thread_time() - begin
            spent += taken
            half += taken if step <= rate * span_s / 2 else 0.0
            batches.clear()
    return {
        "requests_per_s": rate,
        "one_in": meter.caches.one_in,
        "sampled": meter.caches.seen,
        "us_per_request": round(1e6 * spent / (rate * span_s), 1),
        "share": round(100 * spent / span_s, 3),
        "share_second_half": round(200 * (spent - half) / span_s, 3),
        "origins": len(meter._origins),
        "blocks": sum(meter.caches.blocks().values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--trace", choices=TRACES, nargs="*", default=TRACES)
    parser.add_argument("--capacity", type=float, nargs="*", default=CAPACITIES)
    parser.add_argument("--one-in", type=int, nargs="*", help="0: auto")
    parser.add_argument("--seed", type=int, nargs="*", default=SEEDS)
    parser.add_argument("--rate", type=float, nargs="*", default=(1, 8, 32, 128))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.cost:
        for rate in args.rate:
            print(json.dumps(cost(rate)), flush=True)
        return
    if args.data is None:
        sys.exit("give --data DIR, or --cost")
    samples = SAMPLES if args.one_in is None else tuple(n or None for n in args.one_in)
    found: list[dict[str, Any]] = []
    begin = time.perf_counter()
    for name in args.trace:
        for share in args.capacity:
            for row in rows(args.data, name, share, samples, tuple(args.seed)):
                found.append(row)
                print(json.dumps(row), flush=True)
    print("\n".join(table(found)))
    print(f"{time.perf_counter() - begin:.0f} s")
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
