"""ET-LRU taken apart: which of its two factors, learnt, moves the tail, and which the hits.

    rank = belief that the conversation returns  x  chance that the token decides the next excess

T-LRU is both factors at their simplest: the belief by recency alone, the chance as a yes or no at
the mean growth. Each is replaced here by what ``etlru`` learns, one at a time, with floor 0.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from sglang_canopy.policy.etlru import Config, ExpectedTailLRU
from sglang_canopy.policy.structures.cells import Cell
from sglang_canopy.records import Leaf
from sglang_canopy.reuse.bins import TOKEN_BINS
from sglang_canopy.reuse.categories import ROOT, Category
from sglang_canopy.reuse.learner import mean_growth

BELIEFS = ("recency", "category")
CHANCES = ("mean", "mean of the category", "distribution", "distribution of the category")


class Parts(ExpectedTailLRU):
    """``etlru`` with floor 0 and either factor made simple.

    ``belief``: ``recency`` ranks every leaf by one curve for all, which is LRU's order;
    ``category`` as ``etlru``. ``chance``: P(Q > slack) by all prompts' or by the category's growth,
    or 1 where slack is at most the mean growth, else 0. ``inside`` says which slack a bucket stands
    for: 0 is its lower end (``etlru``), 0.5 the mean of both, 1 the upper end. ``steepness`` is an
    exponent of the belief.
    """

    def __init__(
        self,
        belief: str,
        chance: str,
        threshold_tokens: float,
        *,
        floor: float = 0.0,
        inside: float = 0.0,
        steepness: float = 1.0,
    ) -> None:
        super().__init__(Config(threshold_tokens=threshold_tokens, floor=floor))
        self.belief, self.chance = belief, chance
        self.inside, self.steepness = inside, steepness

    def _own(self, leaf: Leaf) -> Category:
        return super()._category(leaf)

    def admit(self, leaf: Leaf, now: float) -> None:
        own = self._own(leaf)
        ranked = own if self.belief == "category" else self.model.categories.get(ROOT)
        grown = own if self.chance.endswith("category") else self.model.categories.get(ROOT)
        bucket = self._place(leaf, grown)
        key = (ranked.label, (grown.label, bucket))
        self._cells.push(key, leaf, lambda: (self._bent(ranked), self._chance_of(grown, bucket)))

    def _bent(self, category: Category) -> Category:
        if self.steepness == 1.0:
            return category
        return dataclasses.replace(category, rank=[r**self.steepness for r in category.rank])

    def _place(self, leaf: Leaf, grown: Category) -> Any:
        if self.chance.startswith("mean"):
            slack = self._slack(leaf)
            return slack is None or slack <= mean_growth(grown)
        return self._bucket(leaf, grown)

    def _chance_of(self, grown: Category, bucket: Any) -> float:
        if self.chance.startswith("mean"):
            return float(bucket)
        lower = self._weight(grown, bucket)
        upper = self._weight(grown, min(bucket + 1, TOKEN_BINS - 1)) if bucket > 0 else lower
        return lower + self.inside * (upper - lower)

    def _reweigh(self, cell: Cell) -> float:
        label, (grown, bucket) = cell.key  # type: ignore[misc]
        cell.category = self._bent(self.model.categories.get(label))
        return self._chance_of(self.model.categories.get(grown), bucket)

    def _keep(self, leaf: Leaf) -> int:
        if not self.chance.startswith("mean"):
            return super()._keep(leaf)
        own = self.chance.endswith("category")
        grown = self._own(leaf) if own else self.model.categories.get(ROOT)
        slack = self._slack(leaf)
        over = 0.0 if slack is None else slack - mean_growth(grown)
        return max(0, leaf.length - max(1, int(over) + 1)) if over > 0 else 0
