"""What ``meta_info.canopy_chunks`` says of a request, and what is counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from canopy_chunks.server.request import ChunkRequest, ResolvedChunk, ReusePlan

COUNTERS = (
    "fused_requests", "reused_tokens", "recomputed_tokens", "fused_batches", "mixed_batches",
    "corrected_requests", "replanned_requests", "split_batches", "most_rows", "fallbacks",
)  # fmt: skip
"""split_batches: batches of more than a window, computed in several forwards; most_rows: the most
tokens that one forward with chunk requests computed; mixed_batches: fused batches with decode rows
in them; corrected_requests: whose reused KV was corrected; replanned_requests: started again after a
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
