"""The last tip of each conversation, for hints that come between its requests. Bounded."""

from __future__ import annotations

from collections.abc import Hashable

from sglang_canopy.reuse.shadow import Tip

MAX_CONVERSATIONS = 1024
"""Of one tenant: those that it used last."""
MAX_TENANTS = 64
"""Those that were here last."""


class LastTips:
    """By tenant and conversation. One tenant's conversations push out no other's."""

    def __init__(self) -> None:
        self._tips: dict[str | None, dict[Hashable, Tip]] = {}

    def remember(self, conversation: tuple[str | None, Hashable], tip: Tip) -> None:
        """``tip`` is where a tenant's conversation ends now."""
        tenant, name = conversation
        mine = self._tips.pop(tenant, {})
        mine.pop(name, None)
        if len(mine) >= MAX_CONVERSATIONS:
            del mine[next(iter(mine))]
        mine[name] = tip
        if len(self._tips) >= MAX_TENANTS:
            del self._tips[next(iter(self._tips))]
        self._tips[tenant] = mine

    def last(self, conversation: tuple[str | None, Hashable]) -> Tip | None:
        """Where a tenant's conversation ends, if that is known."""
        return self._tips.get(conversation[0], {}).get(conversation[1])
