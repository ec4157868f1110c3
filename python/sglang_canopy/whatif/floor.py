"""Limit how far a policy may fall behind LRU on the same requests, in prompt tokens.

Shadow caches of both policies serve every request, so the loss is known and needs no significance
test: the rule is a budget. The policy ranks until its balance, its savings beyond LRU's, falls
below minus ``SLACK_SHARE`` of the cache; then LRU ranks. The policy ranks again once its shadow has
gained four times that slack, doubled after each further fall, so that two equally good policies do
not alternate. Earlier gains count as credit, up to ``MAX_CREDIT``.

A loss of ``TOLERATED_SHARE`` of the prompts is always tolerated, but does not accumulate: the tolerance
refills the balance up to ``SLACK_SHARE`` of the cache and no further. docs/research/eviction.md measures
the three constants.
"""

from __future__ import annotations

TOLERATED_SHARE = 0.0005
"""Share of the prompt tokens: 0.05 points."""
SLACK_SHARE = 0.02
"""Chance difference allowed between two policies' contents, as a share of the cache."""
MAX_CREDIT = 2.0
"""Maximum accumulated gains and losses, in cache sizes."""


class Floor:
    """Compare one policy with LRU for a cache of ``capacity_tokens``."""

    __slots__ = ("_balance_tokens", "_max_credit_tokens", "_slack_tokens", "falls", "is_behind")

    def __init__(self, capacity_tokens: int) -> None:
        self.is_behind = False
        """True while LRU ranks instead of the policy."""
        self.falls = 0
        """Number of times that the policy fell behind."""
        self._slack_tokens = SLACK_SHARE * capacity_tokens
        self._max_credit_tokens = MAX_CREDIT * capacity_tokens
        self._balance_tokens = 0.0

    def compare(
        self, policy_tokens: int, lru_tokens: int, prompt_tokens: int, error_share: float = 0.0
    ) -> None:
        """Add one request: its prompt tokens, and the leading tokens that each policy hit.
        ``error_share``: further tolerance for sampling error, as a share of the prompt."""
        balance_tokens = self._balance_tokens + policy_tokens - lru_tokens
        tolerated_tokens = (TOLERATED_SHARE + error_share) * prompt_tokens
        if self.is_behind:
            if balance_tokens > -self._slack_tokens:
                balance_tokens = max(balance_tokens - tolerated_tokens, -self._slack_tokens)
            self._balance_tokens = max(balance_tokens, -self._max_credit_tokens)
            if self._balance_tokens > 2.0 * self._slack_tokens * 2.0**self.falls:
                self._switch(is_behind=False)
            return
        if balance_tokens < self._slack_tokens:
            balance_tokens = min(balance_tokens + tolerated_tokens, self._slack_tokens)
        self._balance_tokens = min(balance_tokens, self._max_credit_tokens)
        if self._balance_tokens < -self._slack_tokens:
            self.falls += 1
            self._switch(is_behind=True)

    def _switch(self, is_behind: bool) -> None:
        self.is_behind = is_behind
        self._balance_tokens = 0.0
