"""The prefixes that a document is encoded after, by its place in the prompt.

A first document attends only to the tokens before it (the head), so its KV after the head is exact.
Every other document has predecessors; without a substitute for them, it would be encoded like a
first document. So a first document is encoded after the head, and others after head and
stand-ins. Many heads never recur: a question before a tool's results, a system text with the time
in it. Until a head has recurred, documents are encoded after the stand-ins alone, and are used with
any head. For many documents in a long prompt, more stand-ins give KV nearer to full recompute; a
short prompt does not need them.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_canopy.bounded import BoundedByTenant

Tokens = tuple[int, ...]

MAX_HEADS = 1 << 12
"""Maximum number of heads remembered, over all tenants."""
LONG_TOKENS = 3072
"""Minimum tokens of a prompt with all stand-ins (docs/research/documents.md)."""


@dataclass(frozen=True, slots=True)
class Place:
    """A document's place in a prompt.

    first: whether no other document precedes it; head: the tokens before the prompt's first document
    that are encoded with it; stand_ins: of a few documents, and of all, or empty; head_is_all:
    whether the head is all tokens before the document; long: whether the prompt has at least
    ``LONG_TOKENS``.
    """

    first: bool
    head: Tokens
    stand_ins: tuple[Tokens, ...]
    head_is_all: bool
    long: bool = False

    def acceptable(self) -> tuple[Tokens, ...]:
        """Return the prefixes with which the document's KV may be used here, best first."""
        behind = [p for s in self._sort_by_length() for p in (self.head + s, s)]
        exact = (self.head,) if self.first and self.head_is_all else ()
        return tuple(dict.fromkeys((*exact, *behind, self.head, ())))

    def to_encode(self, head_returns: bool) -> tuple[tuple[Tokens, ...], ...]:
        """Return groups of equally good prefixes. The document is to be encoded after the first of
        each group, unless it is stored with another prefix of the group.

        head_returns: the head has occurred before. A document without a head is encoded for
        all other places too.
        """
        if not self.stand_ins:
            return ((self.head,),)
        exact = self.first and self.head_is_all
        stand_ins = self._sort_by_length()
        good = stand_ins[:1] if self.long else stand_ins
        if not self.head:
            return (((),), good) if exact else (good,)
        if not head_returns:
            return (good,)
        return ((self.head,),) if exact else (tuple(self.head + s for s in good),)

    def _sort_by_length(self) -> tuple[Tokens, ...]:
        """Return the stand-ins, the best for the prompt's length first."""
        return self.stand_ins[::-1] if self.long else self.stand_ins


class Heads:
    """Heads that have occurred, by salt. Equal on ranks that receive the same requests."""

    def __init__(self, most: int = MAX_HEADS) -> None:
        self._heads: BoundedByTenant[int, bool] = BoundedByTenant(most)

    def seen_before(self, salt: str, head: Tokens) -> bool:
        """Record a head. Returns whether it had occurred before."""
        key = hash(head)
        seen = self._heads.get(salt, key) is not None
        self._heads.put(salt, key, True)
        return seen
