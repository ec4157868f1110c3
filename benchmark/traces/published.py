"""The published statistics of the paper's two traces, and the comparison of a trace with them.

Numbers are those of "KVCache Cache in the Wild" (USENIX ATC 2025, arXiv 2506.02634), from its
text, or from numbers printed in its figures; no number is read from a curve. Two are from
recomputations of the public two-hour samples by third parties and are marked so. A range includes both
sides of a number; if the paper has "less" or "more", its number is one end. Users are not in the
Bailian format: their rows can only be measured on the generator itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from canopy_lab.characterize.hits import measure_ideal_hits
from canopy_lab.characterize.observe import Observation
from canopy_lab.characterize.reuse_time import measure_reuse_times
from canopy_lab.characterize.skew import measure_skew
from sglang_canopy.errors import CanopyError

Measure = Callable[[Observation], float | None]


@dataclass(frozen=True, slots=True)
class PublishedTarget:
    """One published number and the range that counts as agreement."""

    name: str
    published: str
    """Text of the source."""
    low: float
    high: float
    source: str
    """Section or figure of the paper."""
    measure: Measure
    """``None`` if the trace lacks the data."""


@dataclass(frozen=True, slots=True)
class PublishedStatistic:
    """A target and the value of a trace."""

    name: str
    published: str
    low: float
    high: float
    value: float | None
    source: str

    @property
    def is_met(self) -> bool | None:
        """Whether ``value`` is in the range; ``None`` without a value."""
        return None if self.value is None else self.low <= self.value <= self.high


def compare(name: str, observation: Observation) -> tuple[PublishedStatistic, ...]:
    """Compare ``observation`` with the published numbers of ``trace-a`` or ``trace-b``. Raises CanopyError."""
    if name not in TARGETS:
        raise CanopyError(f"no published statistics of {name!r}; choose from {', '.join(TARGETS)}")
    return tuple(
        PublishedStatistic(t.name, t.published, t.low, t.high, t.measure(observation), t.source)
        for t in TARGETS[name]
    )


def _kind_share(kind: str, is_later: bool = False) -> Measure:
    """Measure a kind's share of the requests; with ``is_later``, the share of later turns in the kind."""

    def measure(observation: Observation) -> float | None:
        if kind not in observation.labels:
            return None
        of_kind = observation.kind == observation.labels.index(kind)
        return float((observation.turn[of_kind] > 1).mean() if is_later else of_kind.mean())

    return measure


def _turn_quantile(quantile: float) -> Measure:
    return lambda observation: float(np.quantile(observation.turn, quantile))


def _turn_tokens(is_later: bool, quantile: float | None) -> Measure:
    """Measure the tokens of prompt and output together: their mean, or a quantile."""

    def measure(observation: Observation) -> float | None:
        is_measured = (observation.turn > 1) == is_later
        tokens = (observation.input_tokens + observation.output_tokens)[is_measured]
        if not len(tokens):
            return None
        return float(tokens.mean() if quantile is None else np.quantile(tokens, quantile))

    return measure


def _reuse_within_s(seconds: float) -> Measure:
    return lambda observation: dict(measure_reuse_times(observation).within)[seconds]


def _lifespan_quantile(quantile: float) -> Measure:
    return lambda blocks: float(np.quantile(blocks.last_s - blocks.first_s, quantile))


def _first_turn_hit_share(observation: Observation) -> float:
    return float(observation.hits[observation.turn == 1].sum() / max(observation.hits.sum(), 1))


def _first_turns_with_hits(observation: Observation) -> float:
    return float((observation.hits[observation.turn == 1] > 0).mean())


def _user_share(held_share: float, quantity: str) -> Measure:
    """Measure the share of users that have ``held_share`` of the ``requests`` or ``hits``."""

    def measure(observation: Observation) -> float | None:
        if not observation.has_users:
            return None
        amount = observation.hits if quantity == "hits" else np.ones_like(observation.hits)
        has_user = observation.user >= 0
        by_user = np.bincount(observation.user[has_user], amount[has_user])
        falling = np.sort(by_user)[::-1]
        holders = np.searchsorted(np.cumsum(falling), held_share * falling.sum()) + 1
        return float(holders / len(falling))

    return measure


TARGETS: dict[str, tuple[PublishedTarget, ...]] = {
    "trace-a": (
        PublishedTarget("ideal block hit ratio", "62 %", 0.60, 0.64, "3.2, Figure 4, text", lambda observation: measure_ideal_hits(observation).block_hit_ratio),
        PublishedTarget("text, of requests", "78 %", 0.76, 0.80, "3.2, text", _kind_share("text")),
        PublishedTarget("file, of requests", "4 %", 0.03, 0.05, "Figure 5, label", _kind_share("file")),
        PublishedTarget("image, of requests", "3 %", 0.02, 0.04, "Figure 5, label", _kind_share("image")),
        PublishedTarget("search, of requests", "15 %", 0.13, 0.17, "Figure 5, label", _kind_share("search")),
        PublishedTarget("text, later turns", "47 %", 0.44, 0.50, "Figure 5, label", _kind_share("text", is_later=True)),
        PublishedTarget("file, later turns", "51 %", 0.46, 0.56, "Figure 5, label", _kind_share("file", is_later=True)),
        PublishedTarget("image, later turns", "10 %", 0.06, 0.14, "Figure 5, label", _kind_share("image", is_later=True)),
        PublishedTarget("search, later turns", "49 %", 0.45, 0.53, "Figure 5, label", _kind_share("search", is_later=True)),
        PublishedTarget("first turns, of requests", "54 %", 0.52, 0.56, "3.3, text", lambda observation: float((observation.turn == 1).mean())),
        PublishedTarget("turn number, P50", "1", 1, 1, "3.3, text", _turn_quantile(0.5)),
        PublishedTarget("turn number, P90", "5", 5, 5, "3.3, text", _turn_quantile(0.9)),
        PublishedTarget("longest conversation", "232 turns in a day", 30, 232, "3.3, text", _turn_quantile(1.0)),
        PublishedTarget("first turn, mean tokens", "973", 900, 1050, "3.5, text", _turn_tokens(False, None)),
        PublishedTarget("later turn, mean tokens", "5,953", 5500, 6400, "3.5, text", _turn_tokens(True, None)),
        PublishedTarget("first turn, P90 tokens", "0.15 % of HBM, about 1,600", 1300, 1800, "3.5, text (1 % is about 10,700 tokens)", _turn_tokens(False, 0.9)),
        PublishedTarget("later turn, P50 tokens", "0.36 % of HBM, about 3,850", 3500, 4300, "3.5, text (likewise)", _turn_tokens(True, 0.5)),
        PublishedTarget("later turn, P90 tokens", "1.31 % of HBM, about 14,000", 12_000, 15_500, "3.5, text (likewise)", _turn_tokens(True, 0.9)),
        PublishedTarget("later turn, P99 tokens", "2.21 % of HBM, about 23,600", 21_000, 26_000, "3.5, text (likewise)", _turn_tokens(True, 0.99)),
        PublishedTarget("reuses within 10 minutes", "80 % within less than 10 min", 0.76, 0.84, "3.4, text", _reuse_within_s(600.0)),
        PublishedTarget("block lifespan, P90", "612 s", 500, 730, "3.5, text", _lifespan_quantile(0.9)),
        PublishedTarget("first turns with a hit", "less than 30 %", 0.15, 0.30, "3.4, text", _first_turns_with_hits),
        PublishedTarget("prompt tokens, P50", "1,046", 850, 1150, "public two-hour sample, recomputed by third parties", lambda observation: float(np.median(observation.input_tokens))),
        PublishedTarget("users with 50 % of requests", "19 %", 0.15, 0.24, "3.2, text", _user_share(0.5, "requests")),
        PublishedTarget("users with 90 % of requests", "72 %", 0.60, 0.76, "3.2, text", _user_share(0.9, "requests")),
        PublishedTarget("users with 90 % of hits", "19 %", 0.14, 0.24, "3.2, text", _user_share(0.9, "hits")),
        PublishedTarget("hits across users", "rare", 0.0, 0.10, "3.2, Figure 6, text", lambda observation: measure_skew(observation).cross_user_hits),
    ),
    "trace-b": (
        PublishedTarget("ideal block hit ratio", "54 %", 0.52, 0.56, "3.2, Figure 4, text", lambda observation: measure_ideal_hits(observation).block_hit_ratio),
        PublishedTarget("api, of requests", "100 %", 1.0, 1.0, "3.2, text", _kind_share("api")),
        PublishedTarget("api, later turns", "0.08 %", 0.0003, 0.001, "Figure 5, label (text: under 0.1 %)", _kind_share("api", is_later=True)),
        PublishedTarget("hits of first turns", "97 %", 0.94, 1.0, "3.2, text", _first_turn_hit_share),
        PublishedTarget("first turns with a hit", "more than 50 %", 0.5, 1.0, "3.4, text", _first_turns_with_hits),
        PublishedTarget("reuses within 10 s", "80 % within 10 s", 0.76, 0.85, "3.4, text", _reuse_within_s(10.0)),
        PublishedTarget("block lifespan, P90", "0.3 s", 0.15, 0.6, "3.5, text", _lifespan_quantile(0.9)),
        PublishedTarget("block lifespan, P99", "97 s", 60, 140, "1, text", _lifespan_quantile(0.99)),
        PublishedTarget("prompt tokens, P50", "574", 500, 650, "public two-hour sample, recomputed by third parties", lambda observation: float(np.median(observation.input_tokens))),
        PublishedTarget("users with 90 % of requests", "15 %", 0.10, 0.20, "3.2, text", _user_share(0.9, "requests")),
        PublishedTarget("users with 90 % of hits", "4 %", 0.02, 0.13, "3.2, text", _user_share(0.9, "hits")),
        PublishedTarget("hits across users", "rare", 0.0, 0.10, "3.2, Figure 6, text", lambda observation: measure_skew(observation).cross_user_hits),
    ),
}  # fmt: skip
