"""Value of hits under a profile: GPU-seconds of prefill, and TTFT of each request alone.

The latter is the minimum that hits save: ``canopy simulate system`` has the queue.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from canopy_lab.advise.arms import Uncached
from canopy_lab.sim.system.engine_profile import EngineProfile

DISK_BYTES_PER_S = 3e9
"""Read speed of a local NVMe disk, if the profile has none."""


@dataclass(frozen=True, slots=True)
class ArmCost:
    gpu_s_per_request: float
    ttft_mean_s: float
    """TTFT without a queue."""


class CostModel:
    """Computes the costs of arms on one sample.

    ``tokens``: prompt tokens of each request; each stands for ``token_scale`` tokens of the server.
    """

    def __init__(self, profile: EngineProfile, tokens: NDArray[np.int64], scale: float) -> None:
        self.profile, self.token_scale = profile, scale
        self._tokens = tokens * scale

    def prefill_s(self, uncached: Uncached) -> NDArray[np.float64]:
        """Return the seconds to compute the uncached tokens of each prompt, at least one."""
        uncached = np.maximum(uncached * self.token_scale, 1.0)
        return np.array(
            [
                self.profile.prefill_batch_s([(computed, max(total - computed, 0.0))])
                for computed, total in zip(uncached.tolist(), self._tokens.tolist())
            ]
        )

    def cost(self, uncached: Uncached, transfer_s: NDArray[np.float64] | None = None) -> ArmCost:
        """Return the cost of a run. ``transfer_s``: each request's wait for tiers below the device."""
        prefill_s = self.prefill_s(uncached)
        ttft_s = prefill_s + self.profile.arrival_s
        if transfer_s is not None:
            ttft_s = ttft_s + transfer_s
        return ArmCost(gpu_s_per_request=float(prefill_s.mean()), ttft_mean_s=float(ttft_s.mean()))

    def transfer_s(self, tokens: Uncached, bytes_per_s: float) -> NDArray[np.float64]:
        """Return the seconds to load ``tokens`` of each request."""
        moved_bytes = np.maximum(tokens, 0) * self.token_scale * self.profile.kv_bytes_per_token
        return moved_bytes / bytes_per_s
