"""Which session a request goes on with: by its conversation's name, or by its prompt alone.

Clients that name no conversation are recognised by their prompts: a request whose path runs
through the end of a session's last prompt, or of the answer to it, goes on with that session. Each
session can be found at its newest end only, so that others that begin alike are sessions of their
own.
"""

from __future__ import annotations

from collections.abc import Hashable

from sglang_canopy.admission.session import Session
from sglang_canopy.records import Request
from sglang_canopy.reuse.shadow import full_blocks


class SessionIndex:
    """Sessions by what their next request will show. As many entries as there are sessions."""

    def __init__(self) -> None:
        self._by_conversation: dict[tuple[str | None, Hashable], Session] = {}
        self._by_end: dict[int, Session] = {}

    def of_conversation(self, tenant: str | None, conversation: Hashable) -> Session | None:
        """The session of a conversation that is named; the last one, if it has several."""
        return self._by_conversation.get((tenant, conversation))

    def find(self, request: Request) -> Session | None:
        """The session that ``request`` goes on with; ``None`` where that has one under way."""
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
        """What ``session`` holds, and what the next request is to find it by."""
        session.tokens = tokens
        session.path = tuple(request.path)
        self.hide(session)
        if request.conversation is not None:
            # A chain of stored responses is named from its second turn on.
            session.who = request.tenant, request.conversation
        # An answer may not come back as it was: the prompt's end is known as well.
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
        """No request finds ``session`` any more."""
        for end in session.ends:
            if self._by_end.get(end) is session:
                del self._by_end[end]
        session.ends = ()
        if self._by_conversation.get(session.who) is session:
            del self._by_conversation[session.who]
