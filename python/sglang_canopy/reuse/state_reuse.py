"""How soon a recurrent state is used again, learnt from requests.

A hybrid model continues a prompt only from a place where its state was kept. Of all places on a
prompt's path where a state was once made, a request uses the deepest, whether or not it is still
cached: that is a sample of the place's reuse, and every other place waits on. Two things set this
apart from the reuse of KV: a state that a conversation has moved on from is used again only by
those who branch off there, and the label of a place changes with every use.
"""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator, Sequence

from sglang_canopy.reuse.bins import BINS, age_bin
from sglang_canopy.reuse.categories import Category
from sglang_canopy.reuse.survival import gittins_rank, survival_curve

SHRINK = 10.0
"""Samples at risk that a coarser label's curve counts for in a finer one's."""
_MOST_LABELS = 256
_USES = (1, 2, 4, 8, 16)
_GAPS_S = (4.0, 16.0, 64.0, 256.0)
USED = "used"
BRANCH = "branch"
ANY = "*"


class Place:
    """A place where a state was made: what was seen of it since its last use."""

    __slots__ = ("born", "closed", "first", "label", "uses")

    def __init__(self, label: str, now: float) -> None:
        self.label = label
        self.born = self.first = now
        """Seconds: its last use, and when it was made."""
        self.uses = 0
        self.closed: float | None = None
        """Age at which it was used again; ``None``: not yet."""


class StateReuse:
    """Curves of reuse by label, from a sliding window of places.

    ``window_s`` seconds and ``most`` places are remembered. Without ``labels`` all places share one
    curve. ``placebo_seed``: give every place the label of another one, drawn among those seen; what
    is still won does not come from labels.
    """

    def __init__(
        self,
        window_s: float = 10800.0,
        most: int = 20_000,
        min_samples: int = 20,
        labels: bool = True,
        placebo_seed: int | None = None,
    ) -> None:
        self.window_s = window_s
        self.most = most
        self.min_samples = min_samples
        self._labels = labels
        self.version = 0
        """Grows with every fit."""
        self._places: OrderedDict[Hashable, Place] = OrderedDict()
        self._samples: deque[Place] = deque()
        self._categories: dict[str, Category] = {ANY: Category(ANY, None)}
        self._since_fit = 0
        self._draw = None if placebo_seed is None else random.Random(placebo_seed)
        self._labels_seen: list[str] = []

    def arrive(self, path: Sequence[Hashable], now: float) -> None:
        """A request came: it continues from the deepest place on ``path``."""
        for at in range(len(path) - 1, -1, -1):
            place = self._places.get(path[at])
            if place is not None:
                self._use(path[at], place, now)
                break
        self._since_fit += 1
        if self._since_fit >= max(64, len(self._samples) // 16):
            self.fit(now)

    def make(self, at: Hashable, label: str, now: float) -> str:
        """A state was made at ``at``. Returns the label of the place, known ones keep theirs."""
        place = self._places.get(at)
        if place is None:
            place = self._places[at] = Place(self._drawn(label), now)
            self._samples.append(place)
            while len(self._places) > self.most:
                self._places.popitem(last=False)
        return place.label

    def label(self, at: Hashable) -> str:
        """The label of a place; that of anything for one that is forgotten."""
        place = self._places.get(at)
        return ANY if place is None else place.label

    def category(self, label: str) -> Category:
        """The curve of a label, or of the coarser one that has samples."""
        while label not in self._categories and "|" in label:
            label = label.rpartition("|")[0]
        return self._categories.get(label, self._categories[ANY])

    def fit(self, now: float) -> None:
        """Fit every label's curve to the window."""
        self._since_fit = 0
        while self._samples and (
            len(self._samples) > self.most or self._samples[0].born < now - self.window_s
        ):
            self._samples.popleft()
        counts: dict[str, tuple[list[float], list[float]]] = {}
        for place in self._samples:
            for label in _coarser(place.label):
                if label not in counts:
                    if len(counts) >= _MOST_LABELS:
                        continue
                    counts[label] = ([0.0] * BINS, [0.0] * BINS)
                events, waiting = counts[label]
                if place.closed is not None:
                    events[age_bin(place.closed)] += 1.0
                else:
                    waiting[age_bin(now - place.born)] += 1.0
        fitted: dict[str, Category] = {}
        for label in sorted(counts, key=lambda one: (one != ANY, one.count("|"), one)):
            events, waiting = counts[label]
            if label != ANY and sum(events) + sum(waiting) < self.min_samples:
                continue
            parent = fitted.get(label.rpartition("|")[0], fitted.get(ANY))
            curve = survival_curve(
                events,
                waiting,
                None if parent is None else parent.curve,
                1.0 if parent is None else SHRINK,
            )
            fitted[label] = Category(label, parent, gittins_rank(curve), curve)
        if fitted:
            self._categories = fitted
        self.version += 1

    def _use(self, at: Hashable, place: Place, now: float) -> None:
        place.closed = max(0.0, now - place.born)
        again = Place(ANY, now)
        again.first, again.uses = place.first, place.uses + 1
        gap = (now - again.first) / again.uses
        again.label = self._drawn(f"{USED}|{_step(again.uses, _USES)}|every{_step(gap, _GAPS_S)}s")
        self._places[at] = again
        self._places.move_to_end(at)
        self._samples.append(again)

    def _drawn(self, label: str) -> str:
        if self._draw is None:
            return label if self._labels else ANY
        if len(self._labels_seen) < self.most:
            self._labels_seen.append(label)
        else:
            self._labels_seen[self._draw.randrange(self.most)] = label
        return self._draw.choice(self._labels_seen)

    def stats(self) -> dict[str, float]:
        """Probability of another use within the window, by label."""
        return {c.label: round(1.0 - c.curve[-1], 4) for c in self._categories.values()}


def _coarser(label: str) -> Iterator[str]:
    yield ANY
    parts = label.split("|")
    for depth in range(1, len(parts) + 1):
        name = "|".join(parts[:depth])
        if name != ANY:
            yield name


def _step(value: float, edges: Sequence[float]) -> str:
    for edge in edges:
        if value <= edge:
            return f"<={edge:g}"
    return f">{edges[-1]:g}"
