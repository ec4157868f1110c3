"""What a request tells about itself without saying so."""

from __future__ import annotations

from typing import Any

from sglang_canopy.request.fields import MAX_TURN


def infer_from_chat(body: Any) -> dict[str, Any]:
    """What a chat completion body tells by itself.

    ``turn``: assistant messages so far, plus one. ``category``: ``chat``, with ``-tools`` where
    tools are offered, ``-json`` where a response format is, ``-image`` where a message has
    one; ``-after-tool`` where the last message is a tool's answer, that is, where the previous
    response of this conversation stopped for a tool call.
    """
    messages = body.messages or []
    roles = [getattr(m, "role", None) for m in messages]
    category = "chat"
    if getattr(body, "tools", None):
        category += "-tools"
    if getattr(body, "response_format", None) is not None:
        category += "-json"
    if any(_has_image(m) for m in messages):
        category += "-image"
    if roles and roles[-1] in ("tool", "function"):
        category += "-after-tool"
    return {"category": category, "turn": min(1 + roles.count("assistant"), MAX_TURN)}


def _has_image(message: Any) -> bool:
    content = getattr(message, "content", None)
    return isinstance(content, list) and any(
        getattr(part, "type", "text") not in ("text", "input_text") for part in content
    )
