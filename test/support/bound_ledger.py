"""Independent accounts for `BoundedShortest`: the work that overtook each request.

Observes a live queue's order without reading or changing its budgets. Work is in predicted seconds of
the server, at the cost of each request's admission.
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

ROUNDING = 1e-9


@dataclass(slots=True)
class _Account:
    allowed_s: float
    """Allowed younger work: lambda * own work + beta."""
    passed_s: float = 0.0


class BoundLedger:
    """Requests that wait in `order`, with the allowed and the actual work that overtakes them."""

    def __init__(
        self, order: Any, is_excluded: Callable[[Any], bool] = lambda _waiting: False
    ) -> None:
        """``is_excluded``: whether a waiting request may be passed without a charge, because SGLang
        reads its KV from storage."""
        self.order = order
        self.is_excluded = is_excluded
        self.excluded = 0
        """Times that a request was passed beyond its budget while its KV was read from storage."""
        self.over = 0
        """Number of violations."""
        self.fullest = 0.0
        """Largest used share of an allowance."""
        self._accounts: dict[Any, _Account] = {}
        """Accounts of waiting requests and of the prompt in chunked prefill."""
        self._inside: dict[Any, _Account] = {}
        self._chunked_prompt: Any = None
        for name in ("add", "requeue", "admit", "remove", "set_chunked_prompt"):
            setattr(order, name, functools.partial(getattr(self, "_" + name), getattr(order, name)))

    def close(self) -> None:
        """Forget the requests, which keep SGLang's alive."""
        self._accounts.clear()
        self._inside.clear()
        self._chunked_prompt = None

    def _add(self, theirs: Any, *args: Any, **kwargs: Any) -> Any:
        entry = theirs(*args, **kwargs)
        self._accounts[entry] = _Account(self.order.cost_factor * entry.cost + self.order.least_s)
        return entry

    def _admit(self, theirs: Any, admitted: Iterable[Any]) -> None:
        admitted = list(admitted)
        for entry in admitted:
            self._inside[entry] = self._accounts.pop(entry)
            for waiting, account in self._accounts.items():
                if waiting.number < entry.number and _line(waiting) == _line(entry):
                    account.passed_s += entry.cost
                    over = account.passed_s > account.allowed_s + ROUNDING
                    if over and self.is_excluded(waiting):
                        self.excluded += 1
                        account.allowed_s = account.passed_s
                    self.over += account.passed_s > account.allowed_s + ROUNDING
                    full = account.passed_s / account.allowed_s
                    self.fullest = max(self.fullest, full)
        theirs(admitted)

    def _requeue(self, theirs: Any, waiting: Any, *args: Any) -> None:
        self._accounts[waiting] = self._inside.pop(waiting)
        theirs(waiting, *args)

    def _remove(self, theirs: Any, waiting: Any) -> Any:
        self._accounts.pop(waiting, None)
        return theirs(waiting)

    def _set_chunked_prompt(self, theirs: Any, waiting: Any) -> None:
        if self._chunked_prompt is not None and self._chunked_prompt is not waiting:
            self._accounts.pop(self._chunked_prompt, None)
        if waiting is not None and waiting in self._inside:
            self._accounts[waiting] = self._inside[waiting]
        self._chunked_prompt = waiting
        theirs(waiting)


def _line(waiting: Any) -> tuple[Any, int]:
    """Budgets count within one tenant's turn and one priority."""
    return waiting.share, waiting.urgency
