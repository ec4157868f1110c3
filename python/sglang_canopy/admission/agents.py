"""Classifies sessions as agents: their next turn follows within seconds.

A tool answers within seconds, and the next turn needs the KV of this turn. Users pause longer than
a device keeps KV, so a reserved place would be useless. An answer was an agent's if

- it ended in a tool call, where SGLang's parser or the client states so; else
- the next prompt ends in a tool's result, or arrives within ``SWIFT_S``.

So neither parser nor labels are needed. An answer that nothing follows for ``SWIFT_S`` was none.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from sglang_canopy.admission.session import Session
from sglang_canopy.records import Request

TOOL_STOP = "tool"
SWIFT_S = 20.0
"""A client that returns within these seconds of an answer is likely an agent: 65 % of agents' and
2 % of conversations' pauses in traces are shorter."""
AFTER_TOOL = "-after-tool"
"""End of the inferred category of a prompt that ends in a tool's result (``request/infer.py``)."""
_MIN_NEWEST_WEIGHT = 0.05
"""Smallest weight of the newest session in a share."""
_ENOUGH_SESSIONS = 8
"""Sessions after which a narrower share replaces a wider one."""
_MAX_SHARES = 1024
_CERTAIN_EVIDENCE, _MAX_EVIDENCE = 2, 4
"""Evidence of a tool call, and the bound of a session's own, so that a changed client is recognised.
One swift return is half of it: some people reply within seconds."""


class Agents:
    """Share of sessions that began as agents', by category, tenant and first block. Bounded."""

    def __init__(self) -> None:
        self.recognised = 0
        """Answers that were an agent's."""
        self._shares: OrderedDict[Hashable, tuple[int, float]] = OrderedDict()
        """Sessions (up to ``_ENOUGH_SESSIONS``) and share, by key; latest last."""

    def recognise(self, session: Session, request: Request) -> bool:
        """Return whether ``session`` is an agent's, or likely is before it is certain."""
        return self._is_probably_agent(session, _share_keys(request)) or request.category.endswith(
            AFTER_TOOL
        )

    def _is_probably_agent(self, session: Session, keys: tuple[Hashable, ...]) -> bool:
        if not 0 <= session.evidence < _CERTAIN_EVIDENCE:
            return session.evidence > 0
        share = 0.0
        for nth, key in enumerate(keys):
            count, key_share = self._shares.get(key, (0, 0.0))
            if count >= _ENOUGH_SESSIONS or not nth:
                share = key_share
        return share > 0.5

    def judge_answer(self, session: Session, request: Request) -> None:
        """Judge an answered ``request`` of ``session``, if it called a tool; else its return will."""
        session.unjudged_keys, session.is_silent = _share_keys(request), False
        if request.stop == TOOL_STOP:
            self._judge(session, _CERTAIN_EVIDENCE)
        session.is_agent = self.recognise(session, request)

    def judge_return(self, session: Session, request: Request, now: float) -> bool:
        """Judge the last answer of ``session``, which ``request`` continues. Return whether it is an
        agent's."""
        is_after_tool = request.category.endswith(AFTER_TOOL)
        if is_after_tool and session.is_silent:  # the tool was slow
            session.unjudged_keys = _share_keys(request)
        step = 1 if now - session.last_contact_s <= SWIFT_S else -1
        self._judge(session, _CERTAIN_EVIDENCE if is_after_tool else step)
        return session.is_agent

    def judge_silence(self, session: Session, now: float) -> None:
        """Judge the last answer of the thinking ``session`` once it is silent for too long."""
        if session.unjudged_keys and now - session.last_contact_s > SWIFT_S:
            session.is_silent = True
            self._judge(session, -1)

    def _judge(self, session: Session, step: int) -> None:
        keys, session.unjudged_keys = session.unjudged_keys, ()
        if not keys:
            return
        is_agent, is_certain = step > 0, step == _CERTAIN_EVIDENCE
        is_first = not session.evidence
        self.recognised += is_agent
        evidence = max(0, session.evidence) if is_certain else session.evidence
        session.evidence = max(-_MAX_EVIDENCE, min(_MAX_EVIDENCE, evidence + step)) or step
        session.is_agent = self._is_probably_agent(session, keys)
        for key in keys if is_first or is_certain else ():
            count, share = self._shares.pop(key, (0, 0.0))
            share += max(_MIN_NEWEST_WEIGHT, 1.0 / (count + 1)) * (is_agent - share)
            self._shares[key] = min(count + 1, _ENOUGH_SESSIONS), share
        while len(self._shares) > _MAX_SHARES:
            self._shares.popitem(last=False)


def _share_keys(request: Request) -> tuple[Hashable, ...]:
    """Return the keys of a request's shares, the widest first. A system prompt separates agents
    from users of the same tenant."""
    category = request.category.removesuffix(AFTER_TOOL)
    tenant_category = request.tenant, category
    return category, tenant_category, (*tenant_category, request.path[0] if request.path else None)
