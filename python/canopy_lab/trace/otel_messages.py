"""Messages, tools and system prompt of an OpenTelemetry span."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from canopy_lab.trace.fields import decoded
from canopy_lab.trace.lines import BadLine

_MESSAGES = "gen_ai.input.messages"
_MAX_INDEX = 100_000
_MAX_DIGITS = 20
"""Characters of the longest number of 64 bits, its sign included."""


class Attributes:
    """A span's attributes, by their dotted names."""

    def __init__(self, span: Mapping[str, Any]) -> None:
        attributes = decoded(span.get("attributes"))
        self.flat = _flat(attributes) if isinstance(attributes, (dict, list)) else {}
        self.tree = nested(self.flat)

    def first(self, names: tuple[str, ...]) -> Any:
        return next((self.flat[n] for n in names if self.flat.get(n) not in (None, "")), None)

    def under(self, name: str) -> Any:
        """Return the objects and lists nested under a dotted name, or ``None``."""
        at: Any = self.tree
        for word in name.split("."):
            at = at.get(word) if isinstance(at, dict) else None
        return decoded(at)


def messages_of(attributes: Attributes) -> tuple[list[dict[str, Any]], dict[str, Any]] | None:
    """Return messages, and a body with ``tools`` and ``system``; ``None`` without messages.

    Raises ``BadLine`` if an attribute was truncated.
    """
    value = attributes.under(_MESSAGES)
    if isinstance(value, str):
        raise BadLine(
            f"its {_MESSAGES} is truncated or not JSON; set OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT higher"
        )
    if _is_messages(value):
        system = attributes.under("gen_ai.system_instructions")
        return value, {"tools": attributes.under("gen_ai.tool.definitions"), "system": system}
    messages, tools = _openinference(attributes)
    if _is_messages(messages):
        return messages, {"tools": tools}
    whole = attributes.under("input.value")
    if isinstance(whole, dict) and _is_messages(whole.get("messages")):
        return whole["messages"], whole
    return None


def _is_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)


def _openinference(attributes: Attributes) -> tuple[Any, Any]:
    logged = attributes.under("llm.input_messages")
    if not _is_messages(logged):
        return None, None
    messages = [_with_contents(_inner(one, "message")) for one in logged]
    tools = attributes.under("llm.tools")
    if _is_messages(tools):
        tools = [_inner(_inner(tool, "tool"), "json_schema") for tool in tools]
    return messages, tools


def _with_contents(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its contents and calls in OpenAI's places."""
    whole = {**message, "content": decoded(message.get("content"))}
    if _is_messages(message.get("contents")):
        whole["content"] = [
            {k: v for k, v in _inner(part, "message_content").items() if v is not None}
            for part in message["contents"]
        ]
    if _is_messages(message.get("tool_calls")):
        whole["tool_calls"] = [_inner(call, "tool_call") for call in message["tool_calls"]]
    return whole


def _inner(value: dict[str, Any], name: str) -> dict[str, Any]:
    inner = decoded(value.get(name))
    return inner if isinstance(inner, dict) else value


def _flat(nested: dict[str, Any] | list[Any], before: str = "") -> dict[str, Any]:
    """Return attributes by dotted names, from nested objects or from OTLP's keys and values."""
    if isinstance(nested, list):
        pairs = {
            str(one["key"]): _otlp(one.get("value"))
            for one in nested
            if isinstance(one, dict) and "key" in one
        }
        return _flat(pairs)
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        name = f"{before}{key}"
        if isinstance(value, dict):
            flat |= _flat(value, f"{name}.")
        else:
            flat[name] = value
    return flat


def _otlp(value: Any) -> Any:
    if not isinstance(value, dict) or len(value) != 1:
        return value
    ((kind, inner),) = value.items()
    if kind == "arrayValue" and isinstance(inner, dict):
        return [_otlp(one) for one in inner.get("values") or []]
    if kind == "kvlistValue" and isinstance(inner, dict):
        pairs = inner.get("values") or []
        return {
            p["key"]: _otlp(p.get("value")) for p in pairs if isinstance(p, dict) and "key" in p
        }
    if kind == "intValue":
        text = str(inner)
        if not text.lstrip("-").isdecimal():
            return inner
        if len(text) > _MAX_DIGITS:
            raise BadLine(f"a number has {len(text)} digits; OpenTelemetry's have 64 bits")
        return int(text)
    return inner


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested objects, and lists for numbered names: ``a.0.b`` is ``{"a": [{"b": ...}]}``.

    If a name is both a value and a prefix, the value is dropped.
    """
    root: dict[str, Any] = {}
    for name in sorted(flat):
        at, words = root, name.split(".")
        for word in words[:-1]:
            below = at.get(word)
            if not isinstance(below, dict):
                below = at[word] = {}
            at = below
        at.setdefault(words[-1], flat[name])
    lists: dict[str, Any] = {key: _listed(value) for key, value in root.items()}
    return lists


def _listed(value: Any) -> Any:
    if isinstance(value, list):
        return [_listed(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    inner = {key: _listed(inner) for key, inner in value.items()}
    if inner and all(key.isdecimal() and int(key) < _MAX_INDEX for key in inner):
        return [inner[key] for key in sorted(inner, key=int)]
    return inner
