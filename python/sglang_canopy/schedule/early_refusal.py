"""Refuse a request at arrival if the calibrated bound of its TTFT exceeds a limit.

The server and the simulator drive the same object. It reads no clock, so ranks that make the same
calls decide alike.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_canopy.schedule.predicted_ttft import WorkBefore
from sglang_canopy.schedule.ttft_bound import TtftBound

MAX_RETRY_S = 600


@dataclass(slots=True, frozen=True)
class Decision:
    """Decision on one arriving request. Times in seconds."""

    predicted_s: float
    """Predicted seconds until the end of its own prefill."""
    bound_s: float
    refused: bool


class EarlyRefusal:
    """Decides for one queue. ``limit_s``: maximum predicted TTFT."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.bound = TtftBound()
        self.refused = 0

    def decide(self, work: WorkBefore, waiting: int) -> Decision:
        """Decide on a request. ``work``: ahead of it. ``waiting``: number of waiting requests.

        If no request waits, the prediction is used instead of the bound: a bound that has become
        too large would refuse every request, and would then never be measured again.
        """
        predicted = self.bound.predicted_s(work)
        bound = self.bound.seconds(predicted)
        refused = (bound if waiting else predicted) > self.limit_s
        self.refused += refused
        return Decision(predicted, bound, refused)

    def retry_after_s(self, decision: Decision) -> int:
        """Return whole seconds until the work ahead is within the limit, without arrivals."""
        return min(max(1, round(decision.bound_s - self.limit_s)), MAX_RETRY_S)
