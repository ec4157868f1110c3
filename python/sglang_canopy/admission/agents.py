"""Whose sessions are agents': those whose answers end in tool calls.

A tool answers within seconds, and the next turn needs what this one leaves. People pause for
longer than a device remembers, and keeping a place for them would be in vain.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from sglang_canopy.admission.session import Session
from sglang_canopy.records import Request

TOOL = "tool"
_NEWEST = 0.05
"""Least weight of the newest answer in a share."""
_OWN = 8
"""Answers after which a tenant's own share counts, instead of all tenants'."""
_MOST = 1024


class Agents:
    """Of each category, the share of answers that end in tool calls. Bounded."""

    def __init__(self) -> None:
        self._shares: OrderedDict[Hashable, tuple[int, float]] = OrderedDict()
        """By category, and by tenant and category: answers, up to ``_OWN``, and the share. The one
        that was counted last is at the end."""

    def is_one(self, session: Session, request: Request) -> bool:
        """Whether ``session`` is an agent's; before its first answer, whether that is likely."""
        if session.answered:
            return session.calls_tools
        count, share = self._shares.get((request.tenant, request.category), (0, 0.0))
        if count < _OWN:
            _, share = self._shares.get(request.category, (0, 0.0))
        return share > 0.5

    def answered(self, session: Session, request: Request) -> None:
        """``request`` of ``session`` says how its answer stopped."""
        session.calls_tools = request.stop == TOOL
        for key in (request.category, (request.tenant, request.category)):
            count, share = self._shares.pop(key, (0, 0.0))
            weight = max(_NEWEST, 1.0 / (count + 1))
            share += weight * (session.calls_tools - share)
            self._shares[key] = min(count + 1, _OWN), share
        while len(self._shares) > _MOST:
            self._shares.popitem(last=False)
