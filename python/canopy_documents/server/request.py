"""The document state of a request, its eligibility, and its report in ``meta_info``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from canopy_documents.fuse.choice import ChosenTokens
from canopy_documents.fuse.transfer import RowTransfer
from canopy_documents.server.options import LEARN_PREFIX_TOKENS, MIN_DOCUMENT_TOKENS, ReuseOptions
from canopy_documents.store.chunk import Chunk, ChunkSuffix, PlacedChunk
from canopy_documents.store.host_memory import HostChunk
from canopy_documents.store.store import ChunkStore
from canopy_documents.text.fields import MAX_DOCUMENTS, DocumentFields
from canopy_documents.text.variants import MIN_LONG_PROMPT_TOKENS, PrefixVariants
from sglang_canopy.wire.request_state import state_of

TOO_FEW_STORED, PLANNING_FAILED = "too few of its documents are stored", "planning failed"
IN_PREFIX = "its cached prefix saves as much as its stored documents"
DIFFERED = "its tenant's answers differed too often from full recompute"
NOT_FOUND = "no document of enough tokens is in its prompt"
TOO_MANY = f"more than {MAX_DOCUMENTS} documents"
STILL_ENCODED = (TOO_FEW_STORED, IN_PREFIX, PLANNING_FAILED, DIFFERED)
"""Reasons for a normal run after which the request's documents are encoded nevertheless."""

_INELIGIBLE_FIELDS = (
    ("lora_id", "lora"),
    ("input_embeds", "input embeddings"),
    ("positional_embed_overrides", "embedding overrides"),
    ("multimodal_inputs", "multimodal"),
    ("session", "session"),
    ("return_hidden_states", "hidden states"),
    ("return_routed_experts", "routed experts"),
    ("beam_group", "beam search"),
)


@dataclass(slots=True)
class ResolvedDocument:
    """A document of a prompt: its position and address, and its KV if the store has it.

    prefix_index: of the prefix that it was encoded after, in ``acceptable_prefixes``.
    """

    start: int
    end: int
    key: str
    prefix_index: int = 0
    tier: str | None = None
    chunk: Chunk | HostChunk | None = None

    def placed_from(self, first: int) -> PlacedChunk | None:
        """Return the stored tokens from position ``first`` on; None without stored tokens."""
        if self.chunk is None or self.end <= first:
            return None
        skip = max(0, first - self.start)
        stored_part = ChunkSuffix(self.chunk, skip) if skip else self.chunk
        return PlacedChunk(stored_part, self.start + skip)  # type: ignore[arg-type]


@dataclass(slots=True)
class ReusePlan:
    """The computed tokens of one prompt, and the documents that supply KV for the others.

    chosen: the computed tokens; placed: documents with KV, after the exact prefix; prefix_tokens:
    tokens matched in the exact tree; transfers: KV transfers to the device in progress.
    """

    chosen: ChosenTokens
    placed: tuple[PlacedChunk, ...]
    prefix_tokens: int
    transfers: list[RowTransfer] = field(default_factory=list)

    @property
    def computes_all(self) -> bool:
        """Whether no KV is reused (ratio 1), so that the KV is as exact as its prefix."""
        return self.chosen.count == self.chosen.total - self.prefix_tokens

    @property
    def computed(self) -> torch.Tensor:
        """``[n]`` bool on the host; waits for a choice made on a device (:class:`ChosenTokens`)."""
        return self.chosen.mask()

    def compute_from(self, first: int) -> int:
        """Compute every token from position ``first`` on. Returns the number of tokens that would
        have been reused."""
        computed = self.computed.clone()
        reused = int((~computed[first:]).sum())
        computed[first:] = True
        self.chosen = ChosenTokens(computed)
        return reused


@dataclass(slots=True, eq=False, weakref_slot=True)
class DocumentRequest:
    """A request's document fields and state, at ``req.canopy.documents``."""

    bounds: tuple[tuple[int, int], ...]
    """First and end token of each document of enough tokens, in order."""
    keys: tuple[tuple[str, ...], ...]
    """Addresses of each document, by its acceptable prefixes, the best first."""
    variants: tuple[PrefixVariants, ...]
    salt: str
    """SGLang's namespace of the request, a part of the addresses."""
    named_documents: int
    """Documents in the prompt, with those of too few tokens."""
    ratio: float | None = None
    """Recompute ratio that the request asks for."""
    tenant: str | None = None
    """Owner of the documents."""
    time_s: float = 0.0
    deletions: int = 0
    """Deletions of documents before the request was created."""
    is_decided: bool = False
    """Whether ``reason`` and ``quality_level`` are set."""
    too_long: bool = False
    """Whether it may only extend kept KV."""
    reason: str | None = None
    """Why it runs normally; ``None`` if it may reuse documents."""
    quality_level: int = 0
    """Level of its tenant: ``SERVED``, ``RAISED`` or ``STOPPED``."""
    kept_key: str | None = None
    """Extra key of its namespace for approximate KV (:mod:`.kept`)."""
    kept_tokens: int = 0
    """Tokens matched in that namespace from its first document on."""
    is_fused: bool = False
    """Whether its slots have held approximate KV; never reset."""
    plan: ReusePlan | None = None
    first_choice: tuple[ChosenTokens, int] | None = None
    """Choice and prefix of the first plan: a retraction does not change the answer."""
    is_reported: bool = False
    """Whether its prompt was complete once, and the report was sent."""
    report: dict[str, Any] = field(default_factory=dict)
    """Content of the response's ``meta_info``."""
    complete_report: Callable[[], None] | None = None
    """Adds the fields of the report that need the choice on the host."""
    prefix_tokens: int = 0
    """Tokens of the prompt that were matched in the tree."""
    _computed_end: int = -1

    def is_apart(self, req: Any) -> bool:
        """Return whether the request's KV goes into the namespace for approximate KV."""
        return self.kept_key is not None and req.extra_key == self.kept_key

    def begin_window(self, req: Any, first: int, end: int) -> None:
        """Record that the prompt's tokens ``first..end`` are computed next, after ``first`` tokens
        with KV.

        Tokens before ``first`` that the request did not compute itself were matched in the tree.
        """
        if first != self._computed_end:  # the prompt's first window, also after a retraction
            self.prefix_tokens = first
            self.kept_tokens = max(0, first - self.bounds[0][0]) if self.is_apart(req) else 0
            self.is_fused |= self.kept_tokens > 0
        self._computed_end = end

    @property
    def has_begun(self) -> bool:
        """Whether a window of the prompt was computed."""
        return self._computed_end >= 0

    def finish_report(self) -> None:
        """Add the fields that need the choice on the host. Does not wait after the forward."""
        if self.complete_report is not None:
            complete, self.complete_report = self.complete_report, None
            complete()


def document_request_of(req: Any) -> DocumentRequest | None:
    """Return the document state of SGLang's request, or ``None`` if it names no documents."""
    return state_of(req).documents  # type: ignore[no-any-return]


def engine_of(scheduler: Any) -> Any:
    """Return a scheduler's ``DocumentEngine``; ``None`` without document reuse, or during the start."""
    worker = getattr(scheduler, "tp_worker", None)
    return None if worker is None else engine_of_runner(worker.model_runner)


def engine_of_runner(runner: Any) -> Any:
    """Return the engine of SGLang's model runner, or ``None``."""
    return getattr(runner, "canopy", None)


def ineligible_reason(req: Any, request: DocumentRequest, options: ReuseOptions) -> str | None:
    """Return why a request runs normally whatever is stored; ``None`` if it may reuse documents."""
    if request.named_documents > MAX_DOCUMENTS:
        return TOO_MANY
    if not request.bounds:
        return NOT_FOUND
    if request.bounds[-1][1] > len(req.origin_input_ids):
        return "aborted or truncated"  # SGLang replaced the prompt after the request was created
    if req.return_logprob and 0 <= req.logprob_start_len < len(req.origin_input_ids) - 1:
        return "prompt logprobs"
    for name, why in _INELIGIBLE_FIELDS:
        if getattr(req, name):
            return why
    if options.prompt_tokens is not None and len(req.origin_input_ids) > options.prompt_tokens:
        request.too_long = True
        return f"more than {options.prompt_tokens} tokens"
    return None


def make_document_request(
    ids: Sequence[int],
    requested: DocumentFields,
    options: ReuseOptions,
    stand_ins: tuple[tuple[int, ...], ...],
    store: ChunkStore,
    salt: str,
) -> DocumentRequest:
    """Return the document state of a new request of tokens ``ids`` with the fields ``requested``.

    stand_ins: tokens of a few stand-in documents, and of all; empty without stand-ins.
    """
    named_documents = len(requested.bounds or ())
    bounds = tuple(
        (a, min(b, len(ids)))
        for a, b in (requested.bounds or () if named_documents <= MAX_DOCUMENTS else ())
        if min(b, len(ids)) - a >= MIN_DOCUMENT_TOKENS
    )
    head_end = requested.bounds[0][0] if requested.bounds else 0
    whole = head_end <= LEARN_PREFIX_TOKENS
    head = tuple(ids[:head_end]) if whole else ()
    long = len(ids) >= MIN_LONG_PROMPT_TOKENS
    variants = tuple(PrefixVariants(a == head_end, head, stand_ins, whole, long) for a, _ in bounds)
    choices = [variant.acceptable_prefixes() for variant in variants]
    return DocumentRequest(
        bounds,
        tuple(store.keys(ids[a:b], prefixes, salt) for (a, b), prefixes in zip(bounds, choices)),
        variants,
        salt,
        named_documents,
        requested.ratio,
    )


COUNTERS = (
    "fused_requests", "reused_tokens", "recomputed_tokens", "fused_batches", "mixed_batches",
    "replanned_requests", "split_batches", "most_rows", "fallbacks", "kept_requests", "kept_tokens",
)  # fmt: skip
"""Names of ``DocumentEngine``'s counters.

split_batches: batches larger than a window, computed in several forwards; most_rows: most tokens
computed by one forward with document requests; mixed_batches: fused batches with decode rows;
replanned_requests: restarted after a retraction; fallbacks: caught failures after which a request
or batch ran normally; kept_requests, kept_tokens: requests that matched approximate KV of an
earlier prompt, and the tokens matched.
"""


def fused_report(
    request: DocumentRequest,
    documents: Sequence[ResolvedDocument],
    plan: ReusePlan,
    ratio: float,
    planning_s: float,
) -> dict[str, Any]:
    """Return a fused request's report, without :func:`reused_by_tier`."""
    in_document = torch.zeros(plan.chosen.total, dtype=torch.bool)
    for p in plan.placed:
        in_document[p.start : p.end] = True
    recomputed = plan.chosen.count_in(in_document)
    return {
        "fused": True,
        "prefix": plan.prefix_tokens,
        "kept": request.kept_tokens,
        "reused": int(in_document.sum()) - recomputed,
        "recomputed": recomputed,
        "computed": plan.chosen.count,
        **_document_counts(request, documents),
        "ratio": round(ratio, 4),
        "plan_ms": round(1000 * planning_s, 3),
    }


def reused_by_tier(documents: Sequence[ResolvedDocument], plan: ReusePlan) -> dict[str, int]:
    """Return the reused tokens by source tier; needs the choice on the host."""
    tiers: Counter[str] = Counter()
    for document in documents:
        if document.tier is not None and document.end > plan.prefix_tokens:
            first = max(document.start, plan.prefix_tokens)
            tiers[document.tier] += int((~plan.computed[first : document.end]).sum())
    return {f"reused_{name}": count for name, count in sorted(tiers.items())}


def kept_report(
    request: DocumentRequest,
    documents: Sequence[ResolvedDocument],
    prefix_tokens: int,
    total: int,
    ratio: float,
) -> dict[str, Any]:
    """Return the report of a request that extends an earlier prompt's KV and reuses no other KV."""
    return {
        "fused": True,
        "prefix": prefix_tokens,
        "kept": request.kept_tokens,
        "reused": 0,
        "recomputed": 0,
        "computed": total - prefix_tokens,
        **_document_counts(request, documents),
        "ratio": round(ratio, 4),
    }


def normal_report(
    request: DocumentRequest, prefix_tokens: int, documents: Sequence[ResolvedDocument], why: str
) -> dict[str, Any]:
    """Return the report of a request whose documents are not reused."""
    counts = _document_counts(request, documents)
    return {"fused": False, "why": why, "prefix": prefix_tokens, **counts}


def _document_counts(
    request: DocumentRequest, documents: Sequence[ResolvedDocument]
) -> dict[str, int]:
    return {
        "documents": len(request.bounds),
        "missing_documents": sum(document.tier is None for document in documents),
    }
