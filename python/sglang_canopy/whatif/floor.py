"""Limit how far a policy may fall behind LRU on the same requests, in prompt tokens.

Shadow caches of both policies serve every request, so the loss is known and needs no significance
test: the rule is a budget. The policy ranks until its balance, its savings beyond LRU's, falls
below minus ``SLACK`` of the cache; then LRU ranks. The policy ranks again once its shadow has
gained four times that slack, doubled after each further fall, so that two equally good policies do
not alternate. Earlier gains count as credit, up to ``CREDIT``.

A loss of ``SHARE`` of the prompts is always tolerated, but does not accumulate: the tolerance
refills the balance up to ``SLACK`` of the cache and no further. docs/research/eviction.md measures
the three constants.
"""

from __future__ import annotations

SHARE = 0.0005
"""Share of the prompt tokens: 0.05 points."""
SLACK = 0.02
"""Chance difference allowed between two policies' contents, as a share of the cache."""
CREDIT = 2.0
"""Maximum accumulated gains and losses, in cache sizes."""


class Floor:
    """Compare one policy with LRU for a cache of ``capacity_tokens``."""

    __slots__ = ("_balance", "_credit", "_slack", "falls", "is_behind")

    def __init__(self, capacity_tokens: int) -> None:
        self.is_behind = False
        """True while LRU ranks instead of the policy."""
        self.falls = 0
        self._slack = SLACK * capacity_tokens
        self._credit = CREDIT * capacity_tokens
        self._balance = 0.0

    def compare(self, policy: int, lru: int, prompt_tokens: int, doubt: float = 0.0) -> None:
        """Add one request: its prompt tokens, and the leading tokens that each policy hit.

        ``doubt``: tolerance for sampling error, as a share of the prompt.
        """
        balance = self._balance + policy - lru
        tolerated = (SHARE + doubt) * prompt_tokens
        if self.is_behind:
            if balance > -self._slack:
                balance = max(balance - tolerated, -self._slack)
            self._balance = max(balance, -self._credit)
            if self._balance > 2.0 * self._slack * 2.0**self.falls:
                self._switch(behind=False)
            return
        if balance < self._slack:
            balance = min(balance + tolerated, self._slack)
        self._balance = min(balance, self._credit)
        if self._balance < -self._slack:
            self.falls += 1
            self._switch(behind=True)

    def _switch(self, behind: bool) -> None:
        self.is_behind = behind
        self._balance = 0.0
