"""Series of the waiting queue's order and of its predicted TTFT."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sglang_canopy.telemetry.metric import Metric

METRICS = (
    Metric(
        "queue_let_in_total",
        "counter",
        ("by",),
        "requests let in: as the shortest of their turn, or because of a budget",
    ),
    Metric(
        "predicted_ttft_seconds",
        "gauge",
        ("tokens",),
        "TTFT of a request that comes now with so many tokens to compute (`512`, `4096`, `32768`), "
        "for a router; with `--canopy-queue-order bounded-shortest`",
    ),
    Metric(
        "predicted_ttft_requests_total",
        "counter",
        (),
        "requests with a predicted TTFT that had their first token",
    ),
    Metric("predicted_ttft_said_seconds_total", "counter", (), "TTFT predicted for these, summed"),
    Metric("predicted_ttft_came_seconds_total", "counter", (), "the TTFT that they had, summed"),
    Metric(
        "predicted_ttft_error_seconds_total",
        "counter",
        (),
        "absolute differences of the two, summed",
    ),
)


def update(
    set_to: Callable[..., None], count: Callable[..., None], status: Mapping[str, Any]
) -> None:
    """Update every series from ``Status.take``: ``set_to`` sets a gauge, ``count`` raises a counter
    to a total, each by name, value and labels."""
    queue = status.get("queue") or {}
    for by, requests in (queue.get("let_in") or {}).items():
        count("queue_let_in_total", requests, by)
    predicted = queue.get("predicted_ttft")
    if predicted is None:
        return
    for tokens, seconds in predicted["now_s"].items():
        set_to("predicted_ttft_seconds", seconds, tokens)
    count("predicted_ttft_requests_total", predicted["requests"])
    count("predicted_ttft_said_seconds_total", predicted["predicted_s"])
    count("predicted_ttft_came_seconds_total", predicted["came_s"])
    count("predicted_ttft_error_seconds_total", predicted["error_s"])
