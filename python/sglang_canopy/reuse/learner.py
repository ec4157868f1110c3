"""The reuse model of a workload-aware policy: return probability, gap and new tokens by label.

Requests are inputs (``arrive`` once, ``finish`` once). Outputs are labels and, per label, a rank by
age (``Category.rank``) and the distribution of the next prompt's new tokens (``Category.growth_exceedance``).
All categories are refitted every few requests from a sliding window. The fit is deterministic: it
uses no clock except the requests' own times, and no randomness.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Any

from sglang_canopy.bounded import BoundedByTenant
from sglang_canopy.records import ABORT, LateHint, Request
from sglang_canopy.reuse import saved_curves
from sglang_canopy.reuse.categories import (
    Categories,
    label_features,
    shared_features,
    type_turn_features,
)
from sglang_canopy.reuse.category import Category
from sglang_canopy.reuse.fitting import fit
from sglang_canopy.reuse.hint_trust import HintRecords, sender_of
from sglang_canopy.reuse.shadow import ShadowIndex, Tip, full_blocks
from sglang_canopy.reuse.survival import age_bin, token_bin

_OWN_GAP_STEP = 0.5
"""Weight of the newest gap in a conversation's moving (geometric) average."""
_MIN_GAP_S = 0.1
MAX_JUNCTIONS = 16
"""Junctions sampled on one path, per request."""
MAX_CONVERSATIONS = 1024
"""Conversations whose last tip is kept."""


class ReuseModel:
    """Labels, curves and prompt growth, learnt online.

    ``window_s``: seconds that samples are kept; ``max_samples``: their maximum number;
    ``max_blocks``: block hashes kept; ``min_samples``: a category with fewer uses its parent's
    curve, and the global curve is then all one (LRU); ``max_categories``: maximum number of
    labels; ``uses_own_gaps``: refine labels by a conversation's past gaps; ``uses_added_tokens``: refine labels by a
    turn's new prompt tokens, which helps to rank leaves but not to predict the next turn's new
    tokens; ``fits_exponential``: fit the paper's exponential instead of a survival curve; ``uses_type_turn``:
    use the paper's categories, type and turn; a shared prefix then has the category of the last
    request that used it.
    """

    def __init__(
        self,
        *,
        window_s: float = 10800.0,
        max_samples: int = 100_000,
        max_blocks: int = 1_000_000,
        min_samples: int = 20,
        max_categories: int = 256,
        uses_own_gaps: bool = True,
        uses_added_tokens: bool = False,
        fits_exponential: bool = False,
        uses_type_turn: bool = False,
    ) -> None:
        self.min_samples = min_samples
        self.uses_own_gaps = uses_own_gaps
        self.uses_added_tokens = uses_added_tokens
        self.fits_exponential = fits_exponential
        self.uses_type_turn = uses_type_turn
        self.categories = Categories(max_categories)
        self.shadow = ShadowIndex(window_s, max_samples, max_blocks)
        self.hints = HintRecords()
        self._last_tip_by_name: BoundedByTenant[Hashable, Tip] = BoundedByTenant(MAX_CONVERSATIONS)
        """Last tip of each named conversation, for hints between its requests."""
        self.version = 0
        """Incremented by every fit, which makes earlier ranks stale."""
        self.reuse_count = 0
        """Number of observed reuses."""
        self._saved_sample_count = 0.0
        self._requests_since_fit = 0
        self._requests_per_fit = min_samples

    def arrive(self, request: Request) -> str:
        """Sample the tip that the request continues and its shared prefixes, open its own tip,
        return its label. Writes ``request.turn`` if the path shows more turns than the request's
        field."""
        shadow, path, now = self.shadow, request.path, request.time
        matched_blocks = shadow.matched_blocks(path)
        previous = shadow.pop_open_tip(path, matched_blocks)
        if previous is not None:
            self._continue(previous, request)
        else:
            self._check_hints_of_the_name(request)
        self.hints.count_overdue(now)
        if matched_blocks and not self.uses_type_turn:
            self._sample_junctions(request, matched_blocks, is_new_branch=previous is None)
        block_count = full_blocks(path, request.prompt_tokens, request.block_tokens)
        tip = self._make_tip(request, previous, matched_blocks, block_count)
        shadow.add_blocks(now, request.tenant, path[matched_blocks:])
        if block_count > matched_blocks or (previous is not None and block_count > 0):
            # A prompt that ends inside another request's prefix has no tip of its own.
            shadow.open_tip(tip, path[block_count - 1])
            self._add_sample(tip, now)
        self._requests_since_fit += 1
        if self._requests_since_fit >= self._requests_per_fit:
            self.categories.forget_unused(shadow.samples.horizon(now), now)
            self.fit(now)
        category = tip.category
        return category.label if category.merged_into is None else category.current.label

    def category_of_first_turn(self, request: Request) -> Category:
        """Return the category of a conversation's first request. The request is not a sample."""
        if self.uses_type_turn:
            features = type_turn_features(request.category, 1)
        else:
            added_tokens = request.prompt_tokens if self.uses_added_tokens else None
            features = label_features(request.category, None, 1, 0, None, added_tokens)
        return self.categories.get("|".join(features))

    def finish(self, request: Request) -> str:
        """Learn the stop reason, output and hints of a finished request. Return its label."""
        tip = self.shadow.tip_created_by(request)
        if tip is None:
            return request.label or self.categories.overflow.label
        tip.category = self._categorise(tip, request)
        if request.stop == ABORT:
            tip.is_void = True
            return tip.category.label
        tip.history_tokens = request.prompt_tokens + request.output_tokens
        if len(request.path) > tip.path_blocks:
            # The path was extended over the output, which may or may not be in the next prompt.
            block_count = full_blocks(request.path, tip.history_tokens, request.block_tokens)
            if block_count and request.path[block_count - 1] not in tip.indexed_at:
                matched_blocks = self.shadow.matched_blocks(request.path)
                self.shadow.add_blocks(request.time, request.tenant, request.path[matched_blocks:])
                self.shadow.open_tip(tip, request.path[block_count - 1])
        tip.sender = sender_of(request.tenant, request.source)
        if request.conversation is not None:
            self._last_tip_by_name.put(request.tenant, request.conversation, tip)
        self.hints.count_tip(tip, request.over)
        if not request.over and request.return_in_s is not None:
            self.hints.add_return_hint(tip, request.return_in_s)
        return tip.category.label

    def record_hint(self, hint: LateHint) -> None:
        """Apply a hint that arrived without a request."""
        tip = self._last_tip_by_name.get(hint.tenant, hint.conversation)
        if tip is None or not tip.is_open:
            return
        tip.sender = sender_of(hint.tenant, hint.source)
        if hint.over:
            self.hints.count_tip(tip, True)
        elif hint.return_in_s is not None:
            self.hints.add_return_hint(tip, hint.time - tip.created_at + hint.return_in_s)

    def begin_gap(self, request: Request, now: float) -> None:
        """Start the gap after ``request`` at ``now``, when it was answered, instead of at its
        arrival. The gaps are then the clients' think times, independent of response times. Call
        after ``finish``."""
        tip = self.shadow.tip_created_by(request)
        if tip is not None and now > tip.created_at:
            tip.created_at = now

    def record_waiting(self, request: Request) -> None:
        """Learn the return that an arriving request is. Its own sample begins with ``learn_answer``."""
        self.arrive(request)
        tip = self.shadow.tip_created_by(request)
        if tip is not None:
            tip.is_void = True

    def learn_answer(self, request: Request, now: float) -> str:
        """Learn the answer, at ``now``, to a request that waits (``record_waiting``). Return its label."""
        tip = self.shadow.tip_created_by(request)
        if tip is not None:
            tip.is_void = False
        label = self.finish(request)
        self.begin_gap(request, now)
        return label

    def shared_category(self, uses: int, average_gap_s: float) -> Category:
        """Return the category of a prefix that ``uses`` requests of several conversations used."""
        return self.categories.refine(shared_features(uses, average_gap_s))

    def early_growth_tokens(self) -> float:
        """Return the mean new tokens per prompt over all categories, for use before a fit."""
        sample_count = sum(sum(category.growth) for category in self.categories)
        total_tokens = sum(category.growth_sum_tokens for category in self.categories)
        return total_tokens / sample_count if sample_count else 0.0

    def fit(self, now: float) -> None:
        """Refit every category from the window."""
        self._requests_since_fit = 0
        self._requests_per_fit = max(
            self.min_samples, 64, len(self.shadow) // 16, len(self.categories) // 2
        )
        share = self._profile_share()
        fit(self.categories, self.shadow, now, self.min_samples, self.fits_exponential, share)
        self.version += 1

    def _make_tip(
        self, request: Request, previous: Tip | None, matched_blocks: int, block_count: int
    ) -> Tip:
        """Return the tip at the end of ``request``'s path. ``block_count``: blocks that its
        prompt fills; ``matched_blocks``: blocks seen before."""
        tip = Tip(request.time, self.categories.root, request.tenant)
        tip.history_tokens = request.prompt_tokens
        tip.path_blocks = len(request.path)
        turn = request.turn if request.turn > 1 else 1
        known_tokens = (
            matched_blocks * request.block_tokens if previous is None else previous.history_tokens
        )
        added_tokens = request.prompt_tokens - known_tokens
        tip.added_tokens = added_tokens if added_tokens > 0 else 0
        if previous is not None:
            # The same prompt after an answer that was cut off is the same turn.
            is_repeat = previous.is_void and request.prompt_tokens <= previous.history_tokens
            seen_turns = previous.turn + (not is_repeat)
            turn = turn if turn > seen_turns else seen_turns
            tip.own_gap_s = previous.own_gap_s
            if not previous.is_void:
                tip.own_gap_s = _moving_average(
                    previous.own_gap_s, request.time - previous.created_at
                )
            last_use = tip.last_use = previous.last_use
            last_use[0] = request.time
            tip.origin = previous.origin
        elif request.path:
            tip.origin = request.path[max(0, block_count - 1)]
        request.turn = tip.turn = turn
        tip.category = self._categorise(tip, request)
        return tip

    def _categorise(self, tip: Tip, request: Request) -> Category:
        if self.uses_type_turn:
            features = type_turn_features(request.category, tip.turn)
        else:
            gap_s = tip.own_gap_s if self.uses_own_gaps else None
            added_tokens = tip.added_tokens if self.uses_added_tokens else None
            features = label_features(
                request.category, request.stop, tip.turn, request.output_tokens, gap_s, added_tokens
            )
        return self.categories.refine(features, request.tenant, request.time)

    def _check_hints_of_the_name(self, request: Request) -> None:
        """Check the hints of a named conversation that continues with another history. Agents rewrite
        their history, and the new path branches off above the old tip. The old tip is not used again
        and stays a censored sample. The request starts a new path."""
        if request.conversation is None:
            return
        tip = self._last_tip_by_name.get(request.tenant, request.conversation)
        if tip is not None and tip.is_open:
            self.hints.judge_hints(tip, request.time)
            tip.tenant_record = tip.over_record = None

    def _sample_junctions(self, request: Request, matched_blocks: int, is_new_branch: bool) -> None:
        """Sample every junction on the path; open a junction at the point where the path branches off.
        At most ``MAX_JUNCTIONS`` of a path are sampled. Deeper junctions are closed without a sample,
        since an open sample would wrongly count as not continued."""
        shadow, path, now = self.shadow, request.path, request.time
        end_block = path[matched_blocks - 1]
        junctions = shadow.find_junctions(path[:matched_blocks])
        has_surplus = len(junctions) >= MAX_JUNCTIONS
        if has_surplus:
            for block in junctions[MAX_JUNCTIONS:]:
                surplus = shadow.junction(block)
                if surplus is not None:
                    surplus.is_void = True
                    shadow.close(surplus)
            del junctions[MAX_JUNCTIONS:]
        for block in junctions:
            junction = shadow.junction(block)
            if junction is None:  # dropped from the window by a shallower junction's sample
                continue
            self._close(junction, now)
            junction.last_use[0] = now
            uses, first_seen_at = junction.turn + 1, junction.first_seen_at
            self._open_junction(request, block, uses, first_seen_at, junction.last_use)
            is_new_branch = is_new_branch and block != end_block
        if is_new_branch and not has_surplus:
            first_seen_at = shadow.birth_time(end_block, now)
            self._open_junction(request, end_block, 2, first_seen_at, [now])

    def _open_junction(
        self, request: Request, block: int, uses: int, first_seen_at: float, last_use: list[float]
    ) -> None:
        now = request.time
        category = self.shared_category(uses, (now - first_seen_at) / (uses - 1))
        tip = Tip(now, category, request.tenant)
        tip.turn, tip.first_seen_at, tip.last_use = uses, first_seen_at, last_use
        self.shadow.open_junction(tip, block)
        self._add_sample(tip, now)

    def _add_sample(self, tip: Tip, now: float) -> None:
        for expelled in self.shadow.add_sample(tip, now):
            self._remove_sample(expelled)

    def _close(self, tip: Tip, now: float) -> None:
        tip.is_open = False
        if tip.is_void:
            return
        gap_s = now - tip.created_at
        gap_s = tip.gap_s = gap_s if gap_s > 0.0 else 0.0
        category = tip.category
        if category.merged_into is not None:
            category = category.current
        category.events[age_bin(gap_s)] += 1.0
        category.gap_sum_s += gap_s
        self.reuse_count += 1

    def _continue(self, tip: Tip, request: Request) -> None:
        self._close(tip, request.time)
        if tip.is_void:
            return
        growth_tokens = request.prompt_tokens - tip.history_tokens
        growth_tokens = tip.growth_tokens = growth_tokens if growth_tokens > 0 else 0
        category = tip.category
        if category.merged_into is not None:
            category = category.current
        category.growth[token_bin(growth_tokens)] += 1.0
        category.growth_sum_tokens += growth_tokens
        self.hints.judge_hints(tip, request.time)

    @staticmethod
    def _remove_sample(tip: Tip) -> None:
        if tip.is_open or tip.is_void:
            tip.is_open = False
            return
        category = tip.category.current
        category.events[age_bin(tip.gap_s)] -= 1.0
        category.gap_sum_s = max(0.0, category.gap_sum_s - tip.gap_s)
        if tip.growth_tokens >= 0:
            category.growth[token_bin(tip.growth_tokens)] -= 1.0
            category.growth_sum_tokens = max(0.0, category.growth_sum_tokens - tip.growth_tokens)

    def state(self) -> Mapping[str, Any]:
        return saved_curves.save(self.categories, self._label_kind(), self._profile_share())

    def _label_kind(self) -> str:
        return "type-turn" if self.uses_type_turn else "refined"

    def _profile_share(self) -> float:
        """Return the weight of a loaded profile's counts against the counts of this run."""
        return self._saved_sample_count / (self._saved_sample_count + self.reuse_count + 1.0)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Load the counts of an earlier run; their weight falls as new samples arrive."""
        self._saved_sample_count = saved_curves.load(state, self.categories, self._label_kind())
        self.fit(max((tip.created_at for tip in self.shadow), default=0.0))


def mean_growth_tokens(category: Category) -> float:
    """Return mean new tokens of the next prompt, of the nearest category with samples."""
    nearest: Category | None = category
    while nearest is not None:
        sample_count = sum(nearest.all_growth) if nearest.all_growth else 0.0
        if sample_count >= 1.0:
            return nearest.all_growth_sum_tokens / sample_count
        nearest = nearest.parent
    return 0.0


def _moving_average(average_s: float | None, gap_s: float) -> float:
    if gap_s < _MIN_GAP_S:
        gap_s = _MIN_GAP_S
    if average_s is None:
        return gap_s
    return math.exp((1.0 - _OWN_GAP_STEP) * math.log(average_s) + _OWN_GAP_STEP * math.log(gap_s))
