"""Finds the session that a request continues, by its conversation's name or by its prompt.

Clients without conversation names are recognised by their prompts: a request continues a session if
its path runs through the end of the session's last prompt, or of the answer to it. Each session is
indexed at its newest end only, so that others with a common prefix are separate sessions.
"""

from __future__ import annotations

from collections.abc import Hashable

from sglang_canopy.admission.session import Session
from sglang_canopy.records import Request
from sglang_canopy.reuse.shadow import full_blocks


class SessionIndex:
    """Sessions by the keys of their next request, bounded by the number of sessions."""

    def __init__(self) -> None:
        self._by_conversation: dict[tuple[str | None, Hashable], Session] = {}
        self._by_end: dict[int, Session] = {}

    def of_conversation(self, tenant: str | None, conversation: Hashable) -> Session | None:
        """Return the session of a named conversation; the last session if it has several."""
        return self._by_conversation.get((tenant, conversation))

    def find(self, request: Request) -> Session | None:
        """Return the session that ``request`` continues, unless it has a request in progress."""
        who = request.tenant, request.conversation
        unnamed = request.tenant, None
        full = full_blocks(request.path, request.prompt_tokens, request.block_tokens)
        found = None
        for block in reversed(request.path[:full]):
            found = self._by_end.get(block)
            if found is not None and not found.under_way and found.who in (who, unnamed):
                return found
        if request.conversation is None:
            return None
        found = self._by_conversation.get(who)
        return found if found is not None and not found.under_way else None

    def describe(self, session: Session, request: Request, tokens: int) -> None:
        """Set the path and tokens of ``session``, and index it for its next request."""
        session.tokens = tokens
        session.path = tuple(request.path)
        self.hide(session)
        if request.conversation is not None:
            # A chain of stored responses is named from its second turn on.
            session.who = request.tenant, request.conversation
        # The next prompt may change the answer, so the prompt's end is indexed as well.
        full = (
            full_blocks(request.path, end, request.block_tokens)
            for end in (request.prompt_tokens, tokens)
        )
        session.ends = tuple({request.path[n - 1] for n in full if n})
        for end in session.ends:
            self._by_end[end] = session
        if session.who[1] is not None:
            self._by_conversation[session.who] = session

    def hide(self, session: Session) -> None:
        """Remove ``session`` from the index."""
        for end in session.ends:
            if self._by_end.get(end) is session:
                del self._by_end[end]
        session.ends = ()
        if self._by_conversation.get(session.who) is session:
            del self._by_conversation[session.who]
