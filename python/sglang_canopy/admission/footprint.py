"""Memory that active sessions need, in tokens of KV.

A session needs its current tokens, which its next turn reads, and the tokens that further turns
add. It is charged in full while it has a request. While it thinks, the charge is multiplied by the
probability that it returns within a horizon, given its silence, from the survival curve of its
category (``reuse/survival.py``); below 0.3, or for a person, it is 0: no place is kept for them. A
prefix that several sessions share is charged once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable, Sequence

from sglang_canopy.admission.session import Session
from sglang_canopy.reuse.learner import ReuseModel, mean_growth
from sglang_canopy.reuse.survival import BINS, age_bin, survival

_NEWEST = 0.05
"""Weight of the newest output in the mean."""
_LIKELY = 0.3
"""A session less likely to return within the horizon is not charged: evicting it costs less than
holding another session back."""
_ENOUGH = 8
"""Tips that are silent for the horizon while none has returned, after which none is expected to."""


class Footprints:
    """Charges of the active sessions, and their sum. Deterministic: the caller passes times."""

    def __init__(self, model: ReuseModel, horizon_s: float, turns_ahead: int) -> None:
        self.model = model
        self.turns_ahead = turns_ahead
        self.horizon_s = horizon_s
        self.charged = 0.0
        """Sum of the sessions' own charges."""
        self.growth = 0.0
        """The part of ``charged`` for future tokens."""
        self.shared_blocks = 0
        """Blocks that at least two active sessions share."""
        self.block_tokens = 1
        self.mean_output = 0.0
        self.charge_by_tenant: defaultdict[Hashable, float] = defaultdict(float)
        """Charges of single sessions by tenant with an active session."""
        self._sessions: dict[int, Session] = {}
        self._uses: dict[int, tuple[int, int]] = {}
        """Per block: the number of active sessions that use it, and the sum of their numbers. For
        one session the sum is its number."""

    @property
    def tokens(self) -> float:
        """Tokens that all active sessions need."""
        return self.charged + self.shared_blocks * self.block_tokens

    @property
    def held_tokens(self) -> float:
        """Tokens that active sessions need now, without their future tokens."""
        return self.tokens - self.growth

    def need(self, session: Session) -> float:
        """Return the tokens that an inactive session would add."""
        uses = self._uses
        in_use = bisect_left(session.path, True, key=lambda block: block not in uses)
        return max(0, session.tokens - in_use * self.block_tokens) + self._growth(session)

    def enter(self, session: Session, now: float) -> None:
        """Charge ``session``, which becomes active."""
        self._sessions[session.number] = session
        self.update_path(session, now)

    def leave(self, session: Session, now: float) -> None:
        """Remove the charges of ``session``."""
        self._charge(session, 0.0, 0.0)
        blocks, session.blocks = session.blocks, ()
        del self._sessions[session.number]
        self._update_all(self._count(blocks, session.number, -1), now)

    def update_path(self, session: Session, now: float) -> None:
        """Update the charges after a change of the session's path or tokens."""
        old, new = session.blocks, session.path
        shared = common_blocks(old, new)
        session.blocks = new
        touched = self._count(new[shared:], session.number, 1)
        touched |= self._count(old[shared:], session.number, -1)
        self._update_all(touched - {session.number}, now)
        self.update(session, now)

    def update(self, session: Session, now: float) -> None:
        """Update the charge of ``session`` as of ``now``."""
        uses = self._uses
        shared = bisect_left(session.blocks, True, key=lambda block: uses[block][0] < 2)
        unshared = max(0, session.tokens - shared * self.block_tokens)
        returns = self.return_probability(session, now)
        if returns < _LIKELY or (session.evidence < 0 and not session.under_way):
            self._charge(session, 0.0, 0.0)
        else:
            self._charge(session, unshared * returns, self._growth(session) * returns)

    def learn_output_length(self, output_tokens: int) -> None:
        """Learn the output length of an answer, in tokens."""
        self.mean_output += _NEWEST * (output_tokens - self.mean_output)

    def return_probability(self, session: Session, now: float) -> float:
        """Return P(the session's next request arrives within the horizon); 1 during a request."""
        if session.under_way:
            return 1.0
        silent = max(0.0, now - session.last_contact_s)
        category = session.category.current
        curve = category.curve
        unseen = sum(category.all_waiting[age_bin(self.horizon_s) + 1 :]) < _ENOUGH
        if unseen and (not curve[0] or curve[-1] == 1.0):  # no tip has returned, or had time to
            return 1.0 if silent < self.horizon_s else 0.0
        alive = survival(curve, silent)
        return 1.0 - survival(curve, silent + self.horizon_s) / alive if alive > 0.0 else 0.0

    def _growth(self, session: Session) -> float:
        """Return the expected tokens that the session adds in its next turns, each turn weighted by
        its probability."""
        if not self.model.version:
            return self.mean_output
        category = session.category.current
        continues = 1.0 - category.curve[BINS - 1]
        turns = sum(continues**turn for turn in range(1, self.turns_ahead + 1))
        return self.mean_output + turns * (mean_growth(category) + self.mean_output)

    def _charge(self, session: Session, has: float, growth: float) -> None:
        change = has + growth - session.charge
        self.growth += growth - session.growth
        self.charged += change
        self.charge_by_tenant[session.charged_to] += change
        session.charge, session.growth = has + growth, growth

    def _update_all(self, numbers: set[int], now: float) -> None:
        # Sums of floats depend on the order, which must be equal on all ranks.
        for number in sorted(numbers):
            self.update(self._sessions[number], now)

    def _count(self, blocks: Sequence[int], number: int, change: int) -> set[int]:
        """Add (``change`` 1) or remove (-1) a session's use of ``blocks``. Return the sessions that
        were the only user of one, or are it now."""
        uses, touched = self._uses, set()
        for block in blocks:
            before, numbers = uses.get(block, (0, 0))
            users, others = before + change, numbers + change * number
            if users:
                uses[block] = users, others
            else:
                del uses[block]
            if users + before == 3:  # one user, and two
                self.shared_blocks += change
                touched.add(numbers if before == 1 else others)
        return touched


def common_blocks(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common prefix of two paths of chained hashes, in blocks."""
    length = min(len(first), len(second))
    if first[:length] == second[:length]:  # most turns append
        return length
    return bisect_left(range(length), True, key=lambda i: first[i] != second[i])
