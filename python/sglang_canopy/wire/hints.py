"""Hints about a conversation that are sent separately from its requests.

``POST /canopy/hint`` adds a hint here. It is sent to the schedulers of every data-parallel replica
in SGLang's own message for changes of internal state, which reaches all ranks of a replica at the
same point between two requests. The first hint is sent at once. Each message takes time on the
scheduler's thread, so later hints within ``SEND_INTERVAL_S`` are sent together.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from sglang_canopy.bounded import BoundedByTenant
from sglang_canopy.errors import CanopyError
from sglang_canopy.records import CLIENT
from sglang_canopy.tenant import tenant_of
from sglang_canopy.wire.stamp import STAMP_FIELDS, client_fields

MAX_WAITING_HINTS = 1024
MAX_WAITING_OF_TENANT = 128
MAX_HINTS_PER_MESSAGE = 128
SEND_INTERVAL_S = 0.2
"""Minimum seconds between two messages."""
TENANT_HINTS_PER_S, MAX_TENANT_BURST = 50.0, 200
"""Hints of one tenant's clients per second, and in one burst. Gateways are not limited."""

_HINT_KEYS = ("over", "return_in_s", "keep_s")
_TENANT_KEYS = ("extra_key", "cache_salt")

Hint = dict[str, Any]
"""``tenant``, ``conversation``, ``time`` (seconds on the requests' clock), ``source`` (of
``records.py``) and one or more of ``over``, ``return_in_s``, ``keep_s``."""


class TooManyHints(CanopyError):
    """A tenant has too many waiting hints, or sent too many in a second."""


class WaitingHints:
    """Unsent hints, the latest of each conversation with its longest keep."""

    def __init__(self) -> None:
        self._rate = TenantRate(TENANT_HINTS_PER_S, MAX_TENANT_BURST)
        self._hints: BoundedByTenant[str, Hint] = BoundedByTenant(MAX_WAITING_HINTS)

    def add(self, body: Any, now: float, source: str = CLIENT) -> None:
        """Add one hint of ``source``, such as ``{"conversation": ..., "over": true}``, at ``now`` (s).
        Raises ``CanopyError`` for a body that is not a hint, ``TooManyHints`` if too many of the tenant
        wait, or it sends too many in a second."""
        hint = hint_of(body, now, source)
        tenant, name = hint["tenant"], hint["conversation"]
        if source == CLIENT and not self._rate.take(tenant, now):
            raise TooManyHints(
                f"this tenant sends more than {TENANT_HINTS_PER_S:g} hints a second; send fewer, or "
                "through a gateway that sends its secret"
            )
        previous = self._hints.get(tenant, name)
        if previous is None and self._hints.tenant_size(tenant) >= MAX_WAITING_OF_TENANT:
            raise TooManyHints(
                f"{MAX_WAITING_OF_TENANT} hints of this tenant are already waiting, the maximum; try "
                "again when they have been sent"
            )
        self._hints.put(tenant, name, _with_keep(hint, previous))

    def take(self) -> list[Hint]:
        """Remove and return up to ``MAX_HINTS_PER_MESSAGE`` hints: tenants in turn, the oldest hint of each first."""
        count = min(MAX_HINTS_PER_MESSAGE, len(self))
        entries = (self._hints.pop_round_robin() for _ in range(count))
        return [entry.value for entry in entries if entry is not None]

    def give_back(self, hints: Sequence[Hint]) -> None:
        """Requeue unsent hints, unless their conversation has a newer hint."""
        for hint in hints:
            tenant, name = hint["tenant"], hint["conversation"]
            newer = self._hints.get(tenant, name)
            self._hints.put(tenant, name, hint if newer is None else _with_keep(newer, hint))

    def __len__(self) -> int:
        return self._hints.size


def _with_keep(hint: Hint, previous: Hint | None) -> Hint:
    """Return ``hint`` with the keep of the older hint ``previous``, if that one lasts longer."""
    if previous is None or "keep_s" not in previous:
        return hint
    left_s = previous["time"] + previous["keep_s"] - hint["time"]
    return {**hint, "keep_s": left_s} if left_s > hint.get("keep_s", 0.0) else hint


async def deliver(
    waiting: WaitingHints,
    send: Callable[[str], Awaitable[Any]],
    pause: Callable[[], Awaitable[None]],
) -> None:
    """Send hints until none wait, with a pause after each message. Raises the exceptions of ``send``;
    the hints of that message then wait again."""
    while waiting:
        hints = waiting.take()
        try:
            await send(pack(hints))
        except BaseException:
            waiting.give_back(hints)
            raise
        await pause()


def hint_of(body: Any, now: float, source: str = CLIENT) -> Hint:
    """Return the hint of a body. Raises ``CanopyError`` naming the error."""
    if not isinstance(body, Mapping):
        raise CanopyError('a hint is a JSON object, such as {"conversation": "c1", "over": true}')
    unknown = sorted(body.keys() - {"conversation", *_TENANT_KEYS, *_HINT_KEYS})
    if unknown:
        raise CanopyError(
            f"unknown key {unknown[0][:60]!r} in a hint; allowed: conversation, "
            f"{', '.join(_TENANT_KEYS)}, {', '.join(_HINT_KEYS)}"
        )
    for key in _TENANT_KEYS:
        if not isinstance(body.get(key), str | None):
            raise CanopyError(f"{key} must be a string, as in the requests of the conversation")
    custom_params = {f"canopy_{k}": v for k, v in body.items() if k not in _TENANT_KEYS}
    fields, errors = client_fields(custom_params)
    for error in errors.values():
        raise CanopyError(error)
    if "conversation" not in fields or len(fields) == 1:
        raise CanopyError(f"a hint needs a conversation and one of: {', '.join(_HINT_KEYS)}")
    return {
        **fields,
        "tenant": tenant_of(body.get("extra_key"), body.get("cache_salt")),
        "time": now,
        "source": source,
    }


def pack(hints: Sequence[Hint]) -> str:
    return json.dumps(hints)


def unpack(text: str) -> list[Hint]:
    """Return the hints that ``pack`` put into ``text``, and ignore invalid content. Clients can send this
    message through an HTTP route of SGLang, and it must not terminate a scheduler."""
    try:
        hints = json.loads(text)
    except (ValueError, RecursionError):
        return []
    return [hint for hint in hints if _is_hint(hint)] if isinstance(hints, list) else []


def _is_hint(hint: Any) -> bool:
    if not isinstance(hint, dict) or not hint.keys() >= _REQUIRED_KEYS:
        return False
    try:
        for name, value in hint.items():
            _HINT_CHECKS[name](value)
    except (KeyError, ValueError):
        return False
    return True


def _check_tenant(value: Any) -> None:
    if not isinstance(value, str | None):
        raise ValueError("text or null")


_REQUIRED_KEYS = {"tenant", "conversation", "time", "source"}
_HINT_CHECKS = {n: STAMP_FIELDS[n] for n in ("conversation", "time", "source", *_HINT_KEYS)}
_HINT_CHECKS["tenant"] = _check_tenant


MAX_BUCKETS = 4096
"""Maximum tenants with a bucket. A forgotten tenant starts again with a full bucket."""


class TenantRate:
    """At most ``burst`` calls at once and ``calls_per_s`` per second, for each tenant."""

    def __init__(self, calls_per_s: float, burst: int) -> None:
        self.calls_per_s, self.burst = calls_per_s, burst
        self._buckets: OrderedDict[str | None, tuple[float, float]] = OrderedDict()
        """Tokens left in each tenant's bucket, and the time (seconds) of that count."""

    def take(self, tenant: str | None, now: float) -> bool:
        """Take one token at ``now`` (seconds). Returns whether one was available."""
        tokens, counted_at = self._buckets.pop(tenant, (float(self.burst), now))
        tokens = min(self.burst, tokens + self.calls_per_s * max(0.0, now - counted_at))
        is_available = tokens >= 1.0
        self._buckets[tenant] = tokens - is_available, max(now, counted_at)
        if len(self._buckets) > MAX_BUCKETS:
            self._buckets.popitem(last=False)
        return is_available

    def __len__(self) -> int:
        return len(self._buckets)
