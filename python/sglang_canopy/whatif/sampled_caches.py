"""Shadow caches that share one sample of blocks.

Blocks are sampled by a hash of their ids (SHARDS, Waldspurger et al., FAST 2015). An id identifies
the whole path up to its block, so on every path a sampled block follows its sampled ancestors, and
the sampled blocks form a prefix tree. Prefixes shared between conversations are sampled like any
other block; sampling whole conversations would see too few uses of them. The sample depends on
requests and their stamps alone and is therefore identical on all tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sglang_canopy.policy.base import Policy
from sglang_canopy.policy.block_tree import RadixTree
from sglang_canopy.records import Request
from sglang_canopy.reuse.shadow import full_blocks

SAMPLED_BLOCKS = 4096
"""Blocks of the smallest modelled cache up to which all blocks are sampled; of larger caches one in
the power of two that leaves at least as many."""

MAX_BLOCKS = 32_768
"""Sampled blocks of the largest modelled cache; more are sampled more thinly."""

MIN_BLOCKS = 64
"""Capacity, in sampled blocks, below which the hits of a shadow cache are mostly chance."""

_MASK_64 = (1 << 64) - 1
HASH_MULTIPLIER = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio, odd: Fibonacci hashing (Knuth, vol. 3, section 6.4)."""


@dataclass(frozen=True, slots=True)
class ModelledCache:
    """The cache that a shadow cache models: policy factory and capacity."""

    make_policy: Callable[[], Policy]
    capacity_tokens: int
    whole_nodes: bool = False


class SampledPath(NamedTuple):
    """Sampled part of a request."""

    blocks: tuple[int, ...]
    prompt_tokens: int
    """Prompt tokens represented by the sampled blocks."""


class ShadowResult(NamedTuple):
    """Result of serving one request in all shadow caches."""

    blocks: tuple[int, ...]
    prompt_tokens: int
    hit_blocks: dict[Hashable, int]
    """Leading blocks of ``blocks`` that each cache hit."""
    saved_tokens: dict[Hashable, int]
    """Prompt tokens represented by these hits."""


def block_number(block: int) -> int:
    """Hash a block id to 32 bits, scattering neighbouring ids."""
    return (block * HASH_MULTIPLIER & _MASK_64) >> 32


def covered_tokens(request: Request) -> int:
    """Return the prompt tokens covered by the blocks of a request's path."""
    return min(request.prompt_tokens, len(request.path) * request.block_tokens)


class SampledCaches:
    """Shadow caches by name. ``sample_stride``: sample one block in this many. ``None``: fixed by the
    capacities at the first request."""

    def __init__(self, sample_stride: int | None = None) -> None:
        self.sample_stride = sample_stride or 1
        self.sampled_requests = 0
        """Requests with a sampled block."""
        self._modelled: dict[Hashable, ModelledCache] = {}
        self._caches: dict[Hashable, ShadowCache] = {}
        self._is_stride_fixed = sample_stride is not None

    def add(self, name: Hashable, modelled: ModelledCache) -> None:
        """Add an empty cache. Call it before the first request."""
        self._modelled[name] = modelled

    def sample_path(self, request: Request) -> SampledPath | None:
        """Return the sampled part of a finished request; ``None`` if no block is sampled. The path may
        include the output."""
        if not self._modelled or not request.path:
            return None
        if not self._is_stride_fixed:
            self.sample_stride = self._choose_stride(request.block_tokens)
            self._is_stride_fixed = True
        path, block_tokens = request.path, request.block_tokens
        prompt_blocks = -(-request.prompt_tokens // block_tokens)
        if self.sample_stride == 1:
            return SampledPath(tuple(path), covered_tokens(request))
        blocks = self.sampled_blocks(path[:prompt_blocks])
        represented_tokens = len(blocks) * block_tokens
        if prompt_blocks <= len(path) and blocks and blocks[-1] == path[prompt_blocks - 1]:
            # The prompt only partly fills its last block, which is sampled.
            represented_tokens -= prompt_blocks * block_tokens - request.prompt_tokens
        blocks += self.sampled_blocks(path[prompt_blocks:])
        return (
            SampledPath(tuple(blocks), self.sample_stride * represented_tokens) if blocks else None
        )

    def serve(self, copy: Request, sampled_path: SampledPath) -> ShadowResult:
        """Serve the sampled part of a request in every cache. Modifies ``copy``."""
        copy.path = sampled_path.blocks
        copy.block_tokens *= self.sample_stride
        represented_tokens = sampled_path.prompt_tokens
        hit_blocks = {name: self._get_cache(name, copy).access(copy) for name in self._modelled}
        saved_tokens = {
            name: min(blocks * copy.block_tokens, represented_tokens)
            for name, blocks in hit_blocks.items()
        }
        self.sampled_requests += 1
        return ShadowResult(sampled_path.blocks, represented_tokens, hit_blocks, saved_tokens)

    def is_too_small(self, name: Hashable) -> bool:
        """Return whether the sample leaves a cache fewer than ``MIN_BLOCKS``."""
        cache = self._caches.get(name)
        return cache is not None and self.sample_stride > 1 and cache.capacity_blocks < MIN_BLOCKS

    def has_evicted(self, name: Hashable) -> bool:
        """Return whether a cache has been full; until then all policies hit the same."""
        cache = self._caches.get(name)
        return cache is not None and cache.has_evicted

    def count_blocks(self) -> dict[Hashable, int]:
        return {name: len(cache) for name, cache in self._caches.items()}

    def sampled_blocks(self, path: Sequence[int]) -> list[int]:
        # ``block_number`` is inlined: this runs for every block of every request.
        stride = self.sample_stride
        if stride & (stride - 1) == 0:
            bits = stride - 1 << 32
            return [block for block in path if not block * HASH_MULTIPLIER & bits]
        return [id_ for id_ in path if ((id_ * HASH_MULTIPLIER & _MASK_64) >> 32) % stride == 0]

    def _get_cache(self, name: Hashable, request: Request) -> ShadowCache:
        cache = self._caches.get(name)
        if cache is None:
            modelled = self._modelled[name]
            block_tokens = request.block_tokens // self.sample_stride
            cache = self._caches[name] = ShadowCache(
                modelled.make_policy(),
                modelled.capacity_tokens,
                block_tokens,
                self.sample_stride,
                modelled.whole_nodes,
            )
        return cache

    def _choose_stride(self, block_tokens: int) -> int:
        """Return the power of two that fixes the sample for caches of blocks of ``block_tokens``."""
        caches = self._modelled.values()
        capacities_blocks = [cache.capacity_tokens // block_tokens for cache in caches]
        sample_stride = 1
        while (
            min(capacities_blocks) >= 2 * sample_stride * SAMPLED_BLOCKS
            or max(capacities_blocks) > sample_stride * MAX_BLOCKS
        ):
            sample_stride *= 2
        return sample_stride


class ShadowCache:
    """Tree of block ids under ``policy``, fed with sampled blocks of live requests.

    ``capacity_tokens``: size of the modelled cache. Each sampled block represents ``sample_stride`` blocks
    and counts ``sample_stride * block_tokens`` tokens, so capacity, lengths and offsets match the modelled
    cache (SHARDS, Waldspurger et al., FAST 2015, scales the capacity instead). The cache does not
    learn: requests arrive with labels from the meter.
    """

    def __init__(
        self,
        policy: Policy,
        capacity_tokens: int,
        block_tokens: int,
        sample_stride: int = 1,
        whole_nodes: bool = False,
    ) -> None:
        block_tokens *= sample_stride
        capacity_blocks = max(1, capacity_tokens // block_tokens)
        self.tree = RadixTree(policy, capacity_blocks, block_tokens, whole_nodes=whole_nodes)

    @property
    def has_evicted(self) -> bool:
        return self.tree.eviction_count > 0

    @property
    def capacity_blocks(self) -> int:
        return self.tree.capacity_blocks

    def access(self, request: Request) -> int:
        """Serve a finished request with a sampled path; return the leading blocks that hit."""
        tree = self.tree
        if request.time > tree.now:
            tree.now = request.time
        node, hit_blocks = tree.match(request.path)
        tree.cache_path(request, node, hit_blocks)
        return hit_blocks

    def __len__(self) -> int:
        """Return the number of sampled blocks held."""
        return self.tree.used_blocks


def copy_for_shadow(request: Request, conversation: Hashable) -> Request:
    """Copy ``request`` for shadow caches, with its inferred conversation and without keep hints."""
    return request.copy(path=tuple(request.path), conversation=conversation, keep_until=None)


MAX_ORIGINS = 200_000
"""Maximum number of remembered conversations; the least recently used are dropped."""


class Origins:
    """Conversation numbers by the last block of each conversation's latest prompt. A path that
    contains this block continues the conversation. Conversation names from clients are ignored
    because few clients send one."""

    def __init__(self, max_origins: int = MAX_ORIGINS) -> None:
        self._number_by_end: dict[int, int] = {}
        self._max_origins = max_origins

    def number_of(self, path: Sequence[int], prompt_tokens: int, block_tokens: int) -> int:
        """Return the number of the conversation that a request continues or begins. ``path``: chained
        block hashes of the prompt, or of prompt and output."""
        block_count = full_blocks(path, prompt_tokens, block_tokens)
        if not block_count:
            return path[0] if path else 0
        end_block, numbers = path[block_count - 1], self._number_by_end
        number = end_block
        for depth in range(block_count - 1, -1, -1):
            continued_number = numbers.pop(path[depth], None)
            if continued_number is not None:
                number = continued_number
                break
        numbers[end_block] = number
        if len(numbers) > self._max_origins:
            del numbers[next(iter(numbers))]
        return number

    def __len__(self) -> int:
        return len(self._number_by_end)
