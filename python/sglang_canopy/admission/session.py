"""One session: a chain of requests, each sent after the one before it was answered."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from sglang_canopy.reuse.categories import Category


class Session:
    """What the gate knows of a session. Times in seconds on the requests' clock."""

    __slots__ = (
        "active",
        "answered",
        "blocks",
        "calls_tools",
        "category",
        "charge",
        "ends",
        "expires",
        "growth",
        "left",
        "number",
        "over",
        "path",
        "seen",
        "tenant",
        "tickets",
        "tokens",
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
        """Sessions in the order in which they first came: the lowest is the oldest."""
        self.tenant = tenant
        self.who = tenant, conversation
        self.waits_since = now
        """Since when it waits for admission, if it does."""
        self.seen = now
        """When it was last heard of: a request came, or was answered."""
        self.category = category
        self.tickets: set[Hashable] = set()
        """The request that is under way; several are parallel samples of one (n > 1)."""
        self.unlearnt = False
        """Whether nothing has been learnt from that request yet."""
        self.active = False
        """Whether it is admitted."""
        self.answered = False
        """Whether any request of it has been."""
        self.over = False
        self.tokens = 0
        """Of its last request: the prompt, and the output once that is there."""
        self.path: Sequence[int] = ()
        """Block hashes of its last request."""
        self.blocks: Sequence[int] = ()
        """The part of ``path`` that is counted among the blocks in use, while it is active."""
        self.charge = 0.0
        """Tokens that it is charged now, shared prefixes left out."""
        self.growth = 0.0
        """The part of ``charge`` that it does not have yet."""
        self.working = 0.0
        """``charge``, while a request is under way."""
        self.calls_tools = False
        """Whether its last answer ended in a tool call."""
        self.ends: tuple[int, ...] = ()
        """Hashes of the blocks in which its last prompt, and the answer to it, end."""
        self.left = 0
        """Tokens that the request under way should find: what the one before it left."""
        self.expires: float | None = None
        """When its place in the line is given up, if it was refused."""

    @property
    def under_way(self) -> bool:
        """Whether a request of it is waiting or being answered."""
        return bool(self.tickets)
