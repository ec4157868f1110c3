"""A workload category: its reuse samples and fitted curves."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from sglang_canopy.reuse.exponential import Exponential
from sglang_canopy.reuse.survival import AGE_BINS, TOKEN_BINS, exceedance, gittins_rank

_LAZY_CURVES = ("rank", "growth_exceedance")


@dataclass(slots=True, eq=False)
class Category:
    """One label, its samples in the sliding window, and the curves of the last fit. This label's
    own samples: ``events`` (continued tips) and ``waiting`` (open tips) by age bin, ``growth`` by
    token bin. ``all_...``, rebuilt at every fit, adds those of refinements and of a restored
    profile."""

    label: str
    parent: Category | None
    curve: list[float] = field(default_factory=lambda: [1.0] * AGE_BINS)
    """Probability that a tip is not continued yet, at each age edge."""
    events: list[float] = field(default_factory=lambda: [0.0] * AGE_BINS)
    waiting: list[float] = field(default_factory=lambda: [0.0] * AGE_BINS)
    growth: list[float] = field(default_factory=lambda: [0.0] * TOKEN_BINS)
    gap_sum_s: float = 0.0
    growth_sum_tokens: float = 0.0
    life_sum_s: float = 0.0
    """Sum of lifespans, from birth to the conversation's last request (exponential model)."""
    life_count: float = 0.0
    """Samples in ``life_sum_s``, including samples never reused."""
    all_events: list[float] = field(default_factory=list)
    all_waiting: list[float] = field(default_factory=list)
    all_growth: list[float] = field(default_factory=list)
    all_gap_sum_s: float = 0.0
    all_growth_sum_tokens: float = 0.0
    all_life_sum_s: float = 0.0
    all_life_count: float = 0.0
    exponential: Exponential = field(default_factory=Exponential)
    """The fitted exponential, if the policy uses that model."""
    saved_counts: dict[str, list[float]] | None = None
    """Counts of a restored profile: ``events``, ``waiting``, ``growth``, ``sums``, ``lives``."""
    tenant: str | None = None
    """Tenant whose request created the label, and whose share of the table it uses."""
    used_at: float | None = None
    """Time of the last use; ``None`` for an unused label of a profile."""
    use_count: int = 0
    """Requests that used or requested the label, including requests before it was admitted."""
    child_count: int = 0
    """Direct refinements in the table."""
    merged_into: Category | None = None
    """The category that received the samples when this label was dropped."""
    rank: list[float] = field(init=False)
    """Rank of a leaf by age bin; the lowest rank is evicted first."""
    growth_exceedance: list[float] = field(init=False)
    """P(the next prompt adds at least ``TOKEN_EDGES[i]`` tokens)."""
    _fitted_growth: list[float] | None = None
    """``all_growth`` at its last fit; ``None``: its curves are those of its parent."""

    def __getattr__(self, name: str) -> list[float]:
        """Compute ``rank`` or ``growth_exceedance``, which a fit deletes: most are not read before the next fit."""
        if name not in _LAZY_CURVES:
            raise AttributeError(name)
        parent, growth = self.parent, self._fitted_growth
        curve: list[float]
        if growth is None and parent is not None:
            curve = getattr(parent, name)
        elif name == "rank":
            curve = gittins_rank(self.curve)
        elif growth is None:
            curve = [1.0] * TOKEN_BINS
        else:
            curve = exceedance(growth, None if parent is None else parent.growth_exceedance)
        setattr(self, name, curve)
        return curve

    def set_curve(self, curve: list[float] | None) -> None:
        """Use the curve of a new fit; ``None``: too few samples, use the parent's curves."""
        if curve is not None:
            self.curve, self._fitted_growth = curve, self.all_growth
        elif self.parent is not None:
            self.curve, self._fitted_growth = self.parent.curve, None
        else:
            return
        for name in _LAZY_CURVES:
            with contextlib.suppress(AttributeError):
                delattr(self, name)

    @property
    def current(self) -> Category:
        """Return this category, or the coarser category in the table that replaced it."""
        category = self
        while category.merged_into is not None:
            category = category.merged_into
        return category
