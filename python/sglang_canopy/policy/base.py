"""The eviction contract that the live cache and the simulator both drive.

A *tree* (SGLang's radix tree with ``radix/`` on it, or ``policy/block_tree.py``) owns the nodes and
their memory. A *policy* only ranks the nodes that may go: it learns which leaves are
evictable, and is asked for the next victim. No policy reads a clock, draws a random number or
imports torch or sglang, so that tensor-parallel ranks fed the same requests evict alike.

Order of calls, for every request, in every tree:

1. ``label = policy.arrive(request)``     once, before the prompt is looked up
2. ``policy.drop(leaf)`` / ``admit``      as nodes get locked, extended, freed
3. ``label = policy.finish(request)``     once, when its output and stop reason are known
4. the tree stamps every node on the request's path (``Leaf.stamp``), then ``admit``\\ s leaves

and, whenever room is needed, ``victim(now)`` until enough is free. The tree calls
``drop(leaf)`` for every leaf it removes, then ``evicted(leaf, tokens)``.
"""

from __future__ import annotations

import abc
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

from sglang_canopy.records import Leaf, Request


class Victim(NamedTuple):
    """The leaf to evict and how many of its first tokens the policy wants kept.

    ``keep`` is 0 for the whole leaf. The tree rounds it up to a page; where that leaves
    nothing to free it evicts one page.
    """

    leaf: Leaf
    keep: int = 0


TAIL_TARGETS = ("ttft_ms", "ttft_percentile", "threshold_tokens")
"""Options that say which tail a policy aims at."""


class Policy(abc.ABC):
    """One eviction policy. Subclasses live one a file and are named in ``registry.py``."""

    name: ClassVar[str]
    Config: ClassVar[type]
    """Frozen dataclass of the policy's options; its fields are the allowed JSON keys."""
    reads_labels: ClassVar[bool] = True
    """Whether it ranks leaves by their category or turn. Only then does shuffling the labels (a
    placebo) change what it evicts."""
    takes_tail_target: ClassVar[bool] = False
    """Whether it aims at a tail: one of the options ``TAIL_TARGETS``."""

    learns: bool = False
    """Whether it learns from requests. A server announces them to those that do; a twin of one that
    does may not."""

    def arrive(self, request: Request) -> str:
        """A request comes in. Returns the category label its nodes will carry."""
        return request.category

    def finish(self, request: Request) -> str:
        """The same request ended: output length and stop reason are known now."""
        return request.label or request.category

    def hinted(
        self,
        conversation: tuple[str | None, Hashable],
        source: str,
        now: float,
        over: bool,
        return_in_s: float | None,
    ) -> None:
        """A hint about a tenant's ``conversation`` that came by itself: to learn whether it comes
        true. The tree writes it on the leaves."""

    @abc.abstractmethod
    def admit(self, leaf: Leaf, now: float) -> None:
        """``leaf`` became evictable. Never called twice without a ``drop`` between.

        The order in which leaves are admitted decides nothing: ties go to ``Leaf.number``.
        """

    @abc.abstractmethod
    def drop(self, leaf: Leaf) -> None:
        """``leaf`` stopped being evictable (locked, extended, freed). Unknown leaves are ignored."""

    @abc.abstractmethod
    def victim(self, now: float) -> Victim | None:
        """The next leaf to evict, or ``None`` when none is admitted.

        The leaf stays admitted until the tree ``drop``\\ s it, so asking twice without a
        change in between gives the same answer.
        """

    def put_back(self, leaf: Leaf, slot: Any, now: float) -> None:
        """Undo a ``drop``: rank an unchanged ``leaf`` exactly as before. ``slot``: its ``slot``
        before the drop."""
        self.admit(leaf, now)

    def evicted(self, leaf: Leaf, tokens: int) -> None:
        """``tokens`` of ``leaf`` were evicted by this policy's choice (ghosts, clocks).

        A leaf cut short (``tokens < leaf.length`` before the cut) is admitted again by the
        tree with its new length; the tokens that are gone never come back as this leaf.
        """

    def split(self, leaf: Leaf, head: Leaf) -> None:
        """The tree split ``leaf``: ``head`` now holds its first tokens and is its parent.

        Called after ``head.inherit(leaf)`` and after both lengths are right. ``leaf`` keeps
        its identity and, if it was admitted, stays so (its order must not depend on
        ``offset`` unless the policy handles it here).
        """

    def __init__(self, config: Any) -> None:
        self.config = config
        """The policy's own frozen ``Config``."""

    def twin(self) -> Policy:
        """A policy of the same configuration with no leaves, for another tier of one cache.

        It may share what this one learns, and then ignores ``arrive`` and ``finish``: the
        tree announces each request to both.
        """
        return type(self)(self.config)

    def explain(self, leaf: Leaf, now: float) -> Mapping[str, Any]:
        """What is believed of ``leaf``, for operators; admitted or not. In the scheduler's
        thread, on every rank at the same point: labels may be looked up, and so be made."""
        return {}

    def stats(self) -> Mapping[str, Any]:
        """What an operator may want to see: learnt curves, queue sizes, fitted models."""
        return {}

    def state(self) -> Mapping[str, Any]:
        """JSON-able learnt state, to be saved as a profile; ``{}`` where nothing is learnt."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over a validated ``state()`` of an earlier run. Raises ``CanopyError``."""

    def leaves(self) -> Iterator[Leaf]:
        """Every admitted leaf, in no particular order (checks and tests)."""
        raise NotImplementedError
