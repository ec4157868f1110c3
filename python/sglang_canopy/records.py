"""The two records everyone speaks of: a request, and a run of cached tokens that can be evicted."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields
from typing import Any

CLIENT, GATEWAY, INFERRED = "client", "gateway", "inferred"
"""Sources of hints. ``INFERRED``: the server's own, from how a conversation goes on."""

ABORT = "abort"
"""Stop reason of a request whose answer was cut off: it says nothing about when its client returns."""


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
    """Why the response stopped (``"tool"``, ``"end"``, ``"length"``, ``ABORT``); known at ``finish``."""
    tenant: str | None = None
    slo_ms: float | None = None
    """The request's own TTFT target; ``None`` means the policy's."""
    over: bool = False
    """The client says that nothing will continue this conversation."""
    return_in_s: float | None = None
    """The client says when the conversation continues, in seconds after ``time``."""
    source: str = CLIENT
    """Who said ``over`` and ``return_in_s``: the client itself, or a gateway that is trusted."""
    keep_until: float | None = None
    """The client asks to keep the path until this time. The tree decides (``keep.py``)."""
    ttft_model: tuple[float, float] | None = None
    """(alpha s/token, beta s) of TTFT ~ alpha * uncached tokens + beta, fitted by the caller."""
    cached_tokens: int | None = None
    """Prompt tokens that were found in the cache; known at ``finish``."""
    label: str | None = None
    """What ``arrive``/``finish`` returned last; written by the tree, read by ``Leaf.stamp``."""

    def copy(self, **changes: Any) -> Request:
        """A plain ``Request`` that says the same but for ``changes``."""
        return Request(**({name: getattr(self, name) for name in _OF_REQUEST} | changes))


_OF_REQUEST = tuple(f.name for f in fields(Request))


@dataclass(slots=True, eq=False, repr=False)
class LeafRecord:
    """What is known of a run of cached tokens, in whichever tier it is.

    Every field is declared here, once: splits and copies of leaves, pages on disk and the columns
    of their index follow. The lower tiers keep a field by its annotation (``disk/page.py``).
    """

    offset: int = 0
    """Tokens of the path before this run."""
    length: int = 0
    """Tokens of this run."""
    category: str = "default"
    turn: int = 1
    conversation: Hashable | None = None
    tenant: str | None = None
    """See ``tenant.tenant_of``."""
    group: int = -1
    """Index into the TTL table of the tier below; -1 (``ttl.table.RESIDUAL``): in no group."""
    created: float = 0.0
    last_access: float = 0.0
    hits: int = 0
    """Requests that used this run, the one that made it included."""
    history: int = 0
    """High-water mark, in tokens, of the conversation that runs through here."""
    shared: bool = False
    """Whether requests of different conversations (or of none) used this run."""
    over: bool = False
    return_at: float | None = None
    source: str = CLIENT
    """Who said the two above."""
    keep_until: float | None = None
    """Until when a client's wish to keep this run is granted."""
    slo_ms: float | None = None


@dataclass(slots=True, eq=False, repr=False)
class Leaf(LeafRecord):
    """A run of cached tokens that a policy can rank. Trees subclass it or hold one a node.

    The tree writes every field but ``slot``, which belongs to the policy.
    """

    awaited_until: float | None = None
    """Until when it is protected for a request that waits to use it."""
    number: int = 0
    """Order of creation in its tree: the last tie-break of every order of eviction."""
    slot: Any = None

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
        self.source = request.source
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
        """Copy everything but ``offset``, ``length``, ``number`` and ``slot`` (a node was split or
        moved)."""
        copy_record(other, self)
        self.awaited_until = other.awaited_until


RECORD_FIELDS = tuple(f.name for f in fields(LeafRecord))
_COPIED = RECORD_FIELDS[2:]


def copy_record(source: LeafRecord, target: LeafRecord) -> None:
    """Copy every field but where the run lies: ``offset`` and ``length``."""
    for name in _COPIED:
        setattr(target, name, getattr(source, name))
