"""TTFT ~ alpha * uncached tokens + beta, fitted online from served requests.

The linear latency model of arXiv 2510.15152. It converts a target in milliseconds into tokens to
prefill, which an eviction policy can use. The API process, which measures first-token times, fits
it; each request carries it (``Request.ttft_model``), so that every rank uses the same numbers.
"""

from __future__ import annotations

import math
from typing import Any

_DECAY = 0.998
"""Weight of the past per observation: about 500 requests count."""
_MIN_OBSERVATIONS = 20
_MAX_RESIDUALS = 2.0
"""Residuals are clipped at this many mean absolute residuals."""


class TtftFit:
    """Decayed least squares, robust against queueing spikes by bounded residuals."""

    def __init__(self) -> None:
        self.count = 0
        # Decayed sums over requests.
        self._weight = self._tokens = self._seconds = 0.0
        self._squared_tokens = self._tokens_times_s = 0.0
        self._mean_residual_s = 0.0

    def add(self, uncached_tokens: float, ttft_s: float) -> None:
        """Add a served request. Values that are not finite or negative are ignored."""
        if not (math.isfinite(uncached_tokens) and math.isfinite(ttft_s)):
            return
        if uncached_tokens < 0 or ttft_s < 0:
            return
        fitted = self.coefficients()
        if fitted is not None:
            alpha, beta = fitted
            expected_s = alpha * uncached_tokens + beta
            residual_s = ttft_s - expected_s
            max_residual_s = _MAX_RESIDUALS * self._mean_residual_s
            # The scale slowly follows even clipped residuals, or a real change would never be
            # learnt.
            self._mean_residual_s += 0.02 * (abs(residual_s) - self._mean_residual_s)
            if max_residual_s > 0.0:
                ttft_s = expected_s + max(-max_residual_s, min(max_residual_s, residual_s))
        self.count += 1
        self._weight = _DECAY * self._weight + 1.0
        self._tokens = _DECAY * self._tokens + uncached_tokens
        self._seconds = _DECAY * self._seconds + ttft_s
        self._squared_tokens = _DECAY * self._squared_tokens + uncached_tokens * uncached_tokens
        self._tokens_times_s = _DECAY * self._tokens_times_s + uncached_tokens * ttft_s
        if fitted is None and self.count == _MIN_OBSERVATIONS:
            # One tenth of the mean until residuals have been seen.
            is_fitted = self.coefficients() is not None
            self._mean_residual_s = 0.1 * self._seconds / self._weight if is_fitted else 0.0

    def coefficients(self) -> tuple[float, float] | None:
        """Return ``(alpha s/token, beta s)``, both 0 or more; ``None`` without enough data."""
        if self.count < _MIN_OBSERVATIONS:
            return None
        mean_tokens, mean_s = self._tokens / self._weight, self._seconds / self._weight
        variance = self._squared_tokens / self._weight - mean_tokens * mean_tokens
        if variance <= 1e-9 * max(1.0, mean_tokens * mean_tokens):
            return None
        alpha = (self._tokens_times_s / self._weight - mean_tokens * mean_s) / variance
        if alpha <= 0.0:
            return None
        beta = mean_s - alpha * mean_tokens
        if beta < 0.0:  # through the origin instead
            return self._tokens_times_s / self._squared_tokens, 0.0
        return alpha, beta

    def stats(self) -> dict[str, Any]:
        """Return the fitted line and its mean absolute residual, for operators."""
        fitted = self.coefficients()
        return {
            "requests": self.count,
            "alpha_ms_per_1k_tokens": None if fitted is None else round(1e6 * fitted[0], 3),
            "beta_ms": None if fitted is None else round(1e3 * fitted[1], 3),
            "mean_residual_ms": round(1e3 * self._mean_residual_s, 3),
        }


def tokens_within_ttft(ttft_ms: float, ttft_model: tuple[float, float]) -> float:
    """Return the tokens that may be prefilled within ``ttft_ms``; 0 if beta alone exceeds it."""
    alpha, beta = ttft_model
    return max(0.0, (ttft_ms / 1e3 - beta) / alpha) if alpha > 0.0 else math.inf
