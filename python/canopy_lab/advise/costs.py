"""What hits are worth under a profile: GPU-seconds of prefill and the time of a first token.

Each request is costed by itself, the least that hits save, and in a queue of all (``queue.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from canopy_lab.advise.arms import Uncached
from canopy_lab.advise.queue import Arrivals, waits_s
from canopy_lab.sim.system.engine_profile import EngineProfile

DISK_BYTES_PER_S = 3e9
"""Of a local NVMe disk, where the profile has none."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one arm."""

    gpu_s_per_request: float
    ttft_mean_s: float
    """Of each request by itself."""
    queued_mean_s: float
    """TTFT with the wait for the prompts before it."""
    queued_p95_s: float


class Coster:
    """Costs arms on one sample: ``tokens`` of the prompts, each ``scale`` of the server's.

    The prompts arrive at ``servers`` servers as ``arrivals`` has them.
    """

    def __init__(
        self,
        profile: EngineProfile,
        tokens: NDArray[np.int64],
        scale: float,
        arrivals: Arrivals,
        servers: int = 1,
    ) -> None:
        self.profile, self.scale = profile, scale
        self.arrivals, self.servers = arrivals, servers
        self._tokens = tokens * scale
        self._pairs = profile.pair_s()

    def prefill_s(self, uncached: Uncached) -> NDArray[np.float64]:
        """Seconds to compute what is left of each prompt, one token at the least."""
        left = np.maximum(uncached * self.scale, 1.0)
        return np.array(
            [
                self.profile.prefill_batch_s([(new, max(all_ - new, 0.0))], self._pairs)
                for new, all_ in zip(left.tolist(), self._tokens.tolist())
            ]
        )

    def cost(self, uncached: Uncached, transfer_s: NDArray[np.float64] | None = None) -> Cost:
        """``transfer_s`` is what each request of the sample waits for tiers below the device."""
        prefill = self.prefill_s(uncached)
        ttft = prefill + self.profile.arrival_s
        if transfer_s is not None:
            ttft = ttft + transfer_s
        log = self.arrivals
        waits = waits_s(log.times_s, prefill[log.of], self.servers, log.stands_for)
        queued = (ttft[log.of] + waits)[log.measured]
        return Cost(
            gpu_s_per_request=float(prefill.mean()),
            ttft_mean_s=float(ttft.mean()),
            queued_mean_s=float(queued.mean()),
            queued_p95_s=float(np.percentile(queued, 95)),
        )

    def transfer_s(self, tokens: Uncached, bytes_per_s: float) -> NDArray[np.float64]:
        """Seconds to load so many tokens of each request."""
        moved = np.maximum(tokens, 0) * self.scale * self.profile.kv_bytes_per_token
        return moved / bytes_per_s
