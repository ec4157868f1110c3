"""Layer-ahead transfer: the next layer's reused KV travels while this layer computes.

For chunks that are not on the device: a copy stream runs ``AHEAD`` layers before the compute
stream, which rotates and scatters each layer when it has arrived. On a CPU there is nothing to
overlap and each layer is placed when it is needed, with the same result.
"""

from __future__ import annotations

import torch

from canopy_chunks import engine
from canopy_chunks.cache import KVCache
from canopy_chunks.chunk import Chunk, FusedPrompt
from canopy_chunks.disk import DiskChunk
from canopy_chunks.model import Model
from canopy_chunks.rope import rotate
from canopy_chunks.selectors.base import Context, Selector
from canopy_kernel import pages, rope_scatter

AHEAD = 2
"""Layers in flight: one being copied while one waits (two buffers)."""


class LayerAhead:
    """Places the ``wanted [n]`` (bool) tokens' KV layer by layer; give :meth:`arrive` to the engine.

    Only reused rows are needed, but from pinned host memory whole chunks are copied a layer at a
    time: one long copy beats gathering rows on the host, and the scatter drops the rest.
    """

    def __init__(
        self, model: Model, prompt: FusedPrompt, cache: KVCache, wanted: torch.Tensor
    ) -> None:
        self.model, self.cache = model, cache
        self.cuda = cache.slots.is_cuda
        self.parts = []
        for p in prompt.placed:
            inside = wanted[p.start : p.end].nonzero()[:, 0]
            if inside.numel():
                positions = (inside + p.start).to(cache.slots.device)
                self.parts.append((p.chunk, inside.to(cache.slots.device), positions))
        self.flying: dict[int, tuple[list, torch.cuda.Event]] = {}
        self.table = model.rope.table(torch.arange(len(cache), device=cache.slots.device))
        if self.cuda:
            self.stream = torch.cuda.Stream()
            for layer in range(min(AHEAD, model.shape.layers)):
                self._send(layer)

    def arrive(self, layer: int) -> None:
        """Put this layer's KV in place and start the copy of a later one."""
        if not self.cuda:
            for chunk, inside, positions in self.parts:
                k, v = chunk.rows(layer, inside)
                slots = self.cache.slots[positions]
                turned = rotate(k.to(self.model.dtype), self.table[positions])
                pages.write(self.cache.k[layer], slots, turned)
                pages.write(self.cache.v[layer], slots, v)
            return
        rows, done = self.flying.pop(layer)
        torch.cuda.current_stream().wait_event(done)
        for (k, v), (_, inside, positions) in zip(rows, self.parts):
            for x in (k, v):
                x.record_stream(torch.cuda.current_stream())
            slots = self.cache.slots[positions]
            pools = self.cache.k[layer], self.cache.v[layer]
            rope_scatter.rope_scatter(k, v, inside, positions, slots, self.table, *pools)
        if layer + AHEAD < self.model.shape.layers:
            self._send(layer + AHEAD)

    def _send(self, layer: int) -> None:
        device = self.cache.slots.device
        with torch.cuda.stream(self.stream):
            rows = [
                tuple(x.to(device, non_blocking=True) for x in layer_of(chunk, layer))
                for chunk, _, _ in self.parts
            ]
            done = torch.cuda.Event()
            done.record(self.stream)
        self.flying[layer] = (rows, done)


def layer_of(chunk: Chunk | DiskChunk, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K before RoPE and V of one layer of a whole chunk: of a file, this layer alone is read."""
    return chunk.rows(layer, torch.arange(len(chunk)))


@torch.no_grad()
def pipelined_prefill(
    model: Model, prompt: FusedPrompt, cache: KVCache, selector: Selector, ratio: float
) -> torch.Tensor:
    """Fused prefill with layer-ahead transfer. Last token's logits ``[vocab]``.

    For selectors that choose without the cache (stored scores): the others must see the KV first.
    """
    assert not selector.reads_cache, f"{selector.name} reads the cache before it is there"
    inside = prompt.in_chunk()
    inside[len(prompt) - 1] = False
    choice = selector.choose(Context(model, prompt, cache, ratio))
    needed = ~inside
    needed[choice.tokens] = True
    everything = choice.narrow is not None or choice.replaced is not None
    reused = inside if everything else ~needed
    rows = needed.nonzero()[:, 0].to(model.device)
    ahead = LayerAhead(model, prompt, cache, reused)
    hidden, _ = engine.run_rows(
        model,
        prompt.ids[rows],
        rows,
        cache,
        narrow=choice.narrow,
        arrive=ahead.arrive,
        replaced=choice.replaced,
    )
    return engine.logits(model, hidden[-1:])[0]
