"""The chunk state of one request, whether it may reuse chunks at all, and what it says of itself in
``meta_info.canopy_chunks``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from canopy_chunks.fuse.choice import ChosenTokens
from canopy_chunks.fuse.transfer import Transfer
from canopy_chunks.server.options import LEARN_PREFIX_TOKENS, Options
from canopy_chunks.store.chunk import Chunk, Placed
from canopy_chunks.store.disk import DiskChunk
from canopy_chunks.store.host_memory import HostChunk
from canopy_chunks.store.store import ChunkStore
from canopy_chunks.store.suffix import ChunkSuffix
from canopy_chunks.text.fields import ChunkFields
from canopy_chunks.text.variants import Place, Tokens

TOO_FEW_STORED, PLANNING_FAILED = "too few of its documents are stored", "planning failed"
DIFFERED = "its tenant's answers differed too often from full recompute"
STILL_ENCODED = (TOO_FEW_STORED, PLANNING_FAILED, DIFFERED)
"""Reasons for running normally after which the request's documents are encoded all the same."""

_INELIGIBLE_FIELDS = (
    ("lora_id", "lora"),
    ("input_embeds", "input embeddings"),
    ("positional_embed_overrides", "embedding overrides"),
    ("multimodal_inputs", "multimodal"),
    ("session", "session"),
    ("return_hidden_states", "hidden states"),
    ("return_routed_experts", "routed experts"),
    ("beam_list", "beam search"),
)


@dataclass(slots=True)
class ResolvedChunk:
    """A chunk of a prompt: where it is, its address, and its KV if the store has it."""

    start: int
    end: int
    key: str
    tier: str | None = None
    chunk: Chunk | HostChunk | DiskChunk | None = None

    def placed_from(self, first: int) -> Placed | None:
        """The stored tokens from position ``first`` on; None if there are none."""
        if self.chunk is None or self.end <= first:
            return None
        skip = max(0, first - self.start)
        rest = ChunkSuffix(self.chunk, skip) if skip else self.chunk
        return Placed(rest, self.start + skip)  # type: ignore[arg-type]


@dataclass(slots=True)
class ReusePlan:
    """Which tokens of one prompt are computed, and whose KV the others get.

    chosen: the computed ones; placed: chunks with KV, from the exact prefix on; prefix: tokens that
    came from the exact tree; arrivals: KV that is still on its way to the device.
    """

    chosen: ChosenTokens
    placed: tuple[Placed, ...]
    prefix: int
    arrivals: list[Transfer] = field(default_factory=list)

    @property
    def computed(self) -> torch.Tensor:
        """``[n]`` bool on the host; waits for a device that chose (:class:`ChosenTokens`)."""
        return self.chosen.mask()

    def compute_from(self, first: int) -> int:
        """Compute every token from position ``first`` on; how many of them were to be reused."""
        computed = self.computed.clone()
        reused = int((~computed[first:]).sum())
        computed[first:] = True
        self.chosen = ChosenTokens(computed)
        return reused


@dataclass(slots=True, eq=False, weakref_slot=True)
class ChunkRequest:
    """On ``req.canopy_chunks``: what the request asks for and what becomes of it.

    keys: each chunk's addresses, the best for its place first; encode_prefixes: what it is to be
    encoded behind, one for each of its first addresses; salt: of the addresses, what SGLang keeps KV
    apart by; ratio: as the request asks, or None; tenant: whose documents these are; deletions: how many
    documents were deleted before it was made; checked: eligibility was looked at; reason: why it runs normally, or None; fused:
    reused KV has been in this request's slots (never unset); exact_tokens: before the first that
    was ever reused; publish_tokens: these, once they are computed and may enter the exact tree (0:
    not yet); published_tokens: how many were let into the tree; initial: the first
    plan's choice and its prefix, kept so that a retraction does not change the answer; report: what
    the response contains; complete_report: adds what needs the choice on the host, or None;
    reported: the prompt was completed once, and the report was handed over.
    """

    bounds: tuple[tuple[int, int], ...]
    keys: tuple[tuple[str, ...], ...]
    encode_prefixes: tuple[tuple[Tokens, ...], ...]
    salt: str
    selector: str
    ratio: float | None = None
    tenant: str | None = None
    time_s: float = 0.0
    deletions: int = 0
    checked: bool = False
    reason: str | None = None
    fused: bool = False
    exact_tokens: int | None = None
    publish_tokens: int = 0
    published_tokens: int = 0
    plan: ReusePlan | None = None
    initial: tuple[ChosenTokens, int] | None = None
    reported: bool = False
    report: dict[str, Any] = field(default_factory=dict)
    complete_report: Callable[[], None] | None = None

    def finish_report(self) -> None:
        """Add what needs the choice on the host: once the forward is done, that waits no more."""
        if self.complete_report is not None:
            complete, self.complete_report = self.complete_report, None
            complete()


def chunk_request_of(req: Any) -> ChunkRequest | None:
    """The chunk state of SGLang's request, or ``None`` where it names no chunks."""
    return getattr(req, "canopy_chunks", None)


def ineligible_reason(req: Any, request: ChunkRequest, options: Options) -> str | None:
    """Why a request runs normally, whatever the store has; ``None`` if it may reuse chunks."""
    if not request.bounds:
        return "no chunk is long enough"
    if request.bounds[-1][1] > len(req.origin_input_ids):
        return "aborted or truncated"  # SGLang replaced the prompt after it was created
    if options.prompt_tokens is not None and len(req.origin_input_ids) > options.prompt_tokens:
        return f"more than {options.prompt_tokens} tokens"
    if req.return_logprob and 0 <= req.logprob_start_len < len(req.origin_input_ids) - 1:
        return "prompt logprobs"
    return next((why for name, why in _INELIGIBLE_FIELDS if getattr(req, name, None)), None)


def chunk_request(
    ids: Sequence[int],
    requested: ChunkFields,
    options: Options,
    stand_in: tuple[int, ...],
    store: ChunkStore,
    salt: str,
) -> ChunkRequest:
    """The chunk state of a new request of tokens ``ids`` that asks for ``requested``. stand_in: the
    tokens of the stand-ins."""
    bounds = tuple(
        (a, min(b, len(ids)))
        for a, b in requested.bounds or ()
        if min(b, len(ids)) - a >= options.min_tokens
    )
    first = requested.bounds[0][0] if requested.bounds else 0
    whole = first <= LEARN_PREFIX_TOKENS
    head = tuple(ids[:first]) if whole else ()
    places = [Place(options.encode, a == first, head, stand_in, whole) for a, _ in bounds]
    behind = [place.acceptable() for place in places]
    return ChunkRequest(
        bounds,
        tuple(store.keys(ids[a:b], found, salt) for (a, b), found in zip(bounds, behind)),
        tuple(found[: place.to_encode()] for place, found in zip(places, behind)),
        salt,
        requested.selector or options.selector,
        requested.ratio,
    )


COUNTERS = (
    "fused_requests", "reused_tokens", "recomputed_tokens", "fused_batches", "mixed_batches",
    "replanned_requests", "split_batches", "most_rows", "fallbacks",
)  # fmt: skip
"""split_batches: batches of more than a window, computed in several forwards; most_rows: the most
tokens that one forward with chunk requests computed; mixed_batches: fused batches with decode rows
in them; replanned_requests: started again after a
retraction; fallbacks: failures that were caught, after which a request or batch ran normally."""


def fused_report(
    request: ChunkRequest,
    chunks: Sequence[ResolvedChunk],
    plan: ReusePlan,
    ratio: float,
    seconds: float,
) -> dict[str, Any]:
    """Of a fused request, but for :func:`reused_by_tier`."""
    inside = torch.zeros(plan.chosen.total, dtype=torch.bool)
    for p in plan.placed:
        inside[p.start : p.end] = True
    recomputed = plan.chosen.count_in(inside)
    return {
        "fused": True,
        "prefix": plan.prefix,
        "reused": int(inside.sum()) - recomputed,
        "recomputed": recomputed,
        "computed": plan.chosen.count,
        **_chunk_counts(request, chunks),
        "ratio": round(ratio, 4),
        "plan_ms": round(1000 * seconds, 3),
    }


def reused_by_tier(chunks: Sequence[ResolvedChunk], plan: ReusePlan) -> dict[str, int]:
    """Reused tokens by the tier they came from: what the choice must be on the host for."""
    tiers: Counter[str] = Counter()
    for one in chunks:
        if one.tier is not None and one.end > plan.prefix:
            first = max(one.start, plan.prefix)
            tiers[one.tier] += int((~plan.computed[first : one.end]).sum())
    return {f"reused_{name}": count for name, count in sorted(tiers.items())}


def normal_report(
    request: ChunkRequest, prefix: int, chunks: Sequence[ResolvedChunk]
) -> dict[str, Any]:
    """Of a request of whose documents too few are stored."""
    return {
        "fused": False,
        "why": request.reason,
        "prefix": prefix,
        **_chunk_counts(request, chunks),
    }


def _chunk_counts(request: ChunkRequest, chunks: Sequence[ResolvedChunk]) -> dict[str, int]:
    return {
        "chunks": len(request.bounds),
        "missing_chunks": sum(one.tier is None for one in chunks),
    }
