"""Independent accounts for `BoundedShortest`: the work that overtook each request.

Observes a live queue without reading or changing its budgets. Work is in predicted seconds of the
server, at the cost of each request's admission."""

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

ROUNDING_S = 1e-9


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
        self.max_used_fraction = 0.0
        """Largest used part of an allowance; over 1 where a request was passed beyond it."""
        self._waiting: dict[Any, _Account] = {}
        """Accounts of waiting requests and of the prompt in chunked prefill."""
        self._admitted: dict[Any, _Account] = {}
        self._chunked_prompt: Any = None
        for name in ("add", "requeue", "admit", "remove", "set_chunked_prompt"):
            setattr(queue, name, functools.partial(getattr(self, "_" + name), getattr(queue, name)))

    def close(self) -> None:
        """Drop the accounts, which hold references to SGLang's requests."""
        self._waiting.clear()
        self._admitted.clear()
        self._chunked_prompt = None

    def _add(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        waiting = original(*args, **kwargs)
        budget_s = self.queue.cost_factor * waiting.cost_s + self.queue.base_budget_s
        self._waiting[waiting] = _Account(budget_s)
        return waiting

    def _admit(self, original: Any, admitted: Iterable[Any]) -> None:
        admitted = list(admitted)
        for waiting in admitted:
            self._admitted[waiting] = self._waiting.pop(waiting)
            for passed, account in self._waiting.items():
                if passed.number < waiting.number and _budget(passed) == _budget(waiting):
                    account.passed_s += waiting.cost_s
                    exceeds_allowance = account.passed_s > account.allowed_s + ROUNDING_S
                    if exceeds_allowance and self.is_excluded(passed):
                        self.excluded_passes += 1
                        account.allowed_s = account.passed_s
                    self.violations += account.passed_s > account.allowed_s + ROUNDING_S
                    allowed_s = account.allowed_s
                    used_fraction = account.passed_s / allowed_s if allowed_s else math.inf
                    self.max_used_fraction = max(self.max_used_fraction, used_fraction)
        original(admitted)

    def _requeue(self, original: Any, waiting: Any, *args: Any) -> None:
        self._waiting[waiting] = self._admitted.pop(waiting)
        original(waiting, *args)

    def _remove(self, original: Any, waiting: Any) -> Any:
        self._waiting.pop(waiting, None)
        return original(waiting)

    def _set_chunked_prompt(self, original: Any, waiting: Any) -> None:
        if self._chunked_prompt is not None and self._chunked_prompt is not waiting:
            self._waiting.pop(self._chunked_prompt, None)
        if waiting is not None and waiting in self._admitted:
            self._waiting[waiting] = self._admitted[waiting]
        self._chunked_prompt = waiting
        original(waiting)


def _budget(waiting: Any) -> tuple[Any, int]:
    """Return the share and the priority within which the request's budget counts."""
    return waiting.share, waiting.urgency
