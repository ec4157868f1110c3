"""Limit how far a policy may fall behind LRU on the same requests.

Shadow caches of both serve every request, so the loss is known and needs no significance test: the
rule is a budget. The policy ranks until it trails LRU by more than ``SHARE`` of the prompt tokens
plus ``SLACK`` of the cache; then LRU ranks. The policy ranks again once its shadow has gained four
times that slack, doubled after each further fall, so that two equally good policies do not
alternate. Earlier gains count as credit. docs/research/whatif.md measures the three constants.
"""

from __future__ import annotations

SHARE = 0.0005
"""Share of the prompt tokens: 0.05 points."""
SLACK = 0.02
"""Chance difference allowed between two policies' contents, as a share of the cache."""
CREDIT = 2.0
"""Limit of accumulated gains and losses, in cache sizes."""


class Floor:
    """Compare one policy with LRU, in tokens, for a cache of ``capacity_tokens``."""

    __slots__ = ("_credit", "_lead", "_prompt_tokens", "_slack", "behind", "falls")

    def __init__(self, capacity_tokens: int) -> None:
        self.behind = False
        """True while LRU ranks in the policy's place."""
        self.falls = 0
        self._slack = SLACK * capacity_tokens
        self._credit = CREDIT * capacity_tokens
        self._lead = self._prompt_tokens = 0.0

    def compare(self, policy: int, lru: int, prompt_tokens: int, doubt: float = 0.0) -> None:
        """Add one request: prompt tokens, and the tokens that each of the two hit.

        ``doubt``: tolerance for sampling error, as a share of the prompt tokens.
        """
        self._lead += policy - lru
        self._prompt_tokens += prompt_tokens
        if self.behind:
            enough = 2.0 * self._slack * 2.0**self.falls + (SHARE + doubt) * self._prompt_tokens
            if self._lead > enough:
                self._switch(behind=False)
            elif self._lead < -self._credit:
                self._lead, self._prompt_tokens = -self._credit, 0.0
        elif self._lead < -self._slack - (SHARE + doubt) * self._prompt_tokens:
            self.falls += 1
            self._switch(behind=True)
        elif self._lead > self._credit:
            self._lead, self._prompt_tokens = self._credit, 0.0

    def _switch(self, behind: bool) -> None:
        self.behind = behind
        self._lead = self._prompt_tokens = 0.0
