"""Parses the tools that an answer calls from a chat completion's bytes, streamed or whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

MAX_BYTES = 16 << 20
"""Largest number of bytes parsed per answer."""


def tools_called(answer: bytes) -> tuple[str, ...]:
    """Return the names of the tools, each once, in order; empty for bytes that are not a chat
    completion."""
    return tuple(dict.fromkeys(name for part in _parts(answer) for name in tools_in(part)))


def tools_in(completion: Any) -> tuple[str, ...]:
    """Return the names of the tools in one decoded completion, or in one chunk of a stream."""
    found: dict[str, None] = {}
    for choice in _list(completion, "choices"):
        message = _dict(choice, "message") or _dict(choice, "delta")
        for call in _list(message, "tool_calls"):
            name = _dict(call, "function").get("name")
            if isinstance(name, str) and name:
                found[name] = None
    return tuple(found)


def _parts(answer: bytes) -> Iterator[Any]:
    """Yield the JSON objects of a body, or of a stream of server-sent events."""
    if answer.lstrip()[:1] == b"{":
        texts = [answer]
    else:
        texts = [line[5:] for line in answer.splitlines() if line.startswith(b"data:")]
    for text in texts:
        try:
            yield json.loads(text)
        except ValueError:  # truncated, or the stream's [DONE]
            continue


def _dict(value: Any, key: str) -> dict[str, Any]:
    found = value.get(key) if isinstance(value, dict) else None
    return found if isinstance(found, dict) else {}


def _list(value: Any, key: str) -> list[Any]:
    found = value.get(key) if isinstance(value, dict) else None
    return found if isinstance(found, list) else []
