"""How often `canopy trial` is wrong where both policies are the same, and how soon it is sure.

    python benchmark/whatif/trial.py --data DIR
    python benchmark/whatif/trial.py --served 20

The first cuts simulated runs into slices of time: what each request hits under LRU, and under `wa`.
A trial begins at a random second; its pairs, its order in each pair, its looks and its ends are those of
`canopy trial`. *Placebo*: both slices of a pair are LRU's, beside the shadows of LRU and `wa`. *Gain*: one
is `wa`'s, from a cache that was `wa`'s all the time, which is more than turns in one cache show. The second
starts a server on CPU under mixed traffic and runs `canopy trial` on it with slices of so many seconds,
first with the placebo.
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
from pathlib import Path

import numpy as np

from canopy_lab.sim.driver import simulate
from canopy_lab.trial.stopping import BETTER, LOOKS, SAME, UNSURE, WORSE, standing
from canopy_lab.trial.turns import SETTLES
from sglang_canopy.policy.registry import make_policy

sys.path.insert(0, str(Path(__file__).parent))

TRIALS = 2000
CASES = (("conversation", 0.1), ("synthetic", 0.1), ("agentic-60", 0.1))
"""Traces of `meter.py`, and the cache as a share of what an endless one would hold."""
SLICES_S = (15.0, 60.0)
USABLE = 0.95
"""Share of its cache that a server ranks: running requests hold the rest. The meter's shadow caches, beside
which slices are set, have all of it, so that the two differ as a server and its shadow do."""


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


def trial(
    first: Run, second: Run, shadows: tuple[Run, ...], slice_s: float, draw: random.Random
) -> tuple[str, int, float]:
    """The verdict of one trial of ``first`` against ``second``, its pairs, and its mean difference."""
    last = float(first.times[-1])
    at = draw.uniform(0, max(0.0, last - 2 * slice_s * LOOKS[-1]))
    differences: list[float] = []
    while True:
        found = []
        order = [0, 1]
        draw.shuffle(order)
        for which in order:
            begin_s, end_s = at + SETTLES * slice_s, at + slice_s
            ratio = (first, second)[which].ratio(begin_s, end_s)
            beside = [shadow.ratio(begin_s, end_s) or 0.0 for shadow in shadows]
            found.append(
                (which, None if ratio is None else ratio - sum(beside) / max(1, len(beside)))
            )
            at = (at + slice_s) % (last - slice_s)
        ratios = dict(found)
        if None not in ratios.values():
            differences.append(100 * (ratios[0] - ratios[1]))
        if len(differences) > 1:
            so_far = standing(differences)
            if so_far.verdict is not None:
                return so_far.verdict, so_far.pairs, so_far.points


def simulated(data: Path, trials: int) -> None:
    from meter import trace

    print(
        "trace, slice: placebo called different | gain: sure, points, median pairs | cache's gain"
    )
    for name, share in CASES:
        requests, distinct = trace(data, name)
        blocks = int(share * distinct)
        lru, wa = (Run(requests, policy, int(USABLE * blocks)) for policy in ("lru", "wa"))
        shadows = tuple(Run(requests, policy, blocks) for policy in ("lru", "wa"))
        whole = 100 * (wa.hit[-1] - lru.hit[-1]) / lru.asked[-1]
        for slice_s, beside in itertools.product(SLICES_S, ((), shadows)):
            draw = random.Random(1)
            same = Counter(trial(lru, lru, beside, slice_s, draw)[0] for _ in range(trials))
            ends = [trial(wa, lru, beside, slice_s, draw) for _ in range(trials)]
            sure = [end for end in ends if end[0] == BETTER]
            wrong = 100 * (same[BETTER] + same[WORSE]) / trials
            points = np.mean([end[2] for end in sure]) if sure else float("nan")
            middle = np.median([end[1] for end in sure]) if sure else float("nan")
            print(
                f"{name} {slice_s:g} s, {'meter' if beside else 'alone'}: {wrong:.2f} % (same {100 * same[SAME] / trials:.0f} %, unsure "
                f"{100 * same[UNSURE] / trials:.0f} %) | {100 * len(sure) / trials:.0f} %, "
                f"{points:+.1f}, {middle:.0f} | {whole:+.1f}",
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
            words = ["trial", "--url", server.url, "--policy", policy, "--slice", str(slice_s)]
            subprocess.run([*canopy, *words], check=False)
            subprocess.run([*canopy, "top", "--once", "--url", server.url], check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with the traces")
    parser.add_argument("--trials", type=int, default=TRIALS)
    parser.add_argument("--served", type=float, metavar="SECONDS", help="of a slice, on a server")
    args = parser.parse_args()
    if args.served:
        served(args.served)
    else:
        simulated(args.data, args.trials)


if __name__ == "__main__":
    main()
