"""Classifies sessions as agents: their next turn follows within seconds.

A tool answers within seconds, and the next turn needs the KV of this turn. Users pause longer than
a device keeps KV, so a reserved place would be useless. An answer was an agent's if

- it ended in a tool call, according to SGLang's parser or the client; else
- the next prompt ends in a tool's result, or arrives within ``SWIFT_S``.

So neither a parser nor labels are needed. An answer was not an agent's if no request follows it within
``SWIFT_S``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from sglang_canopy.admission.session import Session
from sglang_canopy.records import Request

TOOL_STOP = "tool"
SWIFT_S = 20.0
"""A client that returns within these seconds of an answer is likely an agent: in traces 65 % of agents'
pauses and 2 % of other pauses are shorter."""
AFTER_TOOL_SUFFIX = "-after-tool"
"""End of the inferred category of a prompt that ends in a tool's result (``request/infer.py``)."""
_MIN_SESSION_WEIGHT = 0.05
"""Smallest weight of the newest session in a share."""
_ENOUGH_SESSIONS = 8
"""Sessions from which on a narrower share replaces a wider one."""
_MAX_SHARES = 1024
_CERTAIN_EVIDENCE, _MAX_EVIDENCE = 2, 4
"""Evidence of a tool call, and the bound of a session's evidence, so that a changed client is recognised.
A swift return counts half of a tool call, because some people reply within seconds."""


class Agents:
    """Share of sessions that began as agents', by category, tenant and first block. Bounded."""

    def __init__(self) -> None:
        self.agent_answers = 0
        """Answers that were an agent's."""
        self._shares: OrderedDict[Hashable, tuple[int, float]] = OrderedDict()
        """Sessions (up to ``_ENOUGH_SESSIONS``) and agents' share of them, by key; latest last."""

    def recognise(self, session: Session, request: Request) -> bool:
        """Return whether ``session`` is an agent's, or likely is before it is certain."""
        is_after_tool = request.category.endswith(AFTER_TOOL_SUFFIX)
        return is_after_tool or self._is_probably_agent(session, _share_keys(request))

    def _is_probably_agent(self, session: Session, keys: tuple[Hashable, ...]) -> bool:
        if not 0 <= session.agent_evidence < _CERTAIN_EVIDENCE:
            return session.agent_evidence > 0
        share = 0.0
        for i, key in enumerate(keys):
            sessions, key_share = self._shares.get(key, (0, 0.0))
            if sessions >= _ENOUGH_SESSIONS or not i:
                share = key_share
        return share > 0.5

    def judge_answer(self, session: Session, request: Request) -> None:
        """Judge the answer to ``request`` if it called a tool; otherwise ``judge_return`` does later."""
        session.unjudged_keys, session.is_silent = _share_keys(request), False
        if request.stop == TOOL_STOP:
            self._judge(session, _CERTAIN_EVIDENCE)
        session.is_agent = self.recognise(session, request)

    def judge_return(self, session: Session, request: Request, now: float) -> bool:
        """Judge the last answer of ``session``, which ``request`` continues. Return whether it is an
        agent's."""
        is_after_tool = request.category.endswith(AFTER_TOOL_SUFFIX)
        if is_after_tool and session.is_silent:  # the tool was slow
            session.unjudged_keys = _share_keys(request)
        swift_evidence = 1 if now - session.last_contact_s <= SWIFT_S else -1
        self._judge(session, _CERTAIN_EVIDENCE if is_after_tool else swift_evidence)
        return session.is_agent

    def judge_silence(self, session: Session, now: float) -> None:
        """Judge the last answer of the thinking ``session`` once it is silent for too long."""
        if session.unjudged_keys and now - session.last_contact_s > SWIFT_S:
            session.is_silent = True
            self._judge(session, -1)

    def _judge(self, session: Session, new_evidence: int) -> None:
        keys, session.unjudged_keys = session.unjudged_keys, ()
        if not keys:
            return
        is_agent, is_certain = new_evidence > 0, new_evidence == _CERTAIN_EVIDENCE
        is_first = not session.agent_evidence
        self.agent_answers += is_agent
        earlier_evidence = max(0, session.agent_evidence) if is_certain else session.agent_evidence
        evidence = max(-_MAX_EVIDENCE, min(_MAX_EVIDENCE, earlier_evidence + new_evidence))
        session.agent_evidence = evidence or new_evidence
        session.is_agent = self._is_probably_agent(session, keys)
        for key in keys if is_first or is_certain else ():
            sessions, share = self._shares.pop(key, (0, 0.0))
            share += max(_MIN_SESSION_WEIGHT, 1.0 / (sessions + 1)) * (is_agent - share)
            self._shares[key] = min(sessions + 1, _ENOUGH_SESSIONS), share
        while len(self._shares) > _MAX_SHARES:
            self._shares.popitem(last=False)


def _share_keys(request: Request) -> tuple[Hashable, ...]:
    """Return the keys of a request's shares, the widest first. A system prompt separates agents
    from users of the same tenant."""
    category = request.category.removesuffix(AFTER_TOOL_SUFFIX)
    tenant_category = request.tenant, category
    return category, tenant_category, (*tenant_category, request.path[0] if request.path else None)
