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

from canopy_lab.characterize.hits import ideal_hits
from canopy_lab.characterize.observe import Observation
from canopy_lab.characterize.reuse_time import reuse_times
from canopy_lab.characterize.skew import skew
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
    measure: Measure
    """``None`` if the trace lacks the data."""


@dataclass(frozen=True, slots=True)
class PublishedStatistic:
    """A target and the value of a trace."""

    name: str
    published: str
    low: float
    high: float
    got: float | None
    source: str

    @property
    def is_met(self) -> bool | None:
        """Whether ``got`` is in the range; ``None`` without a value."""
        return None if self.got is None else self.low <= self.got <= self.high


def compare(name: str, observation: Observation) -> tuple[PublishedStatistic, ...]:
    """``observation`` against the published numbers of ``trace-a`` or ``trace-b``."""
    if name not in TARGETS:
        raise CanopyError(
            f"no published statistics of {name!r}; choose one of: {', '.join(TARGETS)}"
        )
    return tuple(
        PublishedStatistic(t.name, t.published, t.low, t.high, t.measure(observation), t.source)
        for t in TARGETS[name]
    )


def _kind(kind: str, later: bool = False) -> Measure:
    """Share of a kind in the requests, or of later turns in the kind."""

    def measure(observation: Observation) -> float | None:
        if kind not in observation.labels:
            return None
        of_kind = observation.kind == observation.labels.index(kind)
        return float((observation.turn[of_kind] > 1).mean() if later else of_kind.mean())

    return measure


def _turn(q: float) -> Measure:
    return lambda observation: float(np.quantile(observation.turn, q))


def _tokens(later: bool, q: float | None) -> Measure:
    """Prompt and output together: the mean, or a quantile."""

    def measure(observation: Observation) -> float | None:
        tokens = (observation.input_tokens + observation.output_tokens)[
            (observation.turn > 1) == later
        ]
        if not len(tokens):
            return None
        return float(tokens.mean() if q is None else np.quantile(tokens, q))

    return measure


def _reuse_within(seconds: float) -> Measure:
    return lambda observation: dict(reuse_times(observation).within)[seconds]


def _life(q: float) -> Measure:
    return lambda observation: float(np.quantile(observation.last_s - observation.first_s, q))


def _first_turns_hits(observation: Observation) -> float:
    return float(observation.hits[observation.turn == 1].sum() / max(observation.hits.sum(), 1))


def _first_reusable(observation: Observation) -> float:
    return float((observation.hits[observation.turn == 1] > 0).mean())


def _users(share: float, quantity: str) -> Measure:
    """Share of the users that hold ``share`` of the requests or hits."""

    def measure(observation: Observation) -> float | None:
        if not observation.has_users:
            return None
        amount = observation.hits if quantity == "hits" else np.ones_like(observation.hits)
        sorted_amounts = np.sort(
            np.bincount(observation.user[observation.user >= 0], amount[observation.user >= 0])
        )[::-1]
        return float(
            (np.searchsorted(np.cumsum(sorted_amounts), share * sorted_amounts.sum()) + 1)
            / len(sorted_amounts)
        )

    return measure


TARGETS: dict[str, tuple[PublishedTarget, ...]] = {
    "trace-a": (
        PublishedTarget("ideal block hit ratio", "62 %", 0.60, 0.64, "3.2, Figure 4, text", lambda observation: ideal_hits(observation).block_hit_ratio),
        PublishedTarget("text, of requests", "78 %", 0.76, 0.80, "3.2, text", _kind("text")),
        PublishedTarget("file, of requests", "4 %", 0.03, 0.05, "Figure 5, label", _kind("file")),
        PublishedTarget("image, of requests", "3 %", 0.02, 0.04, "Figure 5, label", _kind("image")),
        PublishedTarget("search, of requests", "15 %", 0.13, 0.17, "Figure 5, label", _kind("search")),
        PublishedTarget("text, later turns", "47 %", 0.44, 0.50, "Figure 5, label", _kind("text", later=True)),
        PublishedTarget("file, later turns", "51 %", 0.46, 0.56, "Figure 5, label", _kind("file", later=True)),
        PublishedTarget("image, later turns", "10 %", 0.06, 0.14, "Figure 5, label", _kind("image", later=True)),
        PublishedTarget("search, later turns", "49 %", 0.45, 0.53, "Figure 5, label", _kind("search", later=True)),
        PublishedTarget("first turns, of requests", "54 %", 0.52, 0.56, "3.3, text", lambda observation: float((observation.turn == 1).mean())),
        PublishedTarget("turn number, P50", "1", 1, 1, "3.3, text", _turn(0.5)),
        PublishedTarget("turn number, P90", "5", 5, 5, "3.3, text", _turn(0.9)),
        PublishedTarget("longest conversation", "232 turns in a day", 30, 232, "3.3, text", _turn(1.0)),
        PublishedTarget("first turn, mean tokens", "973", 900, 1050, "3.5, text", _tokens(False, None)),
        PublishedTarget("later turn, mean tokens", "5,953", 5500, 6400, "3.5, text", _tokens(True, None)),
        PublishedTarget(
            "first turn, P90 tokens", "0.15 % of HBM, about 1,600", 1300, 1800,
            "3.5, text (1 % is about 10,700 tokens)", _tokens(False, 0.9),
        ),
        PublishedTarget(
            "later turn, P50 tokens", "0.36 % of HBM, about 3,850", 3500, 4300,
            "3.5, text (likewise)", _tokens(True, 0.5),
        ),
        PublishedTarget(
            "later turn, P90 tokens", "1.31 % of HBM, about 14,000", 12_000, 15_500,
            "3.5, text (likewise)", _tokens(True, 0.9),
        ),
        PublishedTarget(
            "later turn, P99 tokens", "2.21 % of HBM, about 23,600", 21_000, 26_000,
            "3.5, text (likewise)", _tokens(True, 0.99),
        ),
        PublishedTarget(
            "reuses within 10 minutes", "80 % within less than 10 min", 0.76, 0.84,
            "3.4, text", _reuse_within(600.0),
        ),
        PublishedTarget("block lifespan, P90", "612 s", 500, 730, "3.5, text", _life(0.9)),
        PublishedTarget(
            "first turns with a hit", "less than 30 %", 0.15, 0.30, "3.4, text", _first_reusable
        ),
        PublishedTarget(
            "prompt tokens, P50", "1,046", 850, 1150,
            "public two-hour sample, recomputed by third parties", lambda observation: float(np.median(observation.input_tokens)),
        ),
        PublishedTarget(
            "users with 50 % of requests", "19 %", 0.15, 0.24, "3.2, text", _users(0.5, "requests")
        ),
        PublishedTarget(
            "users with 90 % of requests", "72 %", 0.60, 0.76, "3.2, text", _users(0.9, "requests")
        ),
        PublishedTarget("users with 90 % of hits", "19 %", 0.14, 0.24, "3.2, text", _users(0.9, "hits")),
        PublishedTarget("hits across users", "rare", 0.0, 0.10, "3.2, Figure 6, text", lambda observation: skew(observation).cross_user_hits),
    ),
    "trace-b": (
        PublishedTarget("ideal block hit ratio", "54 %", 0.52, 0.56, "3.2, Figure 4, text", lambda observation: ideal_hits(observation).block_hit_ratio),
        PublishedTarget("api, of requests", "100 %", 1.0, 1.0, "3.2, text", _kind("api")),
        PublishedTarget(
            "api, later turns", "0.08 %", 0.0003, 0.001, "Figure 5, label (text: under 0.1 %)",
            _kind("api", later=True),
        ),
        PublishedTarget(
            "hits of first turns", "97 %", 0.94, 1.0, "3.2, text", _first_turns_hits
        ),
        PublishedTarget("first turns with a hit", "more than 50 %", 0.5, 1.0, "3.4, text", _first_reusable),
        PublishedTarget(
            "reuses within 10 s", "80 % within 10 s", 0.76, 0.85, "3.4, text", _reuse_within(10.0)
        ),
        PublishedTarget("block lifespan, P90", "0.3 s", 0.15, 0.6, "3.5, text", _life(0.9)),
        PublishedTarget("block lifespan, P99", "97 s", 60, 140, "1, text", _life(0.99)),
        PublishedTarget(
            "prompt tokens, P50", "574", 500, 650,
            "public two-hour sample, recomputed by third parties", lambda observation: float(np.median(observation.input_tokens)),
        ),
        PublishedTarget(
            "users with 90 % of requests", "15 %", 0.10, 0.20, "3.2, text", _users(0.9, "requests")
        ),
        PublishedTarget("users with 90 % of hits", "4 %", 0.02, 0.13, "3.2, text", _users(0.9, "hits")),
        PublishedTarget("hits across users", "rare", 0.0, 0.10, "3.2, Figure 6, text", lambda observation: skew(observation).cross_user_hits),
    ),
}  # fmt: skip
