"""Where the breakpoints of ``cache_control`` lie in a rendered prompt.

A chat template puts the texts of a body into one prompt, in their order. So each text is looked for
behind the one before it; what the template rewrote is not found and says nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sglang_canopy.request.retention import Retention
from sglang_canopy.request.retention_sources import at_breakpoint, breakpoint_s

MAX_BREAKPOINTS = 4
"""Of one request, as with Anthropic: the last ones."""
MAX_MISSED = 16
"""After so many texts that are not found the rest is not looked for: each search reads the prompt."""


@dataclass(frozen=True, slots=True)
class Text:
    """A text of the body, and for how long the prompt up to its end is to be kept."""

    text: str
    seconds: float | None = None
    after_tools: float | None = None
    """For how long the prompt before this text is: where tools end that have a breakpoint."""


def find(
    body: Mapping[str, Any], prompt: Callable[[], str], count: Callable[[str], int]
) -> list[Retention]:
    """The breakpoints of a chat or messages body.

    ``prompt``: gives the rendered prompt; ``count``: the tokens of a text. Neither is called for a
    body without breakpoints.
    """
    texts = list(_texts(body))
    last = max((i for i, t in enumerate(texts) if t.seconds or t.after_tools), default=None)
    if last is None:
        return []
    whole = prompt()
    found, tokens, before = [], 0, 0
    for end, seconds in _ends(texts[: last + 1], whole)[-MAX_BREAKPOINTS:]:
        tokens += count(whole[before:end])
        before = end
        if tokens:
            found.append(at_breakpoint(seconds, tokens))
    return found


def _ends(texts: list[Text], prompt: str) -> list[tuple[int, float]]:
    """Characters of the prompt before each breakpoint, and its seconds."""
    ends, at, missed = [], 0, 0
    for one in texts:
        start = prompt.find(one.text, at)
        if start < 0:
            missed += 1
            if missed > MAX_MISSED:
                break
            continue
        at = start + len(one.text)
        if one.after_tools is not None:
            ends.append((start, one.after_tools))
        if one.seconds is not None:
            ends.append((at, one.seconds))
    return ends


def _texts(body: Mapping[str, Any]) -> Iterator[Text]:
    tools = None
    for tool in _list(body.get("tools")):
        if isinstance(tool, Mapping):
            seconds = breakpoint_s(tool.get("cache_control"))
            tools = seconds if seconds is not None else tools
    yield from _content(body.get("system"))
    for message in _list(body.get("messages")):
        if not isinstance(message, Mapping):
            continue
        own = breakpoint_s(message.get("cache_control"))
        parts = list(_content(message.get("content")))
        for i, part in enumerate(parts):
            seconds = part.seconds
            if seconds is None and i == len(parts) - 1:
                seconds = own
            yield Text(part.text, seconds, tools if message.get("role") != "system" else None)
            if message.get("role") != "system":
                tools = None


def _content(content: Any, nested: bool = False) -> Iterator[Text]:
    if isinstance(content, str):
        content = [{"text": content}]
    for part in _list(content):
        if not isinstance(part, Mapping):
            continue
        seconds = breakpoint_s(part.get("cache_control"))
        inner = part.get("content")  # of a tool's result
        if isinstance(inner, (str, list)) and not nested:
            within = list(_content(inner, nested=True))
            yield from within[:-1]
            for one in within[-1:]:
                yield Text(one.text, one.seconds if seconds is None else seconds)
        text = part.get("text")
        if isinstance(text, str) and text.strip():
            yield Text(text.strip(), seconds)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
