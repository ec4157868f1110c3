"""Packed batches: copies of the scheduler's batches that run only the chosen rows of each request.

Admission charges a fused prompt for the tokens it is expected to compute. If planning fails, or a
document has been evicted meanwhile, the whole prompt is computed, in forwards of at most one window
each: SGLang's window exists to prevent a single forward over a whole prompt.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from canopy_documents.server.attention import FusedAttention
from canopy_documents.store.device_copy import is_host, to_device
from canopy_kernel.attention import Rows


def count_logit_rows(batch: Any) -> list[int]:
    """Return the number of rows at each request's end that need logits: 1, or all rows with prompt
    log-probabilities."""
    if not getattr(batch, "return_logprob", False):
        return [1] * len(batch.extend_lens)
    starts = batch.extend_logprob_start_lens
    return [max(1, n - start) for n, start in zip(batch.extend_lens, starts)]


def pack_rows(
    batch: Any,
    req_to_token: torch.Tensor,
    chosen: Sequence[torch.Tensor],
    transfers: Sequence[Any] = (),
) -> tuple[Any, FusedAttention]:
    """Return a copy of an extend batch with rows ``chosen[i]`` (sorted positions) of request i, and
    its plan.

    The scheduler keeps its own batch: every slot stays allocated as for a plain extend, and
    ``seq_lens`` does not change. Rows may be on the host or already on the batch's device. Rows on
    the device are never read; their number is known on the host. transfers: transfers that attention
    waits for. Raises AssertionError, before anything runs, if an invariant of the fused forward
    would not hold (checked on the host only).
    """
    lengths = [int(n) for n in batch.seq_lens_cpu]
    prefixes, device = list(batch.prefix_lens), batch.input_ids.device
    row_indices, slots, offset = [], [], 0
    for i, positions in enumerate(chosen):
        n, prefix = lengths[i], prefixes[i]
        assert len(positions), f"request {i} would run no row"
        if is_host(positions):
            assert int(positions[0]) >= prefix, "a row before the real prefix was chosen"
            assert int(positions[-1]) < n, "a row past the window was chosen"
            assert bool((positions[1:] > positions[:-1]).all()), "rows are not in position order"
        assert n - prefix == batch.extend_lens[i], "the window is not prefix to length"
        row_indices.append(to_device(positions - prefix + offset, device))
        slots.append(req_to_token[int(batch.req_pool_indices_cpu[i]), :n])
        offset += batch.extend_lens[i]
    assert getattr(batch, "input_embeds", None) is None, "embeddings are not packed"
    assert getattr(batch, "replace_embeds", None) is None, "embeddings are not packed"
    counts = [len(c) for c in chosen]
    rows_kept = torch.cat(row_indices)
    positions = torch.cat([to_device(rows, device) for rows in chosen])
    packed = copy.copy(batch)
    packed.input_ids = batch.input_ids[rows_kept]
    packed.out_cache_loc = batch.out_cache_loc[rows_kept]
    packed.prefill_input_ids_cpu = None
    packed.extend_lens = counts
    packed.extend_num_tokens = sum(counts)
    packed.prefix_lens = [n - m for n, m in zip(lengths, counts)]
    packed.extend_logprob_start_lens = [
        max(0, count - (n - start))  # the requested logits belong to the same last rows
        for count, n, start in zip(counts, batch.extend_lens, batch.extend_logprob_start_lens)
    ]
    for i, request_slots in enumerate(slots):
        if not is_host(request_slots):
            break
        begin = sum(counts[:i])
        packed_slots = packed.out_cache_loc[begin : begin + counts[i]]
        is_same = torch.equal(request_slots[chosen[i]].to(packed_slots.dtype), packed_slots)
        assert is_same, "slots of the rows are not the batch's"
    q_starts, k_starts = (
        to_device(torch.tensor([0, *sizes]).cumsum(0).to(torch.int32), device)
        for sizes in (counts, lengths)
    )
    sizes = (tuple(counts), tuple(lengths))  # host numbers, so that no launch waits
    host_positions = torch.cat(list(chosen)) if all(map(is_host, chosen)) else None
    rows = Rows(
        positions, q_starts, torch.cat(slots).long(), k_starts, max(counts), *sizes, host_positions
    )
    assert packed.seq_lens is batch.seq_lens
    assert packed is not batch
    return packed, FusedAttention(rows, transfers=tuple(transfers))


def split_into_windows(
    chosen: Sequence[torch.Tensor], max_rows: int, ends: Sequence[int]
) -> list[list[torch.Tensor]]:
    """Split ``chosen[i]`` (sorted positions of request i) into forwards of at most ``max_rows``
    rows, in order.

    Only the last forward is sampled. It holds the last ``ends[i]`` rows of every request, at least
    1, even if that exceeds ``max_rows``. SGLang requires a row of every request of a batch, so a
    request without rows in an earlier forward computes its first row there; this gives the same KV
    in every forward.
    """
    surplus = sum(map(len, chosen)) - max_rows
    if surplus <= 0:
        return [list(chosen)]
    rows_per_forward = max(1, max_rows - len(chosen) + 1)  # beside a row of each other request
    early_forwards: list[list[torch.Tensor]] = []
    final_forward, free_rows = [], 0
    for i, rows in enumerate(chosen):
        count = max(0, min(len(rows) - max(1, ends[i]), surplus))
        surplus -= count
        start = 0
        while start < count:
            if free_rows == 0:
                early_forwards.append([positions[:1] for positions in chosen])
                free_rows = rows_per_forward
            step = min(count - start, free_rows)
            early_forwards[-1][i] = rows[start : start + step]
            start, free_rows = start + step, free_rows - step
        final_forward.append(rows[count:])
    return [*early_forwards, final_forward]
