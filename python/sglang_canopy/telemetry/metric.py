"""Definition of a series, for Prometheus and for the documentation."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


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
    at: str = ""
    """Path of its values in a status; empty if code computes them.

    Keys joined by dots. ``{label}`` stands for every key, which becomes the label; ``rows[a,b]`` for
    every row of a list, whose fields ``a`` and ``b`` become labels.
    """

    def values(self, status: Mapping[str, Any]) -> Iterator[tuple[float, tuple[str, ...]]]:
        """Yield each value in ``status`` with its labels; none for a part that is missing or null."""
        for value, labels in _walk(status, self.at.split(".") if self.at else (), {}):
            yield float(value), tuple(labels[name] for name in self.labels)


def reported(name: str, at: str, meaning: str) -> Metric:
    """Return a series of values in a status, with the labels of its path ``at``."""
    kind = "counter" if name.endswith("_total") else "gauge"
    found = re.findall(r"[\[{]([\w,]+)[\]}]", at)
    return Metric(name, kind, tuple(",".join(found).split(",")) if found else (), meaning, at)


def _walk(status: Any, path: Any, labels: dict[str, str]) -> Iterator[tuple[float, dict[str, str]]]:
    if status is None or (not path and isinstance(status, (Mapping, list))):
        return
    if not path:
        yield status, labels
        return
    step, *rest = path
    if step.startswith("{"):
        for key, value in status.items():
            yield from _walk(value, rest, {**labels, step[1:-1]: str(key)})
        return
    name, _, fields = step.rstrip("]").partition("[")
    value = status.get(name)
    if not fields:
        yield from _walk(value, rest, labels)
        return
    for row in value or ():
        named = {field: _label(row[field]) for field in fields.split(",")}
        yield from _walk(row, rest, {**labels, **named})


def _label(value: Any) -> str:
    return ("no", "yes")[value] if isinstance(value, bool) else str(value)
