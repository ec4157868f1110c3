"""Memory of chunk reuse outside the KV pool, reserved before the pool is sized.

SGLang measures the free memory after loading the weights, and gives nearly all of it to the pool.
Memory allocated later (chunks kept on the device, and the planning of prompts) must be excluded
from that measurement; otherwise a long prompt could crash a server that has run for hours.
"""

from __future__ import annotations

from dataclasses import dataclass

from canopy_chunks.fuse.selectors.question import MAX_QUERIES
from canopy_chunks.store.shape import Shape

BEHIND_TOKENS = 3584
"""Upper bound of the tokens before an encoded document (system text and stand-ins), and of that
text's own stored KV."""


@dataclass(frozen=True, slots=True)
class WorkingMemory:
    """Bytes to reserve, by use; ``prompt_tokens``: the longest prompt that reuses chunks.

    tiers: chunks in the pool's own memory; caches: KV outside the pool, of one prompt that is
    planned in several windows, and of one document being encoded; probe: scores, and the keys and
    values that a probe reads.
    """

    prompt_tokens: int
    tiers: int
    caches: int
    probe: int

    @property
    def total(self) -> int:
        return self.tiers + self.caches + self.probe

    def __str__(self) -> str:
        parts = (self.total, self.tiers, self.caches, self.probe)
        total, tiers, caches, probe = (part >> 20 for part in parts)
        return (
            f"{total:,} MiB ({tiers:,} for chunks, {caches:,} for caches beside the pool, "
            f" {probe:,} for probes, at prompts of {self.prompt_tokens:,} tokens)"
        )


def working_memory(shape: Shape, itemsize: int, prompt_tokens: int, tiers: int) -> WorkingMemory:
    """Return the memory for a model of ``shape`` with ``itemsize`` bytes per element."""
    tokens = 2 * prompt_tokens + BEHIND_TOKENS
    caches = tokens * shape.kv_bytes_per_token * itemsize
    scores = 2 * 4 * shape.heads * MAX_QUERIES * prompt_tokens  # before and after the softmax, fp32
    seen = 4 * 4 * shape.kv_heads * shape.head_dim * prompt_tokens  # K and V, as read and in fp32
    return WorkingMemory(prompt_tokens, tiers, caches, scores + seen)
