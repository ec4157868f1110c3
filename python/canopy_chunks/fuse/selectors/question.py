"""What the question and above all the prompt's last token attend to in some middle layers; nothing exact.

Close to ProphetKV (arXiv 2602.02579), which spends the budget on what the question attends to, over
all layers. The last token is where the answer starts: its attention in the upper-middle layers marks
what the answer is read from, on some prompts better than the whole question's, on some worse
(docs/research/chunks.md); both are weighed alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from canopy_chunks.fuse import rows as engine
from canopy_chunks.fuse.cache import KVCache
from canopy_chunks.fuse.selectors.base import Context, SelectedTokens, Selector, best
from canopy_chunks.store.chunk import FusedPrompt
from canopy_chunks.store.device_copy import is_host, to_device

FIRST, LAST = 0.5, 0.7
"""The probed layers, as shares of the depth: as good as 0.4 to 0.8 (docs/research/chunks.md), and cheaper."""
MOST = 64
"""Question tokens probed at most, the last ones."""
STRIDE, FEWEST = 8, 100
"""Below the probed layers the question reads one in so many tokens of the chunks, each standing for
all of them, but no fewer than so many: what it reads there hardly tells what it asks for
(docs/research/chunks.md), and it is half of a probe's attention. On a device it reads all of them:
there a kernel more costs the host more than these keys cost the device."""
PIECE_ROWS = 2048
"""Other tokens outside chunks run at a time: what they take is bounded as a prefill's window is."""


def probed_layers(layers: int) -> int:
    """How many of a model's layers the probe runs through, from the first."""
    return max(1, math.ceil(LAST * layers))


def question_scores(context: Context, most: int = MOST, last_weight: float = 0.0) -> torch.Tensor:
    """``[prompt]`` attention mass from the last ``most`` question tokens, over layers and heads,
    on the model's device: nothing here waits for it.

    Runs the rows outside chunks alone, through the first ``LAST`` of the layers, over reused KV, of
    which the question reads a sample before the layers that count (:data:`STRIDE`).
    ``last_weight`` is the share of the very last token's attention in the sum, the other tokens'
    together having the rest; 0 counts every token alike.
    """
    model, prompt, cache = context.model, context.prompt, context.cache
    shape = model.shape
    outside = (~prompt.in_chunk()).nonzero()[:, 0]
    outside = outside[outside >= context.ready]
    tail = prompt.tail()
    probed = tail[-most:]
    lowest, depth = int(FIRST * shape.layers), probed_layers(shape.layers)
    score = torch.zeros(len(prompt), device=model.device)
    rows = torch.cat([outside, tail]).unique()
    before = int((rows < probed[0]).sum())  # sorted: those who ask are the last ones
    first, ids = int(rows[before]), to_device(prompt.ids[rows.to(prompt.ids.device)], model.device)
    rows = to_device(rows, model.device)
    while before > PIECE_ROWS:  # none attends to a later one
        engine.probe_rows(model, ids[:PIECE_ROWS], rows[:PIECE_ROWS], cache, depth - 1)
        ids, rows, before = ids[PIECE_ROWS:], rows[PIECE_ROWS:], before - PIECE_ROWS
    at = rows[before:]
    share = torch.ones(at.numel(), device=model.device)
    if last_weight and at.numel() > 1:
        share.fill_((1 - last_weight) / (at.numel() - 1))
        share[-1] = last_weight
    layers, heads, group = range(lowest, depth), shape.heads, shape.heads // shape.kv_heads
    probe = _Probe(cache, layers, rows, before, first, share, heads, group, score)
    watch = probe.host(prompt) if is_host(rows) else probe.device()
    engine.probe_rows(model, ids, rows, cache, depth - 1, watch)
    return model.whole(score)


@dataclass(slots=True)
class _Probe:
    """What is done with the queries of sorted ``rows``, of which those from ``before`` on are asked:
    the attention of the asked, over heads and by their ``share [m]``, is added to ``score [prompt]``
    at ``layers``. first: the first position that is asked; heads: of queries; group: of them a KV head."""

    cache: KVCache
    layers: range
    rows: torch.Tensor
    before: int
    first: int
    share: torch.Tensor
    heads: int
    group: int
    score: torch.Tensor

    def host(self, prompt: FusedPrompt) -> engine.Watch:
        """Each layer's weights are made once for scores and attention; below ``layers`` a sample of
        the chunks is read."""
        cache, before = self.cache, self.before
        at, others = self.rows[before:], self.rows[:before]
        every = torch.arange(len(prompt))
        some, bias = _sampled(prompt, at, self.group)

        def watch(layer: int, q: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
            scale = q.shape[-1] ** -0.5
            if layer in self.layers:
                if cache.in_order:
                    k, v = (pool[layer][: len(prompt), 0] for pool in (cache.k, cache.v))
                else:
                    k, v = cache.read(layer, every)
                attended, mass = _weighed(q[before:], k, v, at, self.first, self.share, scale)
                self.score.add_(mass)
            else:
                attended = _biased(q[before:], *cache.read(layer, some), bias, scale)
            if not others.numel():
                return attended
            out = torch.empty_like(q)
            out[before:] = attended
            if layer < self.layers.stop - 1:
                out[:before] = cache.attend(layer, q[:before], others, scale)
            return out

        return watch

    def device(self) -> engine.Watch:
        """In few operations, which cost a device's host more than the device: all rows attend to all
        keys in one kernel, and only the weights of ``layers`` are made beside it."""
        at, every = (
            self.rows[self.before :],
            torch.arange(len(self.score), device=self.score.device),
        )
        hidden = torch.zeros(len(at), len(every), device=every.device)
        hidden.masked_fill_(every > at[:, None], float("-inf"))
        bias = hidden.repeat(self.group, 1)  # the group's heads one after another
        share = self.share.repeat(self.heads)

        def watch(layer: int, q: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
            if layer not in self.layers:
                return None
            keys = self.cache.read_keys(layer, every).float().permute(1, 2, 0)
            queries = q[self.before :].float().transpose(0, 1).reshape(len(keys), -1, q.shape[-1])
            weight = torch.baddbmm(bias, queries, keys, alpha=q.shape[-1] ** -0.5).softmax(-1)
            self.score.addmv_(weight.flatten(0, 1).T, share)
            return None

        return watch


def _sampled(
    prompt: FusedPrompt, at: torch.Tensor, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of the keys that rows ``at [m]`` read below the probed layers, ``[s]``, and what is
    added to their scores ``[m * group, s]``: the log of how many each stands for, -inf where hidden.
    """
    chosen = prompt.in_chunk()
    inside = chosen.nonzero()[:, 0]
    stride = max(1, min(STRIDE, inside.numel() // FEWEST))
    every = torch.ones(len(prompt), dtype=torch.bool)
    every[inside] = False
    every[inside[::stride]] = True
    some = to_device(every.nonzero()[:, 0], at.device)
    weight = to_device(chosen[every] * math.log(stride), at.device)
    bias = weight.masked_fill(some > at[:, None], float("-inf"))
    return some, bias.repeat_interleave(group, 0)


def _biased(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention of ``q [m, heads, d]`` over ``k, v [s, kv_heads, d]``, ``bias [m * group, s]`` added
    to the scores of each KV head's group; in q's type."""
    m, heads, dim = q.shape
    kv_heads = k.shape[1]
    rows = (q.float() * scale).view(m, kv_heads, -1, dim).transpose(0, 1).reshape(kv_heads, -1, dim)
    weight = torch.softmax(torch.baddbmm(bias, rows, k.float().permute(1, 2, 0)), dim=-1)
    out = torch.matmul(weight, v.float().transpose(0, 1)).view(kv_heads, m, -1, dim)
    return out.transpose(0, 1).reshape(m, heads, dim).to(q.dtype)


def _weighed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    at: torch.Tensor,
    first: int,
    share: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of ``q [m, heads, d]`` at sorted positions ``at``, from ``first`` on, over
    ``k, v [n, kv_heads, d]``.

    Returns it in q's type, and the mass ``[n]`` fp32 each key gets: over heads, and over rows by
    their ``share [m]``. The weights are made once for both.
    """
    m, heads, dim = q.shape
    n, kv_heads = k.shape[:2]
    group = heads // kv_heads
    rows = (q.float() * scale).view(m, kv_heads, group, dim).transpose(0, 1)
    weight = torch.matmul(rows.reshape(kv_heads, -1, dim), k.float().permute(1, 2, 0))
    hidden = torch.arange(first + 1, n, device=q.device) > at[:, None]
    weight[:, :, first + 1 :].masked_fill_(hidden.repeat_interleave(group, 0), float("-inf"))
    weight = torch.softmax(weight, dim=-1)
    mass = torch.matmul(share.repeat_interleave(group), weight).sum(dim=0)
    out = torch.matmul(weight, v.float().transpose(0, 1))
    return out.view(kv_heads, m, group, dim).transpose(0, 1).reshape(m, heads, dim).to(
        q.dtype
    ), mass


class Question(Selector):
    """The whole budget by attention, half the weight on the last token and half on the rest of the
    question. A first chunk that is exact already gets nothing."""

    name = "question"
    reads_cache = True

    def choose(self, context: Context) -> SelectedTokens:
        prompt = context.prompt
        score = question_scores(context, last_weight=0.5)
        allowed = prompt.in_chunk()
        allowed[len(prompt) - 1] = False
        if prompt.first_is_exact:
            allowed[prompt.placed[0].start : prompt.placed[0].end] = False
        return SelectedTokens(best(score, allowed, context.budget))
