"""Concentration of reuse over blocks, users and conversations (Section 3.2, Figures 6 to 8)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from canopy_lab.characterize.observe import Observation

OWNER_SHARES = np.concatenate([[0.0], np.geomspace(1e-4, 1.0, 81)])
"""Shares of the owners at which the curves are given, busiest first."""


@dataclass(frozen=True, slots=True)
class Concentration:
    """Concentration of a quantity over its owners."""

    owners: int
    top: tuple[float, ...]
    """Shares of the owners, busiest first, from 0 to 1 (``OWNER_SHARES``)."""
    share: tuple[float, ...]
    """Joint share of these owners, 0 to 1."""
    top_tenth: float
    """Share of the busiest tenth."""
    owners_of_90: float
    """Share of the owners that hold 90 %."""


@dataclass(frozen=True, slots=True)
class Skew:
    """Concentrations; ``None`` if the trace lacks the ids."""

    block_reuses: Concentration
    user_requests: Concentration | None
    user_hits: Concentration | None
    conversation_hits: Concentration | None
    cross_user_hits: float | None
    """Share of the hits on blocks that another user used last."""
    cross_conversation_hits: float | None


def measure_skew(observation: Observation) -> Skew:
    hits = int(observation.hits.sum())
    by_user = _per_owner(observation.user, observation.hits) if observation.has_users else None
    by_conversation = None
    if observation.has_conversations:
        by_conversation = _per_owner(observation.conversation, observation.hits)
    has_hits_by_user = hits > 0 and observation.has_users
    has_hits_by_conversation = hits > 0 and observation.has_conversations
    same_user, same_conversation = observation.same_user_hits, observation.same_conversation_hits
    return Skew(
        block_reuses=concentration(observation.uses - 1),
        user_requests=concentration(_per_owner(observation.user, np.ones_like(observation.hits)))
        if observation.has_users
        else None,
        user_hits=None if by_user is None else concentration(by_user),
        conversation_hits=None if by_conversation is None else concentration(by_conversation),
        cross_user_hits=1.0 - same_user / hits if has_hits_by_user else None,
        cross_conversation_hits=1.0 - same_conversation / hits
        if has_hits_by_conversation
        else None,
    )


def concentration(amounts: np.ndarray) -> Concentration:
    """Return the Lorenz curve of ``amounts`` (one entry per owner), from the top."""
    descending = np.sort(np.asarray(amounts, float))[::-1]
    cumulated = np.concatenate([[0.0], np.cumsum(descending)])
    total = cumulated[-1] or 1.0
    owner_share = np.arange(len(cumulated)) / max(len(descending), 1)
    share = np.interp(OWNER_SHARES, owner_share, cumulated / total)
    owners_needed = int(np.searchsorted(cumulated, 0.9 * total))
    return Concentration(
        owners=len(descending),
        top=tuple(OWNER_SHARES.tolist()),
        share=tuple(share.tolist()),
        top_tenth=float(np.interp(0.1, owner_share, cumulated / total)),
        owners_of_90=min(owners_needed, len(descending)) / max(len(descending), 1),
    )


def _per_owner(owner: np.ndarray, amount: np.ndarray) -> np.ndarray:
    is_named = owner >= 0
    return np.bincount(owner[is_named], amount[is_named])
