"""The record type of all trace readers."""

from __future__ import annotations

from dataclasses import dataclass

STOPS = {
    **dict.fromkeys(("tool", "tool_calls", "function_call", "tool_use", "tool_call"), "tool"),
    **dict.fromkeys(("end", "stop", "end_turn", "stop_sequence"), "end"),
    **dict.fromkeys(("length", "max_tokens"), "length"),
}
"""Stop reasons of all logs -> ours."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace. Times in seconds from the start of the trace."""

    time_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    """Prefix-chained block ids of the prompt: equal ids mean equal prefixes up to the block's end.
    The last block may be partial (``input_tokens`` is exact)."""
    block_tokens: int
    """Tokens per full block."""
    category: str = "default"
    turn: int = 1
    conversation: str | None = None
    stop: str | None = None
    """Stop reason of the response (``tool``, ``end``, ``length``); ``None`` if it is missing."""
    user: str | None = None
    think_s: float | None = None
    """Seconds since the answer to the previous turn, if the trace has it."""
    answer_s: float | None = None
    """Duration of the answer, in seconds, when the trace was recorded."""
    model: str | None = None
    tool_tokens: int = 0
    """Tokens of the tool definitions at the prompt's start; 0 if the trace lacks them."""
    system_tokens: int = 0
    """Tokens of the system prompt, which follows the tools."""
    line: int = 0
    """1-based line (or ordinal) in the source, for messages."""
