"""The eviction contract that the live cache and the simulator both drive.

A *tree* (SGLang's radix tree with ``radix/`` on it, or ``sim/tree.py``) owns the nodes and
their memory. A *policy* only ranks the nodes that may go: it is told which leaves are
evictable, and asked for the next victim. No policy reads a clock, draws a random number or
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
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple


@dataclass(slots=True)
class Request:
    """What one request tells the policy. Times in seconds, on the requests' own clock."""

    time: float
    """Arrival, stamped once where the request enters."""
    category: str = "default"
    """The workload category before any refinement by the policy (bounded by the caller)."""
    path: Sequence[int] = ()
    """Chained hashes of the prompt's token blocks, shallowest first: equal hash, equal prefix.
    At ``finish`` the caller may have extended it over the output."""
    block_tokens: int = 1
    """Tokens a block of ``path``."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    turn: int = 1
    """1 for the first turn of a conversation."""
    conversation: Hashable | None = None
    stop: str | None = None
    """Why the response stopped (``"tool"``, ``"end"``, ``"length"``); known at ``finish``."""
    tenant: str | None = None
    slo_ms: float | None = None
    """The request's own TTFT target; ``None`` means the policy's."""
    over: bool = False
    """The client says that nothing will continue this conversation."""
    return_in_s: float | None = None
    """The client says when the conversation continues, in seconds after ``time``."""
    keep_until: float | None = None
    """The client asks to keep the path until this time. The tree decides (``keep.py``)."""
    ttft_model: tuple[float, float] | None = None
    """(alpha s/token, beta s) of TTFT ~ alpha * uncached tokens + beta, fitted by the caller."""
    cached_tokens: int | None = None
    """Prompt tokens that were found in the cache; known at ``finish``."""
    label: str | None = None
    """What ``arrive``/``finish`` returned last; written by the tree, read by ``Leaf.stamp``."""


class Leaf:
    """A run of cached tokens that a policy can rank. Trees subclass it or hold one a node.

    The tree writes every field but ``slot``, which belongs to the policy.
    """

    __slots__ = (
        "awaited_until",
        "category",
        "conversation",
        "created",
        "group",
        "history",
        "hits",
        "keep_until",
        "last_access",
        "length",
        "offset",
        "over",
        "return_at",
        "shared",
        "slo_ms",
        "slot",
        "tenant",
        "turn",
    )

    def __init__(self, offset: int = 0, length: int = 0) -> None:
        self.offset = offset
        """Tokens of the path before this node."""
        self.length = length
        """Tokens of this node."""
        self.category = "default"
        self.turn = 1
        self.conversation: Hashable | None = None
        self.tenant: str | None = None
        self.group: int | None = None
        """Subtree group of a tiered cache; ``None`` where there are no groups."""
        self.last_access = 0.0
        self.created = 0.0
        self.hits = 0
        """Requests that used this node, the one that made it included."""
        self.history = 0
        """High-water mark, in tokens, of the conversation that runs through this node."""
        self.shared = False
        """Whether requests of different conversations (or of none) used this node."""
        self.over = False
        self.return_at: float | None = None
        self.keep_until: float | None = None
        """Until when the tree grants a client's wish to keep this node."""
        self.awaited_until: float | None = None
        """Until when it is protected for a request that waits to use it."""
        self.slo_ms: float | None = None
        self.slot: Any = None

    def stamp(self, request: Request) -> None:
        """Record that ``request`` used this node (call while the node is not admitted)."""
        if self.hits == 0:
            self.created = request.time
        self.hits += 1
        self.refresh(request)

    def refresh(self, request: Request) -> None:
        """Take over what ``request`` says without counting another use of it."""
        who = request.conversation
        if self.hits > 1 and (who is None or who != self.conversation):
            self.shared = True
        if request.time > self.last_access:
            self.last_access = request.time
        self.category = request.label or request.category
        self.turn = request.turn
        self.conversation = request.conversation
        self.tenant = request.tenant
        tokens = request.prompt_tokens + request.output_tokens
        if tokens > self.history:
            self.history = tokens
        # A conversation's end says nothing of a prefix that others use as well.
        self.over = request.over and not self.shared
        self.slo_ms = request.slo_ms
        back = request.return_in_s
        self.return_at = None if back is None else request.time + back

    def protected_until(self) -> float:
        """Until when the node goes after all others; minus infinity for an ordinary one."""
        keep, awaited = self.keep_until, self.awaited_until
        if keep is None:
            return float("-inf") if awaited is None else awaited
        return keep if awaited is None else max(keep, awaited)

    def inherit(self, other: Leaf) -> None:
        """Copy everything but ``offset``, ``length`` and ``slot`` (a node was split or moved)."""
        for name in _INHERITED:
            setattr(self, name, getattr(other, name))


_INHERITED = tuple(n for n in Leaf.__slots__ if n not in ("offset", "length", "slot"))


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

    def arrive(self, request: Request) -> str:
        """A request comes in. Returns the category label its nodes will carry."""
        return request.category

    def finish(self, request: Request) -> str:
        """The same request ended: output length and stop reason are known now."""
        return request.label or request.category

    @abc.abstractmethod
    def admit(self, leaf: Leaf, now: float) -> None:
        """``leaf`` became evictable. Never called twice without a ``drop`` between."""

    @abc.abstractmethod
    def drop(self, leaf: Leaf) -> None:
        """``leaf`` stopped being evictable (locked, extended, freed). Unknown leaves are ignored."""

    @abc.abstractmethod
    def victim(self, now: float) -> Victim | None:
        """The next leaf to evict, or ``None`` when none is admitted.

        The leaf stays admitted until the tree ``drop``\\ s it, so asking twice without a
        change in between gives the same answer.
        """

    def evicted(self, leaf: Leaf, tokens: int) -> None:
        """``tokens`` of ``leaf`` were evicted by this policy's choice (ghosts, clocks).

        A leaf cut short (``tokens < leaf.length`` before the cut) is admitted again by the
        tree with its new length; the part that is gone never comes back as this leaf.
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
