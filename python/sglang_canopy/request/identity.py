"""Identify a request's conversation by fields that its client already sends.

Clients, agents and gateways have different fields and headers for their sessions. ``IDENTITY_FIELDS`` lists
those that Canopy reads; the first present is used. Names are scoped to the tenant, so that no
tenant can refer to another's conversations.

Agents' headers follow Dynamo 1.5 (``lib/llm/src/protocols/agents.rs``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sglang_canopy.wire.stamp import MAX_NAME_CHARS, MAX_TURN, conversation_name

Headers = Mapping[str, str]
Body = Mapping[str, Any]
Fields = dict[str, Any]
"""Fields of a stamp: ``conversation``; ``linear``; ``over``, set for its last request; ``turn``."""


def _read_name(value: Any) -> str | None:
    """Return a valid name (``conversation_name``), or ``None``."""
    try:
        return conversation_name(value)
    except ValueError:
        return None


def _make_fields(conversation: Any, is_last: Any = None) -> Fields | None:
    name = _read_name(conversation)
    if name is None:
        return None
    fields: Fields = {"conversation": name, "linear": True}
    if is_last is True or (isinstance(is_last, str) and is_last.strip().lower() in ("true", "1")):
        fields["over"] = True
    return fields


def _read_agent_context(extensions: Any) -> Fields | None:
    context = extensions.get("agent_context") if isinstance(extensions, Mapping) else None
    if not isinstance(context, Mapping):
        return None
    return _make_fields(*map(context.get, ("session_id", "session_final")))


def _read_claude_code(session: Any, agent: Any) -> Fields | None:
    session, agent = _read_name(session), _read_name(agent)
    if session is None or agent is None:
        return _make_fields(session)
    return _make_fields(f"{session}/{agent}")


_NAME_AND_TURN = re.compile(r"(.+?)[_-](?:t|turn)(\d{1,7})")


def _read_request_id(*request_ids: Any) -> Fields | None:
    for request_id in request_ids:
        is_short = isinstance(request_id, str) and len(request_id) < 1024
        match = _NAME_AND_TURN.fullmatch(request_id) if is_short else None
        if match:
            fields = _make_fields(match[1])
            turn = min(max(int(match[2]), 1), MAX_TURN)
            return None if fields is None else fields | {"turn": turn}
    return None


_USER_ID = re.compile(r"_session_([\w-]+)$", re.ASCII)


def _read_user_id(metadata: Any) -> Fields | None:
    user_id = metadata.get("user_id") if isinstance(metadata, Mapping) else None
    match = _USER_ID.search(user_id[-MAX_NAME_CHARS:]) if isinstance(user_id, str) else None
    return _make_fields(match[1]) if match else None


@dataclass(frozen=True, slots=True)
class IdentityField:
    """Keys or headers of a request that may identify its conversation."""

    sent_by: str
    body: tuple[str, ...] = ()
    """Keys of the body."""
    headers: tuple[str, ...] = ()
    read: Callable[..., Fields | None] = _make_fields
    """Function of the values of ``body`` and ``headers``; at least one value is not ``None``."""
    note: str = ""
    """Additional text for the reference."""

    @property
    def locations_text(self) -> str:
        places = (("body", self.body), ("header" + "s" * (len(self.headers) > 1), self.headers))
        texts = [
            f"{place}: {', '.join(f'`{key}`' for key in keys)}" for place, keys in places if keys
        ]
        return "; ".join(texts) + self.note


IDENTITY_FIELDS = (
    IdentityField("SGLang's clients", body=("session_id",)),
    IdentityField(
        "Dynamo, clients of it", headers=("x-dynamo-session-id", "x-dynamo-session-final")
    ),
    IdentityField(
        "Dynamo, clients of it",
        body=("nvext",),
        read=_read_agent_context,
        note=", its `agent_context` (`session_id`, `session_final`)",
    ),
    IdentityField(
        "Claude Code",
        headers=("x-claude-code-session-id", "x-claude-code-agent-id"),
        read=_read_claude_code,
    ),
    IdentityField("OpenCode, proxies", headers=("x-session-id",)),
    IdentityField("Codex", headers=("thread-id",)),
    IdentityField("SGLang's gateways", headers=("x-override-conversation-id",)),
    IdentityField(
        "load generators, gateways",
        body=("rid",),
        headers=("x-override-rid", "x-request-id"),
        read=_read_request_id,
        note="; where they end in a turn (`conv_t2`, `conv-turn2`)",
    ),
    IdentityField(
        "Claude Code",
        body=("metadata",),
        read=_read_user_id,
        note=", its `user_id`, where it ends in `_session_ID`",
    ),
)
"""By priority; each request of one conversation continues the previous request. ``canopy_conversation`` of a
client overrides all of them."""


def find_conversation(body: Body, headers: Headers) -> Fields:
    """Return the stamp fields of the first identity field present, or an empty dict. ``headers``: a
    case-insensitive mapping, or one with lower-case names. Malformed values count as absent."""
    for field in IDENTITY_FIELDS:
        values = [*map(body.get, field.body), *map(headers.get, field.headers)]
        fields = None if values.count(None) == len(values) else field.read(*values)
        if fields is not None:
            return fields
    return {}
