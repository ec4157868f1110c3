"""Lists a policy's next victims, in order, without evicting them."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

from sglang_canopy.policy.base import Policy, Victim
from sglang_canopy.records import Leaf


def lowest_ranked(
    policy: Policy,
    now: float,
    tokens: int,
    leaves: int,
    exposed: Callable[[Leaf, Container[Leaf]], Leaf | None],
) -> list[Victim]:
    """Return the next victims, up to ``tokens`` tokens or ``leaves`` leaves, whichever is less.

    Every leaf keeps its rank. ``exposed(leaf, gone)`` returns the unadmitted leaf that becomes
    evictable once all leaves in ``gone`` are evicted, ``leaf`` last, or ``None``.
    """
    victims: list[Victim] = []
    gone: dict[Leaf, Any] = {}
    lent: set[Leaf] = set()
    try:
        while tokens > 0 and len(victims) < leaves:
            victim = policy.victim(now)
            if victim is None:
                break
            leaf = victim.leaf
            gone[leaf] = leaf.slot
            policy.drop(leaf)
            victims.append(victim)
            tokens -= max(1, leaf.length - victim.keep_tokens)
            above = None if victim.keep_tokens else exposed(leaf, gone)
            if above is not None:
                lent.add(above)
                policy.admit(above, now)
    finally:
        for leaf in lent:
            if leaf not in gone:
                policy.drop(leaf)
        for leaf, slot in gone.items():
            if leaf not in lent:
                policy.put_back(leaf, slot, now)
    return victims
