"""One request of an agent's session, as its file lets it be put together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """What a session held before one answer of the model."""

    time_s: float
    """When the last message before the answer was written."""
    line: int
    name: str
    """The answer's own name; empty if it has none."""
    session: str
    """``parent/child`` for a sub-agent."""
    parent: str | None
    turn: int
    model: str
    messages: list[dict[str, Any]]
    system: str | None = None
    stop: str = ""
    output_tokens: int = 0
