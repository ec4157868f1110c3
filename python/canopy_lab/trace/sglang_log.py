"""SGLang's own request logs.

Written by a server started with ``--log-requests --log-requests-level 3 --log-requests-format
json`` (to stdout, or into a folder with ``--log-requests-target``). Other lines of the server's
log are ignored. A request has two lines, for its arrival and its end. Requests are yielded in order
of arrival once their ends are known. Memory is that of the requests in flight, plus O(distinct
blocks) to infer conversations that clients do not name.

SGLang's own requests (warm-up, health checks) are ignored, as are refused requests and requests that
were aborted before their first token. ``sglang_prompt.py`` cuts the prompts.
"""

from __future__ import annotations

import datetime
import re
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canopy_lab.trace import lines
from canopy_lab.trace.infer import ConversationIndex
from canopy_lab.trace.prompts import ORDER_WINDOW, copy_with, escape_name, with_conversation
from canopy_lab.trace.record import STOPS, TraceRequest
from canopy_lab.trace.sglang_prompt import (
    HOW_TO_LOG,
    SERVER_BLOCK_TOKENS,
    PromptCutter,
    characters_per_token,
    event_of,
    has_server_ids,
    is_event,
    media_ids,
    object_in,
    token_ids,
)
from sglang_canopy.errors import CanopyError

WARM_UP_TEXT = "The capital city of France is"
"""Prompt of SGLang's warm-up (``http_server.py``, ``_execute_server_warmup``)."""
HEALTH_CHECK = "HEALTH_CHECK"
"""Prefix of the request ids of SGLang's health checks (``constants.py``)."""
_RECEIVED, _FINISHED = "request.received", "request.finished"

_POOL_TOKENS = re.compile(rb"\bmax_total_num_tokens=(\d{1,15})\b")
_DP_RANK = re.compile(rb"^\[[^\]]* DP(\d{1,5})\b")
_START_MARK = b"server_args=ServerArgs("
_FLUSH_MARK = b"Cache flushed successfully!"
"""``scheduler.py``, ``flush_cache``."""

_COMPARED_LINES = 16
"""Number of recent lines that a new line is compared with, to find copies."""
_MIN_SET_BACK_S = 60.0
"""A clock that falls by less belongs to mixed lines of several processes."""


@dataclass(slots=True)
class _ReceivedRequest:
    """A request that was received; ``request`` is ``None`` until it is finished."""

    rid: str
    time_s: float
    request: TraceRequest | None = None
    is_ignored: bool = False
    """Whether it ended without being a request of the trace."""


def read(path: Path, tolerance: lines.Tolerance) -> Iterator[TraceRequest]:
    """Yield the finished requests of ``path`` in order of arrival."""
    cutter = PromptCutter(characters_per_token=characters_per_token(path))
    return _read_requests(path, _LogReader(path, tolerance, cutter))


def read_as_server(
    path: Path | str, *, block_tokens: int = SERVER_BLOCK_TOKENS, skip_bad: int = 0
) -> Iterator[TraceRequest]:
    """Yield the requests with the block ids that a server computes from tokens and salts.

    The ids are those of ``radix/live_request.py``: whole blocks of ``block_tokens`` (the server's
    setting of that name), chained xxh3 seeded by the request's salts. So a plan made from these ids
    names subtrees of the server. A prompt that is logged as text only, or with images, or for a LoRA
    adapter (the log lacks its salt) has ids that no server computes: it counts as traffic, and a TTL
    for its subtree has no effect. Raises ``CanopyError``.
    """
    source = lines.readable_path(path)
    tolerance = lines.Tolerance(source, skip_bad)
    cutter = PromptCutter(block_tokens, characters_per_token(source), as_server=True)
    yield from _read_requests(source, _LogReader(source, tolerance, cutter))
    tolerance.report()


def logs_tokens(path: Path | str) -> bool:
    """Return whether a prompt of the log has a server's ids: token ids, without an adapter."""
    for _, text in lines.read_lines(lines.readable_path(path)):
        try:
            event = event_of(text, (_FINISHED,))
            if event is not None and has_server_ids(object_in(event, "obj")):
                return True
        except lines.BadLine:
            continue
    return False


def pool_tokens(path: Path | str) -> tuple[int, int] | None:
    """Return the device's KV pool in tokens, as logged at the latest start, and the number of DP ranks
    that it is the sum of; ``None`` if the log has no such line."""
    pool_by_rank: dict[bytes, int] = {}
    for _, text in lines.read_lines(lines.readable_path(path)):
        if is_event(text):
            continue
        if _START_MARK in text:
            pool_by_rank = {}
        pool, rank = _POOL_TOKENS.search(text), _DP_RANK.search(text)
        if pool is not None:
            pool_by_rank[rank[1] if rank else b""] = int(pool[1])
    return (sum(pool_by_rank.values()), len(pool_by_rank)) if pool_by_rank else None


def last_flush(path: Path | str) -> int:
    """Return the line of the last server start or cache flush (``/flush_cache``, weights update); 0 if
    there is none. No request runs at that time, so later lines belong to later requests. Raises
    ``CanopyError``."""
    line_of_flush = 0
    for line, text in lines.read_lines(lines.readable_path(path)):
        if (_FLUSH_MARK in text or _START_MARK in text) and not is_event(text):
            line_of_flush = line
    return line_of_flush


def _read_requests(path: Path, reader: _LogReader) -> Iterator[TraceRequest]:
    for line, text in lines.read_lines(path):
        try:
            reader.read_line(line, text)
        except lines.BadLine as error:
            reader.tolerance.count_bad(line, error)
        yield from reader.pop_ready()
    yield from reader.pop_ready(0)
    reader.report()


class _LogReader:
    def __init__(self, path: Path, tolerance: lines.Tolerance, cutter: PromptCutter) -> None:
        self.path, self.tolerance, self._cutter = path, tolerance, cutter
        self._event_count = 0
        self._changes: Counter[str] = tolerance.understood.changed
        self._arrived: deque[_ReceivedRequest] = deque()
        """In the order of the log, finished or not; a client may reuse a name."""
        self._latest_lines: deque[bytes] = deque(maxlen=_COMPARED_LINES)
        self._running_by_rid: dict[str, _ReceivedRequest] = {}
        self._dropped_rids: set[str] = set()
        """Requests dropped while they were in flight."""
        self._clock = _ServerClock(path)
        self._last_s = 0.0
        self._index = ConversationIndex()

    def read_line(self, line: int, text: bytes) -> None:
        """Read one line of the log. Raises ``BadLine``."""
        event = event_of(text, (_RECEIVED, _FINISHED))
        if event is None:
            if b"Receive: obj=" in text and not is_event(text):
                raise lines.BadLine(f"the log is in text form; start the server with {HOW_TO_LOG}")
            return
        if text in self._latest_lines:
            # Two handlers of the server's logger write every line twice.
            self.tolerance.understood.left_out["logged twice"] += event["event"] == _FINISHED
            return
        self._latest_lines.append(text)
        self._event_count += 1
        rids = event.get("rid")
        for rid in map(str, rids if isinstance(rids, list) else [rids]):
            if rid.startswith(HEALTH_CHECK):
                continue  # not a client's request, and often more frequent than all others
            if event["event"] == _FINISHED:
                self._finish(rid, event, line)
            elif not _has_several_answers(event):
                self._add_arrival(_ReceivedRequest(rid, self._clock.event_s(event, line)))

    def _add_arrival(self, received: _ReceivedRequest) -> _ReceivedRequest:
        self._arrived.append(received)
        self._running_by_rid[received.rid] = received
        return received

    def _finish(self, rid: str, event: Mapping[str, Any], line: int) -> None:
        obj, meta = object_in(event, "obj"), object_in(event, "out", "meta_info")
        ended_s = self._clock.event_s(event, line)
        self._dropped_rids.discard(rid)
        received = self._running_by_rid.get(rid)
        if received is None:
            # The log begins after the request's arrival.
            latency = meta.get("e2e_latency")
            latency_s = latency if isinstance(latency, (int, float)) else 0.0
            received = self._add_arrival(_ReceivedRequest(rid, ended_s - latency_s))
        del self._running_by_rid[rid]
        received.is_ignored = True  # until it is parsed successfully
        if was_refused(meta):
            self.tolerance.understood.left_out["refused, or aborted before their first token"] += 1
        elif not is_warm_up(obj):
            received.request = self._parse(obj, meta, line)
            received.is_ignored = False

    def pop_ready(self, max_running: int | None = None) -> Iterator[TraceRequest]:
        """Yield the oldest requests up to the first that still runs. A running request is dropped after
        ``max_running`` (``ORDER_WINDOW``) later arrivals."""
        max_running = ORDER_WINDOW if max_running is None else max_running
        while self._arrived:
            head = self._arrived[0]
            if head.request is None and not head.is_ignored and len(self._arrived) <= max_running:
                return
            self._arrived.popleft()
            if head.is_ignored:
                continue
            if head.request is None:
                self._dropped_rids.add(head.rid)
                if self._running_by_rid.get(head.rid) is head:
                    del self._running_by_rid[head.rid]
                continue
            # A request without a received event may be late; times of a trace never decrease.
            self._last_s = max(self._last_s, head.time_s)
            yield with_conversation(copy_with(head.request, time_s=self._last_s), self._index)

    def _parse(self, obj: Mapping[str, Any], meta: Mapping[str, Any], line: int) -> TraceRequest:
        """Return the request without its time and its inferred fields. Raises ``BadLine``."""
        blocks, tokens = self._cutter(obj)
        self._count_changes(obj)
        custom_params = object_in(obj, "sampling_params", "custom_params")
        conversation, category = labels_of(obj)
        turn, stop = custom_params.get("canopy_turn"), custom_params.get("canopy_stop")
        reason = object_in(meta, "finish_reason").get("type")
        return TraceRequest(
            0.0,
            tokens,
            # An embedding has no completion tokens.
            lines.count(meta, "completion_tokens") if "completion_tokens" in meta else 0,
            blocks,
            self._cutter.block_tokens,
            category=category,
            turn=turn if type(turn) is int and turn > 0 else 0,
            conversation=conversation,
            stop=str(stop) if stop else STOPS.get(str(reason)),
            line=line,
        )

    def _count_changes(self, obj: Mapping[str, Any]) -> None:
        estimate = f"{self._cutter.characters_per_token:.3g} characters a token"
        if not token_ids(obj):
            self._changes[f"are logged as text, so their lengths are estimated ({estimate})"] += 1
        if media_ids(obj):
            self._changes["have images, video or sound, whose tokens are not counted"] += 1
        if obj.get("session_params"):
            self._changes["continue a session that is not in the log, so they look shorter"] += 1

    def report(self) -> None:
        """Count the requests that never finished. Raises ``CanopyError`` if the log has no request."""
        if self._event_count == 0:
            raise CanopyError(
                f"{str(self.path)!r} holds no request in JSON; start the server with {HOW_TO_LOG}"
            )
        self._clock.check_order()
        if self._dropped_rids:
            self.tolerance.understood.left_out["never finished"] += len(self._dropped_rids)


class _ServerClock:
    """Seconds since the first stamp. If the clock was set back, time continues from there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._previous: datetime.datetime | None = None
        self._rises = self._falls = 0
        self._start: datetime.datetime | None = None
        self._last_s = self._set_back_s = 0.0

    def check_order(self) -> None:
        """Raise ``CanopyError`` if most stamps fall: the log is newest first."""
        if self._falls > 3 and self._falls > 4 * self._rises:
            raise CanopyError(
                f"{str(self._path)!r} is newest first; reverse its lines (tac FILE > sorted.log) and "
                "read that"
            )

    def event_s(self, event: Mapping[str, Any], line: int) -> float:
        """Return the time of an event. Raises ``BadLine``."""
        text = event.get("timestamp")
        try:
            date = datetime.datetime.fromisoformat(str(text))
        except ValueError:
            raise lines.BadLine(f"'timestamp' must be a date and time, got {text!r:.60}") from None
        date = date if date.tzinfo else date.replace(tzinfo=datetime.timezone.utc)
        self._start = self._start or date
        if self._previous is not None:
            self._rises, self._falls = (
                self._rises + (date > self._previous),
                self._falls + (date < self._previous),
            )
            if self._rises + self._falls == ORDER_WINDOW:
                self.check_order()
        self._previous = date
        now_s = (date - self._start).total_seconds() + self._set_back_s
        if now_s < self._last_s - _MIN_SET_BACK_S:
            lines.log.warning(
                "%s, line %d: the clock goes back by %.0f s; put files of one log together in order "
                "of time (a clock that was set back does no harm)",
                self._path, line, self._last_s - now_s,
            )  # fmt: skip
            self._set_back_s += self._last_s - now_s
            now_s = self._last_s
        self._last_s = max(self._last_s, now_s)
        return now_s


def labels_of(obj: Mapping[str, Any]) -> tuple[str | None, str]:
    """Return the conversation and the category of a logged request."""
    params = object_in(obj, "sampling_params", "custom_params")
    name = params.get("canopy_conversation") or obj.get("session_id")
    return escape_name(name) if name else None, str(params.get("canopy_category") or "default")


def is_warm_up(obj: Mapping[str, Any]) -> bool:
    """Return whether the server sent this request to itself at its start."""
    text = obj.get("text")
    texts = text if isinstance(text, list) else [text]
    return bool(texts) and all(t == WARM_UP_TEXT for t in texts) and not token_ids(obj)


def was_refused(meta: Mapping[str, Any]) -> bool:
    """Return whether no part of the prompt was computed: the queue was full, the prompt too long,
    or the request aborted while it waited."""
    reason = object_in(meta, "finish_reason")
    return reason.get("type") == "abort" and (
        reason.get("status_code") is not None or not meta.get("completion_tokens")
    )


def _has_several_answers(event: Mapping[str, Any]) -> bool:
    """Return whether each of several answers (n > 1) ends under its own name instead of this one."""
    params = object_in(event, "obj").get("sampling_params")
    settings = params if isinstance(params, list) else [params]
    counts = [item.get("n") for item in settings if isinstance(item, dict)]
    return any(type(n) is int and n > 1 for n in counts)
