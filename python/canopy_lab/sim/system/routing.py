"""Route requests to instances."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

MIN_MATCH_SHARE = 0.3
"""Prefix-aware: minimum share of the prompt that a known prefix must cover
(``--cache-threshold`` of sglang-router 0.3.2)."""
IMBALANCE_REQUESTS = 64
IMBALANCE_RATIO = 1.5
"""Prefix-aware: above both, balance load (``--balance-abs-threshold``, ``-rel-threshold``)."""


MAX_KNOWN_BLOCKS = 1 << 20
"""Blocks remembered: 2^26 characters (``--max-tree-size``) at 16 tokens of four characters. The
router has this limit per server; here it is for all servers, and up to twice as many are kept."""


class LoadedInstance(Protocol):
    """An instance's load, as seen by a router."""

    @property
    def request_count(self) -> int:
        """Waiting and running requests."""


class KnownPrefixes:
    """The instance to which a router last sent each prefix.

    Evictions are not known. Prefixes expire after ``max_blocks`` further blocks.
    """

    def __init__(self, max_blocks: int = MAX_KNOWN_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._sent_to: dict[int, int] = {}
        """Block -> instance. Ids are chained, so the known part of a path is a prefix."""
        self._previous: dict[int, int] = {}
        """The previous generation of ``_sent_to``."""

    def __len__(self) -> int:
        return len(self._sent_to) + len(self._previous)

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
        self._sent_to.update(dict.fromkeys(path, instance))
        if len(self._sent_to) > self._max_blocks:
            self._previous, self._sent_to = self._sent_to, {}

    def _instance_of(self, block: int) -> int:
        instance = self._sent_to.get(block)
        return self._previous.get(block, -1) if instance is None else instance


class Router:
    """``round-robin`` or ``prefix-aware``.

    Prefix-aware is SGLang's ``cache_aware``: the instance to which a long prefix was sent, or the
    first instance with the fewest requests if there is none or the load is unbalanced.
    """

    def __init__(self, name: str, instances: Sequence[LoadedInstance]) -> None:
        self._name = name
        self._instances = instances
        self._next_instance = 0
        self._prefixes = KnownPrefixes()

    def choose(self, path: Sequence[int]) -> int:
        """Return the index of the instance for a request with these blocks."""
        count = len(self._instances)
        if count == 1:
            return 0
        if self._name == "round-robin":
            chosen = self._next_instance
            self._next_instance = (chosen + 1) % count
            return chosen
        return self._by_prefix(path)

    def _by_prefix(self, path: Sequence[int]) -> int:
        requests = [instance.request_count for instance in self._instances]
        most, least = max(requests), min(requests)
        chosen = requests.index(least)
        is_balanced = most - least <= IMBALANCE_REQUESTS or most <= least * IMBALANCE_RATIO
        if is_balanced and path:
            blocks, instance = self._prefixes.longest_prefix(path)
            if blocks > MIN_MATCH_SHARE * len(path):
                chosen = instance
        self._prefixes.record_sent(path, chosen)
        return chosen
