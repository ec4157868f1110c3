"""The next victims of a policy, in their order, without evicting any."""

from __future__ import annotations

from collections.abc import Callable

from sglang_canopy.policy.base import Policy, Victim
from sglang_canopy.records import Leaf


def lowest_ranked(
    policy: Policy,
    tokens: int,
    now: float,
    exposed: Callable[[Leaf, set[Leaf]], Leaf | None],
    enough: Callable[[int], bool] = lambda leaves: False,
) -> list[Victim]:
    """The victims in the order in which ``policy`` would name them, ``tokens`` of them in all, or
    fewer where ``enough(leaves)`` says that so many leaves will do.

    Every leaf is with the policy again afterwards. ``exposed(leaf, gone)`` is the leaf that
    becomes evictable, and is not admitted, once those in ``gone`` have left, ``leaf`` the last of
    them; ``None`` where there is none.
    """
    victims: list[Victim] = []
    gone: set[Leaf] = set()
    lent: set[Leaf] = set()
    try:
        while tokens > 0 and not enough(len(victims)):
            victim = policy.victim(now)
            if victim is None:
                break
            policy.drop(victim.leaf)
            victims.append(victim)
            gone.add(victim.leaf)
            tokens -= max(1, victim.leaf.length - victim.keep)
            above = None if victim.keep else exposed(victim.leaf, gone)
            if above is not None:
                lent.add(above)
                policy.admit(above, now)
    finally:
        for leaf in lent:
            if leaf not in gone:
                policy.drop(leaf)
        for leaf, _ in victims:
            if leaf not in lent:
                policy.admit(leaf, now)
    return victims
