"""Compare two texts: common prefixes and suffixes, sentences, and normal forms of equal contents."""

from __future__ import annotations

import json
import re
import unicodedata
from typing import Any

MIN_SENTENCE = 12
"""Minimum characters of a sentence. Shorter sentences occur everywhere and identify nothing."""

_SENTENCE_ENDS = re.compile(r"[\r\n]+|(?<=[.!?;:,}\]])\s+")
_BLANKS = re.compile(r"\s+")
_WORDS = re.compile(r"\w+|[^\w\s]")


def common_prefix(a: str, b: str) -> int:
    """Return the number of leading characters that two texts share."""
    high = min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    low, step = 0, 64
    while low + step < high and a[low : low + step] == b[low : low + step]:
        low, step = low + step, step * 2
    high = min(high, low + step)
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


def common_suffix(a: str, b: str) -> int:
    """Return the number of trailing characters that two texts share."""
    low, high = 0, min(len(a), len(b)) + 1
    while high - low > 1:
        middle = (low + high) // 2
        if a[len(a) - middle :] == b[len(b) - middle :]:
            low = middle
        else:
            high = middle
    return low


def sentences(text: str) -> list[str]:
    """Return the lines and sentences of a text that are long enough to identify it."""
    return [s for s in map(str.strip, _SENTENCE_ENDS.split(text)) if len(s) >= MIN_SENTENCE]


def sentence_spans(text: str) -> list[tuple[int, int, str]]:
    """Return ``sentences`` with their places: (begin, end, text)."""
    spans, start = [], 0
    for end in _SENTENCE_ENDS.finditer(text):
        if end.start() - start >= MIN_SENTENCE:
            spans.append((start, end.start(), text[start : end.start()]))
        start = end.end()
    if len(text) - start >= MIN_SENTENCE:
        spans.append((start, len(text), text[start:]))
    return spans


def differ_in_blanks(a: str, b: str) -> bool:
    """Return whether two texts differ only in white space or in how accents are encoded."""
    return _without_blanks(a) == _without_blanks(b)


def _without_blanks(text: str) -> str:
    return _BLANKS.sub("", unicodedata.normalize("NFC", text))


def have_equal_words(a: str, b: str) -> bool:
    """Return whether two texts have the same words and signs in another order."""
    return sorted(_WORDS.findall(a)) == sorted(_WORDS.findall(b))


def canonical(text: str) -> str:
    """Return a JSON text with sorted keys, nested JSON texts included; other texts unchanged."""
    value = _parse_json(text)
    return text if value is None else json.dumps(_sort_nested(value), sort_keys=True)


def _sort_nested(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sort_nested(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_sort_nested(item) for item in value]
    item = _parse_json(value) if isinstance(value, str) else None
    return value if item is None else _sort_nested(item)


def _parse_json(text: str) -> Any:
    """Return the object or list of a JSON text; ``None`` for any other text."""
    start = text.find("{") if text[:1] == "<" else 0  # a message's first part begins with its role
    body = text[start:] if start >= 0 else ""
    if body[:1] not in ("{", "["):
        return None
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return parsed if start == 0 else [text[:start], parsed]
