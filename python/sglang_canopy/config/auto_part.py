"""State of one part of ``--radix-eviction auto``, for the doctor and the status."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

NAMES = ("policy", "order", "write policy", "floor", "meter")
"""Parts of ``auto``."""


@dataclass(frozen=True, slots=True)
class Part:
    """State of one part of ``auto`` on a server."""

    name: str
    """One of ``NAMES``."""
    active: bool
    runs: str
    """Setting in effect."""
    why: str = ""
    """Reason for an inactive part."""
    change: str = ""
    """Change that activates the part; empty if there is none."""

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON data."""
        return asdict(self)

    def text(self) -> str:
        """Return the state in one line."""
        if self.active:
            return f"{self.name} is on ({self.runs})"
        return f"{self.name} is off: {self.why}" + (f"; {self.change}" if self.change else "")
