"""Re-admit leaves at random: the order in which a tree's leaves are admitted must decide nothing.

Ranks of one replica may admit leaves in different orders (sets, reads of one rank's own state), and
must evict alike.
"""

import random
from typing import Any


class Readmission:
    """Re-admits leaves of a live tree, and admits pending leaves in a random order.

    ``which`` draws the leaves, ``order`` their order: two trees with equal ``which`` and different
    ``order`` re-admit the same leaves in different orders.
    """

    def __init__(self, core: Any, which: int, order: int) -> None:
        self.core = core
        self._which, self._order = random.Random(which), random.Random(order)
        self.readmitted = 0

    def __call__(self) -> None:
        for leaves in (self.core.evictable_device_leaves, self.core.evictable_host_leaves):
            nodes = sorted(leaves, key=lambda node: node.id)
            chosen = [node for node in nodes if self._which.random() < 0.5]
            self._order.shuffle(chosen)
            for node in chosen:
                self.core.readmit(node)
            self.readmitted += len(chosen)
            pending = list(leaves.pending.items())
            self._order.shuffle(pending)
            leaves.pending = dict(pending)
