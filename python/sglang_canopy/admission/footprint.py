"""Memory that active sessions need, in tokens of KV.

A session needs its current tokens, which its next turn reads, and the tokens that further turns
add. It is charged in full while it has a request. While it thinks, the charge is multiplied by the
probability that it returns within a horizon, given its silence, from the survival curve of its
category (``reuse/survival.py``). The charge is 0 if that probability is below 0.3, or if the session is
a person's. A prefix that several sessions share is charged once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from sglang_canopy.admission.session import Session
from sglang_canopy.reuse.learner import ReuseModel, mean_growth_tokens
from sglang_canopy.reuse.survival import AGE_BINS, age_bin, survival

_NEWEST_OUTPUT_WEIGHT = 0.05
"""Weight of the newest output in the mean."""
_MIN_CHARGED_PROBABILITY = 0.3
"""A session less likely to return within the horizon is not charged: evicting it costs less than
holding another session back."""
_ENOUGH_SILENT_TIPS = 8
"""If this many tips were silent for the horizon and none has returned, none is expected to return."""


class _BlockUse(NamedTuple):
    users: int
    """Active sessions that use the block."""
    number_sum: int
    """Sum of their numbers; for one session its number."""


_NO_USE = _BlockUse(0, 0)


class Footprints:
    """Charges of the active sessions, and their sum. Deterministic: the caller passes times."""

    def __init__(self, model: ReuseModel, horizon_s: float, turns_ahead: int) -> None:
        self.model = model
        self.turns_ahead = turns_ahead
        self.horizon_s = horizon_s
        self.charged_tokens = 0.0
        """Sum of the sessions' own charges."""
        self.growth_tokens = 0.0
        """The part of ``charged_tokens`` for future tokens."""
        self.shared_blocks = 0
        """Blocks that at least two active sessions share."""
        self.block_tokens = 1
        self.mean_output_tokens = 0.0
        self.tenant_charges: defaultdict[Hashable, float] = defaultdict(float)
        """Charges of single sessions by tenant with an active session."""
        self._sessions: dict[int, Session] = {}
        self._uses: dict[int, _BlockUse] = {}

    @property
    def total_tokens(self) -> float:
        """Tokens that all active sessions need."""
        return self.charged_tokens + self.shared_blocks * self.block_tokens

    @property
    def held_tokens(self) -> float:
        """Tokens that active sessions need now, without their future tokens."""
        return self.total_tokens - self.growth_tokens

    def needed_tokens(self, session: Session) -> float:
        """Return the tokens that an inactive session would add."""
        used_blocks = bisect_left(session.path, True, key=lambda block: block not in self._uses)
        return max(0, session.tokens - used_blocks * self.block_tokens) + self._growth_of(session)

    def enter(self, session: Session, now: float) -> None:
        """Charge ``session``, which becomes active."""
        self._sessions[session.number] = session
        self.update_path(session, now)

    def leave(self, session: Session, now: float) -> None:
        """Remove the charges of ``session``."""
        self._charge(session, 0.0, 0.0)
        blocks, session.blocks = session.blocks, ()
        del self._sessions[session.number]
        self._update_charges(self._add_use(blocks, session.number, -1), now)

    def update_path(self, session: Session, now: float) -> None:
        """Update the charges after a change of the session's path or tokens."""
        old_blocks, new_blocks = session.blocks, session.path
        common = common_blocks(old_blocks, new_blocks)
        session.blocks = new_blocks
        changed = self._add_use(new_blocks[common:], session.number, 1)
        changed |= self._add_use(old_blocks[common:], session.number, -1)
        self._update_charges(changed - {session.number}, now)
        self.update(session, now)

    def update(self, session: Session, now: float) -> None:
        """Update the charge of ``session`` at ``now``."""
        uses = self._uses
        shared_blocks = bisect_left(session.blocks, True, key=lambda block: uses[block].users < 2)
        unshared_tokens = max(0, session.tokens - shared_blocks * self.block_tokens)
        probability = self.return_probability(session, now)
        is_idle_person = session.agent_evidence < 0 and not session.has_request
        if probability < _MIN_CHARGED_PROBABILITY or is_idle_person:
            self._charge(session, 0.0, 0.0)
        else:
            growth_tokens = self._growth_of(session) * probability
            self._charge(session, unshared_tokens * probability, growth_tokens)

    def learn_output_length(self, output_tokens: int) -> None:
        """Learn the output length of an answer, in tokens."""
        self.mean_output_tokens += _NEWEST_OUTPUT_WEIGHT * (output_tokens - self.mean_output_tokens)

    def return_probability(self, session: Session, now: float) -> float:
        """Return P(the session's next request arrives within the horizon); 1 during a request."""
        if session.has_request:
            return 1.0
        silent_s = max(0.0, now - session.last_contact_s)
        category = session.category.current
        curve = category.curve
        silent_tips = sum(category.all_waiting[age_bin(self.horizon_s) + 1 :])
        has_no_return = not curve[0] or curve[-1] == 1.0
        if silent_tips < _ENOUGH_SILENT_TIPS and has_no_return:
            return 1.0 if silent_s < self.horizon_s else 0.0
        silent = survival(curve, silent_s)  # probability
        return 1.0 - survival(curve, silent_s + self.horizon_s) / silent if silent > 0.0 else 0.0

    def _growth_of(self, session: Session) -> float:
        """Return the expected tokens that the session adds in its next turns, each turn weighted by
        its probability."""
        if not self.model.version:
            return self.mean_output_tokens
        category = session.category.current
        continuation = 1.0 - category.curve[AGE_BINS - 1]
        turns = sum(continuation**turn for turn in range(1, self.turns_ahead + 1))
        growth_tokens = mean_growth_tokens(category)
        return self.mean_output_tokens + turns * (growth_tokens + self.mean_output_tokens)

    def _charge(self, session: Session, own_tokens: float, growth_tokens: float) -> None:
        change = own_tokens + growth_tokens - session.charged_tokens
        self.growth_tokens += growth_tokens - session.growth_tokens
        self.charged_tokens += change
        self.tenant_charges[session.charged_to] += change
        session.charged_tokens = own_tokens + growth_tokens
        session.growth_tokens = growth_tokens

    def _update_charges(self, numbers: set[int], now: float) -> None:
        # Sums of floats depend on the order, which must be equal on all ranks.
        for number in sorted(numbers):
            self.update(self._sessions[number], now)

    def _add_use(self, blocks: Sequence[int], number: int, change: int) -> set[int]:
        """Add (``change`` 1) or remove (-1) a session's use of ``blocks``. Return the sessions that
        were the only user of one, or are it now."""
        uses, changed = self._uses, set()
        for block in blocks:
            before = uses.get(block, _NO_USE)
            after = _BlockUse(before.users + change, before.number_sum + change * number)
            if after.users:
                uses[block] = after
            else:
                del uses[block]
            if before.users + after.users == 3:  # from one to two, or back
                self.shared_blocks += change
                changed.add(before.number_sum if before.users == 1 else after.number_sum)
        return changed


def common_blocks(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common prefix of two paths of chained hashes, in blocks."""
    length = min(len(first), len(second))
    if first[:length] == second[:length]:  # most turns append
        return length
    return bisect_left(range(length), True, key=lambda i: first[i] != second[i])
