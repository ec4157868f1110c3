"""Counts of replaced categories stay in the sums, whatever they count."""

from dataclasses import fields, is_dataclass
from itertools import count
from typing import Any

from sglang_canopy.radix.counters import IDLE_REQUESTS, MAX_CATEGORIES, PAST, Counters, Row

NO_COUNTS = {"category", "tenant", "used"}


def counts(one: Any) -> list[float]:
    """Every number in a row, in the order of its fields."""
    if is_dataclass(one):
        names = [f.name for f in fields(one) if f.name not in NO_COUNTS]
        return [n for name in names for n in counts(getattr(one, name))]
    return [n for part in one for n in counts(part)] if isinstance(one, (list, tuple)) else [one]


def fill(one: Any, numbers: Any) -> None:
    """Give every count of a row a number of its own."""
    for name in (f.name for f in fields(one) if f.name not in NO_COUNTS):
        value = getattr(one, name)
        if isinstance(value, tuple):
            for tier in value:
                fill(tier, numbers)
        elif is_dataclass(value):
            fill(value, numbers)
        else:
            setattr(
                one,
                name,
                [next(numbers) for _ in value] if isinstance(value, list) else next(numbers),
            )


def test_counts_of_replaced_categories_are_added() -> None:
    counters, numbers = Counters(), count(1)
    for n in range(MAX_CATEGORIES):
        counters.served(f"old-{n}", 10, (4, 0, 0))
    replaced = [counters.row("old-1"), counters.row("old-2")]
    for row in replaced:
        fill(row, numbers)
    before = [counts(row) for row in replaced]
    for _ in range(IDLE_REQUESTS):
        counters.served("old-0", 10, (4, 0, 0))
    for name in ("new-1", "new-2"):
        counters.served(name, 10, (4, 0, 0))
    rows = {row.category: row for row in counters.rows()}
    assert not {row.category for row in replaced} & set(rows)
    assert counts(rows[PAST]) == [a + b for a, b in zip(*before)]
    assert len(before[0]) == len(counts(Row("any"))) > 50
