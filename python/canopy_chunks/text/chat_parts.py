"""The documents of a chat request before its template is applied: its parts and its template's.

They are enclosed in markers, which show their positions in the rendered text.
"""

from __future__ import annotations

import secrets
from types import SimpleNamespace
from typing import Any

from sglang_canopy.errors import CanopyError


def mark(request: Any, in_parts: bool) -> tuple[str, str] | None:
    """Put markers around the documents in a chat's parts and template.

    ``None`` without documents: if retrieval finds no document, the prompt is an ordinary one.
    """
    nonce = secrets.token_hex(8)
    signs = f"\ue000{nonce}\ue001", f"\ue001{nonce}\ue000"
    marked = in_parts and _mark_parts(request, *signs)
    listed = (getattr(request, "chat_template_kwargs", None) or {}).get("documents")
    if listed:
        shown = _marked(listed, *signs)
        request.chat_template_kwargs = {**request.chat_template_kwargs, "documents": shown}
    return signs if marked or listed else None


def _mark_parts(request: Any, opening: str, closing: str) -> bool:
    """Put markers around the documents in messages. Returns whether there are any.

    Documents are all text parts of a message except its last, and all text of a tool's result.
    Blank parts are not documents. A chat with other kinds of parts, such as images, is not changed.
    """
    contents = [_parts_of(message) for message in request.messages]
    if any(getattr(p, "type", None) != "text" for parts in contents for p in parts):
        return False
    found, messages = False, []
    for message, parts in zip(request.messages, contents):
        texts = [p.text for p in parts]
        last = len(texts) if getattr(message, "role", None) == "tool" else len(texts) - 1
        signed = [f"{opening}{t}{closing}" if t.strip() else t for t in texts[:last]]
        if signed != texts[:last]:
            found = True
            content = "\n".join([*signed, *texts[last:]])
            message = message.model_copy(update={"content": content})
        messages.append(message)
    request.messages = messages
    return found


def _parts_of(message: Any) -> list[Any]:
    """Return a message's parts; plain text becomes the only part."""
    content = getattr(message, "content", None)
    if isinstance(content, str):
        return [SimpleNamespace(type="text", text=content)]
    return content or []


def _marked(listed: Any, opening: str, closing: str) -> list[dict[str, Any]]:
    if not isinstance(listed, list) or not all(
        isinstance(d, dict) and isinstance(d.get("text", d.get("content")), str) for d in listed
    ):
        raise CanopyError(
            'chat_template_kwargs.documents must be a list of {"title": ..., "text": ...}'
        )
    out = []
    for document in listed:
        field = "text" if "text" in document else "content"
        if not document[field].strip():
            raise CanopyError("chat_template_kwargs.documents has an empty document; leave it out")
        out.append({**document, field: f"{opening}{document[field]}{closing}"})
    return out
