"""A session: a chain of requests, each sent after the answer to its predecessor."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from sglang_canopy.reuse.category import Category


class Session:
    """State of a session. Times are in seconds on the requests' clock."""

    __slots__ = (
        "active",
        "answered",
        "blocks",
        "category",
        "charge",
        "ends",
        "evidence",
        "growth",
        "is_agent",
        "left",
        "number",
        "over",
        "party",
        "path",
        "seen",
        "tenant",
        "tickets",
        "tokens",
        "unjudged",
        "unlearnt",
        "waits_since",
        "who",
        "working",
    )

    def __init__(
        self,
        number: int,
        tenant: str | None,
        conversation: Hashable | None,
        now: float,
        category: Category,
    ) -> None:
        self.number = number
        """Number in order of arrival: the lowest is the oldest."""
        self.tenant = tenant
        self.party: Hashable = tenant
        """Party that its turns and its memory are charged to (``tenant.Parties``)."""
        self.who = tenant, conversation
        self.waits_since = now
        """Time since which it waits for admission, if it does."""
        self.seen = now
        """Time of the last arrival or answer."""
        self.category = category
        self.tickets: set[Hashable] = set()
        """Tickets of the request in progress; several for parallel samples (n > 1)."""
        self.unlearnt = False
        """Whether that request has yet to be learnt from."""
        self.active = False
        """Whether the session is admitted."""
        self.answered = False
        """Whether any request of the session was answered."""
        self.over = False
        self.tokens = 0
        """Tokens of its last request: the prompt, then also the output."""
        self.path: Sequence[int] = ()
        """Block hashes of its last request."""
        self.blocks: Sequence[int] = ()
        """The part of ``path`` counted as blocks in use, while active."""
        self.charge = 0.0
        """Tokens charged now, without shared prefixes."""
        self.growth = 0.0
        """The part of ``charge`` for future tokens."""
        self.working = 0.0
        """``charge`` while it has a request, otherwise 0."""
        self.is_agent = False
        """Whether it is, or likely is, an agent's (``agents.py``)."""
        self.evidence = 0
        """Its latest answers that were an agent's, less those that were not; 0: none is judged."""
        self.unjudged: tuple[Hashable, ...] = ()
        """Keys of its last answer in the shares of agents, while it is not judged."""
        self.ends: tuple[int, ...] = ()
        """Hashes of the last blocks of its prompt and answer."""
        self.left = 0
        """Tokens that the previous request cached for the request in progress."""

    @property
    def under_way(self) -> bool:
        """Whether a request of the session is waiting or being answered."""
        return bool(self.tickets)
