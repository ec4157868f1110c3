"""Which conversation a request belongs to, from what its client sends anyway.

Clients, agents and gateways name their sessions in fields and headers of their own. ``SOURCES`` is
the one list of those that are read, the first that is there wins, and an operator says which count.
A name is one within its tenant: no tenant can speak of another's conversations.

The headers of agents, and a sub-agent's parent being its session where no other is named, are as
Dynamo 1.5 reads them (its ``lib/llm/src/protocols/agents.rs``).
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sglang_canopy.errors import CanopyError
from sglang_canopy.request.fields import MAX_NAME, MAX_TURN

FLAG = "--canopy-identity-sources"
SESSIONS, ALL, NONE = "sessions", "all", "none"

MAX_RESPONSES = 1024
"""Responses of one tenant whose conversation is remembered, for ``previous_response_id``."""
MAX_TENANTS = 64

Headers = Mapping[str, str]
Body = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Identity:
    """What a source says."""

    conversation: str
    parent: str | None = None
    """The conversation that waits for this one."""
    over: bool = False
    """This is its last request."""
    turn: int | None = None

    def fields(self, linear: bool) -> dict[str, Any]:
        """As fields of a stamp; ``linear``: each request goes on from the one before."""
        found: dict[str, Any] = {"conversation": self.conversation}
        if linear:
            found["linear"] = True
        if self.parent is not None and self.parent != self.conversation:
            found["parent"] = self.parent
        if self.over:
            found["over"] = True
        if self.turn is not None:
            found["turn"] = self.turn
        return found


@dataclass(frozen=True, slots=True)
class Source:
    """One place where an identity may stand."""

    name: str
    """As in ``--canopy-identity-sources``."""
    where: str
    sent_by: str
    read: Callable[[Body, Headers], Identity | None]
    linear: bool = True
    """Whether it names one conversation, and not a user or a group of prompts."""


def _name(value: Any) -> str | None:
    """A usable name; longer ones by their digest; ``None`` for anything else."""
    if not isinstance(value, str):
        return None
    value = value.strip()
    if not value or not value.isprintable():
        return None
    if len(value) <= MAX_NAME:
        return value
    return "#" + hashlib.sha256(value.encode(errors="surrogatepass")).hexdigest()


def _is_true(value: Any) -> bool:
    return value is True or (isinstance(value, str) and value.strip().lower() in ("true", "1"))


def _of(
    conversation: Any, parent: Any = None, over: Any = None, turn: int | None = None
) -> Identity | None:
    name = _name(conversation)
    return None if name is None else Identity(name, _name(parent), _is_true(over), turn)


def _field(key: str) -> Callable[[Body, Headers], Identity | None]:
    return lambda body, _headers: _of(body.get(key))


def _header(
    key: str, parent: str | None = None, final: str | None = None
) -> Callable[[Body, Headers], Identity | None]:
    def read(_body: Body, headers: Headers) -> Identity | None:
        return _of(
            headers.get(key),
            headers.get(parent) if parent else None,
            headers.get(final) if final else None,
        )

    return read


def _agent_context(body: Body, _headers: Headers) -> Identity | None:
    extensions = body.get("nvext")
    context = extensions.get("agent_context") if isinstance(extensions, Mapping) else None
    if not isinstance(context, Mapping):
        return None
    return _of(
        context.get("session_id"), context.get("parent_session_id"), context.get("session_final")
    )


def _claude_code(_body: Body, headers: Headers) -> Identity | None:
    session = _name(headers.get("x-claude-code-session-id"))
    agent = _name(headers.get("x-claude-code-agent-id"))
    if session is None or agent is None:
        return _of(session)
    above = _name(headers.get("x-claude-code-parent-agent-id"))
    return _of(f"{session}/{agent}", session if above is None else f"{session}/{above}")


_USER_ID = re.compile(r"_session_([\w-]+)$", re.ASCII)


def _user_id(body: Body, _headers: Headers) -> Identity | None:
    metadata = body.get("metadata")
    given = metadata.get("user_id") if isinstance(metadata, Mapping) else None
    found = _USER_ID.search(given[-MAX_NAME:]) if isinstance(given, str) else None
    return _of(found[1]) if found else None


_LINEAGE = re.compile(r"(.+?)[_-](?:t|turn)(\d{1,7})")


def _request_id(body: Body, headers: Headers) -> Identity | None:
    for given in (body.get("rid"), headers.get("x-override-rid"), headers.get("x-request-id")):
        found = _LINEAGE.fullmatch(given) if isinstance(given, str) and len(given) < 1024 else None
        if found:
            return _of(found[1], turn=min(max(int(found[2]), 1), MAX_TURN))
    return None


SOURCES = (
    Source("session_id", "body: `session_id`", "SGLang's clients", _field("session_id")),
    Source(
        "dynamo",
        "headers: `x-dynamo-session-id`, `x-dynamo-parent-session-id`, `x-dynamo-session-final`",
        "Dynamo, clients of it",
        _header("x-dynamo-session-id", "x-dynamo-parent-session-id", "x-dynamo-session-final"),
    ),
    Source(
        "agent_context",
        "body: `nvext.agent_context` (`session_id`, `parent_session_id`, `session_final`)",
        "Dynamo, clients of it",
        _agent_context,
    ),
    Source(
        "claude-code",
        "headers: `x-claude-code-session-id`, `x-claude-code-agent-id`, "
        "`x-claude-code-parent-agent-id`",
        "Claude Code",
        _claude_code,
    ),
    Source(
        "x-session-id",
        "headers: `x-session-id`, `x-parent-session-id`",
        "OpenCode, proxies",
        _header("x-session-id", "x-parent-session-id"),
    ),
    Source(
        "codex",
        "headers: `thread-id`, `x-codex-parent-thread-id`",
        "Codex",
        _header("thread-id", "x-codex-parent-thread-id"),
    ),
    Source(
        "x-override-conversation-id",
        "header: `x-override-conversation-id`",
        "SGLang's gateways",
        _header("x-override-conversation-id"),
    ),
    Source(
        "previous_response_id",
        "body: `previous_response_id`, and the ids of the responses before",
        "OpenAI's Responses API",
        _field("previous_response_id"),
    ),
    Source(
        "request-id",
        "body: `rid`; headers: `x-override-rid`, `x-request-id`; where they end in a turn "
        "(`conv_t2`, `conv-turn2`)",
        "load generators, gateways",
        _request_id,
    ),
    Source(
        "metadata",
        "body: `metadata.user_id`, where it ends in `_session_ID`",
        "Claude Code",
        _user_id,
    ),
    Source(
        "prompt_cache_key",
        "body: `prompt_cache_key`",
        "OpenAI's clients, Codex",
        _field("prompt_cache_key"),
        linear=False,
    ),
    Source(
        "x-smg-routing-key",
        "header: `x-smg-routing-key`",
        "clients of SGLang's gateways",
        _header("x-smg-routing-key"),
        linear=False,
    ),
    Source(
        "safety_identifier",
        "body: `safety_identifier`",
        "OpenAI's clients",
        _field("safety_identifier"),
        linear=False,
    ),
    Source("user", "body: `user`", "OpenAI's clients", _field("user"), linear=False),
)
"""In order: the first that says something wins. A client's own ``canopy_conversation`` comes before
all of them."""


def sources_of(text: str) -> tuple[str, ...]:
    """The names that a flag's value stands for. Raises ``CanopyError`` for an unknown one."""
    groups = {
        SESSIONS: [s.name for s in SOURCES if s.linear],
        ALL: [s.name for s in SOURCES],
        NONE: [],
    }
    known = {s.name for s in SOURCES}
    wanted: set[str] = set()
    for word in (part.strip() for part in text.split(",")):
        if word not in known and word not in groups:
            raise CanopyError(
                f"has an unknown source {word[:60]!r}; give {SESSIONS}, {ALL} or {NONE}, or some of: "
                f"{', '.join(s.name for s in SOURCES)}"
            )
        wanted.update(groups.get(word, [word]))
    return tuple(s.name for s in SOURCES if s.name in wanted)


class Responses:
    """The conversations of past responses, which continue by ``previous_response_id``. Bounded, by
    tenant and in all. Several threads may ask."""

    def __init__(self) -> None:
        self._roots: dict[str | None, dict[str, str]] = {}
        self._lock = threading.Lock()

    def conversation(self, tenant: str | None, rid: str, previous: str | None) -> str:
        """The conversation of the response ``rid``, which follows ``previous``, if that is given.
        It has the name of its first response."""
        with self._lock:
            mine = self._roots.pop(tenant, {})
            root = rid if previous is None else mine.get(previous, previous)
            mine.pop(rid, None)
            if len(mine) >= MAX_RESPONSES:
                del mine[next(iter(mine))]
            mine[rid] = root
            if len(self._roots) >= MAX_TENANTS:
                del self._roots[next(iter(self._roots))]
            self._roots[tenant] = mine
        return root


@dataclass(frozen=True, slots=True)
class Identities:
    """The rule of this server: which sources count."""

    sources: tuple[str, ...] = sources_of(SESSIONS)
    responses: Responses = dataclasses.field(default_factory=Responses)

    def fields(
        self, body: Body, headers: Headers, rid: Any = None, tenant: str | None = None
    ) -> dict[str, Any]:
        """What the first source that is there says, as fields of a stamp; none where none is.

        ``headers``: any mapping that ignores case, or has names in lower case. ``rid``: SGLang's id
        of the request. Malformed values are as absent.
        """
        found: dict[str, Any] = {}
        for source in SOURCES:
            identity = source.read(body, headers) if source.name in self.sources else None
            if identity is not None:
                found = identity.fields(source.linear)
                break
        if _CHAIN in self.sources and _is_response(rid):
            previous = _name(body.get(_CHAIN))
            root = self.responses.conversation(tenant, rid, previous)
            if not found or found["conversation"] == previous:
                found = Identity(root).fields(linear=True)
        return found


_CHAIN = "previous_response_id"


def _is_response(rid: Any) -> bool:
    """Whether SGLang's Responses API gave the id."""
    return isinstance(rid, str) and rid.startswith("resp_") and len(rid) <= MAX_NAME
