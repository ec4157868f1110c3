"""What a server's request log says of how each request was served: TTFT, duration, cached tokens.

With ``--enable-metrics`` SGLang notes when the prefill was done, and with ``--enable-cache-report``
from which tier the cached tokens came. Beside ``sglang_log.py``, whose records name the line of the
log that each request ended on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canopy_lab.trace import lines
from canopy_lab.trace.sglang_prompt import event_of, inner
from sglang_canopy.errors import CanopyError

HOW = "--log-requests --log-requests-level 3 --log-requests-format json --enable-metrics"
REPORT = "--enable-cache-report"
TIERS = {"device": "device", "host": "host", "storage": "disk"}
"""SGLang's names of where cached tokens were, and ours."""


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """One finished request. Times in seconds, ``None`` where the log does not say."""

    ttft_s: float | None
    e2e_s: float | None
    cached_tokens: int
    cached_by_tier: Mapping[str, int] | None
    """``device``, ``host``, ``disk``."""


def read_served(path: Path | str) -> dict[int, ServedRequest]:
    """The finished requests of a log by the number of their line.

    Raises ``CanopyError`` if none says when its first token was there.
    """
    source = lines.existing(path)
    found: dict[int, ServedRequest] = {}
    for number, text in lines.read_lines(source):
        try:
            event = event_of(text, ("request.finished",))
        except lines.BadLine:
            continue
        if event is not None:
            found[number] = _served(inner(event, "out", "meta_info"))
    if not any(r.ttft_s is not None for r in found.values()):
        raise CanopyError(
            f"{str(path)!r} does not say when first tokens were there; start the server with {HOW}"
        )
    return found


def _served(meta: Mapping[str, Any]) -> ServedRequest:
    received, filled = (_number(meta, k) for k in ("request_received_ts", "prefill_finished_time"))
    # Without streaming the first token that is sent is not the first that was there.
    ttft = _number(meta, "first_token_latency")
    if received is not None and filled is not None and filled > received:
        ttft = filled - received
    details = meta.get("cached_tokens_details")
    by_tier = None
    if isinstance(details, dict):
        by_tier = {ours: int(_number(details, name) or 0) for name, ours in TIERS.items()}
    cached = _number(meta, "cached_tokens")
    return ServedRequest(ttft, _number(meta, "e2e_latency"), int(cached or 0), by_tier)


def _number(of: Mapping[str, Any], key: str) -> float | None:
    value = of.get(key)
    return float(value) if isinstance(value, (int, float)) and value == value else None
