"""One pass over a trace that collects everything the report needs.

Memory: O(distinct blocks), about 150 bytes each, and about 130 bytes per request. Times are the
trace's seconds. A *hit* is a block in the leading run of blocks that some earlier request had, as
in an unbounded cache (the paper's ideal hit ratio, Section 3.2).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from canopy_lab.trace.record import TraceRequest
from sglang_canopy.errors import CanopyError
from sglang_canopy.reuse.survival import AGE_EDGES_S

FINER_BINS = 4
"""Age bins of the charts per bin of the policies (``reuse.survival``)."""
TOP_TURN = 10
"""Turns from here on share one category."""


def _fine_edges() -> np.ndarray:
    first = np.concatenate([[0.0], np.geomspace(0.001, AGE_EDGES_S[1], 33)])
    rest = [np.geomspace(a, b, FINER_BINS + 1)[1:] for a, b in itertools.pairwise(AGE_EDGES_S[1:])]
    return np.concatenate([first, *rest])


FINE_EDGES = _fine_edges()
"""Lower edges of the age bins, seconds. The last is open."""
FINE_BINS = len(FINE_EDGES)


def edges_within(seconds: float) -> int:
    """Return the number of ``FINE_EDGES`` within ``seconds`` (at least two)."""
    return max(2, int(np.searchsorted(FINE_EDGES, seconds, "right")))


class _Column:
    """A numpy array that grows at its end."""

    def __init__(self, dtype: str) -> None:
        self._values = np.zeros(1 << 14, dtype)
        self.length = 0

    def append_copies(self, count: int, value: float) -> None:
        end = self._grow(count)
        self._values[end - count : end] = value

    def append(self, values: np.ndarray) -> None:
        end = self._grow(len(values))
        self._values[end - len(values) : end] = values

    def _grow(self, count: int) -> int:
        end = self.length + count
        if end > len(self._values):
            grown = np.zeros(max(end, 2 * len(self._values)), self._values.dtype)
            grown[: self.length] = self._values[: self.length]
            self._values = grown
        self.length = end
        return end

    @property
    def values(self) -> np.ndarray:
        return self._values[: self.length]


@dataclass(slots=True)
class Observation:
    """What the pass collects. Arrays have one entry per request or per block."""

    block_tokens: int
    labels: list[str]
    """Names of the request types."""
    # One entry per request, in order.
    time_s: np.ndarray
    kind: np.ndarray
    """Index into ``labels``."""
    turn: np.ndarray
    conversation: np.ndarray
    """Number of the conversation; -1 if unnamed."""
    user: np.ndarray
    """Number of the user; -1 if unnamed."""
    input_tokens: np.ndarray
    output_tokens: np.ndarray
    blocks: np.ndarray
    hits: np.ndarray
    """Prompt blocks in the leading run seen before."""
    next_request: np.ndarray
    """Next request of the conversation; -1 without one."""
    # One entry per distinct block.
    first_s: np.ndarray
    last_request: np.ndarray
    uses: np.ndarray
    # One entry per pair of requests: the later request reused blocks last used by the earlier one.
    reused_from: np.ndarray
    """The earlier request."""
    reused_by: np.ndarray
    """The later request."""
    reused_blocks: np.ndarray
    # Aggregates.
    same_conversation_hits: int
    same_user_hits: int
    stranded: int
    """Blocks seen before but after a miss: unusable for a prefix cache."""

    @property
    def requests(self) -> int:
        return len(self.time_s)

    @property
    def distinct_blocks(self) -> int:
        return len(self.first_s)

    @property
    def span_s(self) -> float:
        """Seconds from the first request to the last."""
        return float(self.time_s[-1] - self.time_s[0])

    @property
    def last_s(self) -> np.ndarray:
        """Time of the last use of each distinct block."""
        return self.time_s[self.last_request]

    @property
    def reuse_age_s(self) -> np.ndarray:
        """Age of each pair's blocks at reuse: seconds since their last use."""
        age: np.ndarray = self.time_s[self.reused_by] - self.time_s[self.reused_from]
        return age

    @property
    def category(self) -> np.ndarray:
        """Category of each request: ``kind * TOP_TURN + min(turn, TOP_TURN) - 1``."""
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
        """Return ``text-1``, or ``text-10+`` from ``TOP_TURN`` on, without common parts."""
        name = self.labels[category // TOP_TURN]
        if not self.has_turns:
            return name
        turn = category % TOP_TURN + 1
        number = f"{turn}{'+' if turn == TOP_TURN else ''}"
        return f"turn {number}" if self.labels == ["default"] else f"{name}-{number}"


def categories(kind: np.ndarray, turn: np.ndarray) -> np.ndarray:
    """Return the category numbers of requests of these kinds and turns."""
    return kind.astype(np.int64) * TOP_TURN + np.clip(turn, 1, TOP_TURN) - 1


def observe(trace: Iterable[TraceRequest]) -> Observation:
    """Read a trace once. Raises ``CanopyError`` for an empty trace or for mixed block sizes."""
    running = _Pass()
    for request in trace:
        running.add(request)
    return running.result()


class _Numbering(dict[str, int]):
    """Numbers of names, in order of first appearance; ``None`` is -1."""

    def number_of(self, name: str | None) -> int:
        return -1 if name is None else self.setdefault(name, len(self))


class _Pass:
    """State of the pass: columns per request and per distinct block, and sums."""

    def __init__(self) -> None:
        self.kinds, self.users, self.conversations = _Numbering(), _Numbering(), _Numbering()
        self.requests = {
            name: _Column(dtype)
            for name, dtype in (
                ("time_s", "d"),
                ("kind", "i4"),
                ("turn", "i4"),
                ("conversation", "i8"),
                ("user", "i8"),
                ("input_tokens", "i8"),
                ("output_tokens", "i8"),
                ("blocks", "i8"),
                ("hits", "i8"),
                ("next_request", "i8"),
            )
        }
        self.latest_request: dict[int, int] = {}
        """Conversation -> its latest request."""
        self.row_by_block: dict[int, int] = {}
        """Block id -> its row in the columns below."""
        self.first_s, self.last_request = _Column("d"), _Column("i4")
        self.uses = _Column("i4")
        self.reused_from, self.reused_by = _Column("i4"), _Column("i4")
        self.reused_blocks = _Column("i4")
        self.same_conversation = self.same_user = self.stranded = 0
        self.block_tokens = 0

    def add(self, request: TraceRequest) -> None:
        if not self.block_tokens:
            self.block_tokens = request.block_tokens
        elif request.block_tokens != self.block_tokens:
            raise CanopyError(
                f"line {request.line} has blocks of {request.block_tokens} tokens, the lines before of "
                f"{self.block_tokens}; characterize traces of one block size"
            )
        number = self.requests["time_s"].length
        kind, conversation, user = (
            self.kinds.number_of(request.category),
            self.conversations.number_of(request.conversation),
            self.users.number_of(request.user),
        )
        if conversation >= 0:
            if conversation in self.latest_request:
                self.requests["next_request"].values[self.latest_request[conversation]] = number
            self.latest_request[conversation] = number
        rows = [self.row_by_block.get(block, -1) for block in request.blocks]
        hits = rows.index(-1) if -1 in rows else len(rows)
        if hits:
            self._record_hits(np.array(rows[:hits], np.int64), number, conversation, user)
        if rows:
            block_rows = self._append_new_blocks(request, rows, hits)
            self.last_request.values[block_rows] = number
            self.uses.values[block_rows] += 1
        values = {
            "time_s": request.time_s,
            "kind": kind,
            "turn": request.turn,
            "conversation": conversation,
            "user": user,
            "input_tokens": request.input_tokens,
            "output_tokens": request.output_tokens,
            "blocks": len(rows),
            "hits": hits,
            "next_request": -1,
        }
        for name, value in values.items():
            self.requests[name].append_copies(1, value)

    def _record_hits(self, rows: np.ndarray, request: int, conversation: int, user: int) -> None:
        """Record the hits of ``request`` on ``rows``, by the last requests that used them."""
        # Most blocks of one prompt were used last by the same request.
        earlier, blocks = np.unique(self.last_request.values[rows], return_counts=True)
        columns = self.requests
        self.reused_from.append(earlier)
        self.reused_blocks.append(blocks)
        self.reused_by.append_copies(len(earlier), request)
        if conversation >= 0:
            self.same_conversation += int(
                blocks[columns["conversation"].values[earlier] == conversation].sum()
            )
        if user >= 0:
            self.same_user += int(blocks[columns["user"].values[earlier] == user].sum())

    def _append_new_blocks(self, request: TraceRequest, rows: list[int], hits: int) -> np.ndarray:
        """Return the rows of all blocks of ``request``, after appending new blocks to the columns."""
        rows_before = len(self.row_by_block)
        for i in range(hits, len(rows)):
            if rows[i] >= 0:
                self.stranded += 1
            else:
                rows[i] = self.row_by_block.setdefault(request.blocks[i], len(self.row_by_block))
        new_blocks = len(self.row_by_block) - rows_before
        self.first_s.append_copies(new_blocks, request.time_s)
        for column in (self.last_request, self.uses):
            column.append_copies(new_blocks, 0)
        return np.array(rows, np.int64)

    def result(self) -> Observation:
        if not self.requests["time_s"].length:
            raise CanopyError("the trace has no requests; give a trace with requests")
        return Observation(
            block_tokens=self.block_tokens,
            labels=list(self.kinds),
            **{name: column.values for name, column in self.requests.items()},
            first_s=self.first_s.values,
            last_request=self.last_request.values,
            uses=self.uses.values,
            reused_from=self.reused_from.values,
            reused_by=self.reused_by.values,
            reused_blocks=self.reused_blocks.values,
            same_conversation_hits=self.same_conversation,
            same_user_hits=self.same_user,
            stranded=self.stranded,
        )
