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
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from synthetic.blocks import DrawnRequest, GrowingPrompt, SharedPrompts
from synthetic.draw import OUTPUT_TOKENS_PER_S, choose_index, cumulate, draw_tokens
from synthetic.presets import MAX_TURNS, ChatKind, ChatLoad

_CANDIDATES_PER_CONVERSATION = 5.0
"""Conversations drawn for each accepted one; none lasts longer than 4/5 of the trace."""

_LOST_TURNS_FACTOR = 1.02
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
    return _LOST_TURNS_FACTOR * (mean_turns - 1.0) / later_turns


@functools.cache
def _later_turns(a: float, b: float) -> float:
    """Mean number of turns after the first of the conversations that have any."""
    mean, surviving_share = 0.0, 1.0
    for turn in range(2, MAX_TURNS + 1):
        mean += surviving_share
        surviving_share *= 1.0 - a / (turn + b)
    return mean


class _Turn(NamedTuple):
    time_s: float
    added_tokens: int
    """Tokens that the turn adds, prompt and output together."""
    output_tokens: int


@dataclass(slots=True)
class _Conversation:
    """A conversation's turns, and its prompt up to those drawn."""

    number: int
    user: int
    kind: ChatKind
    prompt: GrowingPrompt
    turns: list[_Turn]
    turns_drawn: int = 0


class ChatSource:
    """Draws the conversations of a load; iterate it once."""

    def __init__(self, load: ChatLoad, trace_s: float, rng: Random, ids: itertools.count) -> None:
        self.load, self.trace_s, self.rng, self.ids = load, trace_s, rng, ids
        self.prompts = SharedPrompts(
            ids, [draw_tokens(rng, load.prompt_tokens) for _ in range(load.prompt_count)]
        )
        self._prompt_weights = cumulate([1.0 / (i + 1) for i in range(load.prompt_count)])
        activities = [math.exp(rng.gauss(0.0, load.user_sigma)) for _ in range(load.users)]
        self._user_weights = cumulate(activities)
        # A kind's share of conversations: its share of requests over its mean turns.
        shares = [kind.request_share * (1.0 - kind.multi_turn_ratio) for kind in load.kinds]
        self._kind_weights = cumulate(shares)

    def __iter__(self) -> Iterator[DrawnRequest]:
        load, rng = self.load, self.rng
        starts_per_s = load.requests_per_s * sum(
            k.request_share * (1.0 - k.multi_turn_ratio) for k in load.kinds
        )
        running: list[tuple[float, int, _Conversation]] = []
        numbers = itertools.count()
        start_s = rng.expovariate(starts_per_s * _CANDIDATES_PER_CONVERSATION)
        while start_s < self.trace_s:
            while running and running[0][0] <= start_s:
                yield self._draw_next_request(running)
            if (conversation := self._draw_conversation(start_s, numbers)) is not None:
                heapq.heappush(running, (start_s, conversation.number, conversation))
            start_s += rng.expovariate(starts_per_s * _CANDIDATES_PER_CONVERSATION)
        while running:
            yield self._draw_next_request(running)

    def _draw_conversation(self, start_s: float, numbers: itertools.count) -> _Conversation | None:
        """Return a conversation from ``start_s`` on, or ``None`` if the candidate is rejected.

        Accepting one that lasts D with the probability (S / (S - D)) / 5 leaves the mix of
        conversations as it would be in an endless trace, although none may pass the end S.
        """
        load, rng = self.load, self.rng
        kind = load.kinds[choose_index(rng, self._kind_weights)]
        turns = self._draw_turns(kind, start_s)
        duration_s = turns[-1].time_s - start_s
        latest_start_s = self.trace_s - duration_s
        if latest_start_s * _CANDIDATES_PER_CONVERSATION < self.trace_s or start_s > latest_start_s:
            return None
        if rng.random() * _CANDIDATES_PER_CONVERSATION * latest_start_s >= self.trace_s:
            return None
        shared = None
        if rng.random() < load.shared_prompt_share:
            shared = self.prompts[choose_index(rng, self._prompt_weights)]
        user = choose_index(rng, self._user_weights)
        return _Conversation(next(numbers), user, kind, GrowingPrompt(self.ids, shared), turns)

    def _draw_turns(self, kind: ChatKind, start_s: float) -> list[_Turn]:
        load, rng = self.load, self.rng
        turn_count = 1
        while turn_count < MAX_TURNS and rng.random() < continue_probability(
            kind, load.tail, turn_count
        ):
            turn_count += 1
        stretch = math.exp(rng.gauss(0.0, load.session_sigma)) * turn_count**-load.length_decay
        pause_s = load.away_s if rng.random() < load.away_share else kind.think_s
        first_tokens = draw_tokens(rng, kind.first_tokens)
        if rng.random() < load.long_first_share:
            first_tokens = round(first_tokens * rng.uniform(1.5, 5.0))
        output_tokens = max(1, round(first_tokens * kind.output_share))
        document_tokens = draw_tokens(rng, kind.document_tokens) if kind.document_tokens else 0
        turns = [_Turn(start_s, first_tokens + document_tokens, output_tokens)]
        for turn in range(1, turn_count):
            time_s = turns[-1].time_s + turns[-1].output_tokens / OUTPUT_TOKENS_PER_S
            pause_factor = load.slow_factor if turn >= load.slow_from_turn else 1.0
            added_tokens = max(2, round(draw_tokens(rng, kind.later_tokens) * stretch))
            output_tokens = max(1, round(added_tokens * kind.output_share))
            time_s += rng.expovariate(1.0 / (pause_factor * pause_s))
            turns.append(_Turn(time_s, added_tokens, output_tokens))
        return turns

    def _draw_next_request(self, running: list[tuple[float, int, _Conversation]]) -> DrawnRequest:
        time_s, _, conversation = heapq.heappop(running)
        turn = conversation.turns[conversation.turns_drawn]
        conversation.turns_drawn += 1
        # This prompt contains the last turn's output; the next prompt contains this turn's.
        prompt = conversation.prompt
        asked_tokens = turn.added_tokens - turn.output_tokens
        if prompt.tokens + asked_tokens > self.load.context_tokens:
            prompt.drop_oldest(self.load.context_tokens // 4)
        prompt.extend(asked_tokens)
        request = DrawnRequest(
            time_s, prompt.tokens, turn.output_tokens, prompt.blocks(), conversation.kind.name,
            conversation.turns_drawn, conversation.number, conversation.user, conversation.turns_drawn < len(conversation.turns),
        )  # fmt: skip
        prompt.extend(turn.output_tokens)
        if conversation.turns_drawn < len(conversation.turns):
            next_s = conversation.turns[conversation.turns_drawn].time_s
            heapq.heappush(running, (next_s, conversation.number, conversation))
        return request
