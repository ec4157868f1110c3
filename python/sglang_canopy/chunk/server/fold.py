"""The folded batch: a copy of the scheduler's that runs only the chosen rows of each request."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from canopy_kernel.attention import Rows
from sglang_canopy.chunk.server.attention import FusedPlan


def tails(batch: Any) -> list[int]:
    """Rows at each request's end whose logits are wanted: those of prompt log-probabilities."""
    if not getattr(batch, "return_logprob", False):
        return [1] * len(batch.extend_lens)
    starts = batch.extend_logprob_start_lens
    return [max(1, n - start) for n, start in zip(batch.extend_lens, starts)]


def fold(
    batch: Any, req_to_token: torch.Tensor, chosen: Sequence[torch.Tensor]
) -> tuple[Any, FusedPlan]:
    """A copy of an extend batch with rows ``chosen[i]`` (sorted positions) of request i, and its plan.

    The scheduler keeps its own batch: every slot stays allocated as for a plain extend, and
    ``seq_lens`` does not change. Raises AssertionError where an invariant of the fused forward
    would not hold; nothing has run by then.
    """
    lengths = [int(n) for n in batch.seq_lens_cpu]
    prefixes, device = list(batch.prefix_lens), batch.input_ids.device
    keep, slots, offset = [], [], 0
    for i, positions in enumerate(chosen):
        n, prefix = lengths[i], prefixes[i]
        assert len(positions), f"request {i} would run no row"
        assert int(positions[0]) >= prefix, "a row before the real prefix was chosen"
        assert int(positions[-1]) < n, "a row past the window was chosen"
        assert bool((positions[1:] > positions[:-1]).all()), "rows are not in position order"
        assert n - prefix == batch.extend_lens[i], "the window is not prefix to length"
        keep.append(positions - prefix + offset)
        slots.append(req_to_token[int(batch.req_pool_indices[i]), :n])
        offset += batch.extend_lens[i]
    assert getattr(batch, "input_embeds", None) is None, "embeddings are not folded"
    assert getattr(batch, "replace_embeds", None) is None, "embeddings are not folded"
    counts = [len(c) for c in chosen]
    kept = torch.cat(keep).to(device)
    positions = torch.cat(list(chosen)).to(device)
    folded = copy.copy(batch)
    folded.input_ids = batch.input_ids[kept]
    folded.out_cache_loc = batch.out_cache_loc[kept]
    folded.prefill_input_ids_cpu = None
    folded.extend_lens = counts
    folded.extend_num_tokens = sum(counts)
    folded.prefix_lens = [n - m for n, m in zip(lengths, counts)]
    folded.extend_logprob_start_lens = [
        max(0, count - (n - start))  # the wanted logits are those of the same last rows
        for count, n, start in zip(counts, batch.extend_lens, batch.extend_logprob_start_lens)
    ]
    for i, row in enumerate(slots):
        at = chosen[i].to(row.device)
        begin = sum(counts[:i])
        own = folded.out_cache_loc[begin : begin + counts[i]]
        assert torch.equal(row[at].to(own.dtype), own), "slots of the rows are not the batch's"
    starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32).to(device)
    keys = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)
    rows = Rows(positions, starts, torch.cat(slots).long(), keys, max(counts))
    assert folded.seq_lens is batch.seq_lens
    assert folded is not batch
    return folded, FusedPlan(rows)
