"""SGLang's own request logs.

Written by a server started with ``--log-requests --log-requests-level 3 --log-requests-format
json`` (to stdout, or into a folder with ``--log-requests-target``). Other lines of the server's
log are ignored. A request appears twice, when it is received and when it is finished; it is
yielded in order of arrival once its end is known, so memory is that of the requests in flight
plus, where clients name no conversation, the inference's O(distinct blocks).

Prompts are token ids in the log (chat, or ``input_ids``), hashed here into chained blocks of 16
tokens. A prompt logged as text only is cut into blocks of 64 characters and its length is
estimated as 4 characters a token: equal texts still mean equal blocks.
"""

from __future__ import annotations

import datetime
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from sglang_canopy.errors import CanopyError
from sglang_canopy.trace import lines
from sglang_canopy.trace.infer import ConversationIndex
from sglang_canopy.trace.record import TraceRequest

BLOCK_TOKENS = 16
CHARACTERS_A_TOKEN = 4
HOW_TO_LOG = "--log-requests --log-requests-level 3 --log-requests-format json"

_STOPS = {"length": "length", "stop": "end", "tool_calls": "tool"}


@dataclass(slots=True)
class _Flight:
    """A request that was received; ``end`` is its finished event, once there."""

    time_s: float
    line: int
    end: dict[str, Any] | None = None


def read(path: Path, tolerance: lines.Tolerance) -> Iterator[TraceRequest]:
    """Yield the finished requests of ``path`` in order of arrival."""
    reader = _Reader(path, tolerance)
    for line, text in lines.read_lines(path):
        try:
            reader.take(line, text)
        except lines.BadLine as error:
            tolerance.bad(line, str(error))
        yield from reader.ready()
    yield from reader.rest()
    if reader.seen == 0:
        raise CanopyError(
            f"{str(path)!r} holds no request in JSON; start the server with {HOW_TO_LOG}"
        )


class _Reader:
    def __init__(self, path: Path, tolerance: lines.Tolerance) -> None:
        self.path, self.tolerance = path, tolerance
        self.seen = 0
        self._flying: OrderedDict[str, _Flight] = OrderedDict()
        self._start: datetime.datetime | None = None
        self._last_s = 0.0
        self._index = ConversationIndex()

    def take(self, line: int, text: bytes) -> None:
        begin = text.find(b'{"timestamp"')
        if begin < 0 or b'"event": "request.' not in text:
            if b"Receive: obj=" in text:
                raise lines.BadLine(f"the log is in text form; start the server with {HOW_TO_LOG}")
            return
        event = lines.parse_object(text[begin:])
        if event.get("event") == "request.received":
            self.seen += 1
            for rid in _ids(event):
                self._flying[rid] = _Flight(self._time(event), line)
        elif event.get("event") == "request.finished":
            self.seen += 1
            for rid in _ids(event):
                flight = self._flying.get(rid)
                if flight is None:
                    # The log begins after this one was received.
                    meta = _mapping(_mapping(event, "out"), "meta_info")
                    waited = meta.get("e2e_latency")
                    waited = waited if isinstance(waited, (int, float)) else 0.0
                    flight = self._flying[rid] = _Flight(self._time(event) - waited, line)
                flight.end, flight.line = event, line

    def ready(self) -> Iterator[TraceRequest]:
        """What can be yielded: the oldest requests, up to the first still running."""
        while self._flying and next(iter(self._flying.values())).end is not None:
            _, flight = self._flying.popitem(last=False)
            yield from self._finish(flight)

    def rest(self) -> Iterator[TraceRequest]:
        """At the end of the log: the finished ones among those still running."""
        lost = 0
        for flight in self._flying.values():
            if flight.end is None:
                lost += 1
            else:
                yield from self._finish(flight)
        self._flying.clear()
        if lost:
            lines.log.warning("%s: %d requests never finished, left out", self.path, lost)

    def _finish(self, flight: _Flight) -> Iterator[TraceRequest]:
        assert flight.end is not None
        try:
            yield self._request(flight, flight.end)
        except lines.BadLine as error:
            self.tolerance.bad(flight.line, str(error))

    def _request(self, flight: _Flight, end: dict[str, Any]) -> TraceRequest:
        given = _mapping(end, "obj")
        meta = _mapping(_mapping(end, "out"), "meta_info")
        blocks, tokens = _blocks(given)
        custom = _mapping(_mapping(given, "sampling_params"), "custom_params")
        conversation, turn, _ = self._index.add(blocks, tokens, BLOCK_TOKENS)
        named = custom.get("canopy_conversation") or given.get("session_id")
        said_turn, stop = custom.get("canopy_turn"), custom.get("canopy_stop")
        reason = _mapping(meta, "finish_reason").get("type")
        # Requests without a received event may come late; a trace never goes back.
        self._last_s = max(self._last_s, flight.time_s)
        return TraceRequest(
            self._last_s,
            tokens,
            lines.count(dict(meta), "completion_tokens"),
            blocks,
            BLOCK_TOKENS,
            category=str(custom.get("canopy_category") or "default"),
            turn=said_turn if type(said_turn) is int and said_turn > 0 else turn,
            conversation=str(named) if named else str(conversation),
            stop=str(stop) if stop else _STOPS.get(str(reason)),
            line=flight.line,
        )

    def _time(self, event: Mapping[str, Any]) -> float:
        stamp = event.get("timestamp")
        try:
            when = datetime.datetime.fromisoformat(str(stamp))
        except ValueError:
            raise lines.BadLine(f"'timestamp' must be a date and time, got {stamp!r}") from None
        self._start = self._start or when
        return (when - self._start).total_seconds()


def _ids(event: Mapping[str, Any]) -> list[str]:
    rid = event.get("rid")
    return [str(r) for r in rid] if isinstance(rid, list) else [str(rid)]


def _mapping(of: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = of.get(key)
    return value if isinstance(value, dict) else {}


def _blocks(given: Mapping[str, Any]) -> tuple[tuple[int, ...], int]:
    """Chained block ids of a logged prompt, and its length in tokens."""
    ids, text = given.get("input_ids"), given.get("text")
    if isinstance(ids, list) and ids:
        if not set(map(type, ids)) <= {int}:
            raise lines.BadLine(
                f"the prompt's token ids are shortened or nested; start the server with {HOW_TO_LOG}"
                " and send one prompt a request"
            )
        raw = array("q", ids).tobytes()
        return chained(raw, BLOCK_TOKENS * array("q").itemsize), len(ids)
    if isinstance(text, str) and text:
        raw = text.encode("utf-32-le")
        tokens = -(-len(text) // CHARACTERS_A_TOKEN)
        return chained(raw, BLOCK_TOKENS * CHARACTERS_A_TOKEN * 4), tokens
    raise lines.BadLine(f"the prompt was not logged; start the server with {HOW_TO_LOG}")


def chained(raw: bytes, block_bytes: int) -> tuple[int, ...]:
    """Ids (63 bits) of the blocks of ``raw``: equal id, equal content up to the block's end."""
    ids, before = [], b""
    for i in range(0, len(raw), block_bytes):
        before = blake2b(raw[i : i + block_bytes], digest_size=8, key=before).digest()
        ids.append(int.from_bytes(before, "little") >> 1)
    return tuple(ids)
