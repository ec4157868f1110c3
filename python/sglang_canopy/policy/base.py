"""The eviction contract between a policy and a tree: the live cache or the simulator.

A *tree* (SGLang's radix tree with ``radix/`` on it, or ``policy/block_tree.py``) owns the nodes and
their memory. A *policy* only ranks the evictable nodes: the tree reports which leaves are evictable
and requests the next victim. No policy reads a clock, draws a random number or imports torch or
sglang, so that tensor-parallel ranks with equal requests evict alike.

Order of calls for every request:

    1. label = policy.arrive(request)     once, at its admission
    2. policy.drop(leaf) / admit          as nodes are locked, extended, freed
    3. label = policy.finish(request)     once, with its output and stop reason
    4. the tree marks every node on the request's path (``Leaf.mark_used``), then admits leaves

The live tree matches the prompt before step 1, and also marks nodes while the request runs.
Whenever room is needed, the tree calls ``victim(now)`` until enough is free, and
``drop(leaf)``, then ``record_eviction(leaf, tokens)``, for every leaf that it removes.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

from sglang_canopy.records import LateHint, Leaf, Request

QUANTUM_TOKENS = 64
"""Default minimum of tokens that an eviction takes from a victim."""


def tokens_kept(
    length_tokens: int,
    keep_tokens: int,
    needed_tokens: int,
    *,
    page_tokens: int,
    quantum_tokens: int,
    whole_nodes: bool,
) -> int:
    """Return the number of leading tokens kept of a victim of ``length_tokens``, a multiple of
    ``page_tokens``.

    The rule of the live tree and of both simulators. ``keep_tokens``: that the policy keeps, rounded
    up to a page. ``needed_tokens``: still to be freed. Evicts the needed tokens, but at least
    ``quantum_tokens``; with ``whole_nodes``, all tokens except ``keep_tokens``. The last page is always evicted.
    """
    kept_tokens = -(-keep_tokens // page_tokens) * page_tokens
    if not whole_nodes:
        # Round down to whole pages: rounding up would leave a remainder, and cut another node.
        evicted_tokens = needed_tokens if needed_tokens > quantum_tokens else quantum_tokens
        unneeded_tokens = (length_tokens - evicted_tokens) // page_tokens * page_tokens
        if unneeded_tokens > kept_tokens:
            kept_tokens = unneeded_tokens
    max_kept_tokens = (length_tokens - 1) // page_tokens * page_tokens
    return kept_tokens if kept_tokens < max_kept_tokens else max_kept_tokens


class Victim(NamedTuple):
    """The leaf to evict, and the number of its first tokens to keep. ``keep_tokens`` is 0 for the
    whole leaf. The tree rounds it up to a page. If that leaves nothing to free, it evicts one
    page."""

    leaf: Leaf
    keep_tokens: int = 0


TAIL_TARGETS = ("ttft_ms", "ttft_percentile", "threshold_tokens")
"""Options that set the tail target."""


class Policy(abc.ABC):
    """An eviction policy. Each subclass has its own file and a name in ``registry.py``."""

    name: ClassVar[str]
    Config: ClassVar[type]
    """Frozen dataclass of the policy's options; its fields are the allowed JSON keys."""
    reads_labels: ClassVar[bool] = True
    """Whether labels or turns affect ranks; only then does a placebo matter."""
    takes_tail_target: ClassVar[bool] = False
    """Whether the policy has a tail target, one of ``TAIL_TARGETS``."""

    learns: bool = False
    """Whether the policy learns from requests; its twin may not."""

    def arrive(self, request: Request) -> str:
        """Learn from an arriving request. Return the category label for its nodes."""
        return request.category

    def finish(self, request: Request) -> str:
        """Learn from the finished request, whose output length and stop reason are known."""
        return request.label or request.category

    def record_hint(self, hint: LateHint) -> None:
        """Learn from a hint that arrived without a request. The policy later checks whether it was
        true. The tree writes the hint to the leaves."""

    @abc.abstractmethod
    def admit(self, leaf: Leaf, now: float) -> None:
        """Rank ``leaf``, which became evictable. Never called twice without a ``drop`` between. Ties
        are broken by ``Leaf.number``, which is unique in a radix tree. On disk every number is 0, and
        the order of admission breaks them: do not use ``number`` as a key."""

    @abc.abstractmethod
    def drop(self, leaf: Leaf) -> None:
        """Stop ranking ``leaf``, which was locked, extended or freed. Ignores unknown leaves."""

    @abc.abstractmethod
    def victim(self, now: float) -> Victim | None:
        """Return the next leaf to evict, or ``None`` if no leaf is admitted. The leaf stays admitted
        until the tree calls ``drop``: two calls without a change between return the same leaf."""

    def put_back(self, leaf: Leaf, rank_state: Any, now: float) -> None:
        """Undo a ``drop``: rank the unchanged ``leaf`` exactly as before. ``rank_state``: its ``rank_state``
        before the drop."""
        self.admit(leaf, now)

    def record_eviction(self, leaf: Leaf, tokens: int) -> None:
        """Record that this policy's choice evicted ``tokens`` of ``leaf``. If the leaf was cut, the
        simulators admit it again with its new length. The live tree splits it first: ``leaf`` is the
        whole tail, and the head is another leaf."""

    def split(self, leaf: Leaf, head: Leaf) -> None:
        """Update the ranks after the tree split ``leaf``: ``head``, its new parent, holds its first
        tokens. Called after ``head.inherit(leaf)``, with both lengths updated. ``leaf`` keeps its
        identity and stays admitted if it was (its order must not depend on ``offset`` unless this
        method handles it)."""

    def __init__(self, config: Any) -> None:
        self.config = config
        """The policy's frozen ``Config``."""

    def twin(self) -> Policy:
        """Return a policy with the same configuration and no leaves, for another tier of the cache. A
        twin that shares this policy's learnt state ignores ``arrive`` and ``finish``; the live tree
        reports requests only to policies that learn (``learns``)."""
        return type(self)(self.config)

    def explain(self, leaf: Leaf, now: float) -> Mapping[str, Any]:
        """Return the policy's view of ``leaf``, admitted or not, for operators. Runs in the scheduler's
        thread, at the same point on every rank, since it may create labels."""
        return {}

    def state(self) -> Mapping[str, Any]:
        """Return the learnt state as JSON data; ``{}`` for a policy that does not learn."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Load a validated ``state()`` of an earlier run. Raises ``CanopyError``."""

    def leaves(self) -> Iterator[Leaf]:
        """Iterate over all admitted leaves, in no particular order (checks and tests)."""
        raise NotImplementedError
