"""Series of LoRA adapters. Bounded: ``counters.MAX_ADAPTERS``, and one for the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sglang_canopy.radix.counters import MAX_ADAPTERS
from sglang_canopy.telemetry.metric import Metric

METRICS = (
    Metric(
        "adapter_requests_total",
        "counter",
        ("adapter",),
        "finished requests, by LoRA adapter; the first "
        f"{MAX_ADAPTERS} adapters used have series of their own",
    ),
    Metric("adapter_prompt_tokens_total", "counter", ("adapter",), "prompt tokens of these"),
    Metric(
        "adapter_hit_tokens_total",
        "counter",
        ("tier", "adapter"),
        "the part of these found in the tier",
    ),
)


def update(count: Callable[..., None], status: Mapping[str, Any]) -> None:
    """Update every series from ``Status.take``. ``count(name, value, *labels)`` sets one series."""
    for row in status.get("adapters", ()):
        count("adapter_requests_total", row["requests"], row["adapter"])
        count("adapter_prompt_tokens_total", row["prompt_tokens"], row["adapter"])
        for tier in status["tiers"]:
            count("adapter_hit_tokens_total", row["hit_tokens"][tier], tier, row["adapter"])
