"""Convert the messages of any chat interface to the parts of a prompt.

OpenAI's chat messages and Responses items, Anthropic's blocks, Gemini's and OpenTelemetry's parts.
Tools come first, then the system prompt, then the messages, as in most chat templates. Of a
message, the content, reasoning and calls are kept; of a block with text, the text. An item or block
of an unknown kind becomes JSON, without keys that change from call to call (``id``, ``cache_control``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, NamedTuple

from canopy_lab.trace.fields import JsonObject, decode, find, find_filled
from sglang_canopy.records import chat_category

TOOL_FIELDS = ("tools", "functions")
SYSTEM_FIELDS = ("system", "instructions", "systemInstruction", "system_instruction")
_ROLE_BY_NAME = {
    "human": "user",
    "ai": "assistant",
    "model": "assistant",
    "gpt": "assistant",
    "developer": "system",
    "function": "tool",
}
_CALL_TYPES = ("function_call", "custom_tool_call", "tool_use", "tool_call", "functionCall")
_RESULT_TYPES = ("tool_result", "tool_call_response", "functionResponse", "function_call_output")
_RESULT_FIELDS = ("output", "content", "response", "result")
_OMITTED_KEYS = ("id", "status", "cache_control", "call_id", "tool_use_id", "tool_call_id", "type")
_IMAGE_WORDS = ("image", "inlineData", "inline_data")
_MEDIA_WORDS = (*_IMAGE_WORDS, "audio", "video", "file", "document", "blob")
_MAX_WORD_CHARACTERS = 256
"""A longer string without a blank, outside text parts, is binary data such as a picture."""


class PromptPart(NamedTuple):
    """A part of a prompt. The text of a prompt is the concatenation of its parts."""

    kind: str
    """``tool`` (a definition), ``text``, ``call``, ``result``, ``image`` or ``media``."""
    role: str
    """``tools``, ``system``, ``user``, ``assistant``, ``tool``, or another name used in the log."""
    text: str


class Chat(NamedTuple):
    """A prompt made of messages."""

    parts: tuple[PromptPart, ...]
    category: str
    """Category that a server infers from this body (``request/infer.py``)."""
    turn: int
    """Number of the prompt's turn, from 1: the assistant's answers in it, and one."""

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts)


def make_chat(messages: list[dict[str, Any]], bodies: list[JsonObject]) -> Chat:
    """Return a chat's parts. ``bodies``: objects that may hold its tools and its system prompt."""
    parts = _tool_parts(decode(find(bodies, TOOL_FIELDS)))
    has_tools = bool(parts)
    rendered = [_message_parts(message) for message in messages]
    parts += _system_parts(find_filled(bodies, SYSTEM_FIELDS)[1], rendered)
    roles = [role for role, _ in rendered]
    turn = 1
    for index, (role, message_parts) in enumerate(rendered):
        # In the Responses interface, items of one answer (text, then calls) are several entries.
        turn += role == "assistant" and roles[index - 1 : index] != ["assistant"]
        parts += message_parts
    category = chat_category(
        tools=has_tools,
        json=find(bodies, ("response_format",)) is not None,
        image=any(part.kind == "image" for part in parts),
        after_tool=roles[-1:] == ["tool"],
    )
    return Chat(tuple(parts), category, turn)


def _tool_parts(logged_tools: Any) -> list[PromptPart]:
    if not logged_tools:
        return []
    tools = logged_tools if isinstance(logged_tools, list) else [logged_tools]
    return [PromptPart("tool", "tools", f"{_to_json(tool)}\n") for tool in tools]


def _system_parts(system: Any, rendered: list[tuple[str, list[PromptPart]]]) -> list[PromptPart]:
    """Return the parts of a system prompt that is a separate field instead of a message."""
    if system is None:
        return []
    content = system.get("parts", system.get("content")) if isinstance(system, dict) else system
    contents = _content_parts(system if content is None else content, "system")
    parts = _add_role("system", contents)
    # Some gateways log it in both places.
    return [] if rendered and rendered[0] == ("system", parts) else parts


def _message_parts(message: Mapping[str, Any]) -> tuple[str, list[PromptPart]]:
    """Return the role and the parts of one message, or of one item of the Responses interface."""
    message_type = str(message.get("type", ""))
    if "role" not in message and message_type not in ("", "message"):
        return _item_parts(message, message_type)
    raw_role = str(message.get("role", ""))
    role = _ROLE_BY_NAME.get(raw_role, raw_role)
    content_parts = _content_parts(message.get("content", message.get("parts")), role)
    reasoning = message.get("reasoning_content", message.get("reasoning"))
    if isinstance(reasoning, str) and reasoning:
        content_parts.insert(0, PromptPart("text", role, reasoning))
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function", call) if isinstance(call, dict) else call
        content_parts.append(PromptPart("call", role, _to_json(function)))
    if isinstance(message.get("function_call"), dict):
        content_parts.append(PromptPart("call", role, _to_json(message["function_call"])))
    # In Anthropic's and Gemini's interfaces, tool results are messages of the user.
    if content_parts and all(part.kind == "result" for part in content_parts):
        role = "tool"
    return role, _add_role(raw_role or role, [part._replace(role=role) for part in content_parts])


def _item_parts(item: Mapping[str, Any], item_type: str) -> tuple[str, list[PromptPart]]:
    if item_type.endswith("_output") or item_type in _RESULT_TYPES:
        return "tool", _add_role("tool", [_result_part(item, "tool")])
    if item_type == "reasoning":
        contents = _content_parts(item.get("summary") or item.get("content"), "assistant")
        if not contents:
            contents = [PromptPart("text", "assistant", _to_json(item))]
        return "assistant", _add_role("assistant", contents)
    role = "assistant" if item_type.endswith("_call") else item_type
    return role, _add_role(role, [PromptPart("call", role, _to_json(item))])


def _add_role(raw_role: str, parts: list[PromptPart]) -> list[PromptPart]:
    """Prefix a message's first part with its role, and end every part with a line feed."""
    if not parts:
        return [PromptPart("text", _ROLE_BY_NAME.get(raw_role, raw_role), f"<{raw_role}>\n\n")]
    terminated = [part._replace(text=f"{part.text}\n") for part in parts]
    terminated[0] = terminated[0]._replace(text=f"<{raw_role}>\n{terminated[0].text}")
    return terminated


def _content_parts(content: Any, role: str) -> list[PromptPart]:
    parts = []
    for block in content if isinstance(content, list) else [content]:
        if isinstance(block, str):
            parts.append(PromptPart("text", role, block))
        elif isinstance(block, dict):
            parts.append(_content_part(block, role))
        elif block is not None:
            parts.append(PromptPart("text", role, _to_json(block)))
    return parts


def _content_part(block: Mapping[str, Any], role: str) -> PromptPart:
    """Return one block of a message's content."""
    block_type = str(block.get("type", ""))
    for name in ("functionCall", "functionResponse"):
        if isinstance(block.get(name), dict):
            block_type, block = name, block[name]
    if block_type in _CALL_TYPES:
        return PromptPart("call", role, _to_json(block))
    if block_type in _RESULT_TYPES:
        return _result_part(block, role)
    for name, words in (("image", _IMAGE_WORDS), ("media", _MEDIA_WORDS)):
        if any(word in block_type or word in block for word in words):
            return PromptPart(name, role, _to_json(block))
    for name in ("text", "content", "thinking"):
        if isinstance(block.get(name), str):
            return PromptPart("text", role, block[name])
    return PromptPart("text", role, _to_json(block))


def _result_part(block: Mapping[str, Any], role: str) -> PromptPart:
    for name in _RESULT_FIELDS:
        if block.get(name) is not None:
            contents = _content_parts(block[name], role)
            kinds = {part.kind for part in contents} & {"image", "media"}
            text = "\n".join(part.text for part in contents)
            return PromptPart(min(kinds, default="result"), role, text)  # "image" before "media"
    return PromptPart("result", role, _to_json(block))


def _to_json(value: Any) -> str:
    """Return a string as it is, else JSON without ``_OMITTED_KEYS``, with digests for binary data."""
    return value if isinstance(value, str) else json.dumps(_omit_keys(value, is_top_level=True))


def _omit_keys(value: Any, is_top_level: bool = False) -> Any:
    if isinstance(value, dict):
        return {
            key: _omit_keys(item)
            for key, item in value.items()
            if key != "cache_control" and not (is_top_level and key in _OMITTED_KEYS)
        }
    if isinstance(value, list):
        return [_omit_keys(item) for item in value]
    if not isinstance(value, str) or len(value) <= _MAX_WORD_CHARACTERS:
        return value
    has_words = not value.isascii() or len(value.split(maxsplit=1)) > 1
    return value if has_words else blake2b(value.encode(), digest_size=8).hexdigest()
