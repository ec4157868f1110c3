"""Measure a live server's prefill and decode costs over HTTP, for ``canopy profile``.

Only ``/generate`` with token ids is used. Prompts are random ids, so only a measurement's own
tokens are cached. Every figure is the median of a few answers. The server should be idle otherwise.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from scipy.optimize import isotonic_regression

from canopy_lab.live.profile.client import ProfiledServer
from sglang_canopy.errors import CanopyError

_PREFILL_TOKENS = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_CONTEXT_TOKENS = (0, 256, 1024, 4096, 16384, 65536)
_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_DECODE_TOKENS = 16
_BATCHED = 8
"""Number of requests in the prefill step that measures the cost per request."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper limits of the measurements, in tokens and requests."""

    prompt_tokens: int
    context_tokens: int
    batch: int
    repeats: int = 3


@dataclass(frozen=True, slots=True)
class Surfaces:
    """Measured seconds, indexed by the named axes."""

    arrival_s: float
    prefill_request_s: float
    prefill_tokens: tuple[int, ...]
    prefill_linear_s: tuple[float, ...]
    attention_context_tokens: tuple[int, ...]
    attention_s: tuple[tuple[float, ...], ...]
    decode_batch: tuple[int, ...]
    decode_context_tokens: tuple[int, ...]
    decode_step_s: tuple[tuple[float, ...], ...]


class Measurer:
    """Measures one server. ``show`` is called with the name of the next measurement."""

    def __init__(self, server: ProfiledServer, limits: Limits, show: Callable[[str], None]) -> None:
        self.server = server
        self.limits = limits
        self._random = random.Random(0)
        self._show = show

    def measure_surfaces(self) -> Surfaces:
        """Measure all costs of prefill and decode. Raises ``CanopyError`` if implausible."""
        limits = self.limits
        self.server.generate([self.random_tokens(8)], 4)
        lengths = tuple(n for n in _PREFILL_TOKENS if n <= limits.prompt_tokens)
        contexts = tuple(n for n in _CONTEXT_TOKENS if n <= limits.context_tokens)
        batches, decode_contexts, decode_s = self._measure_decode(contexts)
        prefill_s: list[list[float]] = []
        for length in lengths:
            self._show(f"prefill of {length} tokens")
            prefill_s.append([self._measure_prefill(length, context) for context in contexts])
        # Computing one token takes equally long in a prefill and a decode step; the rest is
        # arrival.
        arrival_s = max(0.0, prefill_s[0][0] - decode_s[0][0])
        linear_s, attention_s = _split_costs(lengths, contexts, prefill_s, arrival_s)
        self._show(f"prefill of {_BATCHED} requests at once")
        return Surfaces(
            arrival_s=arrival_s,
            prefill_request_s=self._batch_overhead(lengths, linear_s, attention_s, arrival_s),
            prefill_tokens=lengths,
            prefill_linear_s=linear_s,
            attention_context_tokens=contexts,
            attention_s=attention_s,
            decode_batch=batches,
            decode_context_tokens=decode_contexts,
            decode_step_s=decode_s,
        )

    def random_tokens(self, count: int) -> list[int]:
        low, high = self.server.token_range
        return [self._random.randrange(low, high) for _ in range(count)]

    def _measure_prefill(self, new_tokens: int, context: int) -> float:
        """Return the seconds to answer a prompt of ``new_tokens`` tokens after ``context`` cached ones."""
        prefix = self.random_tokens(context)
        if prefix:
            self.server.generate([prefix], 1)
        times_s = []
        for _ in range(self.limits.repeats):
            seconds, cached = self.server.generate([prefix + self.random_tokens(new_tokens)], 1)
            # A server caches whole pages.
            if cached < context - self.server.page_tokens:
                raise CanopyError(
                    f"a prefix of {context} tokens was not cached ({cached} were): is the server "
                    "serving others, or its radix cache off? Profile an idle server, or give a "
                    "smaller --max-context-tokens"
                )
            times_s.append(seconds)
        return statistics.median(times_s)

    def _measure_decode(
        self, contexts: tuple[int, ...]
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[float, ...], ...]]:
        limits, pool = self.limits, self.server.pool_tokens
        lengths = tuple(max(c, 16) for c in contexts)
        batches = [b for b in _BATCH_SIZES if b <= limits.batch]
        rows: list[tuple[float, ...]] = []
        for batch in batches:
            row: list[float] = []
            for context in lengths:
                if batch * (context + 2 * _DECODE_TOKENS) > pool * 0.9 and row:
                    # The pool is too small to measure it: extrapolate.
                    row.append(_extrapolated_step_s(lengths, row, rows, context))
                    continue
                self._show(f"decode of {batch} x {context} tokens")
                row.append(self._measure_decode_step(batch, context))
            rows.append(tuple(row))
        columns = [_non_decreasing(list(column)) for column in zip(*rows, strict=True)]
        smooth = tuple(tuple(_non_decreasing(list(row))) for row in zip(*columns, strict=True))
        return tuple(batches), lengths, smooth

    def _measure_decode_step(self, batch: int, context: int) -> float:
        prompts = [self.random_tokens(context) for _ in range(batch)]
        self.server.generate(prompts, 1)
        times_s = []
        for _ in range(self.limits.repeats):
            first_s, _ = self.server.generate(prompts, 1)
            all_s, _ = self.server.generate(prompts, 1 + _DECODE_TOKENS)
            times_s.append((all_s - first_s) / _DECODE_TOKENS)
        return max(statistics.median(times_s), 1e-6)

    def _batch_overhead(
        self,
        lengths: tuple[int, ...],
        linear_s: tuple[float, ...],
        attention_s: tuple[tuple[float, ...], ...],
        arrival_s: float,
    ) -> float:
        """Return the seconds that each further request adds to a prefill step beyond its tokens."""
        tokens = next((n for n in (64, 16, 1) if n in lengths and n * _BATCHED in lengths), None)
        if tokens is None:
            return 0.0
        times_s = []
        for _ in range(self.limits.repeats):
            prompts = [self.random_tokens(tokens) for _ in range(_BATCHED)]
            times_s.append(self.server.generate(prompts, 1)[0])
        expected_s = arrival_s + linear_s[lengths.index(tokens * _BATCHED)]
        expected_s += _BATCHED * attention_s[lengths.index(tokens)][0]
        return max(0.0, (statistics.median(times_s) - expected_s) / (_BATCHED - 1))


def _split_costs(
    lengths: tuple[int, ...], contexts: tuple[int, ...], rows: list[list[float]], arrival_s: float
) -> tuple[tuple[float, ...], tuple[tuple[float, ...], ...]]:
    """Split answer times into a part linear in new tokens and a part for attention.

    The slope over the context is the cost of a pair of query and key. Pairs among the new tokens
    cost the same.
    """
    steps_s = [_non_decreasing([max(seconds - arrival_s, 1e-6) for seconds in row]) for row in rows]
    among_s = []
    for new_tokens, row in zip(lengths, steps_s, strict=True):
        pair_s = (row[-1] - row[0]) / (contexts[-1] * new_tokens) if len(contexts) > 1 else 0.0
        among_s.append(min(pair_s * new_tokens * (new_tokens + 1) / 2, 0.9 * row[0]))
    linear_s = _non_decreasing([row[0] - own for row, own in zip(steps_s, among_s, strict=True)])
    attention_s = [
        tuple(max(own_s, 1e-9) + step - row[0] for step in row)
        for row, own_s in zip(steps_s, among_s, strict=True)
    ]
    return tuple(linear_s), tuple(attention_s)


def _non_decreasing(values: list[float]) -> list[float]:
    """Return the closest non-decreasing values: more work takes no less time."""
    return [float(v) for v in isotonic_regression(values).x]


def _extrapolated_step_s(
    lengths: tuple[int, ...], row: list[float], smaller: list[tuple[float, ...]], context: int
) -> float:
    """Extrapolate a decode step: the slope before it, or the slope of the batch above."""
    i = len(row)
    if i >= 2:
        slope = (row[-1] - row[-2]) / (lengths[i - 1] - lengths[i - 2])
    elif smaller:
        slope = (smaller[-1][i] - smaller[-1][i - 1]) / (lengths[i] - lengths[i - 1]) * 2
    else:
        slope = 0.0
    return row[-1] + max(slope, 0.0) * (context - lengths[i - 1])
