"""Which instance a request goes to."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

MATCH_SHARE = 0.3
"""Prefix-aware: follow a known prefix that covers more than this share of the prompt
(``--cache-threshold`` of sglang-router 0.3.2)."""
IMBALANCE_REQUESTS = 64
IMBALANCE_RATIO = 1.5
"""Prefix-aware: beyond both, load goes first (``--balance-abs-threshold``, ``-rel-threshold``)."""


BLOCKS_KEPT = 1 << 20
"""Of blocks of 16 tokens, 2^26 characters (``--max-tree-size``), at four a token. The router
counts them for each server; here it is the bound for all together, and twice it at most."""


class Loaded(Protocol):
    """What a router knows of an instance's load."""

    @property
    def requests(self) -> int:
        """Waiting and running."""

    @property
    def outstanding(self) -> int:
        """Tokens that these have, prompts and outputs."""


class KnownPrefixes:
    """What a router knows of caches: where it has sent each prefix last.

    It does not hear of evictions, and forgets what was not sent again for ``blocks_kept`` blocks.
    """

    def __init__(self, blocks_kept: int = BLOCKS_KEPT) -> None:
        self._kept = blocks_kept
        self._sent_to: dict[int, int] = {}
        """By block. Ids are chained, and a path is noted whole, so that what is known of it is a
        run from its start."""
        self._before: dict[int, int] = {}
        """The same, of the blocks before those."""

    def __len__(self) -> int:
        return len(self._sent_to) + len(self._before)

    def longest(self, path: Sequence[int]) -> tuple[int, int]:
        """How many blocks of ``path`` were sent before, and where the last of them went; -1 for
        none."""
        low, high = 0, len(path)
        while low < high:
            middle = (low + high + 1) // 2
            if self._where(path[middle - 1]) >= 0:
                low = middle
            else:
                high = middle - 1
        return low, self._where(path[low - 1]) if low else -1

    def sent(self, path: Sequence[int], instance: int) -> None:
        """A request for ``path`` goes to ``instance``."""
        self._sent_to.update(dict.fromkeys(path, instance))
        if len(self._sent_to) > self._kept:
            self._before, self._sent_to = self._sent_to, {}

    def _where(self, block: int) -> int:
        where = self._sent_to.get(block)
        return self._before.get(block, -1) if where is None else where


class Router:
    """``round-robin``, ``least-loaded`` (fewest tokens outstanding) or ``prefix-aware``.

    Prefix-aware is SGLang's ``cache_aware``: the instance that a long prefix was sent to, and the
    one with the fewest requests for other prompts or out of balance, the first of several. Of the
    least loaded one is drawn, from ``seed``.
    """

    def __init__(self, name: str, instances: Sequence[Loaded], seed: int) -> None:
        self._name = name
        self._instances = instances
        self._next = 0
        self._draw = random.Random(seed)
        self._prefixes = KnownPrefixes()

    def choose(self, path: Sequence[int]) -> int:
        """The number of the instance that gets the request for these blocks."""
        count = len(self._instances)
        if count == 1:
            return 0
        if self._name == "round-robin":
            chosen = self._next
            self._next = (chosen + 1) % count
            return chosen
        if self._name == "least-loaded":
            return self._least([i.outstanding for i in self._instances])
        return self._by_prefix(path)

    def _by_prefix(self, path: Sequence[int]) -> int:
        requests = [i.requests for i in self._instances]
        most, fewest = max(requests), min(requests)
        chosen = requests.index(fewest)
        balanced = most - fewest <= IMBALANCE_REQUESTS or most <= fewest * IMBALANCE_RATIO
        if balanced and path:
            blocks, where = self._prefixes.longest(path)
            if blocks > MATCH_SHARE * len(path):
                chosen = where
        self._prefixes.sent(path, chosen)
        return chosen

    def _least(self, loads: Sequence[float]) -> int:
        least = min(loads)
        ties = [i for i, load in enumerate(loads) if load == least]
        return ties[0] if len(ties) == 1 else self._draw.choice(ties)
