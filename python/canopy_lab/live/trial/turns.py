"""Slices of a trial: the policy of each, its hits, the prefill seconds saved, and the end.

A pair is two slices of time, one under each policy, in random order, so that a trend in the traffic
favours neither. The interval of the mean difference is Student's. It is examined ``len(LOOKS)``
times, at ``LEVEL / len(LOOKS)`` each, so that all looks together find a difference between two
equal policies in at most one of ``1 / LEVEL`` trials (Bonferroni). ``benchmark/whatif/trial.py``
measures that with a placebo.
"""

from __future__ import annotations

import functools
import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from sglang_canopy.errors import CanopyError
from sglang_canopy.reuse.depth_price import price_of_sums

LOOKS = (6, 8, 11, 15, 20, 27)
"""Numbers of pairs after which a trial may end; after the last it must."""
LEVEL = 0.05
WORTH_POINTS = 0.5
"""A difference that is certainly smaller counts as equal."""
BETTER, WORSE, SAME, UNSURE = "better", "worse", "same", "unsure"
IDLE = "idle"
"""No tokens were evicted, so the policies could not differ."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Result of the pairs so far, in points (hundredths) of the prompts' prefill seconds."""

    pairs: int
    points: float
    low: float
    high: float
    verdict: str | None
    """``None``: the trial continues."""


def standing(differences: Sequence[float]) -> Standing:
    """Return the standing after two or more pairs. ``differences``: points of each pair."""
    pairs = len(differences)
    mean = statistics.fmean(differences)
    half = _quantile(pairs - 1) * statistics.stdev(differences) / math.sqrt(pairs)
    verdict = _verdict(mean - half, mean + half, pairs) if pairs in LOOKS else None
    return Standing(pairs, mean, mean - half, mean + half, verdict)


@functools.cache
def _quantile(freedom: int) -> float:
    from scipy.stats import t

    return float(t.ppf(1 - LEVEL / len(LOOKS) / 2, freedom))


def _verdict(low: float, high: float, pairs: int) -> str | None:
    if low > -WORTH_POINTS and high < WORTH_POINTS:
        return SAME
    if low > 0:
        return BETTER
    if high < 0:
        return WORSE
    return UNSURE if pairs == LOOKS[-1] else None


SETTLES = 0.5
"""Share of a slice, at its start, that is excluded: the cache still reflects the other policy."""
MAX_EMPTY = 10
"""Consecutive slices without a request after which a trial fails."""


class Counts(NamedTuple):
    """Counters of a server since its start."""

    prompt_tokens: int
    hit_tokens: int
    running: str
    """Name of the ranking policy."""
    sampled_tokens: int = 0
    """Prompt tokens that its meter's shadow caches sampled; 0 without a meter."""
    shadow_tokens: Mapping[str, int] = {}
    """Sampled tokens that the shadow caches hit, by policy."""
    prompt_squares: int = 0
    """Sum of the squared prompt tokens of each request; the fields below sum the other counts."""
    hit_squares: int = 0
    sampled_squares: int = 0
    shadow_squares: Mapping[str, int] = {}
    depth_scale: float = math.inf
    """Depth in tokens at which a token costs twice as much to prefill as the first. Infinite until
    the server has measured it; seconds then count as tokens."""
    evicted_tokens: int = 0
    """Tokens evicted from the tiers for lack of room."""


class TrialServer(Protocol):
    """Interface of a server in a trial."""

    def counts(self) -> Counts: ...

    def exchange(self, policy: str) -> None:
        """Rank by ``policy`` from now on."""


class Slice(NamedTuple):
    """Shares (0 to 1) of the prompts of one slice."""

    hit: float
    """Share of the prompt tokens."""
    saved: float
    """Share of the prefill seconds."""
    shadow: float
    """Mean share of the prefill seconds that both policies' shadow caches save; 0 without a meter."""
    evicted: bool
    """Whether anything was evicted."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two consecutive slices, and the standing of all pairs so far.

    The difference compares seconds saved *in excess of the shadow caches*. Requests that hit under either
    policy are in the shadows of both slices, so the randomness of the requests cancels (a control
    variate). The average of the two shadows is fair to both policies: with LRU's shadow alone, the
    randomness of requests that only the other policy hits would remain.
    """

    policy: Slice
    against: Slice
    so_far: Standing | None
    """``None`` after the first pair."""

    @property
    def points(self) -> float:
        ours, theirs = (one.saved - one.shadow for one in (self.policy, self.against))
        return 100 * (ours - theirs)


def pairs(
    server: TrialServer,
    policy: str,
    against: str,
    slice_s: float,
    wait: Callable[[float], object],
    seed: int = 0,
) -> Iterator[Pair]:
    """Yield pairs until ``so_far`` has a verdict. ``wait`` takes seconds.

    Two policies can only differ if they evict: while no slice of one of them had an eviction, the
    verdict at a look is ``IDLE``.

    Raises ``CanopyError`` if the server ranks by another policy than requested, is restarted, or
    has no requests.
    """
    draw, differences = random.Random(seed), list[float]()
    evicted = {True: False, False: False}
    shadows = server.counts().shadow_tokens
    beside = [name for name in dict.fromkeys((policy, against)) if name in shadows]
    while True:
        turn = [(True, policy), (False, against)]
        draw.shuffle(turn)
        found = {first: _slice(server, name, beside, slice_s, wait) for first, name in turn}
        pair = Pair(found[True], found[False], None)
        differences.append(pair.points)
        evicted = {first: evicted[first] or one.evicted for first, one in found.items()}
        if len(differences) > 1:
            far = standing(differences)
            if far.verdict is not None and not all(evicted.values()):
                far = replace(far, verdict=IDLE)
            pair = Pair(found[True], found[False], far)
        yield pair
        if pair.so_far is not None and pair.so_far.verdict is not None:
            return


def _slice(
    server: TrialServer,
    policy: str,
    beside: Sequence[str],
    slice_s: float,
    wait: Callable[[float], object],
) -> Slice:
    server.exchange(policy)
    wait(SETTLES * slice_s)
    before = server.counts()
    for _ in range(MAX_EMPTY):
        wait((1 - SETTLES) * slice_s)
        after = server.counts()
        if after.running != policy:
            raise CanopyError(
                f"the server ranks by {after.running} instead of {policy}; start it with "
                "--canopy-whatif auto,floor=off for a trial, and exchange no policies meanwhile"
            )
        if after.prompt_tokens < before.prompt_tokens:
            raise CanopyError("the server was restarted during the trial; begin it again")
        if after.prompt_tokens > before.prompt_tokens:
            return _between(before, after, beside)
    raise CanopyError("no request ended for a long while; a trial needs traffic, or longer slices")


def _between(before: Counts, after: Counts, beside: Sequence[str]) -> Slice:
    def price(tokens: int, squares: int) -> float:
        return price_of_sums(tokens, squares, after.depth_scale)

    prompt_tokens = after.prompt_tokens - before.prompt_tokens
    hit_tokens = after.hit_tokens - before.hit_tokens
    prompts = price(prompt_tokens, after.prompt_squares - before.prompt_squares)
    hits = price(hit_tokens, after.hit_squares - before.hit_squares)
    sampled = price(
        after.sampled_tokens - before.sampled_tokens,
        after.sampled_squares - before.sampled_squares,
    )
    shadows = sum(
        price(
            after.shadow_tokens[name] - before.shadow_tokens[name],
            after.shadow_squares.get(name, 0) - before.shadow_squares.get(name, 0),
        )
        for name in beside
    )
    return Slice(
        _share(hit_tokens, prompt_tokens),
        _share(hits, prompts),
        _share(shadows, sampled * len(beside)),
        after.evicted_tokens > before.evicted_tokens,
    )


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
