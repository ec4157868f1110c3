"""Counts of a log's requests, and of the entries and text that its reader ignored or changed.

If that is more than ``NOTABLE`` of a log, every report begins with it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

NOTABLE = 0.01
"""Share of a log's entries, tokens or times."""
_MAX_NAMES = 1000
"""Distinct models and fields that are counted; the rest count as one."""
_MAX_SHOWN = 5


@dataclass(slots=True)
class Understood:
    """Counts of one reader. ``canopy advise`` prints them before any advice."""

    requests: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    """Entries that are not requests, by reason."""
    changed: Counter[str] = field(default_factory=Counter)
    """Requests with a changed prompt, length or time, by reason."""
    models: Counter[str] = field(default_factory=Counter)
    role_bytes: Counter[str] = field(default_factory=Counter)
    """Characters of the prompts by role; the name is a key of the JSON output."""
    unread_bytes: Counter[str] = field(default_factory=Counter)
    """Characters in fields of request bodies that the reader does not know, by field."""
    remarks: dict[str, None] = field(default_factory=dict)
    """Sentences about the whole log, such as the unit of its times."""

    @property
    def entries(self) -> int:
        return self.requests + self.left_out.total()

    def count_model(self, name: str) -> None:
        if name in self.models or len(self.models) < _MAX_NAMES:
            self.models[name] += 1
        else:
            self.models["other models"] += 1

    def count_unread(self, field_name: str, characters: int) -> None:
        """Count ``characters`` of a field that is not part of the prompt."""
        if field_name in self.unread_bytes or len(self.unread_bytes) < _MAX_NAMES:
            self.unread_bytes[field_name] += characters

    def as_dict(self) -> dict[str, Any]:
        counts = {f.name: dict(getattr(self, f.name)) for f in fields(self) if f.name != "requests"}
        del counts["remarks"]
        return {
            "requests": self.requests,
            **counts,
            "alarms": self.alarms(),
            "details": self.details(),
        }

    def alarms(self) -> list[str]:
        """Return sentences for the top of a report; an empty list if few entries were affected."""
        warnings = []
        left_out = self.left_out.total()
        if left_out > NOTABLE * max(self.entries, 1):
            warnings.append(
                f"{left_out:,} of {self.entries:,} entries ({left_out / self.entries:.1%}) are left out: "
                f"{_counts(self.left_out)}."
            )
        notable = Counter(
            {reason: n for reason, n in self.changed.items() if n > NOTABLE * max(self.requests, 1)}
        )
        if notable:
            warnings.append(f"Of {self.requests:,} requests, {_counts(notable)}.")
        read_bytes, unread_bytes = self.role_bytes.total(), self.unread_bytes.total()
        if unread_bytes > NOTABLE * max(read_bytes + unread_bytes, 1):
            warnings.append(
                f"{unread_bytes / (read_bytes + unread_bytes):.1%} of the request bodies' text is in fields that are not "
                f"read as part of the prompt: {', '.join(dict(self.unread_bytes.most_common(_MAX_SHOWN)))}."
            )
        return warnings

    def details(self) -> list[str]:
        """Return sentences about models, roles and units, and about few ignored entries."""
        sentences = [*self.remarks]
        if self.models:
            names = [name or "unnamed" for name, _ in self.models.most_common(_MAX_SHOWN)]
            more = ", ..." if len(self.models) > _MAX_SHOWN else ""
            sentences.append(f"Models: {len(self.models)} ({', '.join(names)}{more}).")
        total = self.role_bytes.total()
        if total:
            shares = (f"{role} {n / total:.0%}" for role, n in self.role_bytes.most_common())
            sentences.append(f"Prompt text by role: {', '.join(shares)}.")
        if self.left_out and self.left_out.total() <= NOTABLE * max(self.entries, 1):
            sentences.append(f"Left out: {_counts(self.left_out)}.")
        return sentences


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{n:,} {reason}" for reason, n in counts.most_common())
