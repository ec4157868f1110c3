"""Counts of the session gate, and a digest for the comparison of ranks."""

from __future__ import annotations

import struct
import zlib
from typing import Any

from sglang_canopy.admission.session import Session

_EVENT = struct.Struct("<qdd")
_PAUSED = -1.0


class GateCounts:
    def __init__(self) -> None:
        self.admitted = 0
        """Sessions admitted, most of them at once."""
        self.delayed = 0
        """Admitted sessions that waited."""
        self.wait_sum_s = 0.0
        self.pauses = 0
        """Active sessions that lost their place until the rest fits."""
        self.forgotten = 0
        """Sessions assumed over: silent too long, or beyond the bound."""
        self._digest = 0

    def admit(self, session: Session, now: float) -> None:
        """Count the admission of ``session``, new or paused."""
        waited_s = now - session.waits_since
        self.admitted += 1
        self._note(session, now, waited_s)
        if waited_s <= 0.0:
            return
        self.delayed += 1
        self.wait_sum_s += waited_s

    def pause(self, session: Session, now: float) -> None:
        self.pauses += 1
        self._note(session, now, _PAUSED)

    def stats(self) -> dict[str, Any]:
        """Return the counts for the status."""
        return {
            "admitted_sessions": self.admitted,
            "delayed_sessions": self.delayed,
            "pauses": self.pauses,
            "forgotten_sessions": self.forgotten,
            "wait_seconds": round(self.wait_sum_s, 3),
        }

    def agreement(self) -> dict[str, Any]:
        """Return admissions, pauses, and a digest of both with their times; equal on all ranks."""
        return {
            "gate_admitted": self.admitted,
            "gate_pauses": self.pauses,
            "gate_digest": f"{self._digest:08x}",
        }

    def _note(self, session: Session, now: float, what: float) -> None:
        self._digest = zlib.crc32(_EVENT.pack(session.number, now, what), self._digest)
