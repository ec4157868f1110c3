"""A tip: the end of one request's path, and what became of it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from sglang_canopy.reuse.categories import Category
from sglang_canopy.reuse.hint_trust import HintRecord


@dataclass(slots=True, eq=False)
class Tip:
    """Where one request's path ends (or two paths part), and what became of it."""

    born: float
    category: Category
    tenant: str | None = None
    origin: int = 0
    """The last full block of the conversation's first prompt: the same for all of its tips."""
    turn: int = 1
    """Requests seen on this path, this one included."""
    own_gap_s: float | None = None
    """Moving average of this conversation's own gaps."""
    added: int = 0
    """Tokens of its prompt that were new to its path."""
    history: int = 0
    """Prompt and output tokens."""
    blocks: int = 0
    """Blocks of the path on arrival."""
    keys: tuple[int, ...] = ()
    open: bool = True
    """Nobody has continued it yet."""
    void: bool = False
    """It is no sample of returns: its answer was cut off, or its path has too many junctions."""
    gap_s: float = 0.0
    growth: int = -1
    """New tokens of the prompt that continued it; -1 where none was sampled."""
    seen: list[float] = field(init=False)
    """One time, shared by all tips of a conversation (or of a junction): when it was last seen."""
    first: float = field(init=False)
    """Of a junction: when its prefix was first seen."""
    speaker: Hashable = field(init=False)
    """Whose word its hints are (``hint_trust.speaker``)."""
    return_at: float | None = None
    hinted_s: float = 0.0
    """Seconds after ``born`` at which it returns, as somebody said."""
    hinted_over: bool = False
    counted: HintRecord | None = None
    counted_over: HintRecord | None = None

    def __post_init__(self) -> None:
        self.seen, self.first, self.speaker = [self.born], self.born, self.tenant
