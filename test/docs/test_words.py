"""Prose in the code uses the field's words: a ceiling for each room, which only falls.

Other code bases of the field have a habit in up to 5 % of their texts. A room of few texts may have more
by chance, so no ceiling is below 5 % plus three standard deviations. ``scripts/words.py --lower`` writes
the ceilings after a room was rewritten.
"""

from math import sqrt

import pytest

import words

FILES = words.python_files()
USUAL = 0.05


@pytest.mark.parametrize("room", sorted(set(map(words.room_of, FILES))))
def test_a_room_stays_below_its_ceiling(room: str) -> None:
    texts = [
        text
        for file in FILES
        if words.room_of(file) == room
        for text in words.prose(words.REPOSITORY / file)
    ]
    hits = [f"{words.habits(text)}: {text[:100]}" for text in texts if words.habits(text)]
    ceiling = words.ceilings().get(room, 0) / 100 * len(texts)
    chance = USUAL * len(texts) + 3 * sqrt(USUAL * (1 - USUAL) * len(texts))
    allowed = max(ceiling, chance)
    assert len(hits) <= allowed, "\n".join([f"{room}: {len(hits)} of {len(texts)}", *hits])


@pytest.mark.parametrize(
    ("text", "habit"),
    [
        ("What the tier holds.", "clause as a name"),
        ("Of the younger ones.", "preposition first"),
        ("Nobody waits.", "nobody, who"),
        ("Sample one in so many blocks.", "so many"),
    ],
)
def test_a_habit_is_found(text: str, habit: str) -> None:
    assert habit in words.habits(text)


def test_plain_prose_has_no_habit() -> None:
    assert words.habits("Return the tokens that the tier holds, or 0 if it is empty.") == []
