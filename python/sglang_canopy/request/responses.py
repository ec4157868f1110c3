"""Read the bodies of ``/v1/responses``, and follow chains of responses.

A stateless client sends all items of its conversation in each request; a stateful client sends the new
items and ``previous_response_id``.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from sglang_canopy.wire.stamp import MAX_TURN

MAX_RESPONSES = 1024
"""Maximum remembered responses per tenant."""
MAX_TENANTS = 64


def infer_from_response(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return category and turn by the rules of ``sent.infer_from_chat``.

    Consecutive items of an answer (reasoning, calls, a message) count as one assistant turn.
    """
    items = [one for one in _list(body.get("input")) if isinstance(one, Mapping)]
    answers = [_is_answer(item) for item in items]
    turns = sum(now and not before for before, now in zip([False, *answers], answers))
    text = body.get("text")
    form = text.get("format") if isinstance(text, Mapping) else None
    category = "chat"
    if body.get("tools"):
        category += "-tools"
    if isinstance(form, Mapping) and form.get("type") != "text":
        category += "-json"
    if any(map(_has_image, items)):
        category += "-image"
    if items and str(items[-1].get("type")).endswith("_output"):
        category += "-after-tool"
    return {"category": category, "turn": min(1 + turns, MAX_TURN)}


def _is_answer(item: Mapping[str, Any]) -> bool:
    kind = str(item.get("type", ""))
    if "role" in item or kind == "message":
        return item.get("role") == "assistant"
    return kind == "reasoning" or ("call" in kind and not kind.endswith("_output"))


def _has_image(item: Mapping[str, Any]) -> bool:
    parts = [*_list(item.get("content")), *_list(item.get("output"))]
    return any(isinstance(part, Mapping) and part.get("type") == "input_image" for part in parts)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


class Responses:
    """Conversations and turns of past responses. Bounded per tenant and in total. Thread-safe."""

    def __init__(self) -> None:
        self._known: dict[str | None, dict[str, tuple[str, int]]] = {}
        self._lock = threading.Lock()

    def continued(
        self, tenant: str | None, rid: str, previous: str | None, turn: int
    ) -> tuple[str, int | None]:
        """Return the conversation of response ``rid``, and its turn if ``previous`` is remembered.

        The first response names the conversation. ``turn``: turns in the items sent for ``rid``.
        """
        with self._lock:
            mine = self._known.pop(tenant, {})
            root, before = (rid, 0) if previous is None else mine.get(previous, (previous, 0))
            mine.pop(rid, None)
            if len(mine) >= MAX_RESPONSES:
                del mine[next(iter(mine))]
            mine[rid] = root, min(before + turn, MAX_TURN)
            if len(self._known) >= MAX_TENANTS:
                del self._known[next(iter(self._known))]
            self._known[tenant] = mine
        return root, min(before + turn, MAX_TURN) if before else None
