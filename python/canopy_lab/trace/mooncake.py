"""Traces of block ids in Mooncake's form: JSON lines with times in milliseconds.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}

``hash_ids`` are prefix-chained and cover the prompt; a last partial block may have one or not. Blocks
have 512 tokens in Mooncake's own traces; in Dynamo's and AIPerf's their size is that of the model's KV
blocks. The size is the field ``block_size``, else it is inferred from lengths and numbers of ids.
Rows may have a ``session_id``; later rows of a session may have a ``delay`` after the previous answer
instead of a time. Without a session, conversation and turn are inferred from the chain (``infer.py``).

Dynamo's own capture (``dynamo.request.trace.v1``) is converted to such rows: each line is an event, and
a request is its ``request_end``. Its hashes of blocks cover the prefix before them
(``replay.input_sequence_hashes``). Times are milliseconds since 1970.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from canopy_lab.trace import lines
from canopy_lab.trace.infer import ConversationIndex
from canopy_lab.trace.prompts import copy_with, escape_name, reorder
from canopy_lab.trace.record import TraceRequest

_DYNAMO_SCHEMA = "dynamo.request.trace."
_ORDERED_BY_END = "captured_at_its_end"
"""Key of rows whose order is that of the requests' ends."""
_END_EVENT = "request_end"


def is_dynamo_event(record: dict[str, Any]) -> bool:
    """Return whether a line is an event of Dynamo's own capture."""
    return str(record.get("schema", "")).startswith(_DYNAMO_SCHEMA)


def _dynamo_to_row(record: dict[str, Any]) -> dict[str, Any] | None:
    """Return the request in Mooncake's form, or ``None`` for another event. Raises ``BadLine``."""
    if record.get("event_type") != _END_EVENT:
        return None
    request = _object_in(record, "request")
    replay = _object_in(request, "replay")
    if "input_sequence_hashes" not in replay:
        raise lines.BadLine(
            "its request has no 'replay' with 'input_sequence_hashes', so its prompt is not known"
        )
    return {
        "timestamp": request.get("request_received_ms"),
        "input_length": replay.get("input_length", request.get("input_tokens")),
        "output_length": request.get("output_tokens", 0),
        "hash_ids": replay["input_sequence_hashes"],
        "block_size": replay.get("trace_block_size"),
        _ORDERED_BY_END: True,
        "session_id": _object_in(record, "agent_context").get("session_id"),
    }


def _object_in(record: dict[str, Any], name: str) -> dict[str, Any]:
    value = record.get(name)
    return value if isinstance(value, dict) else {}


BLOCK_TOKENS = 512
_TRIED_BLOCK_TOKENS = (BLOCK_TOKENS, 16, 32, 64, 128, 256, 1024, 2048, 4096, 8, 4, 2, 1)
"""Block sizes in the order in which they are tried."""
_MAX_HEAD_ROWS = 1000
"""Number of rows from which the block size is inferred."""
_MIN_FITTING_SHARE = 0.95
_MAX_SESSIONS = 1_000_000
"""Maximum sessions whose last time and turn are kept."""


def read(path: Path, tolerance: lines.Tolerance) -> Iterator[TraceRequest]:
    """Yield the requests of ``path`` by time; memory O(distinct blocks), for the inference."""
    time_order, index = lines.TimeOrder(), ConversationIndex()
    reader = _MooncakeReader(infer_block_tokens(path), tolerance)
    if reader.block_tokens != BLOCK_TOKENS:
        tolerance.understood.remarks[f"Blocks have {reader.block_tokens} tokens."] = None
    requests = lines.parse_lines(path, tolerance, reader.parse)
    # Only delays, and captures at the end of requests, put rows out of order.
    unordered = any("delay" in record or _ORDERED_BY_END in record for record in _head_rows(path))
    for request in reorder(requests) if unordered else requests:
        try:
            time_order.check(request.time_s)
        except lines.BadLine as error:
            tolerance.count_bad(request.line, error)
            continue
        if request.conversation is None:
            number, turn, _ = index.add(request.blocks, request.input_tokens, request.block_tokens)
            request = copy_with(request, conversation=str(number), turn=turn)
        else:
            request = copy_with(request, turn=reader.next_turn(request.conversation))
        yield request


def infer_block_tokens(path: Path) -> int:
    """Return the first row's ``block_size``, else a size that fits, else ``BLOCK_TOKENS``."""
    for record in islice(_head_rows(path), 1):
        if type(record.get("block_size")) is int and record["block_size"] > 0:
            return int(record["block_size"])
    lengths = [
        (record["input_length"], len(record["hash_ids"]))
        for record in _head_rows(path)
        if type(record.get("input_length")) is int and isinstance(record.get("hash_ids"), list)
    ]
    lengths = [(tokens, ids) for tokens, ids in lengths if ids]
    # A last partial block has an id in most traces, so sizes are first tried with one.
    for partial in (1, 0):
        for size in _TRIED_BLOCK_TOKENS:
            fits = sum(ids == (tokens + partial * (size - 1)) // size for tokens, ids in lengths)
            if lengths and fits >= _MIN_FITTING_SHARE * len(lengths):
                return size
    return BLOCK_TOKENS


def _head_rows(path: Path) -> Iterator[dict[str, Any]]:
    for _, text in islice(lines.read_lines(path), _MAX_HEAD_ROWS):
        with contextlib.suppress(lines.BadLine):
            record = _to_row(lines.parse_object(text))
            if record is not None:
                yield record


def _to_row(record: dict[str, Any]) -> dict[str, Any] | None:
    return _dynamo_to_row(record) if is_dynamo_event(record) else record


class _MooncakeReader:
    def __init__(self, block_tokens: int, tolerance: lines.Tolerance) -> None:
        self.block_tokens = block_tokens
        self._understood = tolerance.understood
        self._last_by_session: OrderedDict[str, tuple[float, int]] = OrderedDict()
        """Session -> (time, first block) of its last request."""
        self._turn_by_session: dict[str, int] = {}

    def next_turn(self, session: str) -> int:
        """Return the turn of the session's next request by time."""
        turn = self._turn_by_session[session] = self._turn_by_session.pop(session, 0) + 1
        if len(self._turn_by_session) > _MAX_SESSIONS:
            del self._turn_by_session[next(iter(self._turn_by_session))]
        return turn

    def parse(self, line: int, text: bytes) -> TraceRequest | None:
        """Parse one row; ``None`` for an event that is no request. Raises ``BadLine``."""
        record = _to_row(lines.parse_object(text))
        if record is None:
            return None
        tokens = lines.count(record, "input_length")
        output = lines.count(record, "output_length")
        blocks = lines.block_ids(record)
        size = self.block_tokens
        if record.get("block_size") not in (None, size):
            raise lines.BadLine(
                f"its block_size is {record['block_size']!r:.40}, and that of the rows before it is {size}; "
                "give a trace of one block size"
            )
        if len(blocks) > -(-tokens // size):
            raise lines.BadLine(
                f"'hash_ids' has {len(blocks)} blocks of {size} tokens, more than {tokens} tokens "
                "fill; if its blocks have another size, name it as 'block_size' in each row"
            )
        if len(blocks) < tokens // size:
            self._understood.changed[
                f"have fewer ids than their tokens fill blocks of {size}, so their ends count as new"
            ] += 1
        session_id = record.get("session_id")
        session = None if session_id in (None, "") else escape_name(session_id)
        time_s = self._time_s(record, session, blocks[0] if blocks else -1)
        return TraceRequest(time_s, tokens, output, blocks, size, conversation=session, line=line)

    def _time_s(self, record: dict[str, Any], session: str | None, first_block: int) -> float:
        """Return seconds from the start of the trace."""
        previous_s, previous_first = self._last_by_session.get(session or "", (None, first_block))
        if first_block != previous_first:
            self._understood.changed[
                "do not begin as the turn before them does; if rows hold only what a turn adds, their "
                "prompts are longer than this"
            ] += 1
        if (
            record.get("timestamp") is None
            and record.get("delay") is not None
            and previous_s is not None
        ):
            time_s = previous_s + lines.number(record, "delay") / 1000
            self._understood.changed[
                "have a delay instead of a time, and the answer before it counts as immediate"
            ] += 1
        else:
            time_s = lines.number(record, "timestamp") / 1000
        if session is not None:
            self._last_by_session[session] = (time_s, first_block)
            self._last_by_session.move_to_end(session)
            if len(self._last_by_session) > _MAX_SESSIONS:
                self._last_by_session.popitem(last=False)
        return time_s
