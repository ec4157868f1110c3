"""Series of the waiting queue's order and of its predicted TTFT."""

from __future__ import annotations

from sglang_canopy.telemetry.metric import reported

METRICS = (
    reported(
        "queue_let_in_total",
        "queue.let_in.{by}",
        "requests admitted, as the shortest in the queue or on an older request's budget",
    ),
    reported(
        "predicted_ttft_seconds",
        "queue.predicted_ttft.now_s.{tokens}",
        "predicted TTFT of a request that arrives now, by its tokens to compute (`512`, `4096`, "
        "`32768`), for routers; with `--canopy-queue-order bounded-shortest`",
    ),
    reported(
        "predicted_ttft_requests_total",
        "queue.predicted_ttft.requests",
        "requests with both a predicted TTFT and a first token",
    ),
    reported(
        "predicted_ttft_said_seconds_total",
        "queue.predicted_ttft.predicted_s",
        "sum of TTFT predicted for these",
    ),
    reported(
        "predicted_ttft_came_seconds_total",
        "queue.predicted_ttft.came_s",
        "sum of their observed TTFT",
    ),
    reported(
        "predicted_ttft_error_seconds_total",
        "queue.predicted_ttft.error_s",
        "sum of absolute differences of the two",
    ),
    reported(
        "ttft_slo_exceeded_total",
        "queue.ttft_slo.exceeded",
        "requests whose predicted TTFT exceeded `--canopy-ttft-slo-s`, refused or not",
    ),
    reported(
        "ttft_slo_bounds_total",
        "queue.ttft_slo.bounds",
        "admitted requests that had a bound of their TTFT, and a first token",
    ),
    reported(
        "ttft_slo_kept_total",
        "queue.ttft_slo.kept",
        "these whose TTFT was within its bound; over `ttft_slo_bounds_total` it should be 0.9",
    ),
)
