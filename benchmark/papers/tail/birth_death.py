"""Conversations that begin and end at random: the paper's stochastic model.

The model of arXiv 2510.15152, Section 5, that its Appendix F gives ShareGPT its arrival times
with. Conversations begin as a Poisson process of rate ``conversations_per_s`` and last an
exponential time of rate ``ends_per_s``; while one lasts, its turns are a Poisson process of rate
``turns_per_s``; lengths are drawn independently of all that. So, in closed form:

- conversations under way: Poisson with mean ``conversations_per_s / ends_per_s``;
- requests: ``turns_per_s`` times that, a second;
- a turn is followed by another with probability ``turns_per_s / (turns_per_s + ends_per_s)``, and
  then after an exponential time of rate ``turns_per_s + ends_per_s``;
- what has been silent for t seconds is still under way with probability
  ``still_under_way(load, t)``.

The trace starts in the steady state; conversations active at its start count as new.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from synthetic.blocks import DrawnRequest, Prompt
from synthetic.draw import draw_tokens
from synthetic.presets import Lengths, Preset
from synthetic.trace import SOURCES

from sglang_canopy.errors import CanopyError


@dataclass(frozen=True, slots=True)
class BirthDeathLoad:
    """Conversations as a birth-death process (arXiv 2510.15152, Section 5); rates in 1/s."""

    conversations_per_s: float
    """lambda_conv: rate of new conversations."""
    ends_per_s: float
    """mu: one over the mean time that a conversation lasts."""
    turns_per_s: float
    """lambda_i, equal for all: turns of an active conversation."""
    prompt: Lengths
    """Tokens that a turn adds before its answer (Q)."""
    answer: Lengths

    @property
    def requests_per_s(self) -> float:
        """Mean requests per second of all active conversations."""
        return self.turns_per_s * self.conversations_per_s / self.ends_per_s

    def __post_init__(self) -> None:
        for name in ("conversations_per_s", "ends_per_s", "turns_per_s"):
            rate = getattr(self, name)
            if not 0 < rate <= 10_000:
                raise CanopyError(
                    f"{name} must lie above 0 and be at most 10000, got {rate}; it is a rate in 1/s"
                )


LOAD = BirthDeathLoad(
    conversations_per_s=0.5,  # assumption: the paper gives no rates; these make 1.5 requests/s
    ends_per_s=1 / 180,  # assumption
    turns_per_s=1 / 60,  # assumption: 4 turns per conversation with turns
    prompt=Lengths(90, 1.25),  # mean 197 tokens; the paper plans with 200, WildChat's mean
    answer=Lengths(220, 0.9),  # assumption
)


def still_under_way(load: BirthDeathLoad, silent_s: float) -> float:
    """Return P(the conversation is active | no turn for ``silent_s`` seconds after the last).

    By Bayes' rule: silence is more likely after the end of a conversation, so this is below
    exp(-mu t), the paper's belief (Section 5), which ignores the silence. With one rate of turns
    for all conversations, both order them by silence; with several rates the orders can differ.
    """
    turns, ends = load.turns_per_s, load.ends_per_s
    alive_and_silent = math.exp(-(turns + ends) * silent_s)
    ended = ends / (turns + ends) * -math.expm1(-(turns + ends) * silent_s)
    return alive_and_silent / (alive_and_silent + ended)


class _Conversation:
    """Times of the remaining turns, last first, and the prompt so far."""

    __slots__ = ("name", "prompt", "times_s", "turn")

    def __init__(self, name: int, times_s: list[float], prompt: Prompt) -> None:
        self.name, self.times_s, self.prompt = name, times_s, prompt
        self.turn = 0


_Running = list[tuple[float, int, _Conversation]]
"""A heap by the time of the next turn."""


class BirthDeathSource:
    """Draws the conversations of a load; iterate it once."""

    def __init__(
        self, load: BirthDeathLoad, seconds: float, rng: Random, ids: itertools.count
    ) -> None:
        self.load, self.seconds, self.rng, self.ids = load, seconds, rng, ids

    def __iter__(self) -> Iterator[DrawnRequest]:
        load, rng = self.load, self.rng
        running: _Running = []
        names = itertools.count()
        # A Poisson number of conversations at time 0: arrivals of rate 1 within that mean.
        mean, drawn = load.conversations_per_s / load.ends_per_s, rng.expovariate(1.0)
        while drawn < mean:
            self._begin(0.0, next(names), running)
            drawn += rng.expovariate(1.0)
        start = rng.expovariate(load.conversations_per_s)
        while start < self.seconds:
            while running and running[0][0] <= start:
                yield self._serve(running)
            self._begin(start, next(names), running)
            start += rng.expovariate(load.conversations_per_s)
        while running:
            yield self._serve(running)

    def _begin(self, start: float, name: int, running: _Running) -> None:
        """Draw the times of a conversation's turns. A conversation without turns leaves no trace."""
        load, rng = self.load, self.rng
        end = min(start + rng.expovariate(load.ends_per_s), self.seconds)
        times = []
        time_s = start + rng.expovariate(load.turns_per_s)
        while time_s < end:
            times.append(time_s)
            time_s += rng.expovariate(load.turns_per_s)
        if times:
            times.reverse()
            talk = _Conversation(name, times, Prompt(self.ids))
            heapq.heappush(running, (times[-1], name, talk))

    def _serve(self, running: _Running) -> DrawnRequest:
        time_s, name, talk = heapq.heappop(running)
        talk.times_s.pop()
        talk.turn += 1
        prompt, more = talk.prompt, bool(talk.times_s)
        prompt.extend(draw_tokens(self.rng, self.load.prompt))
        answer = draw_tokens(self.rng, self.load.answer)
        request = DrawnRequest(
            time_s, prompt.tokens, answer, prompt.blocks(), "text", talk.turn, name, name, more
        )
        prompt.extend(answer)
        if more:
            heapq.heappush(running, (talk.times_s[-1], name, talk))
        return request


SOURCES[BirthDeathLoad] = BirthDeathSource


def birth_death(**rates: Any) -> Preset:
    """Return the load with the given rates. Raises ``CanopyError``."""
    about = "conversations that begin, go on and end at random rates"
    return Preset("birth-death", replace(LOAD, **rates), about)
