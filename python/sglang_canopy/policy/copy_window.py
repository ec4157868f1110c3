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
"""Steps that the window covers. A wider one costs the host what it holds twice, a narrower one has
evictions wait (benchmark/latency/copies.py)."""
LOOKED_AHEAD = 128
"""Requests of the queue, the first, whose tokens are added up for what enters next."""
_ONE, _MOST = 64, 256
"""The margin in 64ths: once and four times what was seen."""
_FADE = 16
"""A large step is forgotten after so many times its tokens, however many steps they come in."""


class CopyWindow:
    """Tokens next in line for eviction that should have a copy below already.

    ``fixed``: tokens, or ``None`` to follow what enters: ``STEPS_AHEAD`` times the most that one
    recent step took from the device, whether it evicted or not, and a quarter more after each step
    in which an eviction waited for a copy, taken back by 1/64 a step without; never less than what
    is known to enter next. ``least``: tokens of the smaller of the two tiers, which bounds it
    either way.
    """

    def __init__(self, fixed: int | None, least: int) -> None:
        self.fixed = fixed
        self.ceiling = max(1, int(least * (CEILING_SHARE if fixed is None else 2 * CEILING_SHARE)))
        self._floor = max(1, int(least * FLOOR_SHARE))
        self._peak = 0
        self._due = 0
        self._margin = _ONE
        self._free: int | None = None
        self._evicted = 0
        self._waited = False

    @property
    def tokens(self) -> int:
        """How many tokens are to be free or copied ahead now."""
        if self.fixed is not None:
            return min(self.fixed, self.ceiling)
        wanted = max(STEPS_AHEAD * self._peak * self._margin // _ONE, self._due, self._floor)
        return min(wanted, self.ceiling)

    @property
    def batch(self) -> int:
        """Tokens to copy at once: half the window, or what one step takes if that is more."""
        return min(max(self.tokens // 2, self._peak, self._due, 1), self.tokens)

    def lacks(self, free: int, covered: int) -> bool:
        """Whether copies are to be made, ``free`` tokens of the device being free and ``covered``
        copied: with less than three quarters of the window, or too few for what enters next."""
        have = free + covered
        return 4 * covered < 3 * (self.tokens - free) or have < min(self._due, self.tokens)

    def scarce(self, free: int, covered: int) -> bool:
        """Whether hardly a copy is left, so that loads from the host are no reason to wait."""
        return 4 * covered < self.tokens - free or free + covered < min(self._due, self.tokens)

    def evicted(self, tokens: int) -> None:
        """So many tokens left the device."""
        self._evicted += tokens

    def waited(self) -> None:
        """An eviction waited for a copy."""
        self._waited = True

    def step(self, free: int, due: int = 0) -> None:
        """A scheduling step is over: ``free`` tokens of the device are free, and requests that wait
        or are half computed are known to take ``due`` in the next steps."""
        self._due = due
        entered = 0 if self._free is None else self._free + self._evicted - free
        if entered > 0:
            self._peak = max(entered, self._peak - -(-entered // _FADE))
            change = _ONE // 4 if self._waited else -1
            self._margin = min(max(self._margin + change, _ONE), _MOST)
        self._free, self._evicted, self._waited = free, 0, False


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
