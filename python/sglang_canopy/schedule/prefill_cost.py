"""Seconds that a prefill takes, fitted online from the batches that an engine ran.

TTFT ~ ``base + a u + b u (p + u / 2) + c l``: ``u`` tokens computed, after ``p`` tokens that are
cached, of which ``l`` are loaded from below the device. The second term is the layers' matrices,
the third attention over what is before each token, the last the copy. The linear part is the
latency model of arXiv 2510.15152. ``base`` is a step's, which takes a whole budget of tokens: a
request is ranked by what it adds to the queue, with its share of a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from scipy.optimize import nnls

BATCHES = 256
"""Batches that the fit goes over: the last ones."""
REFIT_BATCHES = 32
"""Batches between two fits."""
FEWEST_BATCHES = 8
"""Batches before there is a fit."""
PRIOR = (0.0, 1e-4, 0.0, 0.0)
"""What is taken before: 10,000 tokens a second. Until then only proportions matter."""
LEAST_S = 1e-6
"""No request costs less, so that every ratio is finite; no batch took less, nor more than ``MOST_S``."""
MOST_S = 3600.0
STEP_TOKENS = 8192
"""Tokens that one step takes where nothing else is said (SGLang's ``--chunked-prefill-size``)."""


@dataclass(slots=True, frozen=True)
class Prefill:
    """One request's part of a prefill, in tokens."""

    uncached: int
    """To compute."""
    cached: int = 0
    """Before them, whose KV is there."""
    loaded: int = 0
    """Of the cached ones, those below the device."""


Coefficients = tuple[float, float, float, float]


class Cost(Protocol):
    """Tells what a request costs."""

    def seconds(self, request: Prefill) -> float:
        """What ``request`` adds to a queue's work, in seconds, above 0."""


class PrefillCost:
    """Non-negative least squares of relative errors over the last batches.

    Relative errors let short and long batches count alike, and bound what one slow batch (a
    compilation, a page fault) can do: its row is nearly zero. ``coefficients`` change in ``refit``
    and ``adopt`` alone: where several ranks must agree, all adopt those of one.
    """

    def __init__(self, step_tokens: int = STEP_TOKENS) -> None:
        self.step_tokens = step_tokens
        """Tokens that one step takes at most."""
        self.coefficients: Coefficients = PRIOR
        """Seconds: a batch, a token, a pair of tokens, a loaded token."""
        self.batches = 0
        self._rows: deque[tuple[float, float, float, float, float]] = deque(maxlen=BATCHES)

    def add(self, batch: Iterable[Prefill], seconds: float) -> None:
        """A batch was computed. Times that no batch can have taken are ignored."""
        if not LEAST_S <= seconds <= MOST_S:
            return
        uncached = pairs = loaded = 0.0
        for part in batch:
            uncached += part.uncached
            pairs += _pairs(part)
            loaded += part.loaded
        if uncached > 0:
            self.batches += 1
            self._rows.append((1.0, uncached, pairs, loaded, seconds))

    def fitted(self) -> Coefficients | None:
        """The coefficients of the last batches; ``None`` before there are enough."""
        if len(self._rows) < FEWEST_BATCHES:
            return None
        rows = np.array(self._rows)
        seconds = rows[:, 4]
        features = rows[:, :4] / seconds[:, None]
        scale = np.linalg.norm(features, axis=0)
        scale[scale == 0.0] = 1.0
        solution, _ = nnls(features / scale, np.ones(len(rows)))
        found = solution / scale
        return float(found[0]), float(found[1]), float(found[2]), float(found[3])

    def adopt(self, coefficients: Coefficients | None) -> None:
        """Use these from now on; ``None``, and any that make nothing cost anything, change
        nothing."""
        if coefficients is not None and sum(coefficients[:3]) > 0.0:
            self.coefficients = coefficients

    def refit(self) -> None:
        """Fit and adopt, for an engine of one rank."""
        self.adopt(self.fitted())

    def seconds(self, request: Prefill) -> float:
        """What ``request`` adds to a queue's work, in seconds; at least ``LEAST_S``.

        Of ``base`` its share of the steps' tokens: a short prompt shares its step with others, a
        longer one than a step pays for each.
        """
        base, token, pair, load = self.coefficients
        linear = (base / self.step_tokens + token) * request.uncached + load * request.loaded
        return max(linear + pair * _pairs(request), LEAST_S)

    def batch_seconds(self, batch: Iterable[Prefill]) -> float:
        """What a step of these takes."""
        base, token, pair, load = self.coefficients
        return base + sum(
            token * part.uncached + pair * _pairs(part) + load * part.loaded for part in batch
        )

    def step_tokens_worth(self) -> float:
        """Tokens whose computing takes as long as a step costs beside its tokens; no more than a
        step's."""
        base, token, _, _ = self.coefficients
        return min(base / token, float(self.step_tokens)) if token > 0.0 else 0.0


def _pairs(request: Prefill) -> float:
    """Pairs of a computed token and one that it attends to: u (p + u / 2)."""
    return request.uncached * (request.cached + request.uncached / 2)
