"""What a lower tier knows of one page: everything of a ``Leaf`` that must survive a restart."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sglang_canopy.errors import CanopyError
from sglang_canopy.records import Leaf

MAX_TEXT = 256
"""Longest category, tenant or conversation, in characters."""

_MAX_TOKENS = 1 << 40
_INT32 = (1 << 31) - 1
"""The index on disk keeps a page's own numbers in 32 bits."""
_FAR = 1e13
"""Largest time, in seconds, that is taken for one."""


@dataclass(slots=True)
class PageMeta:
    """The record of one page. Times in seconds on the requests' clock, lengths in tokens."""

    offset: int = 0
    """Tokens of the path before this page."""
    tokens: int = 0
    """Tokens of this page."""
    category: str = "default"
    turn: int = 1
    conversation: str | int | None = None
    tenant: str | None = None
    """See ``tenant.tenant_of``."""
    group: int = -1
    """Index into the tier's ``TTLTable``; -1 (``tier.ttl.RESIDUAL``) for every other path."""
    created: float = 0.0
    last_access: float = 0.0
    hits: int = 0
    """Requests that used this page, the one that made it included."""
    keep_until: float | None = None
    ttl_s: float | None = None
    """The page's own TTL, asked for by a request; ``None``: the group's."""
    shared: bool = False
    history: int = 0
    over: bool = False
    return_at: float | None = None
    slo_ms: float | None = None

    @classmethod
    def from_leaf(
        cls, leaf: Leaf, *, offset: int, tokens: int, ttl_s: float | None = None
    ) -> PageMeta:
        """The record of ``tokens`` of ``leaf``'s tokens, ``offset`` tokens deep in the path."""
        return cls(
            offset=offset,
            tokens=tokens,
            category=_shortened(leaf.category),
            turn=leaf.turn,
            conversation=_plain(leaf.conversation),
            tenant=None if leaf.tenant is None else _shortened(leaf.tenant),
            group=-1 if leaf.group is None else leaf.group,
            created=leaf.created,
            last_access=leaf.last_access,
            hits=leaf.hits,
            keep_until=leaf.keep_until,
            ttl_s=ttl_s,
            shared=leaf.shared,
            history=leaf.history,
            over=leaf.over,
            return_at=leaf.return_at,
            slo_ms=leaf.slo_ms,
        )

    def apply_to(self, leaf: Leaf) -> None:
        """Write all but ``offset`` and the length into ``leaf`` (call while it is not admitted)."""
        for name in _OF_LEAF:
            setattr(leaf, name, getattr(self, name))
        leaf.group = None if self.group < 0 else self.group

    def to_json(self) -> dict[str, Any]:
        """JSON-able; fields at their defaults are left out."""
        return {
            f.name: value
            for f in dataclasses.fields(self)
            if (value := getattr(self, f.name)) != f.default
        }

    @classmethod
    def from_json(cls, given: Any) -> PageMeta:
        """The inverse of ``to_json``. Raises ``CanopyError`` naming the field that is wrong."""
        if not isinstance(given, Mapping):
            raise CanopyError(f"page metadata must be a JSON object, got {type(given).__name__}")
        for name, value in given.items():
            check = _CHECKS.get(name)
            if check is None:
                raise CanopyError(
                    f"page metadata has an unknown field {name!r}; known: {', '.join(_CHECKS)}"
                )
            if not check(value):
                raise CanopyError(f"page metadata field {name!r} cannot be {value!r}")
        return cls(**given)


_OF_LEAF = (
    "category",
    "turn",
    "conversation",
    "tenant",
    "created",
    "last_access",
    "hits",
    "keep_until",
    "shared",
    "history",
    "over",
    "return_at",
    "slo_ms",
)


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT]


def _plain(value: Any) -> str | int | None:
    """A conversation's identity as something a file can hold."""
    if value is None or (type(value) is int and -(1 << 63) <= value < 1 << 63):
        return value
    return _shortened(value if isinstance(value, str) else repr(value))


def _whole(low: int, high: int) -> Callable[[Any], bool]:
    return lambda v: type(v) is int and low <= v <= high


def _seconds(v: Any) -> bool:
    return type(v) in (int, float) and math.isfinite(v) and -_FAR <= v <= _FAR


def _text(v: Any) -> bool:
    return isinstance(v, str) and len(v) <= MAX_TEXT


def _or_none(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda v: v is None or check(v)


def _identity(v: Any) -> bool:
    return _text(v) or _whole(-(1 << 63), (1 << 63) - 1)(v)


def _ttl(v: Any) -> bool:
    return type(v) in (int, float) and v >= 0


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "offset": _whole(0, _MAX_TOKENS),
    "tokens": _whole(0, _INT32),
    "category": _text,
    "turn": _whole(0, _INT32),
    "conversation": _or_none(_identity),
    "tenant": _or_none(_text),
    "group": _whole(-1, _INT32),
    "created": _seconds,
    "last_access": _seconds,
    "hits": _whole(0, 1 << 62),
    "keep_until": _or_none(_seconds),
    "ttl_s": _or_none(_ttl),
    "shared": lambda v: isinstance(v, bool),
    "history": _whole(0, _MAX_TOKENS),
    "over": lambda v: isinstance(v, bool),
    "return_at": _or_none(_seconds),
    "slo_ms": _or_none(_seconds),
}
