"""Speed of the system simulator, and the linearity of its time in requests.

    python benchmark/plan/speed.py                       # 40,000 requests of two hours
    python benchmark/plan/speed.py --requests 10000,40000,100000,1000000

Synthetic chat (``benchmark/traces``, preset ``trace-a``), four instances with host memory and a shared
disk. A trace of n requests lasts n / 5.6 s: longer, not denser. CPU seconds of one process, and its
peak memory; reading and preparing the trace are reported separately.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from canopy_lab.sim.compact import CompactTrace
from canopy_lab.sim.system import (
    SystemConfig,
    TierSpec,
    Workload,
    load_profile,
    simulate_system,
)
from canopy_lab.trace.record import TraceRequest

sys.path.append(str(Path(__file__).resolve().parents[1] / "traces"))
from synthetic.presets import PRESETS
from synthetic.trace import synthesise

RATE = 40_000 / 7200
KV = "llama-3.1-8b-a100"


def records(requests: int) -> Iterator[TraceRequest]:
    """A synthetic chat trace of ``requests``."""
    preset = PRESETS["trace-a"].at_rate(RATE)
    # A little longer than needed on average, then cut.
    drawn = synthesise(preset, requests / RATE * 1.05 + 600, 1)
    for count, (made, _) in enumerate(zip(drawn, range(requests)), 1):
        request = made.request
        if request.line != count:
            request = replace(request, line=count)
        yield request


def configurations() -> dict[str, SystemConfig]:
    """Return the simulated systems: one, two and three tiers, with SGLang's policy and with WA."""
    profile = load_profile(KV)
    host = profile.host_tier(100e9)
    disk = TierSpec(2e12, 3e9, 2e9, shared_channel=True)
    common = {"device_tokens": 400_000, "instances": 4}
    return {
        "device": SystemConfig(**common),
        "device + host": SystemConfig(**common, host=host),
        "device + host + disk": SystemConfig(**common, host=host, disk=disk),
    }


def measure(requests: int, name: str) -> tuple[int, float, float, int, float]:
    """``(requests, seconds to prepare, seconds to simulate, events, peak bytes)``, CPU time."""
    begin = time.process_time()
    workload = Workload(CompactTrace(records(requests)))
    prepared = time.process_time()
    result = simulate_system(workload, configurations()[name], load_profile(KV))
    done = time.process_time()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return len(workload), prepared - begin, done - prepared, result.events, peak


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", default="40000", help="N,N,...")
    parser.add_argument("--configuration", choices=tuple(configurations()), help="one only")
    args = parser.parse_args()
    print("| requests | configuration | draw and prepare, s | simulate, s | us a request | events |"
          " peak memory, MB |")  # fmt: skip
    print("|---:|---|---:|---:|---:|---:|---:|")
    names = [args.configuration] if args.configuration else list(configurations())
    for requests in map(int, args.requests.split(",")):
        for name in names:
            # A process each: its peak memory is its own.
            context = multiprocessing.get_context("spawn")
            with context.Pool(1) as pool:
                count, prepare, took, events, peak = pool.apply(measure, (requests, name))
            each = took / count * 1e6
            print(
                f"| {count:,} | {name} | {prepare:.1f} | {took:.1f} | {each:.0f} | {events:,} | "
                f"{peak / 1e6:,.0f} |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
