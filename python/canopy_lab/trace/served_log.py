"""TTFT, duration and cached tokens of each request in a server's request log.

SGLang logs the end of the prefill with ``--enable-metrics``, and the tiers of cached tokens with
``--enable-cache-report``. A record of ``sglang_log.py`` has the line of the log on which its request
ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canopy_lab.trace import lines
from canopy_lab.trace.sglang_prompt import event_of, object_in
from sglang_canopy.errors import CanopyError

LOG_FLAGS = "--log-requests --log-requests-level 3 --log-requests-format json --enable-metrics"
CACHE_FLAG = "--enable-cache-report"
TIERS = {"device": "device", "host": "host", "storage": "disk"}
"""SGLang's names of the tiers of cached tokens -> ours."""


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """A finished request. Times in seconds; ``None`` if the log has no value."""

    ttft_s: float | None
    e2e_s: float | None
    cached_tokens: int
    cached_by_tier: Mapping[str, int] | None
    """``device``, ``host``, ``disk``."""


def read_served(path: Path | str) -> dict[int, ServedRequest]:
    """Return the finished requests by line. Raises ``CanopyError`` without a first token's time."""
    source = lines.readable_path(path)
    served: dict[int, ServedRequest] = {}
    for number, text in lines.read_lines(source):
        try:
            event = event_of(text, ("request.finished",))
        except lines.BadLine:
            continue
        if event is not None:
            served[number] = _served_request(object_in(event, "out", "meta_info"))
    if not any(r.ttft_s is not None for r in served.values()):
        raise CanopyError(
            f"{str(path)!r} has no times of first tokens; start the server with {LOG_FLAGS}"
        )
    return served


def _served_request(meta: Mapping[str, Any]) -> ServedRequest:
    start_s, filled_s = (_number(meta, k) for k in ("request_received_ts", "prefill_finished_time"))
    # Without streaming, the first token is sent with the last.
    ttft_s = _number(meta, "first_token_latency")
    if start_s is not None and filled_s is not None and filled_s > start_s:
        ttft_s = filled_s - start_s
    details = meta.get("cached_tokens_details")
    by_tier = None
    if isinstance(details, dict):
        by_tier = {ours: int(_number(details, name) or 0) for name, ours in TIERS.items()}
    cached = _number(meta, "cached_tokens")
    return ServedRequest(ttft_s, _number(meta, "e2e_latency"), int(cached or 0), by_tier)


def _number(meta: Mapping[str, Any], key: str) -> float | None:
    value = meta.get(key)
    return float(value) if isinstance(value, (int, float)) and value == value else None
