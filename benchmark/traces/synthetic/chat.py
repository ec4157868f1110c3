"""Conversations of people: the generator behind ``trace-a`` and ``small``.

Every conversation lies completely inside the trace, like nearly all conversations in the day that
the paper analyses, so that the published statistics hold for a trace of any length. A window of
running traffic, like the public two-hour samples, begins with later turns of conversations whose
first turns are missing, which lowers its ideal hit ratio.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Iterator
from random import Random

from synthetic.blocks import DrawnRequest, GrowingPrompt, SharedPrompts
from synthetic.draw import TOKENS_PER_S, choose, cumulate, draw_tokens
from synthetic.presets import LONGEST_CONVERSATION, ChatKind, ChatLoad

_THINNING = 5.0
"""Candidate conversations per accepted one; none lasts longer than 4/5 of the trace."""

_LOST = 1.02
"""Makes up for the later turns of conversations too long for the trace (calibrated: a day)."""


def continue_probability(kind: ChatKind, tail: tuple[float, float], turn: int) -> float:
    """Return the probability of a turn after ``turn``.

    From turn 2 on it is 1 - a / (turn + b): long conversations continue more often, and the turn
    number has a power-law tail (Figure 9). For turn 1 it is what makes the share of later
    turns equal to the kind's multi-turn ratio.
    """
    a, b = tail
    if turn > 1:
        return 1.0 - a / (turn + b)
    later_turns = _later_turns(a, b)
    mean_turns = 1.0 / (1.0 - kind.multi_turn_ratio)
    return _LOST * (mean_turns - 1.0) / later_turns


@functools.cache
def _later_turns(a: float, b: float) -> float:
    """Mean number of turns after the first of the conversations that have any."""
    mean, alive = 0.0, 1.0
    for turn in range(2, LONGEST_CONVERSATION + 1):
        mean += alive
        alive *= 1.0 - a / (turn + b)
    return mean


class _Turn:
    __slots__ = ("added", "output", "time_s")

    def __init__(self, time_s: float, added: int, output: int) -> None:
        self.time_s, self.added, self.output = time_s, added, output


class _Conversation:
    """The rest of a conversation, and its prompt so far."""

    __slots__ = ("kind", "name", "prompt", "turn", "turns", "user")

    def __init__(
        self, name: int, user: int, kind: ChatKind, prompt: GrowingPrompt, turns: list[_Turn]
    ) -> None:
        self.name, self.user, self.kind, self.prompt, self.turns = name, user, kind, prompt, turns
        self.turn = 0


class ChatSource:
    """Draws the conversations of a load; iterate it once."""

    def __init__(self, load: ChatLoad, seconds: float, rng: Random, ids: itertools.count) -> None:
        self.load, self.seconds, self.rng, self.ids = load, seconds, rng, ids
        self.prompts = SharedPrompts(
            ids, [draw_tokens(rng, load.prompt_tokens) for _ in range(load.prompt_count)]
        )
        self._prompt_steps = cumulate([1.0 / (i + 1) for i in range(load.prompt_count)])
        self._user_steps = cumulate(
            [math.exp(rng.gauss(0.0, load.user_sigma)) for _ in range(load.users)]
        )
        # A kind's share of conversations: its share of requests over its mean turns.
        self._kind_steps = cumulate(
            [k.request_share * (1.0 - k.multi_turn_ratio) for k in load.kinds]
        )

    def __iter__(self) -> Iterator[DrawnRequest]:
        load, rng = self.load, self.rng
        starts_per_s = load.requests_per_s * sum(
            k.request_share * (1.0 - k.multi_turn_ratio) for k in load.kinds
        )
        running: list[tuple[float, int, _Conversation]] = []
        names = itertools.count()
        start = rng.expovariate(starts_per_s * _THINNING)
        while start < self.seconds:
            while running and running[0][0] <= start:
                yield self._serve(running)
            if (conversation := self._draw(start, names)) is not None:
                heapq.heappush(running, (start, conversation.name, conversation))
            start += rng.expovariate(starts_per_s * _THINNING)
        while running:
            yield self._serve(running)

    def _draw(self, start: float, names: itertools.count) -> _Conversation | None:
        """A conversation from ``start`` on, or ``None`` if it is thinned out.

        Accepting one that lasts D with the probability (S / (S - D)) / 5 leaves the mix of
        conversations as it would be in an endless trace, although none may pass the end S.
        """
        load, rng = self.load, self.rng
        kind = load.kinds[choose(rng, self._kind_steps)]
        turns = self._turns(kind, start)
        lasts = turns[-1].time_s - start
        room = self.seconds - lasts
        if room * _THINNING < self.seconds or start > room:
            return None
        if rng.random() * _THINNING * room >= self.seconds:
            return None
        shared = None
        if rng.random() < load.shared_prompt_share:
            shared = self.prompts[choose(rng, self._prompt_steps)]
        user = choose(rng, self._user_steps)
        return _Conversation(next(names), user, kind, GrowingPrompt(self.ids, shared), turns)

    def _turns(self, kind: ChatKind, start: float) -> list[_Turn]:
        load, rng = self.load, self.rng
        count = 1
        while count < LONGEST_CONVERSATION and rng.random() < continue_probability(
            kind, load.tail, count
        ):
            count += 1
        scale = math.exp(rng.gauss(0.0, load.session_sigma)) * count**-load.length_decay
        pause = load.away_s if rng.random() < load.away_share else kind.think_s
        first = draw_tokens(rng, kind.first)
        if rng.random() < load.long_first_share:
            first = round(first * rng.uniform(1.5, 5.0))
        output = max(1, round(first * kind.output_share))
        document = draw_tokens(rng, kind.document) if kind.document else 0
        turns = [_Turn(start, first + document, output)]
        for turn in range(1, count):
            time_s = turns[-1].time_s + turns[-1].output / TOKENS_PER_S
            slower = load.slow_factor if turn >= load.slow_from else 1.0
            added = max(2, round(draw_tokens(rng, kind.later) * scale))
            output = max(1, round(added * kind.output_share))
            turns.append(_Turn(time_s + rng.expovariate(1.0 / (slower * pause)), added, output))
        return turns

    def _serve(self, running: list[tuple[float, int, _Conversation]]) -> DrawnRequest:
        time_s, _, conversation = heapq.heappop(running)
        turn = conversation.turns[conversation.turn]
        conversation.turn += 1
        # This prompt contains the last turn's output; the next prompt contains this turn's.
        prompt = conversation.prompt
        asked = turn.added - turn.output
        if prompt.tokens + asked > self.load.context_tokens:
            prompt.drop_oldest(self.load.context_tokens // 4)
        prompt.extend(asked)
        request = DrawnRequest(
            time_s, prompt.tokens, turn.output, prompt.blocks(), conversation.kind.name,
            conversation.turn, conversation.name, conversation.user, conversation.turn < len(conversation.turns),
        )  # fmt: skip
        prompt.extend(turn.output)
        if conversation.turn < len(conversation.turns):
            heapq.heappush(
                running,
                (conversation.turns[conversation.turn].time_s, conversation.name, conversation),
            )
        return request
