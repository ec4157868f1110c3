"""Sessions: chains of requests, each sent after the answer to its predecessor.

Clients without conversation names are recognised by their prompts: a request continues a session if
its path runs through the end of the session's last prompt, or of the answer to it. Each session is
indexed at its newest end only, so that others with a common prefix are separate sessions.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from sglang_canopy.records import Request
from sglang_canopy.reuse.category import Category
from sglang_canopy.reuse.shadow import full_blocks


@dataclass(slots=True, eq=False)
class Session:
    """State of a session. Times are in seconds on the requests' clock."""

    number: int
    """Number in order of arrival: the lowest is the oldest."""
    tenant: str | None
    conversation: Hashable | None
    """Its name at its first request."""
    last_contact_s: float
    """Time of the last arrival or answer."""
    category: Category
    charged_to: Hashable = None
    """Tenant to which its admissions and its memory are charged (``tenant.ChargedTenants``)."""
    arrived_s: float = 0.0
    """Arrival of its last request; unlike the request's time, no overtaking raises it."""
    waiting_since_s: float = 0.0
    """Time since which it waits for admission, if it does."""
    share_key: Hashable = None
    """Key of the share in which it waits, or last waited."""
    has_request: bool = False
    """Whether a request of the session is waiting or being answered."""
    is_active: bool = False
    """Whether the session is admitted."""
    has_answer: bool = False
    """Whether any request of the session was answered."""
    is_over: bool = False
    """Whether a client said that the conversation is over."""
    tokens: int = 0
    """Tokens of its last request: the prompt, then also the output."""
    path: Sequence[int] = ()
    """Block hashes of its last request."""
    blocks: Sequence[int] = ()
    """The part of ``path`` counted as blocks in use, while active."""
    charged_tokens: float = 0.0
    """Tokens charged to it now, without shared prefixes."""
    growth_tokens: float = 0.0
    """The part of ``charged_tokens`` for future tokens."""
    is_agent: bool = False
    """Whether it is, or likely is, an agent's (``agents.py``)."""
    agent_evidence: int = 0
    """Positive: the latest answers were an agent's; negative: they were not; 0: no answer was judged."""
    unjudged_keys: tuple[Hashable, ...] = ()
    """Keys in ``Agents`` of its last answer; empty once that answer is judged."""
    is_silent: bool = False
    """Whether its last answer was judged because no request followed it in time."""
    end_blocks: tuple[int, ...] = ()
    """Hashes of the last blocks of its prompt and answer."""
    cached_before_tokens: int = 0
    """Tokens that the previous request cached for the request in progress."""

    @property
    def key(self) -> tuple[str | None, Hashable | None]:
        return self.tenant, self.conversation


class SessionIndex:
    """Sessions by the keys of their next request, bounded by the number of sessions."""

    def __init__(self) -> None:
        self.by_conversation: dict[tuple[str | None, Hashable], Session] = {}
        """Tenant and conversation -> its session; the last session if it has several."""
        self._by_end: dict[int, Session] = {}

    def find(self, request: Request) -> Session | None:
        """Return the session that ``request`` continues, unless it has a request in progress."""
        key, unnamed = (request.tenant, request.conversation), (request.tenant, None)
        full_block_count = full_blocks(request.path, request.prompt_tokens, request.block_tokens)
        for block in reversed(request.path[:full_block_count]):
            session = self._by_end.get(block)
            if session is not None and not session.has_request and session.key in (key, unnamed):
                return session
        session = self.by_conversation.get(key)
        return session if session is not None and not session.has_request else None

    def index(self, session: Session, request: Request, tokens: int) -> None:
        """Set the path and tokens of ``session``, and index it for its next request."""
        session.tokens = tokens
        session.path = tuple(request.path)
        self.remove(session)
        if request.conversation is not None:
            # A chain of stored responses is named from its second turn on.
            session.conversation = request.conversation
        # The next prompt may change the answer, so the prompt's end is indexed as well.
        block_counts = (
            full_blocks(request.path, end, request.block_tokens)
            for end in (request.prompt_tokens, tokens)
        )
        session.end_blocks = tuple({request.path[n - 1] for n in block_counts if n})
        for end in session.end_blocks:
            self._by_end[end] = session
        if session.conversation is not None:
            self.by_conversation[session.key] = session

    def remove(self, session: Session) -> None:
        for end in session.end_blocks:
            if self._by_end.get(end) is session:
                del self._by_end[end]
        session.end_blocks = ()
        if self.by_conversation.get(session.key) is session:
            del self.by_conversation[session.key]
