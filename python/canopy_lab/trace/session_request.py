"""One request of an agent's session, as far as its file has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """One answer of the model and the messages before it."""

    time_s: float
    """Time at which the last message before the answer was written."""
    line: int
    name: str
    """Id of the answer; empty if the file has no ids."""
    session: str
    """``parent/child`` for a sub-agent."""
    parent: str | None
    turn: int
    model: str
    messages: list[dict[str, Any]]
    system: str | None = None
    stop: str = ""
    output_tokens: int = 0
