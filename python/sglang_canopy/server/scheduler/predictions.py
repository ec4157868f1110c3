"""Predict TTFT for requests in a server's queue, and compare with the observed TTFT.

For metrics only: times come from this rank's clock, so no decision may depend on them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from sglang_canopy.schedule.bounded_shortest import BoundedShortest
from sglang_canopy.schedule.line import Waiting
from sglang_canopy.schedule.predicted_ttft import EXAMPLE_TOKENS, PredictedTtft, WorkBefore
from sglang_canopy.schedule.prefill_cost import Prefill

REFRESH_EVERY_S = 1.0
MAX_PREDICTED = 32
"""Limit of predictions per scheduling pass; the rest of a burst only counts towards the load."""


class Predictions:
    """Predictions for one queue, holding only weak references to requests.

    Only ``status`` may be called outside the scheduler's thread.
    """

    def __init__(self, order: BoundedShortest) -> None:
        self._order = order
        self.model = PredictedTtft()
        self._queued_at: WeakKeyDictionary[Any, float] = WeakKeyDictionary()
        """Arrival time of each request that no pass has ordered yet."""
        self._predicted: WeakKeyDictionary[Any, tuple[float, WorkBefore, float]] = (
            WeakKeyDictionary()
        )
        """Arrival time, work found on arrival, and predicted TTFT."""
        self._ordered_at = -math.inf
        """Time of the latest pass that ordered the queue."""
        self._refreshed_at = 0.0
        self._examples: dict[int, WorkBefore] = {}

    def __len__(self) -> int:
        return len(self._predicted) + len(self._queued_at)

    def queued(self, req: Any, now: float) -> None:
        """Register a request before it joins the queue; no effect after a retraction."""
        if not req.output_ids and req not in self._predicted:
            self._queued_at[req] = now

    def arranged(self, entered: Sequence[Waiting], now: float) -> None:
        """Predict the TTFT of the requests that entered the sorted queue in this pass.

        A request that was queued before the previous pass entered late because the session gate
        held it; its clock starts at that pass.
        """
        predicted = 0
        for waiting in entered:
            req = waiting.about
            arrived_s = self._queued_at.pop(req, None)
            if arrived_s is None:  # retracted
                continue
            self.model.arrived(waiting.cost, now)
            if predicted < MAX_PREDICTED:
                predicted += 1
                work = self._order.work_before(waiting)
                arrived_s = max(arrived_s, self._ordered_at)
                self._predicted[req] = (arrived_s, work, self.model.seconds(work))
        self._ordered_at = now
        if now - self._refreshed_at >= REFRESH_EVERY_S:
            self._refreshed_at = now
            self._examples = {
                tokens: self._order.work_before_new(self._cost(tokens)) for tokens in EXAMPLE_TOKENS
            }

    def _cost(self, tokens: int) -> float:
        return self._order.cost.seconds(Prefill(tokens))

    def of(self, req: Any) -> float | None:
        """Return the TTFT predicted for ``req``, or ``None`` after its first token."""
        predicted = self._predicted.get(req)
        return None if predicted is None else predicted[2]

    def first_token(self, req: Any, now: float) -> None:
        predicted = self._predicted.pop(req, None)
        if predicted is not None:
            arrived_s, work, predicted_s = predicted
            self.model.first_token(work, predicted_s, now - arrived_s)

    def status(self, waiting: int) -> dict[str, Any]:
        """Return predictions and errors.

        ``now_s``: predicted TTFT by prompt size, for a queue of ``waiting`` requests.
        """
        model, examples = self.model, self._examples if waiting else {}
        alone = {tokens: WorkBefore(self._cost(tokens), 0.0, 0.0) for tokens in EXAMPLE_TOKENS}
        return {
            "now_s": {str(size): model.seconds(work) for size, work in (alone | examples).items()},
            "requests": model.requests,
            "predicted_s": model.predicted_s,
            "observed_s": model.observed_s,
            "error_s": model.error_s,
        }
