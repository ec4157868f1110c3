"""Messages, tools and system prompt of an OpenTelemetry span."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from canopy_lab.trace.fields import decode
from canopy_lab.trace.lines import BadLine

_MESSAGES = "gen_ai.input.messages"
_MAX_INDEX = 100_000
_MAX_DIGITS = 20
"""Characters of the longest number of 64 bits, its sign included."""


class Attributes:
    """A span's attributes, by their dotted names."""

    def __init__(self, span: Mapping[str, Any]) -> None:
        attributes = decode(span.get("attributes"))
        self.flat = _flatten(attributes) if isinstance(attributes, (dict, list)) else {}
        self.nested = nest_names(self.flat)

    def find(self, names: tuple[str, ...]) -> Any:
        return next((self.flat[n] for n in names if self.flat.get(n) not in (None, "")), None)

    def find_nested(self, name: str) -> Any:
        """Return the objects and lists nested under a dotted name, or ``None``."""
        node: Any = self.nested
        for word in name.split("."):
            node = node.get(word) if isinstance(node, dict) else None
        return decode(node)


def messages_of(attributes: Attributes) -> tuple[list[dict[str, Any]], dict[str, Any]] | None:
    """Return messages, and a body with ``tools`` and ``system``; ``None`` without messages.

    Raises ``BadLine`` if an attribute was truncated.
    """
    value = attributes.find_nested(_MESSAGES)
    if isinstance(value, str):
        raise BadLine(
            f"its {_MESSAGES} is truncated or not JSON; set OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT higher"
        )
    if _is_messages(value):
        system = attributes.find_nested("gen_ai.system_instructions")
        return value, {"tools": attributes.find_nested("gen_ai.tool.definitions"), "system": system}
    messages, tools = _openinference_messages(attributes)
    if _is_messages(messages):
        return messages, {"tools": tools}
    body = attributes.find_nested("input.value")
    if isinstance(body, dict) and _is_messages(body.get("messages")):
        return body["messages"], body
    return None


def _is_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(m, dict) for m in value)


def _openinference_messages(attributes: Attributes) -> tuple[Any, Any]:
    logged = attributes.find_nested("llm.input_messages")
    if not _is_messages(logged):
        return None, None
    messages = [_in_openai_form(_unwrap(entry, "message")) for entry in logged]
    tools = attributes.find_nested("llm.tools")
    if _is_messages(tools):
        tools = [_unwrap(_unwrap(tool, "tool"), "json_schema") for tool in tools]
    return messages, tools


def _in_openai_form(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its contents and calls in OpenAI's places."""
    converted = {**message, "content": decode(message.get("content"))}
    if _is_messages(message.get("contents")):
        converted["content"] = [
            {k: v for k, v in _unwrap(part, "message_content").items() if v is not None}
            for part in message["contents"]
        ]
    if _is_messages(message.get("tool_calls")):
        converted["tool_calls"] = [_unwrap(call, "tool_call") for call in message["tool_calls"]]
    return converted


def _unwrap(value: dict[str, Any], name: str) -> dict[str, Any]:
    nested_value = decode(value.get(name))
    return nested_value if isinstance(nested_value, dict) else value


def _flatten(attributes: dict[str, Any] | list[Any], prefix: str = "") -> dict[str, Any]:
    """Return attributes by dotted names, from nested objects or from OTLP's keys and values."""
    if isinstance(attributes, list):
        pairs = {
            str(pair["key"]): _plain(pair.get("value"))
            for pair in attributes
            if isinstance(pair, dict) and "key" in pair
        }
        return _flatten(pairs)
    flat: dict[str, Any] = {}
    for key, attribute in attributes.items():
        name = f"{prefix}{key}"
        if isinstance(attribute, dict):
            flat |= _flatten(attribute, f"{name}.")
        else:
            flat[name] = attribute
    return flat


def _plain(value: Any) -> Any:
    if not isinstance(value, dict) or len(value) != 1:
        return value
    ((value_type, content),) = value.items()
    if value_type == "arrayValue" and isinstance(content, dict):
        return [_plain(item) for item in content.get("values") or []]
    if value_type == "kvlistValue" and isinstance(content, dict):
        pairs = content.get("values") or []
        return {
            p["key"]: _plain(p.get("value")) for p in pairs if isinstance(p, dict) and "key" in p
        }
    if value_type == "intValue":
        text = str(content)
        if not text.lstrip("-").isdecimal():
            return content
        if len(text) > _MAX_DIGITS:
            raise BadLine(f"a number has {len(text)} digits; OpenTelemetry's have 64 bits")
        return int(text)
    return content


def nest_names(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested objects, and lists for numbered names: ``a.0.b`` is ``{"a": [{"b": ...}]}``.

    If a name is both a value and a prefix, the value is dropped.
    """
    root: dict[str, Any] = {}
    for name in sorted(flat):
        node, words = root, name.split(".")
        for word in words[:-1]:
            child = node.get(word)
            if not isinstance(child, dict):
                child = node[word] = {}
            node = child
        node.setdefault(words[-1], flat[name])
    lists: dict[str, Any] = {key: _make_lists(value) for key, value in root.items()}
    return lists


def _make_lists(value: Any) -> Any:
    if isinstance(value, list):
        return [_make_lists(items) for items in value]
    if not isinstance(value, dict):
        return value
    items = {key: _make_lists(items) for key, items in value.items()}
    if items and all(key.isdecimal() and int(key) < _MAX_INDEX for key in items):
        return [items[key] for key in sorted(items, key=int)]
    return items
