"""Which tools an answer calls, from the bytes of a chat completion, streamed or whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

MAX_BYTES = 16 << 20
"""What is read of an answer."""


def tools_called(answer: bytes) -> tuple[str, ...]:
    """Names of the tools, each once, in their order; none where the bytes are no chat completion."""
    return tuple(dict.fromkeys(name for part in _parts(answer) for name in tools_in(part)))


def tools_in(completion: Any) -> tuple[str, ...]:
    """The same of one decoded completion, or of one chunk of a stream."""
    found: dict[str, None] = {}
    for choice in _list(completion, "choices"):
        message = _dict(choice, "message") or _dict(choice, "delta")
        for call in _list(message, "tool_calls"):
            name = _dict(call, "function").get("name")
            if isinstance(name, str) and name:
                found[name] = None
    return tuple(found)


def _parts(answer: bytes) -> Iterator[Any]:
    """The JSON objects of a body, or of a stream of server-sent events."""
    if answer.lstrip()[:1] == b"{":
        texts = [answer]
    else:
        texts = [line[5:] for line in answer.splitlines() if line.startswith(b"data:")]
    for text in texts:
        try:
            yield json.loads(text)
        except ValueError:  # cut short, or the stream's [DONE]
            continue


def _dict(value: Any, key: str) -> dict[str, Any]:
    found = value.get(key) if isinstance(value, dict) else None
    return found if isinstance(found, dict) else {}


def _list(value: Any, key: str) -> list[Any]:
    found = value.get(key) if isinstance(value, dict) else None
    return found if isinstance(found, list) else []
