"""Infer a request's category and turn from its body.

On ``/v1/responses`` a stateless client sends all items of its conversation in each request; a stateful
client sends the new items and ``previous_response_id``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from sglang_canopy.records import chat_category
from sglang_canopy.wire.stamp import MAX_TURN


def infer_from_route(path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Infer category and turn on routes other than chat completions."""
    if path.endswith("/v1/responses"):
        return infer_from_responses_body(body)
    if path.endswith("/api/chat"):
        return infer_from_chat(_parse_ollama_chat(body))
    return {"category": "completion" if path.endswith("/v1/completions") else "generate"}


def _parse_ollama_chat(body: Mapping[str, Any]) -> Any:
    """Return the fields that SGLang reads on this route: it ignores ``images`` and ``format``."""
    messages = _as_list(body.get("messages"))
    roles = [SimpleNamespace(role=m.get("role")) for m in messages if isinstance(m, Mapping)]
    return SimpleNamespace(messages=roles, tools=body.get("tools"))


def infer_from_chat(body: Any) -> dict[str, Any]:
    """Infer category and turn from the body of a chat completion. ``turn``: number of assistant
    messages, plus one. ``category``: ``chat`` and suffixes: ``-tools`` if tools are offered, ``-json``
    if a response format is given, ``-image`` if a message has an image, ``-after-tool`` if the last
    message is a tool's result (the previous response stopped for a tool call)."""
    messages = body.messages or []
    roles = [getattr(m, "role", None) for m in messages]
    category = chat_category(
        tools=bool(getattr(body, "tools", None)),
        json=getattr(body, "response_format", None) is not None,
        image=any(map(_has_image, messages)),
        after_tool=bool(roles) and roles[-1] in ("tool", "function"),
    )
    return {"category": category, "turn": min(1 + roles.count("assistant"), MAX_TURN)}


def _has_image(message: Any) -> bool:
    content = getattr(message, "content", None)
    return isinstance(content, list) and any(
        "image" in str(getattr(part, "type", "")) for part in content
    )


def infer_from_responses_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return category and turn by the rules of ``infer_from_chat``. Consecutive items of an answer
    (reasoning, calls, a message) count as one assistant turn."""
    items = [item for item in _as_list(body.get("input")) if isinstance(item, Mapping)]
    are_answers = [_is_answer(item) for item in items]
    turns = sum(now and not before for before, now in zip([False, *are_answers], are_answers))
    text = body.get("text")
    text_format = text.get("format") if isinstance(text, Mapping) else None
    category = chat_category(
        tools=bool(body.get("tools")),
        json=isinstance(text_format, Mapping) and text_format.get("type") != "text",
        image=any(map(_item_has_image, items)),
        after_tool=bool(items) and str(items[-1].get("type")).endswith("_output"),
    )
    return {"category": category, "turn": min(1 + turns, MAX_TURN)}


def _is_answer(item: Mapping[str, Any]) -> bool:
    item_type = str(item.get("type", ""))
    if "role" in item or item_type == "message":
        return item.get("role") == "assistant"
    return item_type == "reasoning" or ("call" in item_type and not item_type.endswith("_output"))


def _item_has_image(item: Mapping[str, Any]) -> bool:
    parts = [*_as_list(item.get("content")), *_as_list(item.get("output"))]
    return any(isinstance(part, Mapping) and part.get("type") == "input_image" for part in parts)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
