"""A chat's top-level ``documents``, as in Cohere's API."""

from __future__ import annotations

from typing import Any

from sglang_canopy.errors import CanopyError

FIELD = "documents"
_TEXTS = ("text", "content", "snippet")


def listed_texts(body: Any) -> list[str]:
    """Return the text of each document in a chat's body. Raises CanopyError for other forms."""
    given = body.get(FIELD) if isinstance(body, dict) else None
    if given is None:
        return []
    if not isinstance(given, list):
        raise CanopyError(_ALLOWED)
    return [_text_of(one) for one in given]


_ALLOWED = (
    f'{FIELD} must be a list of strings or of {{"title": ..., "text": ...}}; "content" and "snippet" '
    'are read as "text", and so is the content of "data"'
)


def _text_of(one: Any) -> str:
    """Return the text of one document, preceded by its title if it has one. Raises CanopyError."""
    if isinstance(one, str):
        return one
    found = one.get("data", one) if isinstance(one, dict) else None
    if isinstance(found, str):
        return found
    if not isinstance(found, dict):
        raise CanopyError(_ALLOWED)
    text = next((found[name] for name in _TEXTS if name in found), None)
    title = found.get("title") or ""
    if not isinstance(text, str) or not isinstance(title, str):
        raise CanopyError(_ALLOWED)
    return f"{title}\n{text}" if title else text
