"""How long which part of a request's path is to stay, and in which tiers: one record for all who
ask.

A range of tokens with a priority and a duration is how TensorRT-LLM says it
(``KvCacheRetentionConfig``, with the priorities from 0 to 100 and 35 as the ordinary one);
``canopy_keep_s``, ``canopy_ttl_s`` and ``canopy_pin_s`` are the cases of it that concern a whole
path and one tier.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

DEVICE, HOST, DISK = "device", "host", "disk"
TIERS = (DEVICE, HOST, DISK)

ORDINARY, MOST = 35, 100
"""Above the first a range is protected, within the tenant's budget; below it, it goes first; with
it, the duration is how long it lives below the device."""

ANSWER = -1
"""As ``start``: where the prompt ends."""
MAX_RANGES = 8
"""Of one request."""
MAX_TOKENS = 1 << 30
MAX_DURATION_S = 30 * 24 * 3600.0

_NUMBERS = 5
"""Numbers that carry one record to the scheduler."""


@dataclass(frozen=True, slots=True)
class Retention:
    """A wish for the tokens from ``start`` to ``end`` of a path, for ``duration_s`` seconds."""

    tiers: tuple[str, ...]
    priority: int
    duration_s: float
    start: int = 0
    """Tokens before the range, or ``ANSWER``."""
    end: int | None = None
    """``None``: the end of the path, the answer included."""

    @property
    def protects(self) -> bool:
        return self.priority > ORDINARY

    @property
    def releases(self) -> bool:
        return self.priority < ORDINARY

    @property
    def whole(self) -> bool:
        return self.start == 0 and self.end is None

    def covers(self, start: int, end: int, prompt_tokens: int) -> bool:
        """Whether a node from ``start`` to ``end`` lies in the range."""
        first = prompt_tokens if self.start == ANSWER else self.start
        return first <= start and (self.end is None or end <= self.end)


def keep(seconds: float) -> Retention:
    """``canopy_keep_s``: evicted from memory after everything else."""
    return Retention((DEVICE,), MOST, seconds)


def ttl(seconds: float) -> Retention:
    """``canopy_ttl_s``: expires below the device."""
    return Retention((HOST, DISK), ORDINARY, seconds)


def pin(seconds: float) -> Retention:
    """``canopy_pin_s``: held on disk."""
    return Retention((DISK,), MOST, seconds)


_CASES = {"keep_s": keep, "ttl_s": ttl, "pin_s": pin}


def whole_path(stamp: Mapping[str, Any]) -> list[Retention]:
    """What the three keys of a stamp ask for."""
    return [make(stamp[key]) for key, make in _CASES.items() if key in stamp]


# ---- what a client writes under canopy_retain ----

_ALLOWED = (
    f"a list of 1 to {MAX_RANGES} objects with priority (0 to {MOST}, {ORDINARY} being ordinary) and "
    f"duration_s (0 to {MAX_DURATION_S:g}), and where wanted start, end (tokens) and tiers "
    f"(some of {', '.join(TIERS)})"
)
_KEYS = {"start", "end", "priority", "duration_s", "tiers"}


def ranges(value: Any) -> list[float]:
    """A check for ``canopy_retain``. Returns the records as ``to_wire`` does."""
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_RANGES:
        raise ValueError(_ALLOWED)
    return to_wire([_range(one) for one in value])


def _range(given: Any) -> Retention:
    if not isinstance(given, Mapping) or not given.keys() <= _KEYS:
        raise ValueError(_ALLOWED)
    tiers = given.get("tiers", [DEVICE])
    if not isinstance(tiers, list) or not tiers or any(tier not in TIERS for tier in tiers):
        raise ValueError(_ALLOWED)
    found = made(
        tuple(tier for tier in TIERS if tier in tiers),
        given.get("priority"),
        given.get("duration_s"),
        given.get("start", 0),
        given.get("end"),
    )
    if found is None:
        raise ValueError(_ALLOWED)
    return found


def made(
    tiers: tuple[str, ...], priority: Any, duration_s: Any, start: Any = 0, end: Any = None
) -> Retention | None:
    """The record that these values say, ``None`` where one is not what it should be."""
    if not _is_number(duration_s) or not 0 <= duration_s <= MAX_DURATION_S:
        return None
    if not _is_count(priority) or not 0 <= priority <= MOST:
        return None
    if not _is_count(start) or not ANSWER <= start < MAX_TOKENS:
        return None
    if end is not None and (not _is_count(end) or not max(start, 0) < end <= MAX_TOKENS):
        return None
    return Retention(tiers, priority, float(duration_s), start, end)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# ---- the way to the scheduler ----


def to_wire(records: Iterable[Retention]) -> list[float]:
    """A flat list of numbers: SGLang carries no other lists."""
    flat: list[float] = []
    for one in records:
        tiers = sum(1 << TIERS.index(tier) for tier in one.tiers)
        flat += [tiers, one.priority, one.duration_s, one.start, -1 if one.end is None else one.end]
    return flat


def from_wire(flat: Any) -> list[Retention]:
    """The records of ``to_wire``. What cannot be from there is left out; never raises."""
    if not isinstance(flat, list) or len(flat) % _NUMBERS or len(flat) > MAX_RANGES * _NUMBERS:
        return []
    found = []
    for i in range(0, len(flat), _NUMBERS):
        mask, priority, duration_s, start, end = flat[i : i + _NUMBERS]
        if not _is_count(mask) or not 0 < mask < 1 << len(TIERS):
            continue
        tiers = tuple(tier for bit, tier in enumerate(TIERS) if mask >> bit & 1)
        one = made(tiers, priority, duration_s, start, None if end == -1 else end)
        if one is not None:
            found.append(one)
    return found
