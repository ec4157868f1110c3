"""What the tree of device and host asks of a write policy that copies before eviction."""

from __future__ import annotations

from typing import Protocol

from canopy_lab.sim.system.nodes import TierNode


class CopyChoices(Protocol):
    """What a write policy that copies before eviction is asked, and told, by the tree."""

    def choose(self, node: TierNode, keep: int) -> tuple[TierNode, int, bool]:
        """The victim to take instead of ``node``, what to keep of it, and whether its copy is in
        flight."""

    def expect(self, tokens: int) -> None:
        """Requests that wait or are half computed will take ``tokens`` in the next steps."""

    def spares(self, node: TierNode) -> bool:
        """Whether the host gives up other copies of what the device has before this one."""

    def evicted(self, tokens: int) -> None:
        """So many tokens left the device."""

    def used_again(self, node: TierNode) -> None:
        """A request used ``node``."""

    def split(self, node: TierNode, head: TierNode) -> None:
        """``head`` holds the first blocks of ``node`` now."""
