"""The tree, what is below it and what shows it: who may import whom."""

from __future__ import annotations

import pytest
from test_laboratory_rooms import FILES, imports, reached

ABOVE = {
    "radix": ("storage", "telemetry", "server"),
    "storage": ("telemetry", "server"),
    "telemetry": ("storage", "server"),
}
"""Room -> rooms that may import it, or stand beside it, and that it must not import."""


def files_of(room: str) -> list[str]:
    return [m for m in FILES if f"{m}.".startswith(f"sglang_canopy.{room}.")]


@pytest.mark.parametrize("room", ABOVE)
def test_no_file_imports_itself_through_others(room: str) -> None:
    assert files_of(room)
    assert [m for m in files_of(room) if m in reached(m)] == []


@pytest.mark.parametrize("room", ABOVE)
def test_no_file_imports_a_room_above_its_own(room: str) -> None:
    above = {m for other in ABOVE[room] for m in files_of(other)}
    assert {m: found for m in files_of(room) if (found := imports(m) & above)} == {}


@pytest.mark.parametrize("room", ABOVE)
def test_files_stay_below_300_lines(room: str) -> None:
    lines = {m: len(FILES[m].read_text().splitlines()) for m in files_of(room)}
    assert {m: n for m, n in lines.items() if n >= 300} == {}
