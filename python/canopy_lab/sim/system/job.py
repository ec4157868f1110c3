"""One request on its way through an instance."""

from __future__ import annotations

import math

from canopy_lab.sim.system.channel import Transfer
from canopy_lab.sim.system.nodes import TierNode
from sglang_canopy.records import Request


class SimulatedRequest:
    """One request on its way through an instance."""

    __slots__ = (
        "anchor",
        "arrival",
        "clipped",
        "device_hit",
        "disk_hit",
        "disk_start",
        "done",
        "end_tokens",
        "entered",
        "fetch",
        "fetch_deadline",
        "fetched_from",
        "first_token",
        "host_hit",
        "index",
        "leaf",
        "max_new",
        "may_end",
        "on_disk",
        "output",
        "path",
        "prefetched",
        "private",
        "prompt",
        "request",
        "start",
        "target",
        "tokens_before",
    )

    def __init__(
        self, index: int, arrival: float, made: tuple[Request, tuple[int, ...], int, int, int]
    ) -> None:
        self.index = index
        self.arrival = arrival
        """Arrival time in seconds."""
        self.request, self.path, self.prompt, self.output, self.end_tokens = made
        self.entered = math.nan
        """Time at which the gate admitted it to the queue."""
        self.tokens_before = 0
        """Tokens that the instance had prefilled when the request was queued."""
        self.max_new = self.output
        """``max_tokens``; at least the output."""
        self.may_end = 0
        """Step of the running batch at which ``max_new`` is reached."""
        self.clipped = False
        """True while its remaining output exceeds the maximum reservation."""
        self.target = self.prompt
        """Tokens to prefill; more than the prompt after a retraction."""
        self.done = 0
        """Tokens whose KV is on the device."""
        self.private = 0
        """Device tokens allocated outside the tree."""
        self.leaf: TierNode | None = None
        """Deepest locked node of its path."""
        self.device_hit = self.host_hit = self.disk_hit = 0
        self.disk_start = 0
        self.on_disk = -1
        """Leading blocks of its path stored or queued on the disk; -1 before the first check."""
        self.fetch: Transfer | None = None
        self.prefetched = 0
        """Tokens requested by its running prefetch."""
        self.anchor: TierNode | None = None
        """Node below which prefetched blocks are added."""
        self.fetched_from = 0
        """First block of the prefetch."""
        self.fetch_deadline = math.inf
        self.start = math.nan
        self.first_token = math.nan

    def path_of_prompt(self, block_tokens: int) -> tuple[int, ...]:
        """Return the blocks of the tokens to prefill."""
        return self.path[: self.blocks_of(self.target, block_tokens)]

    def blocks_of(self, tokens: int, block_tokens: int) -> int:
        return -(-tokens // block_tokens)
