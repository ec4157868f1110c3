"""Requests and hits by LoRA adapter: plain integers, as in ``counters``."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_canopy.radix.counters import OTHER, TIERS

MAX_ADAPTERS = 64
"""Adapters with a row of their own, the first that were used; later ones share ``OTHER``."""


@dataclass(slots=True)
class AdapterRow:
    """One adapter since the start; counts are of finished requests."""

    requests: int = 0
    prompt_tokens: int = 0
    hits: tuple[int, ...] = (0,) * len(TIERS)
    """Prompt tokens that were found in each tier."""


class AdapterCounts:
    """Filled by the scheduler's thread alone; read by any."""

    __slots__ = ("rows",)

    def __init__(self) -> None:
        self.rows: dict[str, AdapterRow] = {}

    def served(self, adapter: str | None, prompt_tokens: int, hits: tuple[int, ...]) -> None:
        """A request finished; ``adapter``: its name, ``None`` for the model alone."""
        if adapter is None:
            return
        row = self.rows.get(adapter)
        if row is None:
            name = adapter if len(self.rows) < MAX_ADAPTERS else OTHER
            row = self.rows.setdefault(name, AdapterRow())
        row.requests += 1
        row.prompt_tokens += prompt_tokens
        row.hits = tuple(a + b for a, b in zip(row.hits, hits, strict=True))
