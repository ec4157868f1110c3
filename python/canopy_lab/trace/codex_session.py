"""Codex's rollouts: ``{"timestamp": "...", "type": "response_item", "payload": {...}}``, one per line.

Items of the model (answers, reasoning, calls) that follow each other are one answer; the items before
it are its prompt. ``session_meta`` begins a session, ``turn_context`` names the model, ``compacted``
replaces the history.
"""

from __future__ import annotations

from typing import Any

from canopy_lab.trace import fields
from canopy_lab.trace.prompts import clients_name
from canopy_lab.trace.session_request import SessionRequest


class CodexSession:
    """Assembles requests from the entries of one or several sessions, one after the other."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begin({})

    def _begin(self, payload: dict[str, Any]) -> None:
        self._session = clients_name(payload.get("id") or self._name)
        base = payload.get("base_instructions")
        text = base.get("text") if isinstance(base, dict) else payload.get("instructions")
        self._system = text if isinstance(text, str) else None
        self._items: list[dict[str, Any]] = []
        self._model = str(payload.get("model") or "")
        self._answering = False
        self._turn, self._asked_s = 0, 0.0

    def take(self, entry: dict[str, Any], line: int) -> SessionRequest | None:
        """Add one entry. Returns the request that it begins to answer. Raises ``BadLine``."""
        kind, payload = entry["type"], entry["payload"]
        if not isinstance(payload, dict):
            return None
        if kind == "session_meta":
            self._begin(payload)
        elif kind == "turn_context":
            self._model = str(payload.get("model") or self._model)
        elif kind == "compacted":
            history = payload.get("replacement_history")
            message = {"role": "user", "content": str(payload.get("message") or "")}
            self._items = list(history) if isinstance(history, list) else [message]
            self._answering = False
        elif kind == "response_item":
            return self._item(payload, fields.seconds(entry.get("timestamp")), line)
        return None

    def _item(self, item: dict[str, Any], time_s: float, line: int) -> SessionRequest | None:
        found = None
        is_models = _is_models(item)
        if is_models and not self._answering and self._items:
            self._turn += 1
            found = SessionRequest(
                time_s=self._asked_s or time_s,
                line=line,
                name="",
                session=self._session,
                parent=None,
                turn=self._turn,
                model=self._model,
                messages=list(self._items),
                system=self._system,
                stop="tool_calls" if str(item.get("type")).endswith("_call") else "",
            )
        self._answering = is_models
        if not is_models:
            self._asked_s = time_s
        self._items.append(item)
        return found


def _is_models(item: dict[str, Any]) -> bool:
    kind = str(item.get("type"))
    if kind == "message":
        return item.get("role") == "assistant"
    return kind == "reasoning" or kind.endswith("_call")
