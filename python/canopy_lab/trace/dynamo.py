"""Dynamo's own capture of requests (``dynamo.request.trace.v1``), as rows of Mooncake's form.

Each line is an event; a request is its ``request_end``. Prompts are hashes of their blocks, which cover
the prefix before them (``replay.input_sequence_hashes``). Times are milliseconds since 1970.
"""

from __future__ import annotations

from typing import Any

from canopy_lab.trace import lines

SCHEMA = "dynamo.request.trace."
ENDED = "captured_at_its_end"
"""Key of rows whose order is that of the requests' ends."""
_END = "request_end"


def is_row(record: dict[str, Any]) -> bool:
    return str(record.get("schema", "")).startswith(SCHEMA)


def row_of(record: dict[str, Any]) -> dict[str, Any] | None:
    """Return the request in Mooncake's form, or ``None`` for another event. Raises ``BadLine``."""
    if record.get("event_type") != _END:
        return None
    request = _inner(record, "request")
    replay = _inner(request, "replay")
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
        ENDED: True,
        "session_id": _inner(record, "agent_context").get("session_id"),
    }


def _inner(of: dict[str, Any], name: str) -> dict[str, Any]:
    value = of.get(name)
    return value if isinstance(value, dict) else {}
