"""``wa``: evict the leaf that is least worth its space, judged by past requests.

    on request:   w = category(type, turn, gaps of its own conversation)
                  curve[w] += time since the previous turn
    admit(leaf):  kept until T > now           -> kept, by T
                  hinted "over", trusted       -> over, by last access
                  hinted return at R, trusted  -> returning[sender], by R
                  else                         -> cell[w], by last access
    victim(now):  move leaves of expired keeps and hints to their cells
                  over is not empty            -> its oldest leaf
                  least = the least rank of each cell's oldest and youngest leaf: G_w(now - last access)
                  last  = the last to return: skill / (R - now) + (1 - skill) G_w(now - last access)
                  the lesser of least and last -> evict it
                  only kept leaves             -> the first to expire

G_w(a) is the reuse that category ``w`` gains per second of space held from age ``a`` on
(``reuse/survival.py``). ``model: exponential`` ranks by the ATC 2025 paper's tuple
(ReuseProb_w(t, life), -offset) instead (``reuse/exponential.py``). With too few samples a category uses a
coarser category's curve, then the global one; without samples the order is LRU. The skill of a sender's
hints is learnt (``reuse/hint_trust.py``). To change the hints of an admitted leaf, a tree calls ``drop``,
writes the fields (``Leaf.refresh``), and calls ``admit`` again.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from sglang_canopy import declared
from sglang_canopy.declared import declare_key
from sglang_canopy.policy.base import Policy, Victim
from sglang_canopy.policy.structures.cells import (
    LEAF,
    TIME_S,
    Cell,
    Cells,
    EndQueue,
    HeapEntry,
    ReturnQueue,
)
from sglang_canopy.records import LateHint, Leaf, Request
from sglang_canopy.reuse.category import Category
from sglang_canopy.reuse.hint_trust import return_slack_s, sender_of
from sglang_canopy.reuse.learner import ReuseModel
from sglang_canopy.reuse.survival import continuation_probability

_MODEL_NAMES = ("survival", "exponential")
_CATEGORY_KINDS = ("refined", "type-turn")


@dataclass(frozen=True, slots=True)
class Config(declared.Checked):
    """Options of ``wa``."""

    model: str = declare_key(
        "survival",
        "``survival``, or ``exponential`` for the ATC 2025 paper's own formula.",
        choices=_MODEL_NAMES,
    )
    categories: str = declare_key(
        "refined",
        "``refined``, or ``type-turn`` for the paper's: a request's type and its turn.",
        choices=_CATEGORY_KINDS,
    )
    window_s: float = declare_key(
        10800.0, "Learn from the requests of this many seconds.", low=1e-3
    )
    max_samples: int = declare_key(100_000, "Learn from at most this many requests.", low=1)
    min_samples: int = declare_key(
        20, "A category with fewer samples uses a coarser category's curve.", low=1
    )
    max_categories: int = declare_key(
        256, "Categories to learn; later ones share a coarser category.", low=4, high=4096
    )
    own_gaps: bool = declare_key(True, "Refine the category by the conversation's own past gaps.")


class WorkloadAware(Policy):
    """The WA policy, over cells of equal category."""

    name: ClassVar[str] = "wa"
    Config: ClassVar[type] = Config
    learns: bool = True

    def __init__(self, config: Any, model: ReuseModel | None = None) -> None:
        """``model``: learnt state to share; by default new."""
        super().__init__(config)
        self.model = _make_model(config) if model is None else model
        self._cells = Cells(is_exponential=config.model == "exponential")
        self._over_queue = EndQueue()
        self._return_queues: dict[Hashable, ReturnQueue] = {}
        """Queues by ``hint_trust.trust_key`` of the sender: each sender has its own accuracy."""
        self._kept_queue = EndQueue()
        self._ranked_version = 0

    def arrive(self, request: Request) -> str:
        return self.model.arrive(request) if self.learns else super().arrive(request)

    def finish(self, request: Request) -> str:
        return self.model.finish(request) if self.learns else super().finish(request)

    def record_hint(self, hint: LateHint) -> None:
        if self.learns:
            self.model.record_hint(hint)

    def twin(self) -> Policy:
        """Return a policy for another tier, which shares this policy's learnt state."""
        twin = type(self)(self.config, self.model)
        twin.learns = False
        return twin

    def admit(self, leaf: Leaf, now: float) -> None:
        protected_until = leaf.protected_until()
        if protected_until > now:
            entry = self._kept_queue.push(leaf, protected_until)
            leaf.rank_state = (self._kept_queue, entry)
            return
        if leaf.over or leaf.return_at is not None:
            over_key = self._queue_if_trusted(leaf, now)
            if leaf.rank_state is not None:
                return
        else:
            over_key = ()
        shared_category = self._shared_category(leaf)
        # Use the leaf's own label, even if it is not in the table: the cell must not depend on the
        # time of admission.
        label = leaf.category if shared_category is None else shared_category.label
        category = shared_category or self.model.categories.get(label)
        bucket = self._bucket(leaf, category)
        self._cells.push(
            (label, bucket, *over_key),
            leaf,
            lambda: (category, self._weight(category, bucket) * self._over_weight(over_key)),
        )

    def _queue_if_trusted(self, leaf: Leaf, now: float) -> tuple[Hashable, ...]:
        """Queue a leaf if its hints are trusted outright. Otherwise return ``(key,)`` of the sender if
        its "over" lowers the rank, by the share of such hints that proved true; else ``()``."""
        hints, sender = self.model.hints, sender_of(leaf.tenant, leaf.source)
        if leaf.over and hints.is_over_trusted(sender):
            leaf.rank_state = (self._over_queue, self._over_queue.push(leaf, leaf.last_access))
            return ()
        key = hints.trust_key(sender)
        may_return = leaf.return_at is not None and _overdue_at(leaf) > now
        if may_return and hints.is_return_trusted(sender):
            queue = self._return_queues.setdefault(key, ReturnQueue(key))
            leaf.rank_state = (queue, self._push_return(queue, leaf))
            return ()
        # Hints without information share a cell: only its two end leaves are compared.
        return (key,) if leaf.over and hints.over_weight(key) < 1.0 else ()

    @staticmethod
    def _push_return(queue: ReturnQueue, leaf: Leaf) -> HeapEntry:
        assert leaf.return_at is not None, "no return was announced"
        return queue.push_until(leaf, leaf.return_at, _overdue_at(leaf))

    def _over_weight(self, over_key: Sequence[Any]) -> float:
        return self.model.hints.over_weight(over_key[0]) if over_key else 1.0

    def _category(self, leaf: Leaf) -> Category:
        return self._shared_category(leaf) or self.model.categories.get(leaf.category)

    def _shared_category(self, leaf: Leaf) -> Category | None:
        """Return the category of a shared leaf, used more often than its conversation has turns."""
        if leaf.hits <= leaf.turn or self.model.uses_type_turn:
            return None
        gap_s = (leaf.last_access - leaf.created) / (leaf.hits - 1)
        return self.model.shared_category(leaf.hits, gap_s)

    def drop(self, leaf: Leaf) -> None:
        if leaf.rank_state is None:
            return
        queue, entry = leaf.rank_state
        if isinstance(queue, Cell):
            self._cells.remove(leaf)
        else:
            leaf.rank_state = None
            queue.remove(entry)

    def put_back(self, leaf: Leaf, rank_state: Any, now: float) -> None:
        queue, entry = rank_state
        if isinstance(queue, Cell):
            self._cells.put_back(queue, leaf)
        elif isinstance(queue, ReturnQueue):
            queue = self._return_queues.setdefault(queue.key, queue)
            leaf.rank_state = (queue, self._push_return(queue, leaf))
        else:
            leaf.rank_state = (queue, queue.push(leaf, entry[TIME_S]))

    def victim(self, now: float) -> Victim | None:
        if self._kept_queue.size or self._over_queue.size or self._return_queues:
            self._release_expired(now)
        if self._ranked_version != self.model.version:
            self._ranked_version = self.model.version
            self._cells.reweigh(self._reweigh)
        if self._over_queue.size and (entry := self._over_queue.oldest()) is not None:
            return Victim(entry[LEAF])
        least_cell = self._cells.least(now)
        if self._return_queues:
            last_leaf, rank = self._last_to_return(now)
            if last_leaf is not None and (least_cell is None or rank < least_cell.order[0]):
                return Victim(last_leaf)
        if least_cell is not None:
            leaf = least_cell.entry[LEAF]
            return Victim(leaf, self._keep_tokens(leaf))
        entry = self._kept_queue.oldest()
        return Victim(entry[LEAF]) if entry is not None else None

    def split(self, leaf: Leaf, head: Leaf) -> None:
        if leaf.rank_state is not None:
            self.drop(leaf)
            self.admit(leaf, leaf.last_access)

    def _release_expired(self, now: float) -> None:
        """Move to their cells the leaves whose keep or return time has expired, and those hinted over,
        from the oldest to the first whose sender is still trusted."""
        while (entry := self._kept_queue.oldest()) is not None and entry[TIME_S] <= now:
            self._readmit(entry[LEAF], now)
        for trust_key, queue in list(self._return_queues.items()):
            while (leaf := queue.longest_overdue(now)) is not None:
                self._readmit(leaf, now)
            if not queue.size:
                del self._return_queues[trust_key]
        while (entry := self._over_queue.oldest()) is not None:
            leaf = entry[LEAF]
            if self.model.hints.is_over_trusted(sender_of(leaf.tenant, leaf.source)):
                break
            self._readmit(leaf, now)

    def _readmit(self, leaf: Leaf, now: float) -> None:
        self.drop(leaf)
        self.admit(leaf, now)

    def _last_to_return(self, now: float) -> tuple[Leaf | None, float]:
        """Return the least leaf with a hinted return, and its rank: the hinted time weighted by the
        hints' skill, plus the category's rank weighted by the rest."""
        least_leaf, least_rank = None, math.inf
        least_order = (math.inf, 0.0, 0, 0)
        for trust_key, queue in self._return_queues.items():
            entry = queue.youngest()
            if entry is None:
                continue
            return_at, depth, number, _, leaf = entry
            skill = self.model.hints.return_skill(trust_key)
            rank = skill / max(return_at - now, 1e-3)
            if skill < 1.0:
                category = self._category(leaf)
                weight = self._weight(category, self._bucket(leaf, category))
                category_rank = weight * self._cells.rank(category, leaf.last_access, now)
                rank += (1.0 - skill) * category_rank
            if (order := (rank, return_at, depth, number)) < least_order:
                least_leaf, least_order, least_rank = leaf, order, rank
        return least_leaf, least_rank

    def _bucket(self, leaf: Leaf, category: Category) -> Hashable:
        """Return the part of a leaf's cell key that is not its category."""
        return 0

    def _weight(self, category: Category, bucket: Any) -> float:
        """Return the factor on the ranks of a cell."""
        return 1.0

    def _reweigh(self, cell: Cell) -> float:
        cell_key: Any = cell.key
        label, bucket, *over_key = cell_key
        cell.category = self.model.categories.get(label)
        return self._weight(cell.category, bucket) * self._over_weight(over_key)

    def _keep_tokens(self, leaf: Leaf) -> int:
        """Return the number of the victim's leading tokens to keep."""
        return 0

    def explain(self, leaf: Leaf, now: float) -> Mapping[str, Any]:
        category = self._category(leaf)
        idle_s, kept_for_s = now - leaf.last_access, leaf.protected_until() - now
        weight = self._weight(category, self._bucket(leaf, category))
        return {
            "category": category.label,
            "idle_s": round(idle_s, 3),
            "still_returns": round(continuation_probability(category.curve, idle_s), 4),
            "rank": weight * self._cells.rank(category, leaf.last_access, now),
            **({"hinted": "over"} if leaf.over else {}),
            **({} if leaf.return_at is None else {"hinted_return_in_s": leaf.return_at - now}),
            **({"kept_for_s": kept_for_s} if kept_for_s > 0 else {}),
        }

    def state(self) -> Mapping[str, Any]:
        return self.model.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self.model.restore(state)

    def leaves(self) -> Iterator[Leaf]:
        for queue in (self._kept_queue, self._over_queue, *self._return_queues.values()):
            yield from queue
        yield from self._cells


def _make_model(config: Config) -> ReuseModel:
    return ReuseModel(
        window_s=config.window_s,
        max_samples=config.max_samples,
        min_samples=config.min_samples,
        max_categories=config.max_categories,
        uses_own_gaps=config.own_gaps,
        uses_added_tokens=True,
        fits_exponential=config.model == "exponential",
        uses_type_turn=config.categories == "type-turn",
    )


def _overdue_at(leaf: Leaf) -> float:
    """Return the time after which the hinted return of ``leaf`` is ignored."""
    assert leaf.return_at is not None, "no return was announced"
    return leaf.return_at + return_slack_s(leaf.return_at - leaf.last_access)


POLICY = WorkloadAware
