"""Claude Code's transcripts: a tree of messages linked by ``parentUuid``.

    {"type": "user", "uuid": "b", "parentUuid": "a", "sessionId": "s", "timestamp": "...",
     "message": {"role": "user", "content": "..."}}

An answer is one line for each of its blocks, with one ``message.id``. ``isSidechain`` marks sub-agents;
an answer of the model ``<synthetic>`` is an error message that no model wrote.
"""

from __future__ import annotations

from typing import Any

from canopy_lab.trace import calls, fields, usage
from canopy_lab.trace.prompts import clients_name
from canopy_lab.trace.session_request import SessionRequest

_SYNTHETIC = "<synthetic>"
_MAX_DEPTH = 100_000


class ClaudeSessions:
    """Assembles requests from the entries of one or several sessions."""

    def __init__(self) -> None:
        self._messages: dict[str, tuple[str | None, dict[str, Any] | None, float]] = {}
        """Uuid -> (parent's uuid, message or ``None``, time)."""
        self._answers: set[str] = set()

    def take(self, entry: dict[str, Any], line: int) -> SessionRequest | str | None:
        """Add one entry. Returns the request that it answers, ``calls.FAILED`` for an error
        message, ``None`` for anything else. Raises ``BadLine``."""
        uuid, parent = entry.get("uuid"), entry.get("parentUuid")
        message = entry.get("message")
        if not isinstance(uuid, str):
            return None
        if entry.get("isApiErrorMessage") or _model(message) == _SYNTHETIC:
            self._messages[uuid] = (parent, None, 0.0)
            return calls.FAILED
        if entry.get("type") not in ("user", "assistant") or not isinstance(message, dict):
            self._messages[uuid] = (parent, None, 0.0)
            return None
        time_s = fields.seconds(entry.get("timestamp"))
        found = None
        if entry["type"] == "assistant":
            found = self._request(entry, message, time_s, line)
        self._messages[uuid] = (parent, message, time_s)
        return found

    def _request(
        self, entry: dict[str, Any], message: dict[str, Any], time_s: float, line: int
    ) -> SessionRequest | None:
        name = str(message.get("id") or entry.get("requestId") or "")
        if name and name in self._answers:
            return None
        self._answers.add(name)
        messages, asked_s, root = self._before(entry.get("parentUuid"))
        if not messages:
            return None
        session = clients_name(entry.get("sessionId") or "session")
        is_side = bool(entry.get("isSidechain"))
        child = f"{session}/{clients_name(entry.get('agentId') or root)}"
        counts = message.get("usage")
        output = usage.count([counts], ("output_tokens",)) if isinstance(counts, dict) else None
        return SessionRequest(
            time_s=min(asked_s or time_s, time_s),
            line=line,
            name=name,
            session=child if is_side else session,
            parent=session if is_side else None,
            turn=1 + sum(m["role"] == "assistant" for m in messages),
            model=_model(message),
            messages=messages,
            stop=str(message.get("stop_reason") or ""),
            output_tokens=output or 0,
        )

    def _before(self, uuid: Any) -> tuple[list[dict[str, Any]], float, str]:
        """Return (messages from the root to ``uuid``, time of the last message, uuid of the root).

        Lines of one answer become one message."""
        found: list[dict[str, Any]] = []
        asked_s, root = 0.0, ""
        for _ in range(_MAX_DEPTH):
            if not isinstance(uuid, str) or uuid not in self._messages:
                break
            root = uuid
            uuid, message, time_s = self._messages[uuid]
            if message is None:
                continue
            asked_s = asked_s or time_s
            if found and message.get("id") and found[-1].get("id") == message["id"]:
                found[-1] = {**message, "content": [*_blocks(message), *_blocks(found[-1])]}
            else:
                found.append({"role": "user", **message})
        return found[::-1], asked_s, root


def _blocks(message: dict[str, Any]) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else [content]


def _model(message: Any) -> str:
    return str(message.get("model") or "") if isinstance(message, dict) else ""
