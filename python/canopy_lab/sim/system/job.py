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
        self,
        index: int,
        arrival: float,
        made: tuple[Request, tuple[int, ...], int, int, int],
    ) -> None:
        self.index = index
        self.arrival = arrival
        """When it was due, in seconds: every time is counted from here."""
        self.request, self.path, self.prompt, self.output, self.end_tokens = made
        self.entered = math.nan
        """When the gate let it into the queue."""
        self.tokens_before = 0
        """Tokens that its instance had prefilled when it began to wait."""
        self.max_new = self.output
        """Tokens that its client allows it to generate; no fewer than it does."""
        self.may_end = 0
        """Step of the running batch at which it would have generated all of them."""
        self.clipped = False
        """Whether it may still generate more than is ever reserved."""
        self.target = self.prompt
        """Tokens to prefill; more than the prompt after a retraction."""
        self.done = 0
        """Tokens whose KV is on the device."""
        self.private = 0
        """Device tokens it holds outside the tree."""
        self.leaf: TierNode | None = None
        """The locked end of its path in the tree."""
        self.device_hit = self.host_hit = self.disk_hit = 0
        self.disk_start = 0
        self.on_disk = -1
        """Blocks of its path that are on the disk or on their way; -1 before the first look."""
        self.fetch: Transfer | None = None
        self.prefetched = 0
        """Tokens that its prefetch under way asks for."""
        self.anchor: TierNode | None = None
        """Where what its prefetch under way brings will be attached."""
        self.fetched_from = 0
        """Block where the prefetch begins."""
        self.fetch_deadline = math.inf
        self.start = math.nan
        self.first_token = math.nan

    def path_of_prompt(self, block_tokens: int) -> tuple[int, ...]:
        """The blocks that are looked up for it."""
        return self.path[: self.blocks_of(self.target, block_tokens)]

    def blocks_of(self, tokens: int, block_tokens: int) -> int:
        return -(-tokens // block_tokens)
