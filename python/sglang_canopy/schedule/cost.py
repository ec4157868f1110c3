"""Cost of a request in seconds of a server: its prefill and its answer, fitted online.

A batch of prefills takes

    base + a u + b u (p + u / 2) + c l

for ``u`` uncached tokens after ``p`` cached ones, ``l`` of them loaded from below the device. The
terms are the matrix multiplications, attention over the preceding tokens, and the copy; the linear
part is the latency model of arXiv 2510.15152. ``base`` is paid per step; a request is charged in
proportion to its share of the step's tokens.

An answer of n tokens is one of the ``max_running`` requests, and holds KV of its whole context, for n steps
of s seconds. It is charged the larger share:

    n s max(1 / max_running, (prompt + n) / pool)

n is SGLang's estimate: ``max_new_tokens``, clipped, times the part that finished answers used.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from scipy.optimize import nnls

FIT_BATCHES = 256
"""Number of the latest batches used in a fit."""
REFIT_BATCHES = 32
"""Batches between fits."""
MIN_FIT_BATCHES = 8
"""Batches required for the first fit."""
PRIOR_COEFFICIENTS = (0.0, 1e-4, 0.0, 0.0)
"""Coefficients before the first fit: 10,000 tokens/s. Only ratios of costs matter until then."""
MIN_COST_S = 1e-6
"""Minimum cost of a request, so that ratios are finite. Batches faster than this are ignored."""
MAX_BATCH_S = 3600.0
"""Batches slower than this are ignored."""
DEFAULT_STEP_TOKENS = 8192
"""Default token limit of a step (SGLang's ``--chunked-prefill-size``)."""


@dataclass(slots=True, frozen=True)
class Prefill:
    """One request's part of a prefill, in tokens."""

    uncached: int
    """Tokens to compute."""
    cached: int = 0
    """Preceding tokens whose KV is cached."""
    loaded: int = 0
    """Cached tokens to load from below the device."""
    reserved: int = 0
    """Tokens that SGLang reserves for its answer."""


Coefficients = tuple[float, float, float, float]


class Cost(Protocol):
    def seconds(self, request: Prefill) -> float:
        """Return the work that ``request`` adds to a queue, in seconds, above 0."""


class PrefillCost:
    """Non-negative least squares on relative errors over the latest batches.

    Relative errors weigh short and long batches alike and limit outliers (a compilation, a page
    fault), whose rows are nearly zero. Only ``adopt`` changes ``coefficients``: if ranks must agree, all
    adopt those of one rank.
    """

    def __init__(self, step_tokens: int = DEFAULT_STEP_TOKENS) -> None:
        self.step_tokens = step_tokens
        self.coefficients: Coefficients = PRIOR_COEFFICIENTS
        """Seconds per batch, token, token pair and loaded token."""
        self._batches: deque[tuple[float, float, float, float, float]] = deque(maxlen=FIT_BATCHES)

    def record_batch(self, batch: Iterable[Prefill], seconds: float) -> None:
        """Record the duration of a batch, unless it is implausible."""
        if not MIN_COST_S <= seconds <= MAX_BATCH_S:
            return
        uncached = pairs = loaded = 0.0
        for prefill in batch:
            uncached += prefill.uncached
            pairs += _pairs(prefill)
            loaded += prefill.loaded
        if uncached > 0:
            self._batches.append((1.0, uncached, pairs, loaded, seconds))

    def fit(self) -> Coefficients:
        """Fit the latest batches; return zeros if there are too few."""
        if len(self._batches) < MIN_FIT_BATCHES:
            return 0.0, 0.0, 0.0, 0.0
        batches = np.array(self._batches)
        seconds = batches[:, 4]
        features = batches[:, :4] / seconds[:, None]
        feature_norms = np.linalg.norm(features, axis=0)
        feature_norms[feature_norms == 0.0] = 1.0
        solution, _ = nnls(features / feature_norms, np.ones(len(batches)))
        base, token, pair, loaded = map(float, solution / feature_norms)
        return base, token, pair, loaded

    def adopt(self, coefficients: Coefficients) -> None:
        """Set the coefficients. A fit that makes prefill free is ignored."""
        if sum(coefficients[:3]) > 0.0:
            self.coefficients = coefficients

    def seconds(self, request: Prefill) -> float:
        """Return the cost, with ``base`` in proportion to the tokens; at least ``MIN_COST_S``.

        Short prompts share a step; long prompts need several.
        """
        base, token, pair, load = self.coefficients
        linear = (base / self.step_tokens + token) * request.uncached + load * request.loaded
        return max(linear + pair * _pairs(request), MIN_COST_S)


def _pairs(request: Prefill) -> float:
    """Count the pairs of computed and attended tokens: u (p + u / 2)."""
    return request.uncached * (request.cached + request.uncached / 2)


MEDIAN_STEPS = 256
"""Number of the latest decode steps in the median."""
MEASURED_ANSWERS = 256
"""Number of the latest answers in ``used_share``."""
MIN_ANSWERS = 8


class AnswerCost:
    """Price of answers. Only ``adopt`` changes it; ranks that adopt equal values agree."""

    def __init__(self, max_running: int, pool_tokens: int) -> None:
        """``max_running``: most running requests. ``pool_tokens``: capacity of the KV pool."""
        self.max_running = max_running
        self.pool_tokens = pool_tokens
        self.step_s = 0.0
        """Seconds of a decode step; 0, which makes answers free, before the first is adopted."""
        self.used_share = 1.0
        """Share of their reserved tokens that answers generate."""
        self._step_seconds: deque[float] = deque(maxlen=MEDIAN_STEPS)
        self._answer_lengths: deque[tuple[int, int]] = deque(maxlen=MEASURED_ANSWERS)
        """Reserved and generated tokens."""

    def record_step(self, seconds: float) -> None:
        """Record the duration of a batch that only decoded."""
        self._step_seconds.append(seconds)

    def record_answer(self, reserved: int, generated: int) -> None:
        """Record the tokens of a finished answer. Call in equal order on all ranks."""
        if reserved > 0:
            self._answer_lengths.append((reserved, generated))

    def median_step_s(self) -> float:
        """Return the median decode step of this rank, 0 without one."""
        return statistics.median(self._step_seconds) if self._step_seconds else 0.0

    def adopt(self, step_s: float) -> None:
        """Set the price, with the first rank's ``step_s``."""
        self.step_s = step_s
        if len(self._answer_lengths) >= MIN_ANSWERS:
            reserved, generated = map(sum, zip(*self._answer_lengths, strict=True))
            self.used_share = generated / reserved

    def seconds(self, prompt_tokens: int, reserved: int) -> float:
        """Return the cost of an answer to a prompt, for which ``reserved`` tokens are reserved."""
        answer_tokens = self.used_share * reserved
        pool_share = (prompt_tokens + answer_tokens) / self.pool_tokens
        server_share = min(max(1.0 / self.max_running, pool_share), 1.0)
        return answer_tokens * self.step_s * server_share


class ServerCost:
    """Cost of a request: its prefill and its answer."""

    def __init__(self, prefill: PrefillCost, answers: AnswerCost) -> None:
        self._prefill = prefill
        self._answers = answers

    def seconds(self, request: Prefill) -> float:
        answer_s = self._answers.seconds(request.cached + request.uncached, request.reserved)
        return self._prefill.seconds(request) + answer_s
