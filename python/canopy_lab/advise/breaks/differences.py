"""Name the kind of a difference between two texts."""

from __future__ import annotations

import re

from canopy_lab.advise.breaks.texts import differ_in_blanks, have_equal_words

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
    earlier: str, later: str, earlier_span: tuple[int, int], later_span: tuple[int, int]
) -> tuple[str, str, int]:
    """Return both sides of a difference, widened to whole words, and where the new one begins."""
    (begin_a, end_a), (begin_b, end_b) = earlier_span, later_span
    for _ in range(_MAX_WIDENING):
        if not begin_a or not begin_b or not _WORD_CHARACTER.match(earlier[begin_a - 1]):
            break
        begin_a, begin_b = begin_a - 1, begin_b - 1
    for _ in range(_MAX_WIDENING):
        if end_a >= len(earlier) or end_b >= len(later) or earlier[end_a] != later[end_b]:
            break
        if not _WORD_CHARACTER.match(earlier[end_a]):
            break
        end_a, end_b = end_a + 1, end_b + 1
    return earlier[begin_a:end_a], later[begin_b:end_b], begin_b


def difference_kind(earlier: str, later: str, place: str) -> str:
    """Return the kind of a difference in a ``place``."""
    if differ_in_blanks(earlier, later):
        return WHITE_SPACE
    is_short = len(earlier) <= MAX_VALUE_CHARACTERS and len(later) <= MAX_VALUE_CHARACTERS
    if place == HISTORY or (place == FIRST and not is_short):
        is_brief = is_short and len(earlier) < _MAX_TIME_CHARACTERS
        if is_brief and _TIME.search(earlier) and _TIME.search(later):
            return TIME
        if earlier and later and have_equal_words(earlier, later):
            return KEY_ORDER
        if not (is_short and earlier and later):
            if len(later) < _SHORTENED_SHARE * len(earlier):
                return SHORTENED
            return REWRITTEN if place == HISTORY else TEXT
    return _kind_of_value(earlier, later, place, is_short)


def _is_value(pattern: re.Pattern[str], text: str) -> bool:
    """Return whether ``text`` is a match of ``pattern`` with few words around it."""
    other_letters = _LETTERS.findall(pattern.sub("", text))
    return bool(pattern.search(text)) and len(other_letters) <= _MAX_OTHER_LETTERS


def _kind_of_value(earlier: str, later: str, place: str, is_short: bool) -> str:
    if is_short and earlier and later:
        if _is_value(_TIME, earlier) and _is_value(_TIME, later):
            return TIME
        if parse_number(earlier) is not None and parse_number(later) is not None:
            return NUMBER
        if _is_value(_IDENTIFIER, earlier) and _is_value(_IDENTIFIER, later):
            return IDENTIFIER
    if earlier and later and have_equal_words(earlier, later):
        return KEY_ORDER
    return USER if is_short and place == SYSTEM else TEXT
