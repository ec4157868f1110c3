"""The next victims of a policy, in order, without evicting any."""

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
    """Return the next victims: ``tokens`` tokens or ``leaves`` leaves of them, whichever is less.

    Afterwards every leaf has the rank that it had before. ``exposed(leaf, gone)`` returns the leaf,
    not admitted, that becomes evictable once those in ``gone`` have left, ``leaf`` the last of
    them; ``None`` if there is none.
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
            tokens -= max(1, leaf.length - victim.keep)
            above = None if victim.keep else exposed(leaf, gone)
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
