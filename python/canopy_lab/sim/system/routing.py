"""Route requests to instances."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

MIN_MATCH_SHARE = 0.3
"""Prefix-aware: minimum share of the prompt that a known prefix must cover
(``--cache-threshold`` of sglang-router 0.3.2)."""
MAX_IMBALANCE_REQUESTS = 64
MAX_IMBALANCE_RATIO = 1.5
"""Prefix-aware: above both, balance load (``--balance-abs-threshold``, ``--balance-rel-threshold``)."""
MAX_KNOWN_BLOCKS = 1 << 20
"""Blocks remembered: 2^26 characters (``--max-tree-size``) at 16 tokens of four characters. The
router has this limit per server; here it is for all servers, and up to twice as many are kept."""


class LoadedInstance(Protocol):
    """An instance's load, as seen by a router."""

    @property
    def request_count(self) -> int:
        """Waiting and running requests."""


class KnownPrefixes:
    """The instance to which a router last sent each prefix, even if the instance evicted it since. A prefix
    expires after ``max_blocks`` to twice as many further blocks."""

    def __init__(self, max_blocks: int = MAX_KNOWN_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._instance_by_block: dict[int, int] = {}
        """Block -> instance. Ids are chained, so the known part of a path is a prefix."""
        self._previous: dict[int, int] = {}
        """The previous generation of ``_instance_by_block``."""

    def __len__(self) -> int:
        return len(self._instance_by_block) + len(self._previous)

    def longest_prefix(self, path: Sequence[int]) -> tuple[int, int]:
        """Return the known leading blocks of ``path``, and the instance of the last (-1: none)."""
        low, high = 0, len(path)
        while low < high:
            middle = (low + high + 1) // 2
            if self._instance_of(path[middle - 1]) >= 0:
                low = middle
            else:
                high = middle - 1
        return low, self._instance_of(path[low - 1]) if low else -1

    def record_sent(self, path: Sequence[int], instance: int) -> None:
        """Record that ``path`` was sent to ``instance``."""
        self._instance_by_block.update(dict.fromkeys(path, instance))
        if len(self._instance_by_block) > self._max_blocks:
            self._previous, self._instance_by_block = self._instance_by_block, {}

    def _instance_of(self, block: int) -> int:
        instance = self._instance_by_block.get(block)
        return self._previous.get(block, -1) if instance is None else instance


class Router:
    """``round-robin`` or ``prefix-aware``.

    Prefix-aware is SGLang's ``cache_aware``: the instance to which a long prefix was sent, or the
    first instance with the fewest requests if there is none or the load is unbalanced.
    """

    def __init__(self, routing: str, instances: Sequence[LoadedInstance]) -> None:
        self._routing = routing
        self._instances = instances
        self._next_instance = 0
        self._prefixes = KnownPrefixes()

    def choose(self, path: Sequence[int]) -> int:
        """Return the index of the instance for a request with these blocks."""
        instance_count = len(self._instances)
        if instance_count == 1:
            return 0
        if self._routing == "round-robin":
            chosen = self._next_instance
            self._next_instance = (chosen + 1) % instance_count
            return chosen
        return self._choose_by_prefix(path)

    def _choose_by_prefix(self, path: Sequence[int]) -> int:
        request_counts = [instance.request_count for instance in self._instances]
        most, least = max(request_counts), min(request_counts)
        chosen = request_counts.index(least)
        is_balanced = most - least <= MAX_IMBALANCE_REQUESTS or most <= least * MAX_IMBALANCE_RATIO
        if is_balanced and path:
            known_blocks, instance = self._prefixes.longest_prefix(path)
            if known_blocks > MIN_MATCH_SHARE * len(path):
                chosen = instance
        self._prefixes.record_sent(path, chosen)
        return chosen
