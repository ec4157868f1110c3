"""The event log of a simulation, as a Chrome trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglang_canopy.errors import CanopyError


class EventLog:
    """Spans and instants of a simulation, bounded; times in simulated seconds.

    A span belongs to a track, ``(process, thread)`` in Chrome's words: here an instance or a
    disk, and an engine, a channel or a request's own line.
    """

    def __init__(self, limit: int = 1_000_000) -> None:
        self.limit = limit
        self.dropped = 0
        """Events beyond the limit, which are not kept."""
        self._events: list[tuple[str, str, str, float, float, dict[str, Any]]] = []

    def __len__(self) -> int:
        return len(self._events)

    def span(
        self, process: str, track: str, name: str, start_s: float, end_s: float, **args: Any
    ) -> None:
        """Something that took from ``start_s`` to ``end_s``."""
        if len(self._events) >= self.limit:
            self.dropped += 1
            return
        self._events.append((process, track, name, start_s, end_s, args))

    def chrome(self) -> dict[str, Any]:
        """The JSON object that chrome://tracing and Perfetto load. Microseconds."""
        processes: dict[str, int] = {}
        tracks: dict[tuple[str, str], int] = {}
        made: list[dict[str, Any]] = []
        for process, track, name, start, end, args in self._events:
            pid = processes.setdefault(process, len(processes) + 1)
            tid = tracks.setdefault((process, track), len(tracks) + 1)
            ts = round(start * 1e6, 3)
            event = {"name": name, "ph": "X", "ts": ts, "pid": pid, "tid": tid, "args": args}
            made.append({**event, "dur": round(round(end * 1e6, 3) - ts, 3)})
        made.sort(key=lambda event: (event["pid"], event["tid"], event["ts"], -event["dur"]))
        names: list[dict[str, Any]] = []
        for process, pid in processes.items():
            names.append(_name("process_name", process, pid, 0))
        for (process, track), tid in tracks.items():
            names.append(_name("thread_name", track, processes[process], tid))
        return {"traceEvents": names + made, "displayTimeUnit": "ms"}

    def write(self, path: Path | str) -> None:
        """Write the Chrome trace. Raises ``CanopyError`` where that cannot be done."""
        try:
            Path(path).write_text(json.dumps(self.chrome()) + "\n", encoding="utf-8")
        except OSError as error:
            raise CanopyError(f"cannot write {str(path)!r}: {error.strerror}") from None


def _name(kind: str, name: str, pid: int, tid: int) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": {"name": name}}
