"""Independent accounts for `BoundedShortest`: the work that overtook each request.

Observes a live queue without reading or changing its budgets. Work is in predicted seconds of
the server, at the cost of each request's admission.
"""

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

ROUNDING = 1e-9


@dataclass(slots=True)
class _Account:
    allowed_s: float
    """Allowed predicted seconds of later requests: ``cost_factor`` * its cost + ``base_budget_s``."""
    passed_s: float = 0.0


class BoundLedger:
    """Requests that wait in `queue`, with the allowed and the actual work that overtakes them."""

    def __init__(self, queue: Any, is_excluded: Callable[[Any], bool] = lambda _: False) -> None:
        """``is_excluded``: whether a waiting request may be passed without a charge, because SGLang
        reads its KV from storage."""
        self.queue = queue
        self.is_excluded = is_excluded
        self.excluded_passes = 0
        """Times that a request was passed beyond its budget while its KV was read from storage."""
        self.violations = 0
        """Admissions that passed a request beyond its allowance, counted at each."""
        self.max_used_share = 0.0
        """Largest used share of an allowance."""
        self._accounts: dict[Any, _Account] = {}
        """Accounts of waiting requests and of the prompt in chunked prefill."""
        self._running: dict[Any, _Account] = {}
        self._chunked_prompt: Any = None
        for name in ("add", "requeue", "admit", "remove", "set_chunked_prompt"):
            setattr(queue, name, functools.partial(getattr(self, "_" + name), getattr(queue, name)))

    def close(self) -> None:
        """Drop the accounts, which hold references to SGLang's requests."""
        self._accounts.clear()
        self._running.clear()
        self._chunked_prompt = None

    def _add(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        waiting = original(*args, **kwargs)
        budget_s = self.queue.cost_factor * waiting.cost + self.queue.base_budget_s
        self._accounts[waiting] = _Account(budget_s)
        return waiting

    def _admit(self, original: Any, admitted: Iterable[Any]) -> None:
        admitted = list(admitted)
        for waiting in admitted:
            self._running[waiting] = self._accounts.pop(waiting)
            for passed, account in self._accounts.items():
                if passed.number < waiting.number and _budget_key(passed) == _budget_key(waiting):
                    account.passed_s += waiting.cost
                    exceeds_allowance = account.passed_s > account.allowed_s + ROUNDING
                    if exceeds_allowance and self.is_excluded(passed):
                        self.excluded_passes += 1
                        account.allowed_s = account.passed_s
                    self.violations += account.passed_s > account.allowed_s + ROUNDING
                    allowed_s = account.allowed_s
                    used_share = account.passed_s / allowed_s if allowed_s else math.inf
                    self.max_used_share = max(self.max_used_share, used_share)
        original(admitted)

    def _requeue(self, original: Any, waiting: Any, *args: Any) -> None:
        self._accounts[waiting] = self._running.pop(waiting)
        original(waiting, *args)

    def _remove(self, original: Any, waiting: Any) -> Any:
        self._accounts.pop(waiting, None)
        return original(waiting)

    def _set_chunked_prompt(self, original: Any, waiting: Any) -> None:
        if self._chunked_prompt is not None and self._chunked_prompt is not waiting:
            self._accounts.pop(self._chunked_prompt, None)
        if waiting is not None and waiting in self._running:
            self._accounts[waiting] = self._running[waiting]
        self._chunked_prompt = waiting
        original(waiting)


def _budget_key(waiting: Any) -> tuple[Any, int]:
    """Budgets count within one tenant's share and one priority."""
    return waiting.share, waiting.urgency
