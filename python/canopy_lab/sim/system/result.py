"""What a simulation of a whole system measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemResult:
    """Times in seconds of simulated time. A hit is in the leading cached run of a prompt."""

    requests: int
    mean_ttft_s: float
    """From arrival to the first token."""
    p50_ttft_s: float
    p90_ttft_s: float
    p99_ttft_s: float
    mean_tpot_s: float
    """Seconds a token after the first one, mean over requests that have more than one."""
    mean_e2e_s: float
    throughput_tokens_per_s: float
    """Prompt and output tokens over the makespan."""
    output_tokens_per_s: float
    makespan_s: float
    """From the first arrival to the last token."""
    token_hit_ratio: float
    token_hit_ratio_by_tier: Mapping[str, float]
    """``device``, ``host``, ``disk``: the tier that a token was read from."""
    mean_bytes_by_tier: Mapping[str, float]
    """Cached and running KV, averaged over the makespan, all instances together."""
    peak_bytes_by_tier: Mapping[str, float]
    host_read_bytes: float
    host_written_bytes: float
    disk_read_bytes: float
    disk_written_bytes: float
    prefill_s_saved_by_tier: Mapping[str, float]
    """Seconds of prefill that the tokens of each tier made needless, had each request been
    computed alone; what is above, with all that is on it, counts first. Copying is not deducted."""
    prefetch_late_bytes: float
    """Read from disk for requests that had begun without it, or had been computed meanwhile."""
    mean_queue_s: float
    """From arrival to the first prefill step."""
    mean_queue_length: float
    peak_queue_length: int
    busy_share: float
    """Share of the makespan in which an instance computes, mean over instances."""
    retracted: int
    """Requests that lost their place to others for lack of device memory."""
    events: int
    seconds: float
    """Wall time of the simulation."""
    ttft_s: np.ndarray = field(repr=False)
    """One entry a request, in order of the trace."""
    e2e_s: np.ndarray = field(repr=False)
    cached_tokens: np.ndarray = field(repr=False)
    due_s: np.ndarray = field(repr=False)
    """When each request was due; its times count from here."""
    prompt_tokens: np.ndarray = field(repr=False)

    def to_json(self) -> dict[str, Any]:
        """All but the arrays."""
        arrays = ("ttft_s", "e2e_s", "cached_tokens", "due_s", "prompt_tokens")
        fields = {n: getattr(self, n) for n in type(self).__slots__ if n not in arrays}
        return {n: dict(v) if isinstance(v, Mapping) else v for n, v in fields.items()}
