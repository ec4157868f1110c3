"""Classifies sessions as agents by the share of answers that end in tool calls.

A tool answers within seconds, and the next turn needs the KV of this turn. Users pause longer than
a device keeps KV, so a reserved place would be useless.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from sglang_canopy.admission.session import Session
from sglang_canopy.records import Request

TOOL = "tool"
_NEWEST = 0.05
"""Smallest weight of the newest answer in a share."""
_OWN = 8
"""Answers after which a tenant's own share replaces all tenants' share."""
_MAX_SHARES = 1024


class Agents:
    """Share of answers that end in tool calls, by category. Bounded."""

    def __init__(self) -> None:
        self._shares: OrderedDict[Hashable, tuple[int, float]] = OrderedDict()
        """Answers (up to ``_OWN``) and share, by category and (tenant, category); latest last."""

    def is_one(self, session: Session, request: Request) -> bool:
        """Return whether ``session`` is an agent's, or likely is before its first answer."""
        if session.answered:
            return session.calls_tools
        count, share = self._shares.get((request.tenant, request.category), (0, 0.0))
        if count < _OWN:
            _, share = self._shares.get(request.category, (0, 0.0))
        return share > 0.5

    def answered(self, session: Session, request: Request) -> None:
        """Record the stop reason of an answered ``request`` of ``session``."""
        session.calls_tools = request.stop == TOOL
        for key in (request.category, (request.tenant, request.category)):
            count, share = self._shares.pop(key, (0, 0.0))
            weight = max(_NEWEST, 1.0 / (count + 1))
            share += weight * (session.calls_tools - share)
            self._shares[key] = min(count + 1, _OWN), share
        while len(self._shares) > _MAX_SHARES:
            self._shares.popitem(last=False)
