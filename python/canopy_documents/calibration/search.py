"""Search for the ratio: the roofline prior and a golden-section search (CacheTune, Algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sglang_canopy.errors import CanopyError

GOLDEN_SECTION = (math.sqrt(5.0) - 1.0) / 2.0


@dataclass(frozen=True, slots=True)
class CostProfile:
    """Costs of a prompt's parts on one device and storage tier, for one model, over all layers.

    compute_s: seconds per recomputed token (l times t_c); transfer_s: seconds per token whose KV is
    read and placed (l times t_i); other_s: seconds per prompt that do not depend on the ratio (l
    times t_o): its question, the selection, and the fixed cost of each step.
    """

    compute_s: float
    transfer_s: float
    other_s: float = 0.0

    def prior_ratio(self, r_min: float, r_max: float) -> float:
        """Return r0 = t_i / (t_c + t_i), where compute and transfer take equally long; clipped."""
        if self.compute_s <= 0 or self.transfer_s < 0:
            raise CanopyError(
                f"a profile needs seconds above 0, got compute {self.compute_s}, transfer "
                f"{self.transfer_s}; measure it again on an idle machine"
            )
        return min(r_max, max(r_min, self.transfer_s / (self.compute_s + self.transfer_s)))


@dataclass(frozen=True, slots=True)
class RatioSearchResult:
    """The best ratio, its TTFT in seconds, and ``(ratio, TTFT)`` of every probe, in order."""

    ratio: float
    ttft_s: float
    probes: tuple[tuple[float, float], ...]


def golden_section(
    measure_ttft_s: Callable[[float], float],
    first_ratio: float,
    r_min: float,
    r_max: float = 1.0,
    ratio_tolerance: float = 0.02,
) -> RatioSearchResult:
    """Find the ratio with the least measured TTFT in ``[r_min, r_max]``, for a unimodal ``measure_ttft_s``.

    The first probe is the prior ``first_ratio``; the second, the golden-section point of the other half,
    gives a valid bracket. Both inner points are then placed anew: the prior is no golden-section
    point, and could lose the minimum. Returns the best measured ratio. Raises CanopyError for bounds
    out of order.
    """
    if not 0.0 <= r_min <= r_max <= 1.0 or ratio_tolerance <= 0:
        raise CanopyError(
            f"ratio bounds {r_min} to {r_max} (tolerance {ratio_tolerance}): give 0 <= min <= max <= 1 "
            f"and a tolerance above 0"
        )
    probes: dict[float, float] = {}

    def measure(ratio: float) -> float:
        if ratio not in probes:
            probes[ratio] = measure_ttft_s(ratio)
        return probes[ratio]

    low, high = r_min, r_max
    first_ratio = min(high, max(low, first_ratio))
    measure(first_ratio)
    if high - low > ratio_tolerance:
        # The minimum cannot lie on the far side of the worse probe.
        step = GOLDEN_SECTION * (high - low)
        second_ratio = low + step if first_ratio <= (low + high) / 2 else high - step
        lower_ratio, upper_ratio = sorted((first_ratio, second_ratio))
        if lower_ratio < upper_ratio and measure(lower_ratio) <= measure(upper_ratio):
            high = upper_ratio
        elif lower_ratio < upper_ratio:
            low = lower_ratio
    while high - low > ratio_tolerance:
        step = GOLDEN_SECTION * (high - low)
        # One of the two was already measured, up to rounding: golden points nest.
        lower_ratio, upper_ratio = (_snap_to_measured(probes, r) for r in (high - step, low + step))
        if measure(lower_ratio) <= measure(upper_ratio):
            high = upper_ratio
        else:
            low = lower_ratio
    if not any(low <= r <= high for r in probes):
        measure((low + high) / 2)
    best_ratio = min(probes, key=lambda r: (probes[r], r))
    return RatioSearchResult(best_ratio, probes[best_ratio], tuple(probes.items()))


def _snap_to_measured(probes: Mapping[float, float], ratio: float) -> float:
    return next((r for r in probes if abs(r - ratio) < 1e-9), ratio)
