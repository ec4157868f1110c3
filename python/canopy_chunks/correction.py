"""Correcting what is not recomputed, from what is.

A recomputed token shows the exact difference between its true K and V and the reused ones. Other
tokens' differences are alike where the tokens are alike: they are estimated by kernel regression
(the mean of a Gaussian process) on the revealed ones, layer by layer, and added to the reused KV
before attention reads it. The weights depend on the reused KV alone and are made once for all
layers. Measured in docs/research/chunks.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from canopy_chunks.cache import KVCache
from canopy_chunks.chunk import FusedPrompt
from canopy_chunks.device_copy import is_host, to_device
from canopy_chunks.model import Model
from canopy_chunks.rope import unrotate
from canopy_kernel import correct, pages
from canopy_kernel.rows import Turns, turned, turns

FEATURE_LAYERS = (1 / 2,)
"""Depths whose reused K and V say how alike two tokens are."""
SAME_CHUNK, NEAR, SPAN, ANY = 0.3, 0.3, 5.0, 0.2
"""The kernel beside the squared cosine: for tokens of one chunk, decaying over ``SPAN`` tokens there,
and for any two."""
NOISE = 1.0
"""Variance of what a difference has of its own, beside the kernel."""
WEIGHTS = 16
"""Revealed differences that one token's estimate is made of: those of the largest weights."""
MOST_REVEALED = 512
"""Differences that the weights are made from at most, evenly spread: the cost grows with their
number times that of the tokens."""
BLOCK = 2048
"""Tokens whose weights are made at a time."""


@dataclass(slots=True)
class Together:
    """Targets that lie one after the other in the pools, but for computed tokens between them.

    first, last: their slots, of pages of one token; offsets ``[last - first]``: where each one's
    weights begin, a computed token having none; turn: what gives RoPE to all of them.
    """

    first: int
    last: int
    offsets: torch.Tensor
    turn: Turns


@dataclass(slots=True)
class Correction:
    """The weights of one prompt's corrections, and where they go.

    rows ``[m]``: positions that reveal differences (recomputed ones); targets ``[t]``: positions
    that are corrected; index, weight ``[t, w]``: of ``rows``; slots are those of rows and targets;
    turn_back: what takes RoPE from the rows (``rows.turns``); table: what gives it to the targets,
    ``[t, d]`` fp32; at ``[m]``: where ``rows`` are among the rows that are run.
    """

    rows: torch.Tensor
    targets: torch.Tensor
    index: torch.Tensor
    weight: torch.Tensor
    row_slots: torch.Tensor
    target_slots: torch.Tensor
    turn_back: Turns
    table: torch.Tensor
    at: torch.Tensor
    together: Together | None = None

    def apply(
        self,
        layer: int,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> None:
        """Correct one layer, before its rows' own K (rotated) and V ``[*, kv_heads, d]`` are written.

        The pools' views still hold the reused KV of ``rows``. At layer 0 nothing knows any context.
        """
        if layer == 0:
            return
        old_k, old_v = pages.read(k_pool, self.row_slots), pages.read(v_pool, self.row_slots)
        delta_k = turned(k.index_select(0, self.at).float() - old_k.float(), self.turn_back)
        delta_v = v.index_select(0, self.at).float() - old_v.float()
        limits = (delta_k.norm(dim=-1).median(0)[0], delta_v.norm(dim=-1).median(0)[0])
        if self.together is not None:
            one = self.together
            known = (delta_k, delta_v, self.index.flatten(), self.weight.flatten(), *limits)
            own = (pool[one.first : one.last, 0] for pool in (k_pool, v_pool))
            correct.in_order(*known, one.offsets, one.turn, *own)
        else:
            known = (delta_k, delta_v, self.index, self.weight, *limits)
            every = torch.arange(self.target_slots.numel(), device=delta_k.device)
            correct.correct(*known, every, self.target_slots, self.table, k_pool, v_pool)


def plan_correction(
    model: Model, prompt: FusedPrompt, cache: KVCache, computed: torch.Tensor, ready: int = 0
) -> Correction | None:
    """The corrections of a prompt whose reused KV is all in the cache; None where nothing is revealed.

    computed: ``[n]`` bool, the tokens that will be run; ready: tokens at the start that will not,
    because their exact KV is in the cache.
    """
    placed = [p for p in prompt.placed[int(prompt.first_is_exact) :] if len(p.chunk)]
    if not placed:
        return None
    inside = torch.cat([torch.arange(p.start, p.end) for p in placed])
    inside = inside[inside >= ready]
    rows = inside[computed[inside]]
    if not rows.numel() or rows.numel() == inside.numel():
        return None
    if rows.numel() > MOST_REVEALED:
        rows = rows[torch.linspace(0, rows.numel() - 1, MOST_REVEALED).round().long()]
    run = computed.clone()
    run[:ready] = False
    targets = inside[~computed[inside]]
    starts = torch.tensor([p.start for p in placed])
    device = cache.slots.device
    targets_there, rows_there = to_device(targets, device), to_device(rows, device)
    index, weight = regression_weights(
        _features(model, cache, targets_there),
        _features(model, cache, rows_there),
        targets,
        rows,
        starts,
    )
    return Correction(
        rows,
        targets,
        index,
        weight,
        cache.slots[rows_there],
        cache.slots[targets_there],
        turns(model.rope.table(rows_there), model.shape.kv_heads, back=True),
        model.rope.table(targets_there),
        to_device((run.cumsum(0) - 1)[rows], device),
        _together(model, cache, inside, computed, index.shape[1]),
    )


def _together(
    model: Model, cache: KVCache, inside: torch.Tensor, computed: torch.Tensor, width: int
) -> Together | None:
    """How corrected rows lie together in a host's pools, if they do; inside: positions of chunks."""
    if not is_host(cache.slots) or cache.k[0].shape[1] != 1:
        return None
    slots = cache.slots[inside].long()
    first, last = int(slots[0]), int(slots[0]) + slots.numel()
    if not torch.equal(slots, torch.arange(first, last)):
        return None
    counts = (~computed[inside]) * width
    turn = turns(model.rope.table(inside), model.shape.kv_heads)
    return Together(first, last, counts.cumsum(0) - counts, turn)


def regression_weights(
    features: torch.Tensor,
    revealed: torch.Tensor,
    positions: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``index, weight [n, w]`` of a Gaussian process's mean, the ``WEIGHTS`` largest of each.

    features ``[n, f]`` and revealed ``[m, f]``: unit rows; positions ``[n]`` and rows ``[m]`` in the
    prompt, both sorted; starts: of the chunks, sorted.
    """
    device = features.device
    rows_chunk = torch.searchsorted(starts, rows, right=True)
    covariance = _kernel(revealed, revealed, rows, rows, rows_chunk, rows_chunk)
    covariance += NOISE * torch.eye(rows.numel(), device=device)
    # The noise keeps it tame: looking whether it went well would wait for a device.
    inverse = torch.cholesky_inverse(torch.linalg.cholesky_ex(covariance)[0])
    width = min(WEIGHTS, rows.numel())
    index, weight = [], []
    for first in range(0, positions.numel(), BLOCK):
        some = slice(first, first + BLOCK)
        chunk = torch.searchsorted(starts, positions[some], right=True)
        near = _kernel(features[some], revealed, positions[some], rows, chunk, rows_chunk)
        dense = near @ inverse
        best = dense.abs().topk(width, dim=1, sorted=False).indices
        index.append(best)
        weight.append(dense.gather(1, best))
    return torch.cat(index), torch.cat(weight)


def _kernel(
    a: torch.Tensor,
    b: torch.Tensor,
    a_at: torch.Tensor,
    b_at: torch.Tensor,
    a_chunk: torch.Tensor,
    b_chunk: torch.Tensor,
) -> torch.Tensor:
    """``[n, m]`` covariances; positions and chunk numbers lie on the host, sorted."""
    out = (a @ b.t()).square_().add_(ANY)
    for chunk in a_chunk.unique().tolist():
        mine, theirs = _run_of(a_chunk, chunk), _run_of(b_chunk, chunk)
        far = (a_at[mine, None] - b_at[None, theirs]).abs()
        near = SAME_CHUNK + NEAR * torch.exp(far / -SPAN)
        out[mine, theirs] += to_device(near, a.device)
    return out


def _run_of(sorted_numbers: torch.Tensor, number: int) -> slice:
    ends = torch.searchsorted(sorted_numbers, torch.tensor([number, number + 1])).tolist()
    return slice(*ends)


def _features(model: Model, cache: KVCache, positions: torch.Tensor) -> torch.Tensor:
    """``[n, f]`` unit rows: K before RoPE and V of some layers, each of the same length."""
    layers = sorted({int(share * model.shape.layers) for share in FEATURE_LAYERS})
    table, parts = model.rope.table(positions), []
    for layer in layers:
        k, v = KVCache.read(cache, layer, positions)
        for part in (unrotate(k, table), v.float()):
            parts.append(torch.nn.functional.normalize(part.flatten(1), dim=1))
    return torch.cat(parts, dim=1) / (2 * len(layers)) ** 0.5
