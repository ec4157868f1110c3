"""Early refusal in a scheduler: decide on each request that joins the queue, and compare.

Decisions use the queue, the requests' stamps and factors of the first rank, so ranks decide alike.
The comparison with observed TTFTs uses this rank's clock.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Iterable
from operator import itemgetter
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from sglang_canopy.config.queue import REFUSE, TtftSlo
from sglang_canopy.request.early_refusal import message
from sglang_canopy.schedule.bounded_shortest import BoundedShortest, Place
from sglang_canopy.schedule.early_refusal import Decision, EarlyRefusal

if TYPE_CHECKING:
    from sglang_canopy.radix.live_request import LiveRequest
    from sglang_canopy.schedule.arranged import Requests


def is_first_entry(req: Any) -> bool:
    """Return whether ``req`` joins the queue for the first time and may be refused: it is not
    retracted, carries no error, and is no health check."""
    from sglang.srt.managers.utils import is_health_check_generate_req

    again = req.output_ids or req.retraction_count
    fails = req.finished() or req.to_finish is not None
    return not (again or fails or is_health_check_generate_req(req))


class LiveRefusal:
    """Decisions for one queue. Only ``status`` may be called outside the scheduler's thread."""

    def __init__(self, slo: TtftSlo, order: BoundedShortest, requests: Requests[Any]) -> None:
        self._slo = slo
        self._order = order
        self._requests = requests
        self._decides = EarlyRefusal(slo.seconds)
        self.bound = self._decides.bound
        self._entering: dict[Any, tuple[Place, float]] = {}
        """Place and cost of the requests that joined after the latest pass."""
        self._costs: dict[Place, list[float]] = {}
        """The same costs by place, in ascending order."""
        self._arriving: tuple[Any, Place, float, Decision] | None = None
        """The latest request that was not refused, with its place, cost and decision."""
        self._decided: WeakKeyDictionary[Any, tuple[float, Decision]] = WeakKeyDictionary()
        """Arrival time and decision of each request without a first token."""

    def arrives(self, req: Any, request: LiveRequest, waiting: int) -> str | None:
        """Return the answer to a request that is refused, ``None`` if it may join the queue.

        ``waiting``: length of the queue. Samples of one request (n > 1) share its first decision.
        """
        self._arriving = None
        if request.first is not None:
            return request.first.refusal
        if not waiting:
            self.ordered()
        about = self._requests
        cost = self._order.cost.seconds(about.prefill(req, False))
        tenant, urgency = about.tenant(req), about.urgency(req)
        work = self._order.work_before_new(cost, tenant, urgency, self._costs)
        decision = self._decides.decide(work, waiting)
        if decision.refused and self._slo.over == REFUSE:
            wait_s = self._decides.retry_after_s(decision)
            request.refusal = message(self._slo.seconds, wait_s)
            return request.refusal
        self._arriving = req, (urgency, self._order.shares.turn_of(tenant)), cost, decision
        return None

    def joined(self, req: Any, request: LiveRequest, held: bool) -> None:
        """Register ``req``, which joins the queue. ``held``: the session gate holds it back."""
        arriving, self._arriving = self._arriving, None
        if arriving is None or arriving[0] is not req:
            return
        _, place, cost, decision = arriving
        self.bound.load.arrived(cost, request.time)
        if held:
            return
        self._entering[req] = place, cost
        insort(self._costs.setdefault(place, []), cost)
        self._decided[req] = time.monotonic(), decision

    def ordered(self) -> None:
        """Record that a pass has ordered the queue, or that no request waits."""
        self._entering.clear()
        self._costs.clear()

    def entering(self) -> int:
        return len(self._entering)

    def keep(self, queue: Iterable[Any]) -> None:
        """Forget the requests that left ``queue`` before a pass ordered them."""
        here = set(map(id, queue))
        self._entering = {req: one for req, one in self._entering.items() if id(req) in here}
        self._costs = {}
        for place, cost in sorted(self._entering.values(), key=itemgetter(1)):
            self._costs.setdefault(place, []).append(cost)

    def first_token(self, req: Any, now: float) -> None:
        found = self._decided.pop(req, None)
        if found is not None:
            arrived, decision = found
            self.bound.observed(decision.predicted_s, decision.bound_s, now - arrived)

    def status(self) -> dict[str, Any]:
        """Return the limit, and the number of TTFTs within their bounds."""
        return {
            "limit_s": self._slo.seconds,
            "over": self._slo.over,
            "exceeded": self._decides.refused,
            "stated": self.bound.quantile,
            "bounds": self.bound.requests,
            "kept": self.bound.covered,
        }
