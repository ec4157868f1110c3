"""What the doctor finds, one line each."""

from __future__ import annotations

from dataclasses import dataclass

REFUSED, FAULT, UNTESTED, NOTE = "refused", "fault", "untested", "note"
"""The start would stop; the machine lacks something; nobody has tried it; good to know."""

STOPS = (REFUSED, FAULT)
"""What makes the exit status 1."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    kind: str
    text: str
