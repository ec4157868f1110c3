"""Requests of the simulation, as an instance keeps them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from canopy_lab.sim.system.channel import DiskIO
from canopy_lab.sim.system.nodes import TierNode
from sglang_canopy.records import Request


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """One request on its way through an instance."""

    index: int
    arrival_s: float
    request: Request
    path: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int
    end_tokens: int
    queued_s: float = math.nan
    """Time at which the gate admitted it to the queue."""
    tokens_before: int = 0
    """Tokens that the instance had prefilled when the request was queued."""
    max_new_tokens: int = field(init=False)
    """``max_tokens``; at least the output."""
    limit_step: int = 0
    """Step of the running batch at which ``max_new_tokens`` is reached."""
    is_clipped: bool = False
    """True while its remaining output exceeds the maximum reservation."""
    target_tokens: int = field(init=False)
    """Tokens to prefill; more than the prompt after a retraction."""
    kv_tokens: int = 0
    """Tokens whose KV is on the device."""
    private_tokens: int = 0
    """Device tokens allocated outside the tree."""
    leaf: TierNode | None = None
    """Deepest locked node of its path."""
    device_hit_tokens: int = 0
    host_hit_tokens: int = 0
    disk_hit_tokens: int = 0
    disk_start_token: int = 0
    disk_blocks: int = -1
    """Leading blocks of its path stored or queued on the disk; -1 before the first check."""
    fetch: DiskIO | None = None
    prefetch_tokens: int = 0
    """Tokens requested by its running prefetch."""
    anchor: TierNode | None = None
    """Node below which prefetched blocks are added."""
    fetch_start_block: int = 0
    """First block of the prefetch."""
    deadline_s: float = math.inf
    start_s: float = math.nan
    first_token_s: float = math.nan

    def __post_init__(self) -> None:
        self.max_new_tokens, self.target_tokens = self.output_tokens, self.prompt_tokens

    def path_of_prompt(self, block_tokens: int) -> tuple[int, ...]:
        """Return the blocks of the tokens to prefill."""
        return self.path[: self.blocks_of(self.target_tokens, block_tokens)]

    def blocks_of(self, tokens: int, block_tokens: int) -> int:
        return -(-tokens // block_tokens)
