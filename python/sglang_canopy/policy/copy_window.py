"""Which leaves to copy to the host before they are evicted, and how many tokens of them.

``lowest_ranked`` asks a policy for its next victims without evicting any; ``CopyWindow`` says how
far ahead of eviction to be. Neither knows a tree, a clock or a link, so that the live cache and
the simulator share them, and so that tensor-parallel ranks decide alike.
"""

from __future__ import annotations

from collections.abc import Callable

from sglang_canopy.policy.base import Policy, Victim
from sglang_canopy.records import Leaf

FLOOR_SHARE, CEILING_SHARE = 1 / 64, 1 / 4
"""Least and greatest share of the smaller tier that a window of its own choice takes."""
STEPS_AHEAD = 3
"""Eviction steps of recent size that the window covers. A wider one costs the host what it holds
twice, a narrower one has evictions wait (benchmark/latency/copies.py)."""
_ONE, _MOST = 64, 256
"""The margin in 64ths: once and four times what was seen."""


class CopyWindow:
    """Tokens next in line for eviction that should have a copy below already.

    ``fixed``: tokens, or ``None`` to follow the rate of eviction: ``STEPS_AHEAD`` times the most
    that one recent step evicted (a peak that fades by 1/32 a step that evicts), and a quarter more
    after each step in which an eviction waited for a copy, taken back by 1/64 a step without.
    ``least``: tokens of the smaller of the two tiers, which bounds it either way.
    """

    def __init__(self, fixed: int | None, least: int) -> None:
        self.fixed = fixed
        self.ceiling = max(1, int(least * (CEILING_SHARE if fixed is None else 2 * CEILING_SHARE)))
        self._floor = max(1, int(least * FLOOR_SHARE))
        self._peak = 0
        self._margin = _ONE
        self._evicted = 0
        self._waited = False

    @property
    def tokens(self) -> int:
        """How many tokens to have copied ahead now."""
        if self.fixed is not None:
            return min(self.fixed, self.ceiling)
        wanted = STEPS_AHEAD * self._peak * self._margin // _ONE
        return min(max(wanted, self._floor), self.ceiling)

    def evicted(self, tokens: int) -> None:
        """So many tokens left the device."""
        self._evicted += tokens

    def waited(self) -> None:
        """An eviction waited for a copy."""
        self._waited = True

    def step(self) -> None:
        """A scheduling step is over."""
        if self._evicted:
            self._peak = max(self._evicted, self._peak - self._peak // 32)
            change = _ONE // 4 if self._waited else -1
            self._margin = min(max(self._margin + change, _ONE), _MOST)
        self._evicted, self._waited = 0, False


def lowest_ranked(
    policy: Policy,
    tokens: int,
    now: float,
    exposed: Callable[[Leaf, set[Leaf]], Leaf | None],
) -> list[Victim]:
    """The victims in the order in which ``policy`` would name them, ``tokens`` of them in all.

    Every leaf is with the policy again afterwards. ``exposed(leaf, gone)`` is the leaf that
    becomes evictable, and is not admitted, once those in ``gone`` have left, ``leaf`` the last of
    them; ``None`` where there is none.
    """
    victims: list[Victim] = []
    gone: set[Leaf] = set()
    lent: set[Leaf] = set()
    try:
        while tokens > 0:
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
