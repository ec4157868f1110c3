"""SGLang's ``--enable-session-radix-cache``, for comparison: leaves ranked by open sessions.

SGLang 0.5.23 (``unified_cache/session_ref_tracker.py``, ``components/full.py``) tags the leaf at the
end of a session's last answer. Until the client closes the session, each ancestor of a tagged leaf
without a tagged ancestor counts one reference. Leaves with the fewest references are evicted first,
ties by LRU. If a tagged leaf is deleted, its tag moves to the parent.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any, ClassVar

from sglang_canopy.policy.base import Policy, Victim
from sglang_canopy.policy.ranked import NoOptions
from sglang_canopy.records import Leaf

SESSION_REFS = ("off", "kept", "closed")
"""Off; on, without closed sessions; on, with sessions closed after the last answer."""


class SessionRefs:
    """Sessions that reference a node. The root's ``parent`` is ``None``."""

    def __init__(self) -> None:
        self._tagged: dict[Hashable, set[Any]] = {}
        """Session -> its leaves."""
        self._sessions: dict[Any, set[Hashable]] = {}
        """Tagged leaf -> its sessions."""
        self._count: dict[Any, int] = {}

    def of(self, node: Any) -> int:
        """Return the references of ``node``."""
        return self._count.get(node, 0)

    def answered(self, session: Hashable | None, leaf: Any) -> None:
        """Tag ``leaf``, at the end of a finished request of ``session``."""
        tagged = self._tagged.get(session, set())
        if session is None or leaf.parent is None or leaf in tagged:
            return
        above = leaf.parent
        while above is not None and above not in tagged:
            above = above.parent
        self._add(leaf, above, 1)
        self._tag(session, leaf)
        if above is not None:
            self._untag(session, above)

    def close(self, session: Hashable | None) -> None:
        """Remove all references of ``session``."""
        for leaf in tuple(self._tagged.get(session, ())):
            self._add(leaf, None, -1)
            self._untag(session, leaf)

    def split(self, node: Any, head: Any) -> None:
        """Handle a split: ``head`` is a new parent of ``node``, with its first tokens."""
        if node in self._count:
            self._count[head] = self._count[node]

    def deleted(self, node: Any) -> None:
        """Move the tags of ``node``, a deleted leaf, to its parent."""
        for session in tuple(self._sessions.get(node, ())):
            above = node.parent
            if above.parent is None or above in self._tagged[session]:
                above = None
            self._add(node, above, -1)
            self._untag(session, node)
            if above is not None:
                self._tag(session, above)

    def _add(self, node: Any, stop: Any, count: int) -> None:
        """Add ``count`` references to ``node`` and its ancestors below ``stop``."""
        while node is not stop and node.parent is not None:
            left = self._count.get(node, 0) + count
            if left:
                self._count[node] = left
            else:
                del self._count[node]
            node = node.parent

    def _tag(self, session: Hashable, leaf: Any) -> None:
        self._tagged.setdefault(session, set()).add(leaf)
        self._sessions.setdefault(leaf, set()).add(session)

    def _untag(self, session: Hashable, leaf: Any) -> None:
        for table, key, value in (
            (self._tagged, session, leaf),
            (self._sessions, leaf, session),
        ):
            table[key].remove(value)  # type: ignore[index]
            if not table[key]:  # type: ignore[index]
                del table[key]  # type: ignore[arg-type]


class SessionAwareLRU(Policy):
    """Rank by (references, last access), lowest first. O(n), as SGLang's heap of all leaves."""

    name: ClassVar[str] = "session-lru"
    Config: ClassVar[type] = NoOptions
    reads_labels: ClassVar[bool] = False

    def __init__(self, refs: SessionRefs) -> None:
        super().__init__(NoOptions())
        self.refs = refs
        self._leaves: dict[Leaf, None] = {}

    def admit(self, leaf: Leaf, now: float) -> None:
        self._leaves[leaf] = None

    def drop(self, leaf: Leaf) -> None:
        self._leaves.pop(leaf, None)

    # victim = the leaf with the least (references, last_access)
    def victim(self, now: float) -> Victim | None:
        if not self._leaves:
            return None
        return Victim(min(self._leaves, key=lambda leaf: (self.refs.of(leaf), leaf.last_access)))

    def twin(self) -> SessionAwareLRU:
        return SessionAwareLRU(self.refs)

    def leaves(self) -> Iterator[Leaf]:
        return iter(self._leaves)
