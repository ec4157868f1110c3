"""Series of LoRA adapters. Bounded: ``counters.MAX_ADAPTERS``, and one for the rest."""

from __future__ import annotations

from sglang_canopy.radix.counters import MAX_ADAPTERS
from sglang_canopy.telemetry.metric import reported

METRICS = (
    reported(
        "adapter_requests_total",
        "adapters[adapter].requests",
        "finished requests, by LoRA adapter; the first "
        f"{MAX_ADAPTERS} adapters used have series of their own",
    ),
    reported(
        "adapter_prompt_tokens_total", "adapters[adapter].prompt_tokens", "prompt tokens of these"
    ),
    reported(
        "adapter_hit_tokens_total",
        "adapters[adapter].hit_tokens.{tier}",
        "the part of these found in the tier",
    ),
)
