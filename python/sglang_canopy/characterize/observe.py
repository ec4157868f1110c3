"""The one pass over a trace from which every question is answered.

Memory: O(distinct blocks), about 120 bytes each, and about 50 bytes a request. Times are the
trace's seconds. A *hit* is a block in the leading run of blocks that some earlier request had:
what a cache that never forgets would give (the paper's ideal hit ratio, Section 3.2).
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from sglang_canopy.errors import CanopyError
from sglang_canopy.reuse.bins import EDGES
from sglang_canopy.trace.record import TraceRequest

PARTS = 4
"""Age bins of the charts per bin of the policies (``reuse.bins``)."""
TOP_TURN = 10
"""Turns from here on share one category."""
POSITIONS = 10
"""A block's place in its prompt, in tenths (Figure 16)."""


def _fine_edges() -> np.ndarray:
    first = np.concatenate([[0.0], np.geomspace(0.001, EDGES[1], 33)])
    rest = [np.geomspace(a, b, PARTS + 1)[1:] for a, b in itertools.pairwise(EDGES[1:])]
    return np.concatenate([first, *rest])


FINE_EDGES = _fine_edges()
"""Lower edges of the age bins, in seconds; the last bin has no upper edge."""
FINE_BINS = len(FINE_EDGES)


def edges_within(seconds: float) -> int:
    """How many of ``FINE_EDGES`` lie within ``seconds`` (at least two)."""
    return max(2, int(np.searchsorted(FINE_EDGES, seconds, "right")))


class _Column:
    """A numpy array that grows at its end."""

    def __init__(self, dtype: str) -> None:
        self._data = np.zeros(1 << 14, dtype)
        self.size = 0

    def extend(self, count: int, value: float) -> None:
        """Append ``count`` times ``value``."""
        end = self.size + count
        if end > len(self._data):
            grown = np.zeros(max(end, 2 * len(self._data)), self._data.dtype)
            grown[: self.size] = self._data[: self.size]
            self._data = grown
        self._data[self.size : end] = value
        self.size = end

    @property
    def all(self) -> np.ndarray:
        """The filled part, as a view."""
        return self._data[: self.size]


@dataclass(slots=True)
class Observation:
    """Everything the questions are answered from. Arrays are one entry a request or a block."""

    block_tokens: int
    labels: list[str]
    """Names of the request types."""
    # One entry a request, in order.
    time_s: np.ndarray
    kind: np.ndarray
    """Index into ``labels``."""
    turn: np.ndarray
    conversation: np.ndarray
    """Number of the conversation, -1 where the trace names none."""
    user: np.ndarray
    """Number of the user, -1 where the trace names none."""
    input_tokens: np.ndarray
    output_tokens: np.ndarray
    blocks: np.ndarray
    """Blocks of the prompt."""
    hits: np.ndarray
    """Of them, in the leading run seen before."""
    next_request: np.ndarray
    """The request that continues this one's conversation, -1 where none does."""
    # One entry a distinct block.
    first_s: np.ndarray
    last_request: np.ndarray
    uses: np.ndarray
    # Aggregates.
    reuse_count: np.ndarray
    """[half, category, age bin]: reuses of blocks by the category that used them before;
    ``half`` is the parity of that earlier request, so that a fit can be tested on the other."""
    reuse_sum_s: np.ndarray
    """[half, category]: the sum of those ages."""
    place_count: np.ndarray
    """[later turn?, place, 2 ** POSITIONS]: accesses of blocks at ``place`` (in tenths of the
    prompt) that stood at that set of places in earlier prompts."""
    same_conversation_hits: int
    same_user_hits: int
    stranded: int
    """Blocks seen before but behind a miss: a prefix cache cannot use them."""

    @property
    def requests(self) -> int:
        return len(self.time_s)

    @property
    def distinct_blocks(self) -> int:
        return len(self.first_s)

    @property
    def span_s(self) -> float:
        """From the first request to the last."""
        return float(self.time_s[-1] - self.time_s[0])

    @property
    def last_s(self) -> np.ndarray:
        """When each distinct block was used last."""
        return self.time_s[self.last_request]

    @property
    def category(self) -> np.ndarray:
        """The category of each request: ``kind * TOP_TURN + min(turn, TOP_TURN) - 1``."""
        return categories(self.kind, self.turn)

    @property
    def has_turns(self) -> bool:
        return bool((self.turn > 1).any())

    @property
    def has_conversations(self) -> bool:
        return bool((self.conversation >= 0).any())

    @property
    def has_users(self) -> bool:
        return bool((self.user >= 0).any())

    def category_name(self, category: int) -> str:
        """``text-1``; ``text-10+`` from ``TOP_TURN`` on; only what tells categories apart."""
        name = self.labels[category // TOP_TURN]
        if not self.has_turns:
            return name
        turn = category % TOP_TURN + 1
        number = f"{turn}{'+' if turn == TOP_TURN else ''}"
        return f"turn {number}" if self.labels == ["default"] else f"{name}-{number}"


def categories(kind: np.ndarray, turn: np.ndarray) -> np.ndarray:
    """Category numbers of requests of these kinds and turns."""
    return kind.astype(np.int64) * TOP_TURN + np.clip(turn, 1, TOP_TURN) - 1


class _Numbering(dict[str, int]):
    def __missing__(self, name: str) -> int:
        number = self[name] = len(self)
        return number


def observe(
    trace: Iterable[TraceRequest], progress: Callable[[], object] = lambda: None
) -> Observation:
    """Read a trace once. Raises ``CanopyError`` for an empty one or one of mixed block sizes."""
    kinds, users, conversations = _Numbering(), _Numbering(), _Numbering()
    time_s, kind, turn = array("d"), array("i"), array("i")
    conversation, user = array("q"), array("q")
    inputs, outputs, blocks, hits = array("q"), array("q"), array("q"), array("q")
    next_request = array("q")
    latest: dict[int, int] = {}  # conversation -> its latest request
    row_of: dict[int, int] = {}
    first_s, last_request, uses, places = (_Column(t) for t in ("d", "i4", "i4", "u2"))
    category_of = _Column("i4")
    count: dict[int, np.ndarray] = {}
    place_count = np.zeros((2, POSITIONS << POSITIONS), np.int64)
    same_conversation = same_user = stranded = 0
    sums: dict[int, np.ndarray] = {}
    times = _Column("d")
    talks, people = _Column("i8"), _Column("i8")
    block_tokens = 0

    for number, r in enumerate(trace):
        if not block_tokens:
            block_tokens = r.block_tokens
        elif r.block_tokens != block_tokens:
            raise CanopyError(
                f"line {r.line} has blocks of {r.block_tokens} tokens, the lines before of "
                f"{block_tokens}; characterize traces of one block size"
            )
        talk = -1 if r.conversation is None else conversations[r.conversation]
        person = -1 if r.user is None else users[r.user]
        label = kinds[r.category]
        category = label * TOP_TURN + min(max(r.turn, 1), TOP_TURN) - 1
        previous = latest.get(talk, -1) if talk >= 0 else -1
        if previous >= 0:
            next_request[previous] = number
        latest[talk] = number

        known = [row_of.get(b, -1) for b in r.blocks]
        length = len(known)
        run = next((i for i, row in enumerate(known) if row < 0), length)
        rows = np.array(known[:run], np.int64)
        if run:
            before = last_request.all[rows]
            ages = r.time_s - times.all[before]
            bins = np.searchsorted(FINE_EDGES, ages, "right") - 1
            keys = (before & 1) * FINE_BINS + bins
            earlier = category_of.all[before]
            for one in np.unique(earlier) if run > 1 else earlier:
                mine = earlier == one
                if int(one) not in count:
                    count[int(one)] = np.zeros(2 * FINE_BINS, np.int64)
                    sums[int(one)] = np.zeros(2)
                np.add.at(count[int(one)], keys[mine], 1)
                np.add.at(sums[int(one)], (before & 1)[mine], ages[mine])
            if talk >= 0:
                same_conversation += int((talks.all[before] == talk).sum())
            if person >= 0:
                same_user += int((people.all[before] == person).sum())
        if length:
            place = (np.arange(length) * POSITIONS) // length
            later = int(r.turn > 1)
            if run < length:
                start = first_s.size
                for i in range(run, length):
                    if known[i] < 0:
                        known[i] = row_of.setdefault(r.blocks[i], len(row_of))
                    else:
                        stranded += 1
                fresh = len(row_of) - start
                first_s.extend(fresh, r.time_s)
                last_request.extend(fresh, number)
                uses.extend(fresh, 0)
                places.extend(fresh, 0)
                rest = np.array(known[run:], np.int64)
                rows = np.concatenate([rows, rest])
            np.add.at(place_count[later], (place << POSITIONS) + places.all[rows], 1)
            last_request.all[rows] = number
            uses.all[rows] += 1
            places.all[rows] |= (1 << place).astype(np.uint16)
        times.extend(1, r.time_s)
        category_of.extend(1, category)
        talks.extend(1, talk)
        people.extend(1, person)
        time_s.append(r.time_s)
        kind.append(label)
        turn.append(r.turn)
        conversation.append(talk)
        user.append(person)
        inputs.append(r.input_tokens)
        outputs.append(r.output_tokens)
        blocks.append(length)
        hits.append(run)
        next_request.append(-1)
        progress()

    if not len(time_s):
        raise CanopyError("the trace has no requests; give one that has")
    cells = len(kinds) * TOP_TURN
    reuse_count = np.zeros((2, cells, FINE_BINS), np.int64)
    reuse_sum = np.zeros((2, cells))
    for one, counted in count.items():
        reuse_count[:, one] = counted.reshape(2, FINE_BINS)
        reuse_sum[:, one] = sums[one]
    return Observation(
        block_tokens=block_tokens,
        labels=list(kinds),
        time_s=np.array(time_s),
        kind=np.array(kind),
        turn=np.array(turn),
        conversation=np.array(conversation),
        user=np.array(user),
        input_tokens=np.array(inputs),
        output_tokens=np.array(outputs),
        blocks=np.array(blocks),
        hits=np.array(hits),
        next_request=np.array(next_request),
        first_s=first_s.all.copy(),
        last_request=last_request.all.copy(),
        uses=uses.all.copy(),
        reuse_count=reuse_count,
        reuse_sum_s=reuse_sum,
        place_count=place_count.reshape(2, POSITIONS, 1 << POSITIONS),
        same_conversation_hits=same_conversation,
        same_user_hits=same_user,
        stranded=stranded,
    )
