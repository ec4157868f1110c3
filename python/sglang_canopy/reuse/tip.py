"""A tip: the end of one request's path, and whether it was continued."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import ClassVar

from sglang_canopy.reuse.categories import Category
from sglang_canopy.reuse.hint_trust import HintRecord


@dataclass(slots=True, eq=False)
class Tip:
    """End of one request's path, or a junction of two paths, and whether it was continued."""

    size: ClassVar[int] = 1
    """A tip is one sample (``tenant_window.py``)."""
    born: float
    category: Category
    tenant: str | None = None
    origin: int = 0
    """Last full block of the conversation's first prompt, equal for all its tips."""
    turn: int = 1
    """Requests seen on this path, including this one."""
    own_gap_s: float | None = None
    """Moving average of this conversation's own gaps."""
    added: int = 0
    """Prompt tokens that were new to its path."""
    history: int = 0
    """Prompt and output tokens."""
    blocks: int = 0
    """Blocks of the path on arrival."""
    keys: tuple[int, ...] = ()
    open: bool = True
    """No request has continued it yet."""
    void: bool = False
    """Not a sample of returns: answer cut off, or too many junctions."""
    gap_s: float = 0.0
    growth: int = -1
    """New tokens of the continuing prompt; -1 if not sampled."""
    seen: list[float] = field(init=False)
    """Last use, shared by all tips of a conversation (or junction)."""
    first: float = field(init=False)
    """Junctions only: time at which the prefix was first seen."""
    speaker: Hashable = field(init=False)
    """Speaker of the hints (``hint_trust.speaker``)."""
    return_at: float | None = None
    hinted_s: float = 0.0
    """Hinted return, in seconds after ``born``."""
    hinted_over: bool = False
    counted: HintRecord | None = None
    counted_over: HintRecord | None = None

    def __post_init__(self) -> None:
        self.seen, self.first, self.speaker = [self.born], self.born, self.tenant
