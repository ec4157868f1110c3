"""What a document is encoded behind, by its place in the prompt.

A document that stands first sees the prompt's own prefix and nothing else, so its KV behind that
prefix is exact. Every other one has predecessors, and takes itself for the first document unless
something stands for them. So ``mixed`` encodes a document behind the prefix where it comes first and
behind prefix and stand-ins elsewhere; whichever of the two a prompt needs is made when one does.
"""

from __future__ import annotations

from dataclasses import dataclass

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a document is in a prompt, as far as it matters to what it is encoded behind.

    encoding: one of ``ENCODINGS``; first: no other document precedes it; head: the tokens before
    the prompt's first document, or as many as are encoded with it; head_is_all: there are no others.
    """

    encoding: str
    first: bool
    head: Tokens
    stand_in: Tokens
    head_is_all: bool

    def acceptable(self) -> tuple[Tokens, ...]:
        """What the document may have been encoded behind to be used here, best first. The last ones
        are without the head: documents registered by themselves."""
        if self.encoding == "prefix":
            return tuple(dict.fromkeys((self.head, ())))
        behind = self.head + self.stand_in
        best = (self.head, behind) if self.first and self.head_is_all else (behind, self.head)
        return tuple(dict.fromkeys((*best, self.stand_in, ())))

    def to_encode(self) -> int:
        """How many of :meth:`acceptable`, the best, the document is to be encoded behind. One that
        nothing precedes, as when it is registered, is encoded for every other place too."""
        alone = self.first and self.head_is_all and not self.head
        return 2 if self.encoding == "mixed" and alone else 1
