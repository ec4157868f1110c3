"""Refit every category's curve, rank and prompt growth from the window's samples."""

from __future__ import annotations

from dataclasses import replace

from sglang_canopy.reuse.categories import Categories
from sglang_canopy.reuse.category import Category
from sglang_canopy.reuse.exponential import fit_exponential
from sglang_canopy.reuse.shadow import ShadowIndex
from sglang_canopy.reuse.survival import AGE_BINS, AGE_EDGES_S, PRIOR_WEIGHT_TIPS, survival_curve


def fit(
    categories: Categories,
    shadow: ShadowIndex,
    now: float,
    min_samples: int,
    fits_exponential: bool,
    profile_share: float,
) -> None:
    """Refit all categories at ``now`` (seconds). ``min_samples``: fewer inherit their parent's curve;
    ``fits_exponential``: exponentials too; ``profile_share`` (0 to 1) scales a restored profile's counts."""
    _count_open_tips(categories, shadow, now)
    if fits_exponential:
        _sum_lifespans(categories, shadow)
    all_categories = list(categories)
    for category in all_categories:
        _start_from_own_samples(category, profile_share)
    for category in reversed(all_categories):
        parent = category.parent
        if parent is not None:
            _add_scaled(parent.all_events, category.all_events)
            _add_scaled(parent.all_waiting, category.all_waiting)
            _add_scaled(parent.all_growth, category.all_growth)
            parent.all_gap_sum_s += category.all_gap_sum_s
            parent.all_growth_sum_tokens += category.all_growth_sum_tokens
            parent.all_life_sum_s += category.all_life_sum_s
            parent.all_life_count += category.all_life_count
    for category in all_categories:
        _fit_category(category, min_samples, fits_exponential)


def _count_open_tips(categories: Categories, shadow: ShadowIndex, now: float) -> None:
    for category in categories:
        category.waiting = [0.0] * AGE_BINS
    age_bin = AGE_BINS - 1
    for tip in shadow:  # oldest first, so the age bin only decreases
        while age_bin > 0 and now - tip.created_at < AGE_EDGES_S[age_bin]:
            age_bin -= 1
        if tip.category.merged_into is not None:
            tip.category = tip.category.current
        if tip.is_open and not tip.is_void:
            tip.category.waiting[age_bin] += 1.0


def _sum_lifespans(categories: Categories, shadow: ShadowIndex) -> None:
    for category in categories:
        category.life_sum_s = category.life_count = 0.0
    for tip in shadow:
        if tip.is_void:
            continue
        # A tip that was not continued was last used at its birth: its lifespan is 0 s.
        if not tip.is_open:
            tip.category.life_sum_s += max(0.0, tip.last_use[0] - tip.created_at)
        tip.category.life_count += 1.0


def _start_from_own_samples(category: Category, profile_share: float) -> None:
    category.all_events = category.events[:]
    category.all_waiting = category.waiting[:]
    category.all_growth = category.growth[:]
    category.all_gap_sum_s = category.gap_sum_s
    category.all_growth_sum_tokens = category.growth_sum_tokens
    category.all_life_sum_s, category.all_life_count = category.life_sum_s, category.life_count
    saved_counts = category.saved_counts
    if saved_counts is not None and profile_share > 0.0:
        _add_scaled(category.all_events, saved_counts["events"], profile_share)
        _add_scaled(category.all_waiting, saved_counts["waiting"], profile_share)
        _add_scaled(category.all_growth, saved_counts["growth"], profile_share)
        category.all_gap_sum_s += profile_share * saved_counts["sums"][0]
        category.all_growth_sum_tokens += profile_share * saved_counts["sums"][1]
        category.all_life_sum_s += profile_share * saved_counts["lives"][0]
        category.all_life_count += profile_share * saved_counts["lives"][1]


def _fit_category(category: Category, min_samples: int, fits_exponential: bool) -> None:
    parent = category.parent
    continued_count = sum(category.all_events)
    sample_count = continued_count + sum(category.all_waiting)
    if sample_count < min_samples:
        category.set_curve(None)
        if parent is not None:
            category.exponential = parent.exponential
        return
    category.set_curve(
        survival_curve(
            category.all_events,
            category.all_waiting,
            parent.curve if parent is not None else None,
            PRIOR_WEIGHT_TIPS if parent is not None else 1.0,
        )
    )
    if not fits_exponential:
        return
    lifespans = category.all_life_sum_s, category.all_life_count
    fitted = fit_exponential(continued_count, sample_count, category.all_gap_sum_s, *lifespans)
    if fitted is not None:
        category.exponential = fitted
    elif parent is not None:
        # Without a reused tip, use the parent's gaps; the returning share is 0.
        category.exponential = replace(parent.exponential, reused_share=0.0)


def _add_scaled(totals: list[float], values: list[float], factor: float = 1.0) -> None:
    for i, value in enumerate(values):  # most are 0
        if value:
            totals[i] += factor * value
