"""Prose in the code uses the field's words: a ceiling for each room, which only falls.

``scripts/words.py --lower`` writes the ceilings after a room was rewritten.
"""

import pytest

import words

ROOMS = words.rooms(words.python_files())
SLACK = 2
"""Texts with a habit allowed above the ceiling: a room of few texts loses some to edits."""


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_a_room_stays_below_its_ceiling(room: str) -> None:
    texts = ROOMS[room]
    hits = [f"{words.habits(text)}: {text[:100]}" for text in texts if words.habits(text)]
    allowed = words.ceilings().get(room, 5) / 100 * len(texts) + SLACK
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
