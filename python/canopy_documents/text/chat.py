"""The documents of a chat's messages, of SGLang's classes or of a JSON body.

A document never continues past its message, and an assistant's text is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from canopy_documents.text.documents import split_texts
from canopy_documents.text.order import Orders

TOOL_ROLES = ("tool", "function")
ROLES = ("system", "developer", "user", *TOOL_ROLES)
"""Roles of messages with documents."""
_TEXT_TYPES = ("text", "input_text", "output_text")


def documents_of_chat(messages: Iterable[Any], in_parts: bool, separator: str | None) -> list[str]:
    """Return the texts of all documents, in order.

    in_parts: every text part of a message but its last is a document, and so is a tool's result.
    """
    return [text for message in messages for text in _message_texts(message, in_parts, separator)]


def _message_texts(message: Any, in_parts: bool, separator: str | None) -> list[str]:
    role, texts = _role(message), _texts(_content(message))
    if role not in ROLES:
        return []
    count = count_leading_documents(role, texts) if in_parts else 0
    documents = [text for text in texts[:count] if text.strip()]
    return documents + [d for text in texts[count:] for d in split_texts(text, separator)]


def count_leading_documents(role: str, texts: Sequence[str]) -> int:
    """Return how many of a message's leading texts are documents."""
    return len(texts) if role in TOOL_ROLES else max(0, len(texts) - 1)


def reorder_messages(
    messages: Sequence[Any],
    in_parts: bool,
    separator: str | None,
    orders: Orders,
    tenant: str | None,
) -> list[Any]:
    """Return the messages with the documents of each list in the best order (``canopy_order``).

    A list is the documents of one message's parts, or those between one text's separators.
    """
    preceding_hash, reordered = 0, []
    for message in messages:
        content = getattr(message, "content", None)
        if (role := _role(message)) in ROLES and content:
            content = _reorder(role, content, in_parts, separator, orders, tenant, preceding_hash)
            message = message.model_copy(update={"content": content})
        preceding_hash = hash((preceding_hash, *_texts(content)))
        reordered.append(message)
    return reordered


def _reorder(
    role: str,
    content: Any,
    in_parts: bool,
    separator: str | None,
    orders: Orders,
    tenant: str | None,
    preceding_hash: int,
) -> Any:
    if isinstance(content, str):
        return reorder_text(content, separator, orders, tenant, preceding_hash)
    texts = _texts(content)
    count = count_leading_documents(role, texts) if in_parts and len(texts) == len(content) else 0
    order = orders.choose_order(preceding_hash, texts[:count], tenant)
    return [*(content[i] for i in order), *content[count:]]


def reorder_text(
    text: str, separator: str | None, orders: Orders, tenant: str | None, preceding_hash: int = 0
) -> str:
    """Return a text with the documents between its separators in the best order."""
    documents = split_texts(text, separator)
    if separator is None or len(documents) < 2:
        return text
    first, *_, last = text.split(separator)
    order = orders.choose_order(hash((preceding_hash, first)), documents, tenant)
    return separator.join([first, *(documents[i] for i in order), last])


def messages_of_body(body: Mapping[str, Any]) -> list[Any]:
    """Return the messages of a Responses or Ollama body that SGLang renders itself."""
    messages: list[Any] = [{"role": "system", "content": body.get("instructions")}]
    body_messages = body.get("input", body.get("messages"))
    if isinstance(body_messages, str):
        return [*messages, {"role": "user", "content": body_messages}]
    return messages + [message for message in body_messages or () if isinstance(message, Mapping)]


def _role(message: Any) -> Any:
    if isinstance(message, Mapping):
        return message.get("role", "tool" if "output" in message else None)
    return message.role


def _content(message: Any) -> Any:
    if isinstance(message, Mapping):
        return message.get("content", message.get("output"))
    return getattr(message, "content", None)


def _texts(content: Any) -> list[str]:
    """Return the texts of a message's content; empty if a part is no text."""
    if isinstance(content, str):
        return [content]
    texts = [_text(part) for part in content or ()]
    return [] if None in texts else texts  # type: ignore[return-value]


def _text(part: Any) -> str | None:
    if isinstance(part, Mapping):
        part_type, text = part.get("type"), part.get("text")
    else:
        part_type, text = part.type, getattr(part, "text", None)
    return text if part_type in _TEXT_TYPES and isinstance(text, str) else None
