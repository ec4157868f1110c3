"""Choose the tokens that get the most attention from the question, with extra weight on its last
token, in the middle layers. Approximate.

Similar to ProphetKV (arXiv 2602.02579), which uses the question's attention over all layers. The
answer starts at the last token, whose attention in the upper-middle layers marks the source of the
answer. On some prompts this is better than the whole question's attention, on others worse
(docs/research/documents.md), so both are weighted equally.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from canopy_documents.fuse import rows as row_forward
from canopy_documents.fuse.cache import KVCache
from canopy_documents.fuse.selectors.base import Selector, SelectorInput, top_allowed
from canopy_documents.store.chunk import FusedPrompt
from canopy_documents.store.device_copy import is_host, to_device

SCORED_FROM, SCORED_TO = 0.5, 0.7
"""The layers that score, as shares of the depth. They are as good as 0.4 to 0.8
(docs/research/documents.md), and cheaper."""
MAX_QUERIES = 64
"""Maximum number of question tokens that score, counted from the end."""
STRIDE, MIN_SAMPLES = 8, 100
"""Below the scored layers the question reads every ``STRIDE``-th chunk token, at least ``MIN_SAMPLES``.

A sample's weight is the number of tokens it represents. Those layers hardly change the
choice (docs/research/documents.md), but account for half of a probe's attention. On a device all
tokens are read: another kernel costs the host more than these keys cost the device.
"""
PIECE_ROWS = 2048
"""Tokens outside chunks that run at a time. This bounds their memory, like a prefill's window."""


def probe_depth(layers: int) -> int:
    """Return the number of layers, from the first, that the probe runs, of ``layers``."""
    return max(1, math.ceil(SCORED_TO * layers))


def question_scores(
    inputs: SelectorInput, max_queries: int = MAX_QUERIES, last_weight: float = 0.0
) -> torch.Tensor:
    """Return ``[prompt]`` attention mass from the last ``max_queries`` question tokens, over layers
    and heads.

    Runs only the rows outside chunks, through the first ``SCORED_TO`` of the layers, over reused KV;
    below the scored layers the question reads a sample of that KV (:data:`STRIDE`). The result is
    on the model's device, and the host does not wait for it. ``last_weight`` is the share of the
    last token's attention in the sum; the other tokens share the rest. With 0 all tokens count
    alike.
    """
    model, prompt, cache = inputs.model, inputs.prompt, inputs.cache
    shape = model.shape
    outside = (~prompt.in_chunk()).nonzero()[:, 0]
    outside = outside[outside >= inputs.exact_prefix_tokens]
    tail = prompt.tail_positions()
    question_tail = tail[-max_queries:]
    first_scored, depth = int(SCORED_FROM * shape.layers), probe_depth(shape.layers)
    scores = torch.zeros(len(prompt), device=model.device)
    rows = torch.cat([outside, tail]).unique()
    question_row = int((rows < question_tail[0]).sum())  # sorted, so the question's rows are last
    start_position = int(rows[question_row])
    ids = to_device(prompt.ids[rows.to(prompt.ids.device)], model.device)
    rows = to_device(rows, model.device)
    while question_row > PIECE_ROWS:  # no row attends to a later row
        row_forward.probe_rows(model, ids[:PIECE_ROWS], rows[:PIECE_ROWS], cache, depth - 1)
        ids, rows, question_row = ids[PIECE_ROWS:], rows[PIECE_ROWS:], question_row - PIECE_ROWS
    question_positions = rows[question_row:]
    row_weights = torch.ones(question_positions.numel(), device=model.device)
    if last_weight and question_positions.numel() > 1:
        row_weights.fill_((1 - last_weight) / (question_positions.numel() - 1))
        row_weights[-1:].fill_(last_weight)  # assigning a number would wait for the device
    layers, heads, group = range(first_scored, depth), shape.heads, shape.heads // shape.kv_heads
    sizes = (row_weights, heads, group, scores)
    probe = _Probe(cache, layers, rows, question_row, start_position, *sizes)
    watch = probe.make_host_watch(prompt) if is_host(rows) else probe.make_device_watch()
    row_forward.probe_rows(model, ids, rows, cache, depth - 1, watch)
    return model.whole(scores)


@dataclass(slots=True)
class _Probe:
    """Adds the attention of the question's rows to ``scores [prompt]`` at ``layers``.

    rows: sorted; the question's rows start at ``question_row``; ``row_weights [m]`` weights them.
    start_position: position of the first of these rows; heads: query heads; group: query heads per KV head.
    """

    cache: KVCache
    layers: range
    rows: torch.Tensor
    question_row: int
    start_position: int
    row_weights: torch.Tensor
    heads: int
    group: int
    scores: torch.Tensor

    def make_host_watch(self, prompt: FusedPrompt) -> row_forward.Watch:
        """Return a watch that computes each layer's weights once for scores and attention, and
        samples the chunks below ``layers``."""
        cache, question_row = self.cache, self.question_row
        question_positions, earlier_rows = self.rows[question_row:], self.rows[:question_row]
        all_positions = torch.arange(len(prompt))
        sample_positions, bias = _sample_keys(prompt, question_positions, self.group)

        def watch(layer: int, q: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
            queries, scale = q[question_row:], q.shape[-1] ** -0.5
            if layer in self.layers:
                if cache.has_identity_slots:
                    k, v = (pool[layer][: len(prompt), 0] for pool in (cache.k, cache.v))
                else:
                    k, v = cache.read(layer, all_positions)
                attended, mass = _attend_and_score(
                    queries, k, v, question_positions, self.start_position, self.row_weights, scale
                )
                self.scores.add_(mass)
            else:
                sampled_kv = cache.read(layer, sample_positions)
                attended = _attend_with_bias(queries, *sampled_kv, bias, scale)
            if not earlier_rows.numel():
                return attended
            out = torch.empty_like(q)
            out[question_row:] = attended
            if layer < self.layers.stop - 1:
                out[:question_row] = cache.attend(layer, q[:question_row], earlier_rows, scale)
            return out

        return watch

    def make_device_watch(self) -> row_forward.Watch:
        """Return a watch with few operations: each costs the host more than the device.

        All rows attend to all keys in one kernel; only the weights of ``layers`` are computed
        separately.
        """
        question_positions = self.rows[self.question_row :]
        all_positions = torch.arange(len(self.scores), device=self.scores.device)
        causal_bias = self.scores.new_zeros(len(question_positions), len(all_positions))
        causal_bias.masked_fill_(all_positions > question_positions[:, None], float("-inf"))
        bias = causal_bias.repeat(self.group, 1)  # the heads of a group are adjacent
        row_weights = self.row_weights.repeat(self.heads)

        def watch(layer: int, q: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
            if layer not in self.layers:
                return None
            keys = self.cache.read_keys(layer, all_positions).float().permute(1, 2, 0)
            queries = q[self.question_row :].float().transpose(0, 1)
            queries = queries.reshape(len(keys), -1, q.shape[-1])
            weights = torch.baddbmm(bias, queries, keys, alpha=q.shape[-1] ** -0.5).softmax(-1)
            self.scores.addmv_(weights.flatten(0, 1).T, row_weights)
            return None

        return watch


def _sample_keys(
    prompt: FusedPrompt, question_positions: torch.Tensor, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample the keys that rows ``question_positions [m]`` read below the scored layers.

    Returns their positions ``[s]``, and the bias on their scores ``[m * group, s]``: the log of the
    number of tokens that each represents, -inf for later tokens.
    """
    in_chunk = prompt.in_chunk()
    inside = in_chunk.nonzero()[:, 0]
    stride = max(1, min(STRIDE, inside.numel() // MIN_SAMPLES))
    sampled_mask = torch.ones(len(prompt), dtype=torch.bool)
    sampled_mask[inside] = False
    sampled_mask[inside[::stride]] = True
    sample_positions = to_device(sampled_mask.nonzero()[:, 0], question_positions.device)
    log_count = to_device(in_chunk[sampled_mask] * math.log(stride), question_positions.device)
    bias = log_count.masked_fill(sample_positions > question_positions[:, None], float("-inf"))
    return sample_positions, bias.repeat_interleave(group, 0)


def _attend_with_bias(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return the attention of ``q [m, heads, d]`` over ``k, v [s, kv_heads, d]``, in q's dtype.

    ``bias [m * group, s]`` is added to the scores of each KV head's group.
    """
    m, heads, dim = q.shape
    kv_heads = k.shape[1]
    group_queries = (q.float() * scale).view(m, kv_heads, -1, dim).transpose(0, 1).flatten(1, 2)
    weights = torch.softmax(torch.baddbmm(bias, group_queries, k.float().permute(1, 2, 0)), dim=-1)
    out = torch.matmul(weights, v.float().transpose(0, 1)).view(kv_heads, m, -1, dim)
    return out.transpose(0, 1).reshape(m, heads, dim).to(q.dtype)


def _attend_and_score(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    question_positions: torch.Tensor,
    start_position: int,
    row_weights: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention of ``q [m, heads, d]`` at sorted ``question_positions``, from ``start_position``
    on, over ``k, v [n, kv_heads, d]``.

    Returns it in q's dtype, and each key's attention mass ``[n]`` fp32, over heads, and over rows
    weighted by ``row_weights [m]``. The weights are computed once for both.
    """
    m, heads, dim = q.shape
    n, kv_heads = k.shape[:2]
    group = heads // kv_heads
    group_queries = (q.float() * scale).view(m, kv_heads, group, dim).transpose(0, 1)
    weights = torch.matmul(group_queries.reshape(kv_heads, -1, dim), k.float().permute(1, 2, 0))
    is_later = torch.arange(start_position + 1, n, device=q.device) > question_positions[:, None]
    is_later = is_later.repeat_interleave(group, 0)
    weights[:, :, start_position + 1 :].masked_fill_(is_later, float("-inf"))
    weights = torch.softmax(weights, dim=-1)
    mass = torch.matmul(row_weights.repeat_interleave(group), weights).sum(dim=0)
    out = torch.matmul(weights, v.float().transpose(0, 1))
    attended = out.view(kv_heads, m, group, dim).transpose(0, 1).reshape(m, heads, dim)
    return attended.to(q.dtype), mass


class QuestionSelector(Selector):
    """Spends the budget by attention: half the weight on the last token, half on the rest of the
    question.

    A first chunk that is already exact gets no budget.
    """

    name = "question"
    reads_cache = True

    def choose(self, inputs: SelectorInput) -> torch.Tensor:
        prompt = inputs.prompt
        scores = question_scores(inputs, last_weight=0.5)
        allowed = prompt.in_chunk()
        allowed[len(prompt) - 1] = False
        if prompt.first_is_exact:
            allowed[prompt.placed[0].start : prompt.placed[0].end] = False
        return top_allowed(scores, allowed, inputs.budget)
