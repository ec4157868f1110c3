"""What a server hit and what sampled shadow caches would have, and how far off the sample may be.

Blocks are sampled independently, one in N. What a cache would have hit more than the control (the
shadow cache of the policy that runs) is a sum over blocks, of which the sampled ones count N times.
What the server missed is such a sum too, and is known in full; the ratio of both sums varies less
than the first one, and a prefix that everybody hits is in neither (ratio estimator). The variance is
estimated from random groups of the sampled blocks (Wolter, Introduction to Variance Estimation,
chapter 2): a block is always in the same group, so what its requests have in common is in it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence

from sglang_canopy.whatif.sampled_caches import Sample, block_number

GROUPS = 32  # the upper five of a block's 32 bits
_MISSED = object()
DESIGN_EFFECT = 2.5
"""Variance beside that of the groups' sums: sampled blocks evict each other, so that one too many
takes room from all. Measured over traces and samples (docs/research/whatif.md)."""
_LARGEST = 25.0
"""Logarithm of a weight."""


class Account:
    """Sums of tokens in which a request's weight falls to 1/e within ``memory_s`` seconds."""

    def __init__(self, memory_s: float) -> None:
        self._memory_s = memory_s
        self._weight, self._grown, self._weighed_at = 1.0, 0.0, 0.0
        self.begin()

    def begin(self) -> None:
        """Forget everything."""
        self._prompt_tokens = self._hit = self._served_missed = 0.0
        self._sampled = self._missed = self._control = self._left_out = 0.0
        self._saved: dict[Hashable, float] = defaultdict(float)
        self._squares: dict[Hashable, float] = defaultdict(float)
        self._groups: dict[Hashable, list[float]] = defaultdict(lambda: [0.0] * GROUPS)

    def serve(self, now: float, prompt_tokens: int, hit: int, missed: int) -> None:
        """A request of ``prompt_tokens`` prompt tokens hit ``hit``; of its blocks' it missed ``missed``."""
        weight = self._weigh(now)
        self._prompt_tokens += weight * prompt_tokens
        self._hit += weight * hit
        self._served_missed += weight * missed

    def sample(
        self, sample: Sample, control: int, served: int, block_tokens: int, one_in: int
    ) -> None:
        """What the last request would have hit. ``control`` and ``served``: how many leading ones
        of its sampled blocks the control and the server had; ``block_tokens``: of one block."""
        weight, stands_for = self._weight, block_tokens * one_in
        prompt_tokens, blocks = sample.prompt_tokens, sample.blocks
        self._sampled += weight * prompt_tokens
        self._left_out = max(self._left_out, 1.0 - 1.0 / one_in)
        had = min(control * stands_for, prompt_tokens)
        self._control += weight * had
        missed = max(0, prompt_tokens - served * stands_for)
        self._missed += weight * missed
        for name, saved in sample.saved_tokens.items():
            self._saved[name] += weight * saved
            self._squares[name] += (weight * (saved - had)) ** 2
            hit = sample.hit_blocks[name]
            if hit != control and one_in > 1:
                more = weight * (stands_for if hit > control else -stands_for)
                self._note(name, blocks[min(hit, control) : max(hit, control)], more)
        if missed and one_in > 1:
            of_prompt = -(-prompt_tokens // stands_for)
            self._note(_MISSED, blocks[served:of_prompt], weight * stands_for)

    @property
    def served_ratio(self) -> float:
        """Share of the prompt tokens that the server hit."""
        return self._hit / (self._prompt_tokens or 1.0)

    def sampled_ratio(self, name: Hashable) -> float:
        """Share that a shadow cache hits of the sampled tokens."""
        return self._saved[name] / (self._sampled or 1.0)

    def lead(self, name: Hashable) -> float:
        """By how much a shadow cache hits a larger share of the prompt tokens than the control."""
        return (self._saved[name] - self._control) * self._per_token()

    def error(self, name: Hashable) -> float:
        """The standard error of that as a word on the traffic, of which these are a few requests."""
        chance = math.sqrt(self._squares.get(name, 0.0)) * self._per_token()
        return math.hypot(chance, self.sampling_error(name))

    def sampling_error(self, name: Hashable) -> float:
        """The standard error that sampling leaves in it as a word on these requests."""
        groups = self._groups.get(name)
        if groups is None:
            return 0.0
        ratio = sum(groups) / (sum(self._groups[_MISSED]) or 1.0)
        rest = [more - ratio * missed for more, missed in zip(groups, self._groups[_MISSED])]
        variance = DESIGN_EFFECT * sum(one * one for one in rest) * GROUPS / (GROUPS - 1)
        return math.sqrt(variance * self._left_out) * self._per_token()

    def _per_token(self) -> float:
        """What one sampled token more is in the share of all prompt tokens."""
        share = self._served_missed / self._missed if self._missed else 1.0
        return share / (self._prompt_tokens or 1.0)

    def _note(self, name: Hashable, blocks: Sequence[int], tokens: float) -> None:
        groups = self._groups[name]
        for block in blocks:
            groups[block_number(block) >> 27] += tokens  # other bits than those that sample

    def _weigh(self, now: float) -> float:
        """The weight of what is added now: instead of letting old sums fall, new ones count more."""
        if now > self._weighed_at:
            self._grown += (now - self._weighed_at) / self._memory_s
            self._weighed_at = now
            if self._grown > _LARGEST:
                self._rescale(math.exp(-self._grown))
                self._grown = 0.0
            self._weight = math.exp(self._grown)
        return self._weight

    def _rescale(self, by: float) -> None:
        self._prompt_tokens *= by
        self._hit *= by
        self._served_missed *= by
        self._sampled *= by
        self._missed *= by
        self._control *= by
        for name in self._saved:
            self._saved[name] *= by
            self._squares[name] *= by * by
        for name, groups in self._groups.items():
            self._groups[name] = [one * by for one in groups]
