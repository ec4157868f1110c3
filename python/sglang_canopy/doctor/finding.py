"""Findings of the doctor, one line each."""

from __future__ import annotations

from dataclasses import dataclass

REFUSED, FAULT, UNTESTED, NOTE = "refused", "fault", "untested", "note"
"""Kinds: the start stops; the machine lacks a requirement; not tested; for information."""
TESTED, AUTO = "tested", "auto"
"""Kinds: level of testing of the set-ups; state of the parts of ``--radix-eviction auto``."""

STOPS = (REFUSED, FAULT)
"""Kinds that set the exit status to 1."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    kind: str
    text: str
