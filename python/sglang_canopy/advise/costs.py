"""What hits are worth under a profile: GPU-seconds of prefill and the time of a first token.

Each request is costed by itself, without a queue: the least that hits save. Under load the queue
adds to it (``canopy simulate-system --loads``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_canopy.advise.arms import Uncached
from sglang_canopy.sim.system.engine_profile import EngineProfile

COSTED = 5000
"""Requests that are costed, evenly spread over the sample."""
DISK_BYTES_PER_S = 3e9
"""Of a local NVMe disk, where the profile has none."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one arm."""

    gpu_s_per_request: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p95_s: float


class Coster:
    """Costs arms on one sample: ``tokens`` of the prompts, each ``scale`` of the server's."""

    def __init__(self, profile: EngineProfile, tokens: NDArray[np.int64], scale: float) -> None:
        self.profile, self.scale = profile, scale
        step = max(1, len(tokens) // COSTED)
        self._taken = slice(None, None, step)
        self._tokens = tokens[self._taken] * scale
        self._pairs = profile.pair_s()

    def cost(self, uncached: Uncached, transfer_s: NDArray[np.float64] | None = None) -> Cost:
        """``transfer_s`` is what each request of the sample waits for tiers below the device."""
        left = np.maximum(uncached[self._taken] * self.scale, 1.0)
        prefill = np.array(
            [
                self.profile.prefill_batch_s([(new, max(all_ - new, 0.0))], self._pairs)
                for new, all_ in zip(left.tolist(), self._tokens.tolist())
            ]
        )
        ttft = prefill + self.profile.arrival_s
        if transfer_s is not None:
            ttft = ttft + transfer_s[self._taken]
        p50, p95 = np.percentile(ttft, (50, 95))
        return Cost(float(prefill.mean()), float(ttft.mean()), float(p50), float(p95))

    def transfer_s(self, tokens: Uncached, bytes_per_s: float) -> NDArray[np.float64]:
        """Seconds to load so many tokens of each request."""
        moved = np.maximum(tokens, 0) * self.scale * self.profile.kv_bytes_per_token
        return moved / bytes_per_s
