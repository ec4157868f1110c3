"""The two central records: a request, and a run of cached tokens that can be evicted."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields
from typing import Any

CLIENT, GATEWAY = "client", "gateway"
"""Sources of hints."""


@dataclass(frozen=True, slots=True)
class LateHint:
    """A hint about a tenant's conversation that arrived without a request."""

    tenant: str | None
    conversation: Hashable
    time: float
    """Arrival, in seconds on the requests' clock."""
    source: str = CLIENT
    over: bool | None = None
    """Whether the conversation is over; ``None``: unchanged."""
    return_in_s: float | None = None
    """Seconds from ``time`` to its next request."""
    keep_s: float | None = None
    """Seconds from ``time`` for which its path should be kept."""


def chat_category(**features: bool) -> str:
    """Return the category of a chat: ``chat`` and the features that it has, in this order."""
    names = (name.replace("_", "-") for name, has_it in features.items() if has_it)
    return "-".join(("chat", *names))


ABORT = "abort"
"""Stop reason of an aborted answer, which says nothing about the client's return."""


@dataclass(slots=True)
class Request:
    """One request, as policies receive it. Times are in seconds on the requests' own clock."""

    time: float
    """Arrival, stamped once at the request's entry."""
    category: str = "default"
    """Workload category before refinement by the policy (bounded by the caller)."""
    path: Sequence[int] = ()
    """Chained hashes of the prompt's token blocks, shallowest first; equal hashes mean equal
    prefixes. The caller may extend it over the output before ``finish``."""
    block_tokens: int = 1
    """Tokens per block of ``path``."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    turn: int = 1
    """1 for the first turn of a conversation."""
    conversation: Hashable | None = None
    stop: str | None = None
    """Stop reason (``"tool"``, ``"end"``, ``"length"``, ``ABORT``); known at ``finish``."""
    tenant: str | None = None
    slo_ms: float | None = None
    """The request's own TTFT target; ``None``: the policy's."""
    over: bool = False
    """Client's hint that the conversation is over."""
    return_in_s: float | None = None
    """Client's hint of the conversation's next request, in seconds after ``time``."""
    source: str = CLIENT
    """Source of ``over`` and ``return_in_s``: the client or a trusted gateway."""
    keep_until: float | None = None
    """Time until which the client requests a keep; ``keep.py`` grants it."""
    ttft_model: tuple[float, float] | None = None
    """(alpha s/token, beta s) of TTFT ~ alpha * uncached tokens + beta, fitted by the caller."""
    cached_tokens: int | None = None
    """Prompt tokens matched in the cache; known at ``finish``."""
    label: str | None = None
    """Label that the policy returned last (``arrive``, ``finish``); set by the tree."""

    def copy(self, **changes: Any) -> Request:
        """Return a plain ``Request`` copy with ``changes``."""
        return Request(**({name: getattr(self, name) for name in _REQUEST_FIELDS} | changes))


_REQUEST_FIELDS = tuple(f.name for f in fields(Request))


@dataclass(slots=True, eq=False, repr=False)
class LeafRecord:
    """Metadata of a run of cached tokens, on any tier. Times are as in ``Request``. Every field is
    declared here only: splits and copies of leaves, pages on disk and the columns of their index
    are derived. The lower tiers store a field by its annotation (``disk/page.py``)."""

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
    """Index into the TTL table of the tier below; -1 (``ttl.table.RESIDUAL``): no group."""
    created: float = 0.0
    last_access: float = 0.0
    hits: int = 0
    """Requests that used this run, including the request that created it."""
    history: int = 0
    """High-water mark, in tokens, of the conversation through this run."""
    shared: bool = False
    """Whether requests of different conversations (or without one) used this run."""
    over: bool = False
    return_at: float | None = None
    source: str = CLIENT
    """Source of ``over`` and ``return_at``."""
    keep_until: float | None = None
    """Time until which a client's keep is granted."""
    slo_ms: float | None = None


@dataclass(slots=True, eq=False, repr=False)
class Leaf(LeafRecord):
    """A run of cached tokens that a policy can rank. Trees subclass it or hold one per node. The tree
    writes every field except ``rank_state``, which belongs to the policy."""

    awaited_until: float | None = None
    """Time until which it is protected for a waiting request."""
    number: int = 0
    """Order of creation in its tree: the final tie-break of every eviction order."""
    rank_state: Any = None

    def mark_used(self, request: Request) -> None:
        """Record that ``request`` used this node (call while the node is not admitted)."""
        if self.hits == 0:
            self.created = request.time
        self.hits += 1
        self.refresh(request)

    def refresh(self, request: Request) -> None:
        """Copy the fields of ``request`` without counting a use."""
        conversation = request.conversation
        if self.hits > 1 and (conversation is None or conversation != self.conversation):
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
        # The end of one conversation does not apply to a prefix that others share.
        self.over = request.over and not self.shared
        self.source = request.source
        self.slo_ms = request.slo_ms
        return_in_s = request.return_in_s
        self.return_at = None if return_in_s is None else request.time + return_in_s

    def protected_until(self) -> float:
        """Return the time until which the node is evicted last; -inf without protection."""
        times = (self.keep_until, self.awaited_until)
        return max((time for time in times if time is not None), default=float("-inf"))

    def inherit(self, other: Leaf) -> None:
        """Copy all fields except ``offset``, ``length``, ``number`` and ``rank_state``."""
        copy_record(other, self)
        self.awaited_until = other.awaited_until


RECORD_FIELDS = tuple(f.name for f in fields(LeafRecord))
_COPIED_FIELDS = RECORD_FIELDS[2:]


def copy_record(source: LeafRecord, target: LeafRecord) -> None:
    """Copy all fields except the run's position, ``offset`` and ``length``."""
    for name in _COPIED_FIELDS:
        setattr(target, name, getattr(source, name))
