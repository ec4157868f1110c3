"""Hit ratios by the part of the prompt that is cached (Section 3.4, Figures 16 to 18)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from canopy_lab.characterize.observe import POSITIONS, Observation


@dataclass(frozen=True, slots=True)
class Locality:
    """Ideal block hit ratio if only a part of every prompt is stored and looked up.

    The part has length ``stride`` and starts at ``offset``. Grids are ``[stride, offset]`` in
    tenths; row 0 is the smallest stride (10 %). Cells that would pass the prompt's end repeat the
    longest stride that fits.
    """

    all: tuple[tuple[float, ...], ...]
    first_turns: tuple[tuple[float, ...], ...]
    later_turns: tuple[tuple[float, ...], ...] | None
    """``None`` if the trace has no turns."""
    first_tenth: float
    """Hit ratio from the first tenth of every prompt alone."""
    first_half: float
    last_half: float


def locality(seen: Observation) -> Locality:
    first, later = seen.place_count
    both = grid(first + later)
    return Locality(
        all=_rows(both),
        first_turns=_rows(grid(first)),
        later_turns=_rows(grid(later)) if seen.has_turns else None,
        first_tenth=float(both[0, 0]),
        first_half=float(both[4, 0]),
        last_half=float(both[4, 5]),
    )


def grid(place_count: np.ndarray) -> np.ndarray:
    """Convert ``place_count[place, set of earlier places]`` to hit ratios by stride and offset.

    An access is a hit if its place and an earlier place of its block are both inside the part.
    """
    sets = np.arange(1 << POSITIONS)
    total = max(int(place_count.sum()), 1)
    ratio = np.zeros((POSITIONS, POSITIONS))
    for stride in range(1, POSITIONS + 1):
        for offset in range(POSITIONS):
            kept = ((1 << stride) - 1) << offset
            inside = place_count[offset : offset + stride].sum(0)
            ratio[stride - 1, offset] = inside[(sets & kept) > 0].sum() / total
    return ratio


def _rows(ratio: np.ndarray) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row) for row in ratio.tolist())
