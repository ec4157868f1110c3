"""The reuse plan of a prompt: which tokens are recomputed, first and after a retraction; and the
store that its chunks come from.

Selectors that look at the prompt need its chunks' KV in place. Where the whole prompt is in this
window its slots are used and nothing is done twice; with chunked prefill the later slots do not
exist yet, and a cache of its own is filled for the choice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from canopy_chunks import engine
from canopy_chunks.cache import KVCache, dense_cache
from canopy_chunks.choice import ChosenTokens
from canopy_chunks.chunk import Chunk, FusedPrompt, Placed
from canopy_chunks.correction import Correction, is_exact, plan_correction
from canopy_chunks.device_copy import to_device
from canopy_chunks.host_memory import HostMemory
from canopy_chunks.model import Model
from canopy_chunks.placement import copy_positions, place_chunks
from canopy_chunks.selectors import make_selector
from canopy_chunks.selectors.base import Context, Offline, Selector
from canopy_chunks.server import model_view
from canopy_chunks.server.model_view import row_cache
from canopy_chunks.server.options import Options
from canopy_chunks.server.request import TOO_FEW_KNOWN, ChunkRequest, ResolvedChunk, ReusePlan
from canopy_chunks.store import ChunkStore
from canopy_chunks.suffix import ChunkSuffix
from canopy_chunks.transfer import Transfer


def make_store(model: Model, options: Options) -> ChunkStore:
    """The tiers that a server was given. On ranks that must agree each has a folder of its own."""
    ranked = model.ranks is not None
    return ChunkStore(
        model.identity,
        options.capacity_bytes(),
        model_view.folder_of_rank(options.directory) if ranked else options.directory,
        device=str(model.device),
        keep=model_view.kept_by_all if ranked else list,
        memory=_host_memory(model, options),
    )


def score_chunk(selector: str, chunk: Chunk) -> None:
    """Before a chunk is stored: its scores, where the server's selector has any."""
    chooser = make_selector(selector)
    if isinstance(chooser, Offline):
        chooser.scores(chunk)


def _host_memory(model: Model, options: Options) -> HostMemory | None:
    """One allocation for the host tier where the model is on a device; pinned for CUDA."""
    if model.device.type == "cpu" or not options.memory_mb:
        return None
    pin = model.device.type == "cuda"
    return HostMemory(model.shape, model.dtype, options.memory_mb << 20, pin)


@dataclass(frozen=True, slots=True)
class ExactChunk:
    """Stands in for the chunk that a cached prefix is: exact where it lies, nothing to place."""

    ids: tuple[int, ...]
    prefix: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)


def choose_tokens(
    model: Model,
    runner: Any,
    ids: torch.Tensor,
    row: torch.Tensor,
    prefix: int,
    placed: Sequence[Placed],
    selector: str,
    ratio: float,
    arrivals: list[Transfer] | None = None,
) -> tuple[ChosenTokens, tuple[Placed, ...]]:
    """The tokens of the prompt to compute; and the chunks whose KV is not in place yet, nor on its
    way in ``arrivals``.

    ids: the whole prompt, on the host;
    row: pool slots by position, as far as they are allocated; prefix: tokens whose exact KV the row
    holds. Tokens outside chunks and the last one are always computed.
    """
    n = ids.numel()
    prompt = FusedPrompt(ids, tuple(placed))
    computed = ~prompt.in_chunk()
    computed[:prefix] = False
    computed[n - 1] = True
    every = tuple(placed)
    if ratio <= 0.0:
        return ChosenTokens(computed), every
    if ratio >= 1.0:
        computed[prefix:] = True
        return ChosenTokens(computed), every
    chooser = make_selector(selector)
    if isinstance(chooser, Offline) or not chooser.reads_cache:
        if isinstance(chooser, Offline):
            for p in placed:
                chooser.scores(p.chunk.base if isinstance(p.chunk, ChunkSuffix) else p.chunk)
        computed[chooser.choose(Context(model, prompt, None, ratio)).tokens] = True  # type: ignore[arg-type]
        computed[:prefix] = False
        return ChosenTokens(computed), every
    whole = row.numel() >= n
    cache = _cache(model, runner, row, prefix, n, whole)
    if whole and arrivals is not None:
        cache.arrivals = arrivals
    place_chunks(model, every, cache, prompt.in_chunk())
    context = _context(model, prompt, cache, ratio, prefix, chooser)
    return _chosen(chooser, context, computed), () if whole else every


def choose(
    model: Model,
    runner: Any,
    request: ChunkRequest,
    ids: Sequence[int],
    row: torch.Tensor,
    plan: ReusePlan,
    ratio: float,
) -> tuple[ChosenTokens, tuple[Placed, ...]]:
    """As :func:`choose_tokens` for a request's plan, whose arrivals it adds to. A request that is
    started again after a retraction gets what was chosen then."""
    if request.initial is not None:
        chosen, before = request.initial
        earlier = chosen.mask().clone()
        earlier[:before] = True
        again = replan(earlier, plan.prefix, plan.placed, len(ids))
        return ChosenTokens(again), plan.placed
    tokens = torch.tensor(ids, dtype=torch.long)
    chosen, left = choose_tokens(
        model, runner, tokens, row, plan.prefix, plan.placed, request.selector, ratio, plan.arrivals
    )
    request.initial = chosen, plan.prefix
    return chosen, left


def replan(
    earlier: torch.Tensor, prefix: int, placed: Sequence[Placed], total: int
) -> torch.Tensor:
    """``[total]`` bool: the tokens to compute when a request that was planned before is begun anew.

    earlier: the tokens computed then, True where the earlier prefix was. What came since (its own answer)
    is computed, and so is what no chunk holds any more: the answer goes on as it began.
    """
    computed = torch.ones(total, dtype=torch.bool)
    reused = ~earlier[:total]
    inside = torch.zeros_like(reused)
    for p in placed:
        inside[p.start : p.end] = True
    computed[: reused.numel()] = ~(reused & inside)
    computed[:prefix] = False
    computed[total - 1] = True
    return computed


def _cache(
    model: Model, runner: Any, row: torch.Tensor, prefix: int, n: int, whole: bool
) -> KVCache:
    pool = row_cache(runner, row[:n], prefix)
    if whole:
        return pool
    separate = dense_cache(model, n)
    copy_positions(pool, separate, prefix)
    return separate


def _context(
    model: Model, prompt: FusedPrompt, cache: KVCache, ratio: float, prefix: int, chooser: Selector
) -> Context:
    """The cached prefix, as an exact chunk of its own, is neither run nor given a budget.

    The ratio is lowered so that the budget in tokens stays what it is without that chunk.
    """
    if not prefix or not chooser.skips_exact:
        return Context(model, prompt, cache, ratio, ready=prefix)
    placed = list(prompt.placed)
    end = prefix
    if placed and placed[0].start == prefix and is_exact(prompt, placed[0]):
        end = placed.pop(0).end
    ids = tuple(prompt.ids[:end].tolist())
    whole = FusedPrompt(prompt.ids, (Placed(ExactChunk(ids), 0), *placed))  # type: ignore[arg-type]
    same = ratio * prompt.reusable / max(1, whole.reusable) + 1e-9
    return Context(model, whole, cache, same)


def correction_of(
    model: Model, runner: Any, ids: Sequence[int], row: torch.Tensor, plan: ReusePlan
) -> Correction | None:
    """How a plan's reused KV, which is all in place in ``row`` or under way to it, is corrected in
    its forward. Waits for a device that chose: the weights go by which tokens are computed."""
    prompt = FusedPrompt(torch.tensor(ids), plan.placed)
    cache = row_cache(runner, row[: len(prompt)], plan.prefix)
    cache.arrivals = plan.arrivals
    return plan_correction(model, prompt, cache, plan.computed, plan.prefix)


def _chosen(selector: Selector, context: Context, certain: torch.Tensor) -> ChosenTokens:
    """The chosen tokens beside the ``certain [n]`` ones.

    A selector that narrows while computing is run as far as it narrows.
    """
    choice = selector.choose(context)
    if choice.narrow is None:
        return ChosenTokens(certain, choice.tokens)
    prompt, model = context.prompt, context.model
    needed = ~prompt.in_chunk()
    needed[choice.tokens] = True
    needed[len(prompt) - 1] = True
    if prompt.placed and isinstance(prompt.placed[0].chunk, ExactChunk):
        needed[: prompt.placed[0].end] = False
    rows = needed.nonzero()[:, 0]
    ids, rows = (to_device(x, model.device) for x in (prompt.ids[rows], rows))
    depth = min(3, model.shape.layers)
    _, left = engine.run_rows(model, ids, rows, context.cache, narrow=choice.narrow, layers=depth)
    outside = int((certain & ~prompt.in_chunk()).sum())
    return ChosenTokens(torch.zeros_like(certain), left, outside)


def reuse_report(
    request: ChunkRequest,
    chunks: Sequence[ResolvedChunk],
    plan: ReusePlan,
    ratio: float,
    seconds: float,
) -> dict[str, Any]:
    """What ``meta_info.canopy_chunks`` says of a fused request, but for :func:`reused_by_tier`."""
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
        "chunks": len(request.bounds),
        "unknown_chunks": sum(one.tier is None for one in chunks),
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
    """What ``meta_info.canopy_chunks`` says of a request of whose tokens too few are known."""
    return {
        "fused": False,
        "why": TOO_FEW_KNOWN,
        "prefix": prefix,
        "chunks": len(request.bounds),
        "unknown_chunks": sum(one.tier is None for one in chunks),
    }
