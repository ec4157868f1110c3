"""The record type of all trace readers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace. Times in seconds from the start of the trace."""

    time_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    """Prefix-chained block ids of the prompt: equal id means equal prefix up to its end.
    The last block may be partial (``input_tokens`` is exact)."""
    block_tokens: int
    """Tokens a full block."""
    category: str = "default"
    turn: int = 1
    conversation: str | None = None
    stop: str | None = None
    """Why the response stopped: ``tool``, ``end``, ``length``; ``None`` if the trace is silent."""
    user: str | None = None
    think_s: float | None = None
    """Seconds since the answer to the previous turn, if the trace has it."""
    api_s: float | None = None
    """Seconds that the answer took where the trace was taken."""
    model: str | None = None
    input_types: tuple[str, ...] = ()
    """Kinds of content in what this turn adds to the prompt: ``text``, ``tool_result``, ..."""
    output_types: tuple[str, ...] = ()
    """Kinds of content in the answer: ``text``, ``thinking``, ``tool_use``."""
    tool_tokens: int = 0
    """Tokens of the tools' definitions, which the prompt begins with; 0 if the trace is silent."""
    system_tokens: int = 0
    """Tokens of the system prompt, which follows the tools."""
    line: int = 0
    """1-based line (or ordinal) in the source, for messages."""
