"""The prefixes that a document is encoded after, by its position in the prompt.

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
MIN_LONG_PROMPT_TOKENS = 3072
"""Minimum tokens of a prompt with all stand-ins (docs/research/documents.md)."""


@dataclass(frozen=True, slots=True)
class PrefixVariants:
    """The prefixes that fit a document at its position in a prompt.

    is_first: whether no other document precedes it; head: the tokens before the prompt's first
    document that are encoded with it; stand_ins: of a few documents, and of all, or empty;
    is_head_whole: whether the head is all tokens before the document; is_long: whether the prompt
    has at least ``MIN_LONG_PROMPT_TOKENS``.
    """

    is_first: bool
    head: Tokens
    stand_ins: tuple[Tokens, ...]
    is_head_whole: bool
    is_long: bool = False

    def acceptable_prefixes(self) -> tuple[Tokens, ...]:
        """Return the prefixes with which the document's KV may be used here, best first."""
        stand_ins = self._stand_ins_best_first()
        after_stand_ins = [prefix for s in stand_ins for prefix in (self.head + s, s)]
        exact_prefixes = (self.head,) if self.is_first and self.is_head_whole else ()
        return tuple(dict.fromkeys((*exact_prefixes, *after_stand_ins, self.head, ())))

    def prefixes_to_encode(self, head_recurs: bool) -> tuple[tuple[Tokens, ...], ...]:
        """Return groups of equally good prefixes. The document is to be encoded after the first of
        each group, unless it is stored with another prefix of the group.

        head_recurs: the head has occurred before. A document without a head is encoded for
        all other positions too.
        """
        if not self.stand_ins:
            return ((self.head,),)
        is_exact = self.is_first and self.is_head_whole
        stand_ins = self._stand_ins_best_first()
        stand_in_group = stand_ins[:1] if self.is_long else stand_ins
        if not self.head:
            return (((),), stand_in_group) if is_exact else (stand_in_group,)
        if not head_recurs:
            return (stand_in_group,)
        return ((self.head,),) if is_exact else (tuple(self.head + s for s in stand_in_group),)

    def _stand_ins_best_first(self) -> tuple[Tokens, ...]:
        """Return the stand-ins, the best for the prompt's length first."""
        return self.stand_ins[::-1] if self.is_long else self.stand_ins


class Heads:
    """Heads that have occurred, by salt. Equal on ranks that receive the same requests."""

    def __init__(self, max_heads: int = MAX_HEADS) -> None:
        self._heads: BoundedByTenant[int, bool] = BoundedByTenant(max_heads)

    def record_head(self, salt: str, head: Tokens) -> bool:
        """Record a head. Returns whether it had occurred before."""
        key = hash(head)
        occurred = self._heads.get(salt, key) is not None
        self._heads.put(salt, key, True)
        return occurred
