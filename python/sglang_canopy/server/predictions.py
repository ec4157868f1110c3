"""What is predicted of the requests that come to a server's queue, and what came.

Times are this rank's own, and nothing is decided with them: predictions are for metrics alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from sglang_canopy.schedule.bounded_shortest import BoundedShortest
from sglang_canopy.schedule.line import Waiting
from sglang_canopy.schedule.predicted_ttft import EXAMPLE_TOKENS, PredictedTtft, WorkBefore
from sglang_canopy.schedule.prefill_cost import Prefill

REFRESH_EVERY_S = 1.0


class Predictions:
    """Of one queue. Nothing here keeps a request alive. All calls but ``status`` are on the
    scheduler's thread."""

    def __init__(self, order: BoundedShortest) -> None:
        self._order = order
        self.model = PredictedTtft()
        self._queued: WeakKeyDictionary[Any, float] = WeakKeyDictionary()
        """When those came of whom nothing is said yet."""
        self._predicted: WeakKeyDictionary[Any, tuple[float, WorkBefore, float]] = (
            WeakKeyDictionary()
        )
        """When a request came, what it found, and the TTFT that was predicted."""
        self._refreshed_at = 0.0
        self._examples: dict[int, WorkBefore] = {}

    def __len__(self) -> int:
        return len(self._predicted) + len(self._queued)

    def queued(self, req: Any, now: float) -> None:
        """Before it is in the queue; again for one that was sent back."""
        if not req.output_ids and req not in self._predicted:
            self._queued[req] = now

    def passing(self, queue: Iterable[Any], now: float) -> None:
        """A pass begins. Whoever came and is not in ``queue`` is held by a gate, whose time is not
        the queue's."""
        if self._queued:
            here = {id(req) for req in queue}
            for req in list(self._queued):
                if id(req) not in here:
                    self._queued[req] = now

    def arranged(self, waiting: Mapping[int, Waiting], now: float) -> None:
        """The queue is in order."""
        for req in [req for req in self._queued if id(req) in waiting]:
            came, work = self._queued.pop(req), self._order.work_before(waiting[id(req)])
            self.model.arrived(work.cost_s, came)
            self._predicted[req] = (came, work, self.model.seconds(work))
        if now - self._refreshed_at >= REFRESH_EVERY_S:
            self._refreshed_at = now
            self._examples = {
                tokens: self._order.work_before_new(self._cost(tokens)) for tokens in EXAMPLE_TOKENS
            }

    def _cost(self, tokens: int) -> float:
        return self._order.cost.seconds(Prefill(tokens))

    def of(self, req: Any) -> float | None:
        """What was predicted for ``req``, until it has its first token."""
        predicted = self._predicted.get(req)
        return None if predicted is None else predicted[2]

    def first_token(self, req: Any, now: float) -> None:
        """``req``'s prompt is computed."""
        predicted = self._predicted.pop(req, None)
        if predicted is not None:
            came, work, predicted_s = predicted
            self.model.first_token(work, predicted_s, now - came)

    def status(self, waiting: int) -> dict[str, Any]:
        """``now_s``: of a request that comes now with so many tokens to compute, where so many
        wait."""
        model, examples = self.model, self._examples if waiting else {}
        alone = {tokens: WorkBefore(self._cost(tokens), 0.0, 0.0) for tokens in EXAMPLE_TOKENS}
        return {
            "now_s": {str(size): model.seconds(work) for size, work in (alone | examples).items()},
            "requests": model.requests,
            "predicted_s": model.predicted_s,
            "came_s": model.came_s,
            "error_s": model.error_s,
        }
