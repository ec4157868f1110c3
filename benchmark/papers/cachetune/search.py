"""Algorithm 1 as printed, against the search that ``canopy documents calibrate`` runs."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from artefact import Context

from canopy_chunks.calibration.search import GOLDEN, CostProfile, golden_section

VALLEYS = 5000
NOISES = (0.0, 0.02, 0.1)
SEARCHES = ("as printed", "as printed, cold", "canopy documents calibrate")
R_MIN, R_MAX, TOLERANCE = 0.15, 1.0, 0.02


def as_printed(
    ttft: Callable[[float], float], r0: float, r_min: float, r_max: float, tolerance: float
) -> tuple[float, int]:
    """Run lines 3 to 24 of Algorithm 1; return the ratio and the number of TTFT measurements."""
    a, b, calls = r_min, r_max, 2
    if r0 <= (a + b) / 2:
        x1, x2 = r0, a + GOLDEN * (b - a)
    else:
        x1, x2 = b - GOLDEN * (b - a), r0
    f1, f2 = ttft(x1), ttft(x2)
    while abs(b - a) >= tolerance:
        calls += 1
        if f1 < f2:
            b, x2, f2 = x2, x1, f1
            x1 = b - GOLDEN * (b - a)
            f1 = ttft(x1)
        else:
            a, x1, f1 = x1, x2, f2
            x2 = a + GOLDEN * (b - a)
            f2 = ttft(x2)
        if calls > 200:
            break
    return (a + b) / 2, calls


def run(_: Context) -> dict[str, Any]:
    """Rooflines of equation 10 with a prior that is off by some noise, as a profile always is.

    A search is wrong where its ratio is further than the tolerance from the best in bounds. ``cold``
    is Algorithm 1 with a golden point for its prior: plain golden-section search.
    """
    cold = R_MAX - GOLDEN * (R_MAX - R_MIN)
    rows = {}
    for noise in NOISES:
        draw = random.Random(0)
        wrong, calls, lost = (dict.fromkeys(SEARCHES, 0.0) for _ in range(3))
        for _valley in range(VALLEYS):
            best = draw.uniform(R_MIN, 0.95)
            cost = CostProfile(1.0 - best, best, draw.uniform(0.0, 0.5))
            prior = min(R_MAX, max(R_MIN, best + draw.gauss(0.0, noise)))

            def ttft(ratio: float, cost: CostProfile = cost) -> float:
                return cost.ttft(1, ratio)

            ours = golden_section(ttft, prior, R_MIN, R_MAX, TOLERANCE)
            found = (
                as_printed(ttft, prior, R_MIN, R_MAX, TOLERANCE),
                as_printed(ttft, cold, R_MIN, R_MAX, TOLERANCE),
                (ours.ratio, len(ours.probes)),
            )
            for name, (ratio, count) in zip(SEARCHES, found):
                wrong[name] += abs(ratio - best) > TOLERANCE
                calls[name] += count / VALLEYS
                inside = min(R_MAX, max(R_MIN, ratio))
                lost[name] += (ttft(inside) / ttft(best) - 1) / VALLEYS
        rows[str(noise)] = {
            name: {
                "wrong": int(wrong[name]),
                "mean_measurements": round(calls[name], 2),
                "mean_ttft_lost": round(lost[name], 4),
            }
            for name in SEARCHES
        }
    return {"rooflines": VALLEYS, "tolerance": TOLERANCE, "by_noise_of_the_prior": rows}
