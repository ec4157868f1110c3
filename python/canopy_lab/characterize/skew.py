"""Concentration of reuse over blocks, users and conversations (Section 3.2, Figures 6 to 8)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from canopy_lab.characterize.observe import Observation

POINTS = np.concatenate([[0.0], np.geomspace(1e-4, 1.0, 81)])
"""Shares of the owners at which the curves are given, busiest first."""


@dataclass(frozen=True, slots=True)
class Concentration:
    """Concentration of a quantity over its owners."""

    owners: int
    top: tuple[float, ...]
    """Shares of the owners, busiest first, from 0 to 1 (``POINTS``)."""
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


def skew(observation: Observation) -> Skew:
    hits = int(observation.hits.sum())
    user = _per_owner(observation.user, observation.hits) if observation.has_users else None
    conversation = None
    if observation.has_conversations:
        conversation = _per_owner(observation.conversation, observation.hits)
    has_hits_by_user = hits > 0 and observation.has_users
    has_hits_by_conversation = hits > 0 and observation.has_conversations
    same_user, same_conversation = observation.same_user_hits, observation.same_conversation_hits
    return Skew(
        block_reuses=concentration(observation.uses - 1),
        user_requests=concentration(_per_owner(observation.user, np.ones_like(observation.hits)))
        if observation.has_users
        else None,
        user_hits=None if user is None else concentration(user),
        conversation_hits=None if conversation is None else concentration(conversation),
        cross_user_hits=1.0 - same_user / hits if has_hits_by_user else None,
        cross_conversation_hits=1.0 - same_conversation / hits
        if has_hits_by_conversation
        else None,
    )


def concentration(amounts: np.ndarray) -> Concentration:
    """Return the Lorenz curve of ``amounts`` (one entry per owner), from the top."""
    falling = np.sort(np.asarray(amounts, float))[::-1]
    cumulated = np.concatenate([[0.0], np.cumsum(falling)])
    total = cumulated[-1] or 1.0
    x = np.arange(len(cumulated)) / max(len(falling), 1)
    share = np.interp(POINTS, x, cumulated / total)
    reach = int(np.searchsorted(cumulated, 0.9 * total))
    return Concentration(
        owners=len(falling),
        top=tuple(POINTS.tolist()),
        share=tuple(share.tolist()),
        top_tenth=float(np.interp(0.1, x, cumulated / total)),
        owners_of_90=min(reach, len(falling)) / max(len(falling), 1),
    )


def _per_owner(owner: np.ndarray, amount: np.ndarray) -> np.ndarray:
    named = owner >= 0
    return np.bincount(owner[named], amount[named])
