"""How much to recompute: the roofline prior and a golden-section search (CacheTune, Algorithm 1).

Beyond the paper, the smallest ratio allowed is measured on the user's own documents
(:func:`quality_floor`) and not fixed at 15 %.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

from sglang_canopy.errors import CanopyError
from sglang_canopy.private_file import replace_file, set_aside

GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0


@dataclass(frozen=True, slots=True)
class CostProfile:
    """What a prompt's parts cost on one device and storage tier, for one model, over all layers.

    compute_s: seconds a token that is recomputed (l times t_c); transfer_s: seconds a token whose KV
    is read and placed (l times t_i); other_s: seconds a prompt takes whatever the ratio (l times
    t_o): its question, the selection, and what is fixed in every step.
    """

    compute_s: float
    transfer_s: float
    other_s: float = 0.0

    def prior(self, r_min: float, r_max: float) -> float:
        """r0 = t_i / (t_c + t_i), where compute and transfer take as long; clipped."""
        if self.compute_s <= 0 or self.transfer_s < 0:
            raise CanopyError(
                f"a profile needs seconds above 0, got compute {self.compute_s}, transfer "
                f"{self.transfer_s}; measure it again on an idle machine"
            )
        return min(r_max, max(r_min, self.transfer_s / (self.compute_s + self.transfer_s)))

    def ttft(self, tokens: int, ratio: float) -> float:
        """Seconds to the first token of a prompt with ``tokens`` in chunks (equations 9 and 10):
        the slower of recomputing and transfer, which overlap, and what no ratio changes."""
        return (
            max(ratio * tokens * self.compute_s, (1.0 - ratio) * tokens * self.transfer_s)
            + self.other_s
        )


@dataclass(frozen=True, slots=True)
class Search:
    """The ratio found, its TTFT in seconds, and every ratio measured with its TTFT, in order."""

    ratio: float
    ttft_s: float
    probes: tuple[tuple[float, float], ...]


def golden_section(
    ttft: Callable[[float], float],
    start: float,
    r_min: float,
    r_max: float = 1.0,
    tolerance: float = 0.02,
) -> Search:
    """The ratio with the least measured TTFT in ``[r_min, r_max]``, for a unimodal ``ttft``.

    The prior ``start`` is the first probe: beside it a second one halves the bracket to a valid
    one around it. A warm probe does not sit at a golden point, so both inner points are placed
    afresh afterwards: reusing it would break the ratio and could lose the minimum. Returns the
    best ratio that was measured. Raises CanopyError for bounds out of order.
    """
    if not 0.0 <= r_min <= r_max <= 1.0 or tolerance <= 0:
        raise CanopyError(
            f"ratio bounds {r_min} to {r_max} (tolerance {tolerance}): give 0 <= min <= max <= 1 "
            f"and a tolerance above 0"
        )
    probes: dict[float, float] = {}

    def at(ratio: float) -> float:
        if ratio not in probes:
            probes[ratio] = ttft(ratio)
        return probes[ratio]

    low, high = r_min, r_max
    start = min(high, max(low, start))
    at(start)
    if high - low > tolerance:
        # The probe opposite to the prior; the side of the worse one cannot hold the minimum.
        other = (
            low + GOLDEN * (high - low)
            if start <= (low + high) / 2
            else high - GOLDEN * (high - low)
        )
        a, b = sorted((start, other))
        if a < b and at(a) <= at(b):
            high = b
        elif a < b:
            low = a
    while high - low > tolerance:
        a, b = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
        # One of the two was measured already, up to rounding: golden points nest.
        a, b = _near(probes, a), _near(probes, b)
        if at(a) <= at(b):
            high = b
        else:
            low = a
    if not any(low <= r <= high for r in probes):
        at((low + high) / 2)
    best = min(probes, key=lambda r: (probes[r], r))
    return Search(best, probes[best], tuple(probes.items()))


def _near(probes: Mapping[float, float], ratio: float) -> float:
    return next((r for r in probes if abs(r - ratio) < 1e-9), ratio)


def quality_floor(
    measured: Sequence[tuple[float, float]], keep: float = 0.95, target: float | None = None
) -> float:
    """The smallest ratio whose quality is good enough.

    measured: ``(ratio, KL)`` pairs, ratio 0 among them. Good enough: KL at most ``1 - keep`` of
    that at ratio 0, or at most ``target`` nats where given. Between two measured ratios KL is
    taken as linear. Returns 1.0 if no measured ratio is good enough.
    Raises CanopyError without a measurement at 0.
    """
    points = sorted(measured)
    if not points or points[0][0] != 0.0:
        raise CanopyError("a quality floor needs the KL at ratio 0 too; measure it as well")
    limit = points[0][1] * (1.0 - keep) if target is None else target
    if points[0][1] <= limit:
        return 0.0
    for (r0, k0), (r1, k1) in itertools.pairwise(points):
        if k1 <= limit:
            return r0 + (r1 - r0) * (k0 - limit) / (k0 - k1)
    return 1.0


@dataclass(frozen=True, slots=True)
class Setting:
    """What a calibration was measured for.

    model: its identity; device: the chip; dtype: of weights and KV, as torch spells it; tp_size:
    ranks that the model is split over; backend: the server's attention backend, empty where the
    engine was measured by itself.
    """

    model: str
    device: str
    dtype: str
    tp_size: int = 1
    backend: str = ""


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was found for one setting and tier."""

    ratio: float
    r_min: float
    profile: CostProfile


class Calibrations:
    """Calibrations in one JSON file, by setting and tier."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @staticmethod
    def key(setting: Setting, tier: str) -> str:
        """A short stable name of both."""
        *about, backend = astuple(setting)
        parts = [str(part) for part in (*about, *([backend] if backend else []), tier)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    def get(self, setting: Setting, tier: str) -> Calibration | None:
        """The saved calibration, or None."""
        found = self._read().get(self.key(setting, tier))
        if found is None:
            return None
        return Calibration(found["ratio"], found["r_min"], CostProfile(**found["profile"]))

    def settings(self, model: str, device: str) -> list[Setting | None]:
        """What the file has of a model on a chip; None: of a version that kept no dtype."""
        found = {
            Setting(model, device, one["dtype"], one["tp_size"], one.get("backend", ""))
            if "dtype" in one
            else None
            for one in self._read().values()
            if isinstance(one, dict) and (one.get("model"), one.get("device")) == (model, device)
        }
        return sorted(found, key=str)

    def put(self, setting: Setting, tier: str, calibration: Calibration) -> None:
        """Save one; the file changes whole or not at all."""
        everything = self._read()
        everything[self.key(setting, tier)] = {
            **asdict(setting),
            "tier": tier,
            **asdict(calibration),
        }
        replace_file(self.path, json.dumps(everything, indent=1, sort_keys=True) + "\n")

    def _read(self) -> dict[str, dict]:
        if not self.path.exists():
            return {}
        try:
            found = json.loads(self.path.read_text())
        except ValueError as error:
            set_aside(self.path, error)
            return {}
        if not isinstance(found, dict):
            set_aside(self.path, "it is no calibration file")
            return {}
        return found
