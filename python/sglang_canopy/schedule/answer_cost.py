"""Seconds of a server that an answer takes while it is decoded.

An answer of n tokens holds a place in the running batch, and KV of its whole context, for n steps of
s seconds. It is charged the larger share:

    n s max(1 / places, (prompt + n) / pool)

n is SGLang's estimate: ``max_new_tokens``, clipped, times the part that finished answers used.
"""

from __future__ import annotations

import statistics
from collections import deque

from sglang_canopy.schedule.prefill_cost import Prefill, PrefillCost

STEPS = 256
"""Latest decode steps in the median."""
ANSWERS = 256
"""Latest answers in the used part of their reservations."""
MIN_ANSWERS = 8


class AnswerCost:
    """Price of answers. Only ``adopt`` changes it; ranks that adopt equal values agree."""

    def __init__(self, places: int, pool_tokens: int) -> None:
        """``places``: most running requests. ``pool_tokens``: KV on the device."""
        self.places = places
        self.pool_tokens = pool_tokens
        self.step_s = 0.0
        """Seconds of a decode step; 0, which makes answers free, before the first is adopted."""
        self.used = 1.0
        """Part of the reserved tokens that answers generate."""
        self._steps: deque[float] = deque(maxlen=STEPS)
        self._answers: deque[tuple[int, int]] = deque(maxlen=ANSWERS)

    def stepped(self, seconds: float) -> None:
        """Record the duration of a batch that only decoded."""
        self._steps.append(seconds)

    def finished(self, reserved: int, generated: int) -> None:
        """Record the tokens of a finished answer. Call in equal order on all ranks."""
        if reserved > 0:
            self._answers.append((reserved, generated))

    def measured_s(self) -> float:
        """Return the median decode step of this rank, 0 without one."""
        return statistics.median(self._steps) if self._steps else 0.0

    def adopt(self, step_s: float) -> None:
        """Set the price, with the first rank's ``step_s``."""
        self.step_s = step_s
        if len(self._answers) >= MIN_ANSWERS:
            reserved, generated = map(sum, zip(*self._answers, strict=True))
            self.used = generated / reserved

    def seconds(self, prompt: int, reserved: int) -> float:
        """Return the cost of an answer to ``prompt`` tokens, for which ``reserved`` are reserved."""
        answer = self.used * reserved
        share = max(1.0 / self.places, (prompt + answer) / self.pool_tokens)
        return answer * self.step_s * min(share, 1.0)


class ServerCost:
    """Cost of a request: its prefill and its answer."""

    def __init__(self, prefill: PrefillCost, answers: AnswerCost) -> None:
        self._prefill = prefill
        self._answers = answers

    def seconds(self, request: Prefill) -> float:
        prompt = request.cached + request.uncached
        return self._prefill.seconds(request) + self._answers.seconds(prompt, request.reserved)
