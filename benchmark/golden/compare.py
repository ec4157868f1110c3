"""Two sets of golden rows, and what differs between them, for a person to read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Rows = Mapping[str, Mapping[str, Any]]
"""Row -> its figures."""


def differences(before: Rows, now: Rows) -> list[str]:
    """A line for each figure that differs in any digit, and for each row that only one side has."""
    lines = []
    for name in [*before, *(name for name in now if name not in before)]:
        if name not in now:
            lines.append(f"- {name}: gone")
        elif name not in before:
            lines.append(f"+ {name}: new")
        else:
            lines += _of_row(name, before[name], now[name])
    return lines


def _of_row(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    lines = []
    for figure in [*before, *(f for f in now if f not in before)]:
        was, is_now = before.get(figure, "nothing"), now.get(figure, "nothing")
        if was != is_now:
            lines.append(f"! {name}: {figure} was {was!r}, is {is_now!r}{_by(was, is_now)}")
    return lines


def _by(was: Any, is_now: Any) -> str:
    """Return the difference of two numbers as text."""
    numbers = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in (was, is_now))
    if not numbers or not was:
        return ""
    return f" ({(is_now - was) / was:+.3%})"
