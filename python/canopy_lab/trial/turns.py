"""The turns of a trial: which policy runs when, and what each slice hit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from canopy_lab.trial.stopping import Standing, standing
from sglang_canopy.errors import CanopyError

SETTLES = 0.5
"""Share of a slice that is left out: what is cached then was chosen by the other policy."""
MOST_EMPTY = 10
"""Slices in a row without a request, after which a trial is given up."""


class Counts(NamedTuple):
    """A server's, since its start."""

    prompt_tokens: int
    hit_tokens: int
    running: str
    """The policy that ranks."""
    sampled_tokens: int = 0
    """Prompt tokens of which its meter knows what its shadow cache under LRU hits, ``lru_tokens``;
    0 without a meter."""
    lru_tokens: int = 0


class TrialServer(Protocol):
    """What a trial needs of a server."""

    def counts(self) -> Counts: ...

    def exchange(self, policy: str) -> None:
        """Let ``policy`` rank from now on."""


class Slice(NamedTuple):
    """Shares (0 to 1) of the prompt tokens of one slice."""

    hit: float
    lru: float
    """What the shadow cache under LRU hit of the same requests; 0 without a meter."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two slices that followed each other, and what all pairs say so far.

    What is compared is what each hit *more than the shadow cache* did: requests that hit much or
    little under any policy are in both, and their luck drops out (a control variate).
    """

    policy: Slice
    against: Slice
    so_far: Standing | None
    """``None`` after the first pair."""

    @property
    def points(self) -> float:
        ours, theirs = (one.hit - one.lru for one in (self.policy, self.against))
        return 100 * (ours - theirs)


def pairs(
    server: TrialServer,
    policy: str,
    against: str,
    slice_s: float,
    wait: Callable[[float], object],
    seed: int = 0,
) -> Iterator[Pair]:
    """Pair after pair, until one's ``so_far`` has a verdict. ``wait`` takes seconds.

    Raises ``CanopyError`` where the server ranks by another policy than it was asked for, or has no
    requests.
    """
    draw, differences = random.Random(seed), list[float]()
    while True:
        turn = [(True, policy), (False, against)]
        draw.shuffle(turn)
        found = {first: _slice(server, name, slice_s, wait) for first, name in turn}
        pair = Pair(found[True], found[False], None)
        differences.append(pair.points)
        if len(differences) > 1:
            pair = Pair(found[True], found[False], standing(differences))
        yield pair
        if pair.so_far is not None and pair.so_far.verdict is not None:
            return


def _slice(
    server: TrialServer, policy: str, slice_s: float, wait: Callable[[float], object]
) -> Slice:
    server.exchange(policy)
    wait(SETTLES * slice_s)
    before = server.counts()
    for _ in range(MOST_EMPTY):
        wait((1 - SETTLES) * slice_s)
        after = server.counts()
        if after.running != policy:
            raise CanopyError(
                f"the server ranks by {after.running} in place of {policy}; start it with "
                "--canopy-whatif auto,floor=off for a trial, and let nobody else exchange policies"
            )
        if after.prompt_tokens > before.prompt_tokens:
            return Slice(
                _share(
                    after.hit_tokens - before.hit_tokens, after.prompt_tokens - before.prompt_tokens
                ),
                _share(
                    after.lru_tokens - before.lru_tokens,
                    after.sampled_tokens - before.sampled_tokens,
                ),
            )
    raise CanopyError("no request ended for a long while; a trial needs traffic, or longer slices")


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
