"""What a document is encoded behind, by its place in the prompt.

A document that stands first sees the prompt's own prefix and nothing else, so its KV behind that
prefix is exact. Every other one has predecessors, and takes itself for the first document unless
something stands for them. So ``mixed`` encodes a document behind the prefix where it comes first and
behind prefix and stand-ins elsewhere; whichever of the two a prompt needs is made when one does.
"""

from __future__ import annotations

from collections.abc import Sequence

Tokens = tuple[int, ...]

STAND_IN_ENCODINGS = ("standin", "mixed")
"""Encodings that put stand-in documents before a chunk."""


def acceptable_prefixes(
    encoding: str, first: bool, head: Sequence[int], stand_in: Sequence[int], head_is_all: bool
) -> tuple[Tokens, ...]:
    """What a document may have been encoded behind to be used in its place, best first.

    encoding: one of ``ENCODINGS``; first: no other document precedes it; head: the tokens before
    the prompt's first document, or as many as are encoded with it; head_is_all: there are no others.
    The last ones are without the head: documents registered by themselves.
    """
    head, stand_in = tuple(head), tuple(stand_in)
    found: tuple[Tokens, ...] = {
        "alone": ((),),
        "prefix": (head, ()),
        "standin": (head + stand_in, stand_in),
        "mixed": (head + stand_in, head, stand_in, ()),
    }[encoding]
    if encoding == "mixed" and first and head_is_all:
        found = (head, head + stand_in, stand_in, ())
    return tuple(dict.fromkeys(found))


def prefixes_to_encode(
    encoding: str, first: bool, head: Sequence[int], stand_in: Sequence[int], head_is_all: bool
) -> tuple[Tokens, ...]:
    """What a document of this place is to be encoded behind: the best of its
    :func:`acceptable_prefixes`. One that nothing precedes, as when it is registered, is encoded for
    every other place too.
    """
    found = acceptable_prefixes(encoding, first, head, stand_in, head_is_all)
    both = encoding == "mixed" and first and head_is_all and not head
    return found[: 2 if both else 1]
