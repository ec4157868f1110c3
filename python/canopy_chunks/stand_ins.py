"""Stand-ins from a tenant's own documents: which two they are, and whether they win.

A chunk is encoded behind documents that stand for its predecessors (``encode.py``). Two that came
together in prompts of the same tenant are more like its predecessors than texts about nothing, but
documents of another corpus do harm (docs/research/chunks.md). So the neutral ones stay in force
until a tenant's own have won on that tenant's prompts (``stand_in_trial.py`` measures them), and
are in force again as soon as a later trial is not won. Nothing of one tenant is seen by another.

Everything follows from the requests in their order and from what the trials measured, so that every
rank of a split model decides alike.
"""

from __future__ import annotations

import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from canopy_chunks.chunk import chunk_key
from canopy_chunks.documents import document_name
from canopy_chunks.quality import mean_se
from sglang_canopy.tenant import shown_tenant

logger = logging.getLogger(__name__)

Tokens = tuple[int, ...]

CANDIDATE_PROMPTS = 8
"""Prompts with two documents or more that are looked at before two documents are chosen."""
LOOKS = (12, 24)
"""Measured prompts at which a trial may end; at the last it does."""
SURE = 2.0
"""A trial is won, or lost early, where the mean difference is so many standard errors from zero."""
REFRESH_PROMPTS = 1000
"""Prompts after a decision before the next trial: of the same documents if they won, else of others."""
TRIAL_TOKENS = 4096
"""The longest prompt that is measured."""
DOCUMENT_TOKENS = 256
"""Of a longer document only so many first tokens stand in."""
MAX_TENANTS = 64
"""Tenants whose documents are remembered."""
MAX_PAIRS = 16
"""Pairs of documents that are remembered of a tenant."""
NEIGHBOURS = 8
"""Documents of a prompt that are looked at."""
MAX_GAP = 16
"""What stands between all documents of a prompt is a separator if it has no more tokens."""


@dataclass(frozen=True, slots=True)
class OwnDocuments:
    """Two documents of a tenant: their tokens as they stand before a chunk, and their names."""

    tokens: Tokens
    names: frozenset[str]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as it was sent: its tenant, its tokens, its documents' bounds; what the request
    recomputes and who chooses it. head: tokens before the first document; head_is_encoded: whether
    documents are encoded behind these."""

    tenant: str | None
    ids: Tokens
    bounds: tuple[tuple[int, int], ...]
    head: int
    ratio: float
    selector: str
    head_is_encoded: bool = True

    def documents(self) -> list[Tokens]:
        """The documents' tokens."""
        return [self.ids[a:b] for a, b in self.bounds]


@dataclass(slots=True)
class _Tenant:
    """What is known of one tenant.

    pairs: neighbouring documents and how often they came; prompts: since the last decision; own: the
    two documents on trial or in force; kl: of each measured prompt, behind the neutral ones and
    behind ``own``; measured: prompts of this trial, by digest; waiting: the prompt to measure next;
    refused: the documents that lost last; keys: chunks that were encoded behind ``own``.
    """

    pairs: OrderedDict[OwnDocuments, int] = field(default_factory=OrderedDict)
    prompts: int = 0
    own: OwnDocuments | None = None
    in_force: bool = False
    on_trial: bool = False
    kl: list[tuple[float, float]] = field(default_factory=list)
    measured: set[str] = field(default_factory=set)
    waiting: Prompt | None = None
    refused: OwnDocuments | None = None
    keys: set[str] = field(default_factory=set)


class StandIns:
    """The tenants' own stand-ins. gap: the tokens that end a document where a prompt does not show
    what does; withdrawn: called with a tenant and the addresses of all chunks that were encoded
    behind its documents, when these are no longer to stand in; on: False for none ever.
    """

    def __init__(
        self,
        gap: Sequence[int],
        withdrawn: Callable[[str | None, set[str]], None] = lambda tenant, keys: None,
        on: bool = True,
    ) -> None:
        self.gap, self.withdrawn, self.on = tuple(gap), withdrawn, on
        self.tenants: OrderedDict[str | None, _Tenant] = OrderedDict()
        self.won = self.lost = self.measured_prompts = 0

    def in_force(self, tenant: str | None) -> OwnDocuments | None:
        """What a tenant's chunks are to be encoded behind; None: the neutral stand-ins."""
        one = self.tenants.get(tenant)
        return one.own if one is not None and one.in_force else None

    def seen(self, prompt: Prompt) -> None:
        """A prompt was computed whose documents may be reused."""
        one = self._tenant(prompt.tenant) if self.on and len(prompt.bounds) > 1 else None
        if one is None:
            return
        one.prompts += 1
        if one.on_trial:
            self._sample(one, prompt)
        elif one.in_force:
            if one.prompts >= REFRESH_PROMPTS:
                self._begin(one)
        else:
            self._remember(one, prompt)
            if one.prompts >= (CANDIDATE_PROMPTS if one.refused is None else REFRESH_PROMPTS):
                one.own = _most_frequent(one)
                if one.own is not None:
                    self._begin(one)

    def waiting(self) -> bool:
        """Whether a prompt waits to be measured."""
        return any(one.waiting is not None for one in self.tenants.values())

    def take(self) -> tuple[Prompt, OwnDocuments] | None:
        """The next prompt to measure and what it is to be measured with, taken out."""
        for one in self.tenants.values():
            if one.waiting is not None and one.own is not None:
                prompt, one.waiting = one.waiting, None
                return prompt, one.own
        return None

    def measured(self, prompt: Prompt, own: OwnDocuments, neutral_kl: float, own_kl: float) -> None:
        """What reuse loses on a prompt (KL, nats a token) behind the neutral ones and behind ``own``."""
        one = self.tenants.get(prompt.tenant)
        if one is None or not one.on_trial or one.own != own:
            return  # withdrawn meanwhile
        self.measured_prompts += 1
        one.kl.append((neutral_kl, own_kl))
        if len(one.kl) not in LOOKS:
            return
        mean, se = _difference(one)
        if mean < -SURE * se:
            self._decide(prompt.tenant, one, True)
        elif mean > SURE * se or len(one.kl) == LOOKS[-1]:
            self._decide(prompt.tenant, one, False)

    def stored(self, key: str, tenant: str | None, exists: Callable[[str], Any]) -> bool:
        """A chunk encoded behind a tenant's own documents was stored under ``key``. False where these
        do not stand in any more, so that it must not stay."""
        one = self.tenants.get(tenant)
        if one is None or not one.in_force:
            return False
        one.keys.add(key)
        if len(one.keys) & (len(one.keys) - 1) == 0:  # now and then, those that were evicted
            one.keys = {known for known in one.keys if exists(known)}
        return True

    def deleted(self, name: str, tenant: str | None) -> None:
        """A tenant deleted a document: it does not stand in, nor is any prompt with it measured."""
        one = self.tenants.get(tenant)
        if one is None:
            return
        for pair in [pair for pair in one.pairs if name in pair.names]:
            del one.pairs[pair]
        if one.refused is not None and name in one.refused.names:
            one.refused = OwnDocuments((), frozenset())
        waiting = one.waiting
        if waiting is not None and name in (document_name(d, tenant) for d in waiting.documents()):
            one.waiting = None
        if one.own is not None and name in one.own.names:
            self._end(tenant, one)

    def stats(self) -> dict[str, Any]:
        """Totals, and of each tenant (by the name that it is shown under) where its trial stands: the
        mean KL behind both, nats a token, and their difference with its standard error."""
        return {
            "measured_prompts": self.measured_prompts,
            "won": self.won,
            "lost": self.lost,
            "in_force": sum(one.in_force for one in self.tenants.values()),
            "chunks": sum(len(one.keys) for one in self.tenants.values()),
            "tenants": [
                {"tenant": shown_tenant(tenant), **_state(one)}
                for tenant, one in self.tenants.items()
            ],
        }

    def _tenant(self, tenant: str | None) -> _Tenant | None:
        """A tenant's own, made where there is room: for who has been away longest without own
        stand-ins in force. None where all tenants have these."""
        if tenant in self.tenants:
            self.tenants.move_to_end(tenant)
            return self.tenants[tenant]
        if len(self.tenants) >= MAX_TENANTS:
            without = [t for t, one in self.tenants.items() if not one.in_force]
            if not without:
                return None
            self._end(without[0], self.tenants.pop(without[0]))
        return self.tenants.setdefault(tenant, _Tenant())

    def _remember(self, one: _Tenant, prompt: Prompt) -> None:
        for pair in neighbours(prompt, self.gap):
            if pair != one.refused:
                one.pairs[pair] = one.pairs.pop(pair, 0) + 1
        while len(one.pairs) > MAX_PAIRS:  # of those that came least often, the oldest
            del one.pairs[min(one.pairs, key=one.pairs.__getitem__)]

    def _begin(self, one: _Tenant) -> None:
        one.on_trial, one.kl, one.measured = True, [], set()
        one.pairs.clear()

    def _sample(self, one: _Tenant, prompt: Prompt) -> None:
        """Have a prompt measured, unless another waits or it was measured in this trial."""
        if one.waiting is not None or len(prompt.ids) > TRIAL_TOKENS or not 0 <= prompt.ratio < 1:
            return
        digest = chunk_key(prompt.ids, "")
        if digest not in one.measured and len(one.measured) < LOOKS[-1]:
            one.measured.add(digest)
            one.waiting = prompt

    def _decide(self, tenant: str | None, one: _Tenant, won: bool) -> None:
        mean, se = _difference(one)
        logger.info(
            "canopy: stand-ins of tenant %s: its own documents %s: KL %+.4g (%.2g) on %d prompts",
            shown_tenant(tenant), "win" if won else "do not win", mean, se, len(one.kl),
        )  # fmt: skip
        self.won, self.lost = self.won + won, self.lost + (not won)
        if won:
            one.in_force, one.on_trial, one.prompts = True, False, 0
            return
        refused, kl = one.own, one.kl
        self._end(tenant, one)
        one.refused, one.kl = refused, kl

    def _end(self, tenant: str | None, one: _Tenant) -> None:
        """The neutral ones are in force again, and nothing encoded behind others stays."""
        keys, one.keys = one.keys, set()
        one.own = one.waiting = None
        one.in_force = one.on_trial = False
        one.prompts, one.kl, one.measured = 0, [], set()
        self.withdrawn(tenant, keys)


def neighbours(prompt: Prompt, gap: Sequence[int]) -> list[OwnDocuments]:
    """The neighbouring documents of a prompt as stand-ins: behind each what is between all of the
    prompt's documents, or ``gap`` where that is not one separator."""
    first, documents = prompt.bounds[:NEIGHBOURS], prompt.documents()[:NEIGHBOURS]
    between = {prompt.ids[a[1] : b[0]] for a, b in itertools.pairwise(first)}
    ends = tuple(gap)
    if len(between) == 1 and len(first) > 2 and len(next(iter(between))) <= MAX_GAP:
        ends = next(iter(between))
    names = [document_name(document, prompt.tenant) for document in documents]

    def standing(document: Tokens) -> Tokens:
        if len(document) <= DOCUMENT_TOKENS:
            return document + ends
        return document[:DOCUMENT_TOKENS] + (ends or tuple(gap))

    return [
        OwnDocuments(standing(a) + standing(b), frozenset(two))
        for a, b, two in zip(documents, documents[1:], itertools.pairwise(names))
        if two[0] != two[1]
    ]


def _most_frequent(one: _Tenant) -> OwnDocuments | None:
    """The pair that came most often, of several the latest."""
    return max(reversed(one.pairs), key=one.pairs.__getitem__, default=None)


def _difference(one: _Tenant) -> tuple[float, float]:
    """Mean KL behind own documents minus behind neutral ones, paired, and its standard error."""
    return mean_se([own - neutral for neutral, own in one.kl])


def _state(one: _Tenant) -> dict[str, Any]:
    named = "own" if one.in_force else "neutral"
    found: dict[str, Any] = {
        "stand_in": named,
        "on_trial": one.on_trial,
        "prompts": one.prompts,
        "measured": len(one.kl),
    }
    if one.kl:
        mean, se = _difference(one)
        found |= {
            "kl_neutral": round(mean_se([n for n, _ in one.kl])[0], 6),
            "kl_own": round(mean_se([o for _, o in one.kl])[0], 6),
            "difference": round(mean, 6),
            "difference_se": round(se, 6),
        }
    return found
