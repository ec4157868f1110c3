"""Two policies on one cache, each for its share of the tenants: a trial before all are switched.

Tenants' KV is never shared, so a leaf is one policy's or the other's. Each side gives up what it
brings in: of the two, that one has to name the next victim which has evicted less for every token
that its requests computed. So neither side takes memory from the other, and their hit ratios can be
compared with what they were before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

from sglang_canopy.policy.base import Policy, Victim
from sglang_canopy.policy.ranked import NoOptions
from sglang_canopy.records import Leaf, Request

_MAX_TENANTS = 4096


@dataclass(slots=True)
class Side:
    """What the tenants of one side asked for, in tokens."""

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    computed: int = 0

    def served(self, request: Request) -> None:
        hit = request.cached_tokens or 0
        self.requests += 1
        self.prompt_tokens += request.prompt_tokens
        self.hit_tokens += hit
        self.computed += max(0, request.prompt_tokens - hit) + request.output_tokens


class Canary(Policy):
    """``trial`` ranks the leaves of a ``share`` of the tenants, ``base`` those of all others.

    Both learn from all requests. Which side a tenant is on depends on its name alone.
    """

    name: ClassVar[str] = "canary"
    Config: ClassVar[type] = NoOptions

    def __init__(
        self, base: Policy, trial: Policy, share: float, sides: tuple[Side, Side] | None = None
    ) -> None:
        super().__init__(NoOptions())
        self.base = base
        self.trial = trial
        self.share = share
        self._counts = sides is None
        self.sides = sides or (Side(), Side())
        self._evicted = [0, 0]
        self._of: dict[str | None, bool] = {}

    def is_trial(self, tenant: str | None) -> bool:
        """Whether ``trial`` ranks a tenant's leaves."""
        found = self._of.get(tenant)
        if found is None:
            digest = hashlib.blake2b((tenant or "").encode(), digest_size=4).digest()
            found = int.from_bytes(digest, "little") < self.share * 2**32
            if len(self._of) < _MAX_TENANTS:
                self._of[tenant] = found
        return found

    def arrive(self, request: Request) -> str:
        labels = [policy.arrive(request) for policy in (self.base, self.trial)]
        return labels[self.is_trial(request.tenant)]

    def finish(self, request: Request) -> str:
        mine = self.is_trial(request.tenant)
        labels = [policy.finish(request) for policy in (self.base, self.trial)]
        if self._counts:
            self.sides[mine].served(request)
        return labels[mine]

    def heard(
        self,
        conversation: tuple[str | None, Hashable],
        source: str,
        now: float,
        over: bool,
        return_in_s: float | None,
    ) -> None:
        for policy in (self.base, self.trial):
            policy.heard(conversation, source, now, over, return_in_s)

    def sized(self, tokens: int) -> None:
        self.base.sized(tokens)
        self.trial.sized(tokens)

    def admit(self, leaf: Leaf, now: float) -> None:
        self._ranks(leaf).admit(leaf, now)

    def drop(self, leaf: Leaf) -> None:
        self._ranks(leaf).drop(leaf)

    # victim = that of the side which has evicted less of what it brought in
    def victim(self, now: float) -> Victim | None:
        paid = [gone / max(1, side.computed) for gone, side in zip(self._evicted, self.sides)]
        first, second = (self.base, self.trial)
        if paid[1] < paid[0]:
            first, second = second, first
        return first.victim(now) or second.victim(now)

    def evicted(self, leaf: Leaf, tokens: int) -> None:
        self._evicted[self.is_trial(leaf.tenant)] += tokens
        self._ranks(leaf).evicted(leaf, tokens)

    def split(self, leaf: Leaf, head: Leaf) -> None:
        self._ranks(leaf).split(leaf, head)

    def twin(self) -> Policy:
        return Canary(self.base.twin(), self.trial.twin(), self.share, self.sides)

    def stats(self) -> Mapping[str, Any]:
        """What each side hit since the trial began."""
        return {
            name: {
                "policy": policy.name,
                "requests": side.requests,
                "prompt_tokens": side.prompt_tokens,
                "hit_tokens": side.hit_tokens,
            }
            for name, policy, side in zip(
                ("base", "trial"), (self.base, self.trial), self.sides, strict=True
            )
        }

    def state(self) -> Mapping[str, Any]:
        return self.base.state()

    def explain(self, leaf: Leaf, now: float) -> Mapping[str, Any]:
        policy = self._ranks(leaf)
        return {"ranked_by": policy.name, **policy.explain(leaf, now)}

    def leaves(self) -> Iterator[Leaf]:
        return chain(self.base.leaves(), self.trial.leaves())

    def _ranks(self, leaf: Leaf) -> Policy:
        return self.trial if self.is_trial(leaf.tenant) else self.base
