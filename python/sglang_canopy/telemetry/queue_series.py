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
        "requests admitted, as the shortest in the queue or on an older request's budget",
    ),
    Metric(
        "predicted_ttft_seconds",
        "gauge",
        ("tokens",),
        "predicted TTFT of a request that arrives now, by its tokens to compute (`512`, `4096`, "
        "`32768`), for routers; with `--canopy-queue-order bounded-shortest`",
    ),
    Metric(
        "predicted_ttft_requests_total",
        "counter",
        (),
        "requests with both a predicted TTFT and a first token",
    ),
    Metric("predicted_ttft_said_seconds_total", "counter", (), "sum of TTFT predicted for these"),
    Metric("predicted_ttft_came_seconds_total", "counter", (), "sum of their observed TTFT"),
    Metric(
        "predicted_ttft_error_seconds_total",
        "counter",
        (),
        "sum of absolute differences of the two",
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
