"""Error rate of `canopy trial` for equal policies, and its time to a verdict.

    python benchmark/whatif/trial.py --data DIR
    python benchmark/whatif/trial.py --served 20

The first command simulates trials that begin at a random second. *Placebo*: both slices of a pair come
from one run of LRU, with shadow caches of LRU and `wa`. *In turns*: `canopy trial` itself, on a
simulated cache whose policies are exchanged, with its meter; `apart` is the gain of `wa` in a separate
cache. The second command starts a server on CPU under mixed traffic and runs `canopy trial` on it with slices of the given
seconds, first with the placebo.
"""

from __future__ import annotations

import argparse
import itertools
import random
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from canopy_lab.live.trial.turns import (
    BETTER,
    LOOKS,
    SETTLES,
    WORSE,
    Counts,
    Standing,
    pairs,
    standing,
)
from canopy_lab.sim.driver import simulate
from canopy_lab.sim.requests import to_requests
from sglang_canopy.policy.base import Policy
from sglang_canopy.policy.registry import make_policy
from sglang_canopy.records import Request
from sglang_canopy.whatif.meter import LRU, Memory, Meter, MeterSetup
from sglang_canopy.whatif.shadow_cache import ShadowCache

sys.path.insert(0, str(Path(__file__).parent))
from meter import hashed, trace

TRIALS, TURNS = 500, 3
CASES = (("conversation", 0.1), ("synthetic", 0.1), ("agentic-60", 0.1))
"""(trace of `meter.py`, cache size as a share of the distinct blocks)"""
SLICES_S = (60.0, 300.0)
USABLE = 0.95
"""Share of its cache that a server ranks: running requests hold the rest. The meter's shadow caches have
all of it, so that slices and shadows differ as a server and its shadow do."""


class Run:
    """Prompt and hit tokens of a simulated run, added up over time."""

    def __init__(self, requests: list, policy: str, blocks: int) -> None:
        result = simulate(requests, make_policy(policy), blocks)
        asked = np.array([r.input_tokens for r in requests], np.int64)
        hit = asked - np.array(result.uncached_tokens, np.int64)
        self.times = np.array([r.time_s for r in requests])
        self.asked = np.concatenate([[0], np.cumsum(asked)])
        self.hit = np.concatenate([[0], np.cumsum(hit)])

    def ratio(self, begin_s: float, end_s: float) -> float | None:
        first, last = np.searchsorted(self.times, (begin_s, end_s))
        asked = self.asked[last] - self.asked[first]
        return float(self.hit[last] - self.hit[first]) / asked if asked else None


class Turns:
    """The server interface of ``pairs``: a simulated cache whose policies are exchanged, and its meter.
    At its end the trace restarts with other blocks."""

    def __init__(self, requests: list, blocks: int, begin_s: float) -> None:
        size = requests[0].block_tokens
        self.meter = Meter(MeterSetup(factors=(1.0,)), Memory(blocks * size), LRU)
        self.live = ShadowCache(make_policy(LRU), int(USABLE * blocks) * size, size)
        self.running, self.now = LRU, 0.0
        self.learner: Policy | None = None
        self.coming = self._rounds(requests)
        self.next = next(self.coming)
        self.wait(begin_s)

    def _rounds(self, requests: list) -> Iterator[Request]:
        for lap in itertools.count(1):
            for request in to_requests(requests):
                request.time += (lap - 1) * (requests[-1].time_s + 1)
                request.path = tuple(hashed(block, lap) for block in request.path)
                yield request

    def wait(self, seconds: float) -> None:
        self.now += seconds
        while self.next.time < self.now:
            request = self.next
            heard = request.copy()
            if self.learner is not None:
                heard.label = self.learner.arrive(heard)
                heard.label = self.learner.finish(heard)
            hit = self.live.access(heard) * request.block_tokens
            self.meter.ended(request, min(hit, request.prompt_tokens))
            self.next = next(self.coming)

    def counts(self) -> Counts:
        sums, shadows = self.meter.sums, dict(self.meter.shadow_tokens)
        return Counts(
            sums["prompt_tokens"],
            sums["hit_tokens"],
            self.running,
            sums["sampled_tokens"],
            shadows,
            evicted_tokens=self.live.evicted_blocks,
        )

    def exchange(self, policy: str) -> None:
        if policy != LRU and self.learner is None:
            self.learner = make_policy(policy)
            self.learner.restore(self.meter.learnt(policy))
        ranks = make_policy(LRU) if policy == LRU or not self.learner else self.learner.twin()
        self.live.thin_out(ranks, 1, lambda block: True)
        self.meter.runs(policy)
        self.running = policy


def in_turns(requests: list, blocks: int, slice_s: float, trials: int) -> Iterator[Standing]:
    """Yield the final standings of trials of `wa` against `canopy-lru`."""
    for seed in range(trials):
        server = Turns(requests, blocks, begin_s=random.Random(seed).uniform(200, 400))
        *_, last = pairs(server, "wa", LRU, slice_s, server.wait, seed)
        assert last.so_far is not None
        yield last.so_far


def placebo(lru: Run, shadows: tuple[Run, ...], slice_s: float, draw: random.Random) -> str:
    """The verdict of one trial of LRU against itself."""
    last = float(lru.times[-1])
    at = draw.uniform(0, max(0.0, last - 2 * slice_s * LOOKS[-1]))
    differences: list[float] = []
    while True:
        found = {}
        for which in draw.sample((0, 1), 2):
            begin_s, end_s = at + SETTLES * slice_s, at + slice_s
            ratio = lru.ratio(begin_s, end_s)
            beside = np.mean([shadow.ratio(begin_s, end_s) or 0.0 for shadow in shadows])
            found[which] = None if ratio is None else ratio - float(beside)
            at = (at + slice_s) % (last - slice_s)
        one, other = found[0], found[1]
        if one is not None and other is not None:
            differences.append(100 * (one - other))
        if len(differences) > 1:
            so_far = standing(differences)
            if so_far.verdict is not None:
                return so_far.verdict


def simulated(data: Path, trials: int, turns: int) -> None:
    print(
        "trace, slice: placebo called different | in turns: verdicts; points, median pairs | apart"
    )
    for name, share in CASES:
        requests, distinct = trace(data, name)
        blocks = int(share * distinct)
        lru, wa = (Run(requests, policy, int(USABLE * blocks)) for policy in ("lru", "wa"))
        shadows = tuple(Run(requests, policy, blocks) for policy in ("lru", "wa"))
        apart = 100 * (wa.hit[-1] - lru.hit[-1]) / lru.asked[-1]
        for slice_s in SLICES_S:
            draw = random.Random(1)
            same = Counter(placebo(lru, shadows, slice_s, draw) for _ in range(trials))
            wrong = 100 * (same[BETTER] + same[WORSE]) / trials
            ends = list(in_turns(requests, blocks, slice_s, turns))
            verdicts = dict(Counter(str(end.verdict) for end in ends))
            points, middle = (np.mean([e.points for e in ends]), np.median([e.pairs for e in ends]))
            print(
                f"{name} {slice_s:g} s: {wrong:.2f} % | {verdicts}; {points:+.1f}, {middle:.0f} | "
                f"{apart:+.1f}",
                flush=True,
            )


def served(slice_s: float) -> None:
    root = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(root / "benchmark" / "metrics")]
    from live import send_traffic, small_server

    with (
        tempfile.TemporaryDirectory(prefix="canopy-trial-") as scratch,
        small_server(
            Path(scratch), "--canopy-whatif", "auto,floor=off", policy="canopy-lru", disk=False
        ) as server,
    ):
        seconds = 2 * 2 * slice_s * LOOKS[-1] + 120
        traffic = threading.Thread(target=send_traffic, args=(server.url, seconds), daemon=True)
        traffic.start()
        canopy = [sys.executable, "-m", "canopy_lab.cli.main"]
        for policy in ("canopy-lru", "wa"):
            words = ["trial", "--url", server.url, "--policy", policy, "--slice-s", str(slice_s)]
            subprocess.run([*canopy, *words], check=False)
            subprocess.run([*canopy, "top", "--once", "--url", server.url], check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with the traces")
    parser.add_argument("--trials", type=int, default=TRIALS, help="placebos")
    parser.add_argument("--turns", type=int, default=TURNS, help="trials of wa")
    parser.add_argument("--served", type=float, metavar="SECONDS", help="of a slice, on a server")
    args = parser.parse_args()
    if args.served:
        served(args.served)
    else:
        simulated(args.data, args.trials, args.turns)


if __name__ == "__main__":
    main()
