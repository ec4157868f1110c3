"""TTFT as a line in uncached tokens, fitted online from served requests."""

from __future__ import annotations

from typing import Any

_DECAY = 0.998
"""Weight a sample loses with each later one: about the last 500 count."""
_LEAST = 16
"""Samples before there is a line at all."""
_CLIP = 4.0
"""A sample above this many times its prediction counts as that much: queues, not prefill."""


class TtftFit:
    """Decayed least squares for ``ttft_s ~ alpha * uncached_tokens + beta``.

    The linear model of arXiv 2510.15152, section 3. Neither coefficient goes below zero.
    """

    def __init__(self) -> None:
        self.samples = 0
        self._w = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, uncached_tokens: float, ttft_s: float) -> None:
        """One served request: prompt tokens it had to compute, and its time to first token."""
        line = self.line()
        if line is not None:
            ttft_s = min(ttft_s, _CLIP * (line[0] * uncached_tokens + line[1]) + 1e-3)
        x, y = float(uncached_tokens), float(ttft_s)
        self._w = self._w * _DECAY + 1.0
        self._x = self._x * _DECAY + x
        self._y = self._y * _DECAY + y
        self._xx = self._xx * _DECAY + x * x
        self._xy = self._xy * _DECAY + x * y
        self.samples += 1

    def line(self) -> tuple[float, float] | None:
        """``(alpha s/token, beta s)``; ``None`` before enough samples of different sizes."""
        if self.samples < _LEAST:
            return None
        mean_x, mean_y = self._x / self._w, self._y / self._w
        variance = self._xx / self._w - mean_x * mean_x
        if variance <= 1e-9 * (1.0 + mean_x * mean_x):
            return None
        alpha = max(0.0, (self._xy / self._w - mean_x * mean_y) / variance)
        beta = mean_y - alpha * mean_x
        if beta < 0.0:  # through the origin is the best line left
            alpha, beta = self._xy / self._xx, 0.0
        return alpha, beta

    def stats(self) -> dict[str, Any]:
        """For an operator: the line in friendlier units, and how many samples made it."""
        line = self.line()
        return {
            "samples": self.samples,
            "ms_per_1k_uncached_tokens": None if line is None else line[0] * 1e6,
            "ms_at_zero": None if line is None else line[1] * 1e3,
        }
