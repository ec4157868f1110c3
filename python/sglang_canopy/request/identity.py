"""Identify a request's conversation by fields that its client already sends.

Clients, agents and gateways have different fields and headers for their sessions. ``SOURCES`` lists
those that Canopy reads. An operator selects sources, and the first one present is used. Names are scoped
to the tenant, so that no tenant can refer to another's conversations.

Agents' headers follow Dynamo 1.5
(``lib/llm/src/protocols/agents.rs``).
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sglang_canopy.errors import CanopyError
from sglang_canopy.request.responses import Responses
from sglang_canopy.wire.stamp import MAX_NAME, MAX_TURN, conversation_name

FLAG = "--canopy-identity-sources"
SESSIONS, ALL, NONE = "sessions", "all", "none"

Headers = Mapping[str, str]
Body = Mapping[str, Any]
Fields = dict[str, Any]
"""Fields of a stamp: ``conversation``; ``over``, set for its last request; ``turn``."""


def _name(value: Any) -> str | None:
    """Return a valid name (``conversation_name``), or ``None``."""
    try:
        return conversation_name(value)
    except ValueError:
        return None


def _named(conversation: Any, over: Any = None) -> Fields | None:
    name = _name(conversation)
    if name is None:
        return None
    fields: Fields = {"conversation": name}
    if over is True or (isinstance(over, str) and over.strip().lower() in ("true", "1")):
        fields["over"] = True
    return fields


def _agent_context(extensions: Any) -> Fields | None:
    context = extensions.get("agent_context") if isinstance(extensions, Mapping) else None
    if not isinstance(context, Mapping):
        return None
    return _named(*map(context.get, ("session_id", "session_final")))


def _claude_code(session: Any, agent: Any) -> Fields | None:
    session, agent = _name(session), _name(agent)
    if session is None or agent is None:
        return _named(session)
    return _named(f"{session}/{agent}")


_LINEAGE = re.compile(r"(.+?)[_-](?:t|turn)(\d{1,7})")


def _request_id(*given: Any) -> Fields | None:
    for one in given:
        found = _LINEAGE.fullmatch(one) if isinstance(one, str) and len(one) < 1024 else None
        if found:
            fields = _named(found[1])
            turn = min(max(int(found[2]), 1), MAX_TURN)
            return None if fields is None else fields | {"turn": turn}
    return None


_USER_ID = re.compile(r"_session_([\w-]+)$", re.ASCII)


def _user_id(metadata: Any) -> Fields | None:
    given = metadata.get("user_id") if isinstance(metadata, Mapping) else None
    found = _USER_ID.search(given[-MAX_NAME:]) if isinstance(given, str) else None
    return _named(found[1]) if found else None


@dataclass(frozen=True, slots=True)
class Source:
    """One place in a request that may identify its conversation."""

    name: str
    """Name in ``--canopy-identity-sources``."""
    sent_by: str
    body: tuple[str, ...] = ()
    """Keys of the body."""
    headers: tuple[str, ...] = ()
    read: Callable[..., Fields | None] = _named
    """Function of the values of ``body`` and ``headers``; at least one value is not ``None``."""
    note: str = ""
    """Additional text for the reference."""
    linear: bool = True
    """Whether each request continues the previous one; false for users or groups of prompts."""

    @property
    def where(self) -> str:
        """Return the places as text for the reference."""
        places = (("body", self.body), ("header" + "s" * (len(self.headers) > 1), self.headers))
        texts = [
            f"{place}: {', '.join(f'`{key}`' for key in keys)}" for place, keys in places if keys
        ]
        return "; ".join(texts) + self.note


SOURCES = (
    Source("session_id", "SGLang's clients", body=("session_id",)),
    Source(
        "dynamo",
        "Dynamo, clients of it",
        headers=("x-dynamo-session-id", "x-dynamo-session-final"),
    ),
    Source(
        "agent_context",
        "Dynamo, clients of it",
        body=("nvext",),
        read=_agent_context,
        note=", its `agent_context` (`session_id`, `session_final`)",
    ),
    Source(
        "claude-code",
        "Claude Code",
        headers=(
            "x-claude-code-session-id",
            "x-claude-code-agent-id",
        ),
        read=_claude_code,
    ),
    Source("x-session-id", "OpenCode, proxies", headers=("x-session-id",)),
    Source("codex", "Codex", headers=("thread-id",)),
    Source(
        "x-override-conversation-id",
        "SGLang's gateways",
        headers=("x-override-conversation-id",),
    ),
    Source(
        "previous_response_id",
        "OpenAI's Responses API",
        body=("previous_response_id",),
        note="; the conversation has its first response's id",
    ),
    Source(
        "request-id",
        "load generators, gateways",
        body=("rid",),
        headers=("x-override-rid", "x-request-id"),
        read=_request_id,
        note="; where they end in a turn (`conv_t2`, `conv-turn2`)",
    ),
    Source(
        "metadata",
        "Claude Code",
        body=("metadata",),
        read=_user_id,
        note=", its `user_id`, where it ends in `_session_ID`",
    ),
    Source(
        "prompt_cache_key",
        "OpenAI's clients, Codex",
        body=("prompt_cache_key",),
        linear=False,
    ),
    Source(
        "x-smg-routing-key",
        "clients of SGLang's gateways",
        headers=("x-smg-routing-key",),
        linear=False,
    ),
    Source("safety_identifier", "OpenAI's clients", body=("safety_identifier",), linear=False),
    Source("user", "OpenAI's clients", body=("user",), linear=False),
)
"""Sources by priority. ``canopy_conversation`` of a client overrides all of them."""


def sources_of(text: str) -> tuple[str, ...]:
    """Return the source names of a flag's value. Raises ``CanopyError`` for an unknown name."""
    names = [s.name for s in SOURCES]
    groups = {
        SESSIONS: [s.name for s in SOURCES if s.linear],
        ALL: names,
        NONE: [],
    }
    wanted: set[str] = set()
    for word in (part.strip() for part in text.split(",")):
        if word not in names and word not in groups:
            raise CanopyError(
                f"has an unknown source {word[:60]!r}; give {SESSIONS}, {ALL} or {NONE}, or some of: "
                f"{', '.join(names)}"
            )
        wanted.update(groups.get(word, [word]))
    return tuple(name for name in names if name in wanted)


@functools.cache
def _selected(names: tuple[str, ...]) -> tuple[Source, ...]:
    return tuple(source for source in SOURCES if source.name in names)


@dataclass(frozen=True, slots=True)
class Identities:
    """Selected sources of this server."""

    sources: tuple[str, ...] = sources_of(SESSIONS)
    responses: Responses = dataclasses.field(default_factory=Responses)

    def fields(
        self,
        body: Body,
        headers: Headers,
        rid: Any = None,
        tenant: str | None = None,
        turn: int = 1,
    ) -> Fields:
        """Return the stamp fields of the first source present, or an empty dict.

        ``headers``: a case-insensitive mapping, or one with lower-case names. ``rid``: SGLang's id of
        the request. ``turn``: inferred from the body. Malformed values count as absent.
        """
        found: Fields = {}
        for source in _selected(self.sources):
            given = [*map(body.get, source.body), *map(headers.get, source.headers)]
            named = None if given.count(None) == len(given) else source.read(*given)
            if named is not None:
                found = named | {"linear": True} if source.linear else named
                break
        of_responses = isinstance(rid, str) and rid.startswith("resp_") and len(rid) <= MAX_NAME
        if of_responses and _CHAIN in self.sources:  # an id of SGLang's Responses API
            previous = _name(body.get(_CHAIN))
            root, later = self.responses.continued(tenant, rid, previous, turn)
            # Do not name a first response: a stateless client never refers to it, and the prompt
            # identifies its next turn.
            if previous is not None and found.get("conversation", previous) == previous:
                found = {"conversation": root, "linear": True}
            if later is not None:
                found = {**found, "turn": later}
        return found


_CHAIN = "previous_response_id"
