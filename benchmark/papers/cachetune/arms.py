"""What is compared: a selector, a ratio and what chunks are encoded behind."""

from __future__ import annotations

from dataclasses import dataclass

from comparators import SELECTORS

from canopy_chunks.selectors.base import Selector
from canopy_chunks.selectors.frequency import ALPHA, Frequency

RATIO = 0.15
ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7)
RATIOS = (0.05, 0.15, 0.25)


@dataclass(frozen=True)
class Arm:
    """One way to reuse. ``ratio`` 0: nothing is recomputed; ``alpha``: of the frequency selectors."""

    selector: str
    ratio: float = RATIO
    encode: str = "alone"
    alpha: float = ALPHA

    @property
    def name(self) -> str:
        what = "no recompute" if self.ratio == 0 else self.selector
        extra = "" if self.alpha == ALPHA else f" alpha={self.alpha:g}"
        share = "" if self.ratio in (0, RATIO) else f" r={self.ratio:g}"
        return f"{what}{extra}{share}, {self.encode}"

    def make(self) -> Selector:
        """The selector itself."""
        kind = SELECTORS[self.selector]
        return kind(self.alpha) if issubclass(kind, Frequency) else kind()


ALONE = (
    Arm("random", 0.0),
    *(Arm("frequency", alpha=alpha) for alpha in ALPHAS),
    Arm("frequency-per-layer"),
    *(Arm(n) for n in ("high-frequency", "random", "hkvd", "epic", "first-k", "prophetkv")),
    Arm("question"),
)
"""The paper's set-up, each chunk encoded by itself: its selector, its controls (Figure 10),
CacheBlend, EPIC with 16 tokens a chunk, as many first tokens as the others have, ProphetKV, ours."""

BEHIND = (
    Arm("random", 0.0, "prefix"),
    *(
        Arm(n, encode="prefix")
        for n in ("frequency", "random", "hkvd", "epic", "prophetkv", "question")
    ),
)
"""Behind the system text: where this project starts."""

SWEEP = tuple(Arm(name, r) for name in ("frequency", "question") for r in RATIOS if r != RATIO)
"""Figure 9."""

TASKS = (
    *(a for a in ALONE if a.alpha == ALPHA),
    *(a for a in BEHIND if a.selector in ("random", "question")),
)
"""On made-up tasks."""

ANSWERED = {
    "full",
    "no recompute, alone",
    *(f"{n}, alone" for n in ("frequency", "high-frequency", "random", "hkvd", "epic")),
    *(f"{n}, alone" for n in ("prophetkv", "question")),
    "asked, prefix",
}
"""Those whose whole answer is generated."""
