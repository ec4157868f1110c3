"""Name the kind of a difference between two texts."""

from __future__ import annotations

import re

from canopy_lab.advise.breaks.texts import equal_but_blanks, equal_words

TIME, IDENTIFIER, NUMBER, COUNTER = "time", "id", "number", "counter"
TOOL_ORDER, TOOL_SET, KEY_ORDER, WHITE_SPACE = "tool order", "tool set", "key order", "white space"
ORDER, USER, TEXT, PICTURE = "order", "user", "text", "picture"
SHORTENED, DROPPED, INSERTED, REWRITTEN = "shortened", "dropped", "inserted", "rewritten"
REMINDER, MODELS = "reminder", "models"
TOOLS, SYSTEM, FIRST, HISTORY = "tools", "system", "first message", "history"
"""Places of a difference. ``first message`` follows the system prompt."""
NEW = "new"
"""A new message after a difference; it costs nothing itself."""

MAX_VALUE_CHARACTERS = 200
"""Maximum characters of a difference that counts as a value instead of a passage."""
_MAX_TIME_CHARACTERS = 60
_MAX_WIDENING = 40
"""Maximum characters added to widen a difference to whole words."""
_SHORTENED_SHARE = 0.7
"""A replacement below this share of the old length counts as shortened."""

_MAX_OTHER_LETTERS = 30
"""Maximum other letters in a difference that is a time or an id."""

_LETTERS = re.compile(r"[^\W\d_]")
_WORD_CHARACTER = re.compile(r"[A-Za-z0-9_.:/+@-]")
_TIME = re.compile(
    r"\d{4}[-/]\d{1,2}[-/]\d{1,2}([T ]\d{1,2}:\d{2}(:\d{2})?(\.\d+)?)?|\b\d{1,2}:\d{2}(:\d{2})?\b"
    r"|\b1[5-9]\d{8}(\.\d+|\d{3}|\d{6})?\b|\b\d{1,2}[./]\d{1,2}[./]\d{2,4}\b"
    r"|\b(Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day\b|\b(Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\b",
    re.I,
)
_IDENTIFIER = re.compile(
    r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-|[0-9a-fA-F]{7,}|(?=[\w-]*\d)(?=[\w-]*[A-Za-z])[\w-]{6,}"
)


_NUMBER = re.compile(r"[+-]?[0-9][0-9,_]*(\.[0-9]+)?%?")


def parse_number(text: str) -> float | None:
    """Return the value of a number, which may have separators of thousands; ``None`` for other text."""
    if not _NUMBER.fullmatch(text.strip()):
        return None
    return float(re.sub("[,_%]", "", text))


def widen_to_words(
    old: str, new: str, span_old: tuple[int, int], span_new: tuple[int, int]
) -> tuple[str, str, int]:
    """Return both sides of a difference, widened to whole words, and where the new one begins."""
    (begin_old, end_old), (begin_new, end_new) = span_old, span_new
    for _ in range(_MAX_WIDENING):
        if not begin_old or not begin_new or not _WORD_CHARACTER.match(old[begin_old - 1]):
            break
        begin_old, begin_new = begin_old - 1, begin_new - 1
    for _ in range(_MAX_WIDENING):
        if end_old >= len(old) or end_new >= len(new) or old[end_old] != new[end_new]:
            break
        if not _WORD_CHARACTER.match(old[end_old]):
            break
        end_old, end_new = end_old + 1, end_new + 1
    return old[begin_old:end_old], new[begin_new:end_new], begin_new


def difference_kind(old: str, new: str, place: str) -> str:
    """Return the kind of a difference in a ``place``."""
    if equal_but_blanks(old, new):
        return WHITE_SPACE
    is_short = len(old) <= MAX_VALUE_CHARACTERS and len(new) <= MAX_VALUE_CHARACTERS
    if place == HISTORY or (place == FIRST and not is_short):
        if is_short and len(old) < _MAX_TIME_CHARACTERS and _TIME.search(old) and _TIME.search(new):
            return TIME
        if old and new and equal_words(old, new):
            return KEY_ORDER
        if not (is_short and old and new):
            if len(new) < _SHORTENED_SHARE * len(old):
                return SHORTENED
            return REWRITTEN if place == HISTORY else TEXT
    return _kind_of_value(old, new, place, is_short)


def _is_value(pattern: re.Pattern[str], text: str) -> bool:
    """Whether ``text`` is a match of ``pattern`` with few words around it."""
    other_letters = _LETTERS.findall(pattern.sub("", text))
    return bool(pattern.search(text)) and len(other_letters) <= _MAX_OTHER_LETTERS


def _kind_of_value(old: str, new: str, place: str, is_short: bool) -> str:
    if is_short and old and new:
        if _is_value(_TIME, old) and _is_value(_TIME, new):
            return TIME
        if parse_number(old) is not None and parse_number(new) is not None:
            return NUMBER
        if _is_value(_IDENTIFIER, old) and _is_value(_IDENTIFIER, new):
            return IDENTIFIER
    if old and new and equal_words(old, new):
        return KEY_ORDER
    return USER if is_short and place == SYSTEM else TEXT
