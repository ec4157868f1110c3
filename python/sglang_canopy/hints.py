"""Hints about a conversation that come by themselves, not with one of its requests.

``POST /canopy/hint`` leaves a hint here; the next request of any client carries all that wait
to the scheduler. Nothing is evicted between requests, so a hint that travels with the next one
acts as early as it could, and every tensor-parallel rank sees it at the same place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sglang_canopy.errors import CanopyError
from sglang_canopy.request import said_by_client

MAX_WAITING = 1024
MAX_CARRIED = 64

_HINTS = ("over", "return_in_s", "keep_s")


class Waiting:
    """Hints not sent yet, the last word on each conversation. Bounded."""

    def __init__(self) -> None:
        self._hints: dict[tuple[str | None, str], dict[str, Any]] = {}

    def add(self, body: Any, now: float) -> None:
        """Take one hint: ``{"conversation": ..., "over": true}`` and the like.

        Raises ``CanopyError`` for a body that says nothing, or too much at once.
        """
        if not isinstance(body, Mapping):
            raise CanopyError(
                'a hint is a JSON object, such as {"conversation": "c1", "over": true}'
            )
        salt = body.get("cache_salt")
        if salt is not None and (not isinstance(salt, str) or len(salt) > 256):
            raise CanopyError("cache_salt must be a string of at most 256 characters")
        fields = {f"canopy_{k}": v for k, v in body.items() if k != "cache_salt"}
        allowed = {"canopy_conversation", *(f"canopy_{k}" for k in _HINTS)}
        if not fields.keys() <= allowed:
            wrong = sorted(k.removeprefix("canopy_") for k in fields.keys() - allowed)
            raise CanopyError(
                f"unknown key {wrong[0][:60]!r} in a hint; allowed: conversation, cache_salt, "
                f"{', '.join(_HINTS)}"
            )
        said = said_by_client(fields)
        conversation = said.pop("conversation", None)
        if conversation is None or not said:
            raise CanopyError(f"a hint needs a conversation and one of: {', '.join(_HINTS)}")
        key = (salt, conversation)
        if key not in self._hints and len(self._hints) >= MAX_WAITING:
            raise CanopyError(
                f"{MAX_WAITING} hints wait already; they leave with the next requests"
            )
        self._hints[key] = {**said, "time": now}

    def take(self) -> str | None:
        """Up to ``MAX_CARRIED`` waiting hints as one JSON string, oldest first; ``None`` if none."""
        if not self._hints:
            return None
        keys = list(self._hints)[:MAX_CARRIED]
        return json.dumps(
            [{"salt": k[0], "conversation": k[1], **self._hints.pop(k)} for k in keys]
        )

    def __len__(self) -> int:
        return len(self._hints)
