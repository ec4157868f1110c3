"""Definition of a series, for Prometheus and for the documentation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """A series, as documented in ``docs/reference/metrics.md`` and exported to Prometheus."""

    name: str
    """Name without the prefix ``canopy:``; a counter's ends in ``_total``."""
    kind: str
    """``counter``, ``gauge`` or ``histogram``.

    The client's own histogram accepts one observation at a time, but Canopy counts millions of
    tokens at once, so the ``_bucket``, ``_sum`` and ``_count`` of a histogram are gauges in the
    client. PromQL's ``histogram_quantile`` and ``rate`` read them alike.
    """
    labels: tuple[str, ...]
    """Labels in addition to ``RANK_LABEL`` and the operator's (``--extra-metric-labels``)."""
    meaning: str
