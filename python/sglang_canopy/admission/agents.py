"""Classifies sessions as agents: their next turn follows within seconds.

A tool answers within seconds, and the next turn needs the KV of this turn. Users pause longer than
a device keeps KV, so a reserved place would be useless. An answer was an agent's if

- it ended in a tool call, where SGLang's parser or the client states so; else
- the next prompt ends in a tool's result, or arrives within ``swift_s``.

So neither parser nor labels are needed. An answer that nothing follows for ``swift_s`` was none.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from sglang_canopy.admission.session import Session
from sglang_canopy.records import Request

TOOL = "tool"
AFTER_TOOL = "-after-tool"
"""End of the inferred category of a prompt that ends in a tool's result (``request/sent.py``)."""
_NEWEST = 0.05
"""Smallest weight of the newest answer in a share."""
_OWN = 8
"""Answers after which a narrower share replaces a wider one."""
_MAX_SHARES = 1024
_MAX_EVIDENCE = 4
"""Bound of a session's own evidence, so that a changed client is recognised."""


class Agents:
    """Share of answers that were agents', by category, tenant and first block. Bounded."""

    def __init__(self, swift_s: float) -> None:
        self.swift_s = swift_s
        self.recognised = 0
        """Answers that were an agent's."""
        self._shares: OrderedDict[Hashable, tuple[int, float]] = OrderedDict()
        """Answers (up to ``_OWN``) and share, by key; latest last."""

    def is_one(self, session: Session, request: Request) -> bool:
        """Return whether ``session`` is an agent's, or likely is before its first judged answer."""
        if session.evidence:
            return session.evidence > 0
        share = 0.0
        for place, key in enumerate(_keys(request)):
            count, found = self._shares.get(key, (0, 0.0))
            if count >= _OWN or not place:
                share = found
        return share > 0.5 or request.category.endswith(AFTER_TOOL)

    def answered(self, session: Session, request: Request) -> None:
        """Judge an answered ``request`` of ``session``, if it called a tool; else its return will."""
        session.unjudged = _keys(request)
        if request.stop == TOOL:
            self._judge(session, True)
        session.is_agent = self.is_one(session, request)

    def returned(self, session: Session, request: Request, now: float) -> None:
        """Judge the last answer of ``session``, which ``request`` continues."""
        after_tool = request.category.endswith(AFTER_TOOL)
        if after_tool and not session.unjudged:  # silence has judged it
            session.unjudged = _keys(request)
        self._judge(session, after_tool or now - session.seen <= self.swift_s)

    def silent(self, session: Session, now: float) -> None:
        """Judge the last answer of the thinking ``session`` once it is silent for too long."""
        if now - session.seen > self.swift_s:
            self._judge(session, False)

    def _judge(self, session: Session, agent: bool) -> None:
        keys, session.unjudged = session.unjudged, ()
        if not keys:
            return
        step = 1 if agent else -1
        self.recognised += agent
        session.evidence = max(-_MAX_EVIDENCE, min(_MAX_EVIDENCE, session.evidence + step)) or step
        session.is_agent = session.evidence > 0
        for key in keys:
            count, share = self._shares.pop(key, (0, 0.0))
            share += max(_NEWEST, 1.0 / (count + 1)) * (agent - share)
            self._shares[key] = min(count + 1, _OWN), share
        while len(self._shares) > _MAX_SHARES:
            self._shares.popitem(last=False)


def _keys(request: Request) -> tuple[Hashable, ...]:
    """Return the keys of a request's shares, the widest first. A system prompt separates agents
    from users of the same tenant."""
    category = request.category.removesuffix(AFTER_TOOL)
    who = request.tenant, category
    return category, who, (*who, request.path[0] if request.path else None)
