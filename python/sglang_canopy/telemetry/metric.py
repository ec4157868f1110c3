"""What one of Canopy's series is: for Prometheus and for the documentation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """One series: what ``docs/reference/metrics.md`` says of it, and what Prometheus is told."""

    name: str
    """Without the ``canopy:`` before it. A counter's ends in ``_total``."""
    kind: str
    """``counter``, ``gauge`` or ``histogram``. The client's own histogram takes one observation at
    a time; ours counts millions of tokens at once, so its ``_bucket``, ``_sum`` and ``_count`` are
    gauges to the client. PromQL's ``histogram_quantile`` and ``rate`` read them alike."""
    labels: tuple[str, ...]
    """Its own labels, beside ``RANK_LABEL`` and the operator's (``--extra-metric-labels``)."""
    meaning: str
