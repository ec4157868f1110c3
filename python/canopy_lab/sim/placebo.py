"""The placebo of a policy that learns from labels: each label is another request's.

A shuffle of the trace's own labels is too weak: the reuse model counts turns and new tokens from the
paths. So the placebo replaces the features that the model has already inferred.
"""

from __future__ import annotations

import random

from sglang_canopy.policy.base import Policy
from sglang_canopy.reuse.categories import Categories, Category
from sglang_canopy.reuse.learner import ReuseModel

_POOL = 10_000


class RandomCategories(Categories):
    """A table that categorises each request by the features of a random earlier request."""

    def __init__(self, cap: int, seed: int) -> None:
        super().__init__(cap)
        self._draw = random.Random(seed)
        self._pool: list[tuple[str, ...]] = []

    def refine(
        self, names: tuple[str, ...], tenant: str | None = None, now: float | None = None
    ) -> Category:
        if len(self._pool) < _POOL:
            self._pool.append(names)
        else:
            self._pool[self._draw.randrange(_POOL)] = names
        return super().refine(self._draw.choice(self._pool), tenant, now)


def randomise_categories(policy: Policy, seed: int) -> bool:
    """Give a new policy random categories. Return whether it has a reuse model to change."""
    model = getattr(policy, "model", None)
    if not isinstance(model, ReuseModel):
        return False
    model.categories = RandomCategories(model.categories.cap, seed)
    return True
