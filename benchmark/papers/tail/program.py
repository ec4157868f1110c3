"""Definition 1, Policy 2 and the recursion of Appendix B, on instances small enough to enumerate.

A conversation has a rate of turns lambda_i, a history of L_i tokens, and X_i of them cached.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

Growth = Mapping[int, float]
"""P(Q = q): tokens that the next prompt adds."""
Sizes = tuple[int, ...]


def next_turn_excess(
    rates: Sequence[float], history: Sequence[int], kept: Sequence[int], growth: Growth, xi: int
) -> float:
    """The objective of problem (8): sum of lambda_i E (L_i + Q - Y_i - xi)^+."""
    return sum(
        rate * sum(p * max(length + q - y - xi, 0) for q, p in growth.items())
        for rate, length, y in zip(rates, history, kept, strict=True)
    )


def greedy(
    rates: Sequence[float],
    history: Sequence[int],
    most: Sequence[int],
    growth: Growth,
    xi: int,
    room: int,
) -> Sizes:
    """Policy 2: from ``most`` tokens each, evict the one with the least
    lambda_i P(L_i + Q - xi >= X_i) until ``room`` holds them."""
    kept = list(most)

    def rank(i: int) -> float:
        return rates[i] * sum(p for q, p in growth.items() if history[i] + q - xi >= kept[i])

    while sum(kept) > room:
        kept[min((i for i in range(len(kept)) if kept[i]), key=rank)] -= 1
    return tuple(kept)


def allocations(most: Sequence[int], room: int) -> Iterator[Sizes]:
    """Yield all allocations with at most ``most`` of each and at most ``room`` in total."""
    for kept in itertools.product(*(range(m + 1) for m in most)):
        if sum(kept) <= room:
            yield kept


def least_excess(
    rates: Sequence[float],
    history: Sequence[int],
    most: Sequence[int],
    growth: Growth,
    xi: int,
    room: int,
) -> float:
    """Problem (8) by enumeration."""
    return min(
        next_turn_excess(rates, history, kept, growth, xi) for kept in allocations(most, room)
    )


@dataclass(frozen=True)
class Model:
    """The stochastic model in discrete time: arrivals are 1 or 2 steps apart."""

    turn_rates: tuple[float, ...]
    """lambda-bar, by conversation."""
    growth: Growth
    answer: int
    xi: int
    room: int
    belief: Callable[[float, int], float] = field(default=lambda turns, age: 0.5**age)
    """(lambda-bar, steps of silence) -> probability that the conversation is active. The paper's does not
    depend on lambda-bar."""
    forced: bool = False
    """Forced caching (Appendix C): the served conversation is cached whole, if there is room."""
    chosen_by: Callable[[float, int], float] | None = None
    """Belief of ET-LRU; ``None``: the true belief."""

    def rates(
        self, ages: Sizes, belief: Callable[[float, int], float] | None = None
    ) -> list[float]:
        """lambda_i = pi_i x lambda-bar_i."""
        known = belief or self.belief
        return [r * known(r, age) for r, age in zip(self.turn_rates, ages, strict=True)]


def silent_posterior(end_rate: float) -> Callable[[float, int], float]:
    """The belief by Bayes' rule (``birth_death.py``'s ``still_under_way``), in place of exp(-mu t)."""

    def belief(turns: float, age: int) -> float:
        silent = math.exp(-(turns + end_rate) * age)
        return silent / (silent + end_rate / (turns + end_rate) * (1 - silent))

    return belief


def values(model: Model, history: Sizes, turns: int) -> tuple[float, float]:
    """(least expected excess of ``turns`` arrivals, that of ET-LRU), from an empty cache.

    The recursion V_k of Appendix B: an arrival after tau steps is of conversation i with a
    probability in proportion to lambda_i then; its belief is reset, the others' decay.
    """
    count = len(history)

    def arrivals(ages: Sizes) -> Iterator[tuple[float, Sizes, int, int]]:
        for steps in (1, 2):
            older = tuple(age + steps for age in ages)
            rates = model.rates(older)
            for i, q in itertools.product(range(count), model.growth):
                chance = 0.5 * rates[i] / sum(rates) * model.growth[q]
                yield chance, (*older[:i], 0, *older[i + 1 :]), i, q

    def after(past: Sizes, cached: Sizes, i: int, q: int) -> tuple[int, Sizes, Sizes]:
        excess = max(past[i] + q - cached[i] - model.xi, 0)
        grown = past[i] + q + model.answer
        return (
            excess,
            (*past[:i], grown, *past[i + 1 :]),
            (*cached[:i], grown, *cached[i + 1 :]),
        )

    def solve(chosen: Callable[[Sizes, Sizes, Sizes, int], Iterator[Sizes]]) -> float:
        @cache
        def expected(left: int, ages: Sizes, past: Sizes, cached: Sizes) -> float:
            if not left:
                return 0.0
            total = 0.0
            for chance, now, i, q in arrivals(ages):
                excess, grown, most = after(past, cached, i, q)
                total += chance * excess
                if left > 1:
                    total += chance * min(
                        expected(left - 1, now, grown, kept) for kept in chosen(now, grown, most, i)
                    )
            return total

        return expected(turns, (0,) * count, history, (0,) * count)

    def feasible(ages: Sizes, grown: Sizes, most: Sizes, i: int) -> Iterator[Sizes]:
        for kept in allocations(most, model.room):
            if not model.forced or kept[i] == min(most[i], model.room):
                yield kept

    def etlru(ages: Sizes, grown: Sizes, most: Sizes, i: int) -> Iterator[Sizes]:
        rates = model.rates(ages, model.chosen_by)
        if not model.forced:
            yield greedy(rates, grown, most, model.growth, model.xi, model.room)
            return
        own = min(most[i], model.room)
        others = greedy(
            rates, grown, (*most[:i], 0, *most[i + 1 :]), model.growth, model.xi, model.room - own
        )
        yield (*others[:i], own, *others[i + 1 :])

    return solve(feasible), solve(etlru)
