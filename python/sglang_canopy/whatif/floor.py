"""The floor under a policy: how far it may fall behind LRU on the same requests.

Two shadow caches serve every request, so what a policy has lost is known and need not be guessed:
the rule is a budget, and no test of significance. The policy ranks while it is behind LRU by no
more than ``SHARE`` of what was asked and ``SLACK`` of the cache; then LRU does. It ranks again
when its shadow has gained four times that slack since, and twice as much again after each further
fall, so that two orders which are equal but for chance do not take turns. What it was ahead by
before is its credit. The three constants and what they do: docs/research/whatif.md.
"""

from __future__ import annotations

SHARE = 0.0005
"""Of the prompt tokens that were asked for: .05 points."""
SLACK = 0.02
"""Of the cache: what one order may happen to hold more than the other at any time."""
CREDIT = 2.0
"""Of the cache: what was won or lost before counts up to this much."""


class Floor:
    """One policy held against LRU, in tokens. ``capacity_tokens``: of the cache that they share."""

    __slots__ = ("_credit", "_lead", "_prompt_tokens", "_slack", "behind", "falls")

    def __init__(self, capacity_tokens: int) -> None:
        self.behind = False
        """Whether LRU has to rank."""
        self.falls = 0
        self._slack = SLACK * capacity_tokens
        self._credit = CREDIT * capacity_tokens
        self._lead = self._prompt_tokens = 0.0

    def compare(self, policy: int, lru: int, prompt_tokens: int, doubt: float = 0.0) -> None:
        """One request asked for so many tokens, and each of the two had so many.

        ``doubt``: share of what was asked by which the two may differ for sampling alone.
        """
        self._lead += policy - lru
        self._prompt_tokens += prompt_tokens
        if self.behind:
            enough = 2.0 * self._slack * 2.0**self.falls + (SHARE + doubt) * self._prompt_tokens
            if self._lead > enough:
                self._turn(behind=False)
            elif self._lead < -self._credit:
                self._lead, self._prompt_tokens = -self._credit, 0.0
        elif self._lead < -self._slack - (SHARE + doubt) * self._prompt_tokens:
            self.falls += 1
            self._turn(behind=True)
        elif self._lead > self._credit:
            self._lead, self._prompt_tokens = self._credit, 0.0

    def _turn(self, behind: bool) -> None:
        self.behind = behind
        self._lead = self._prompt_tokens = 0.0
