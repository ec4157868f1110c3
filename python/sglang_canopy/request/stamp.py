"""What travels with a request to the scheduler: one small dict, ``custom_params["canopy"]``.

It is made once, where the request enters: what the client said, what was inferred, and the time of
arrival, so that every tensor-parallel rank sees the same one. No client may write it itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from sglang_canopy.records import CLIENT, GATEWAY, Request
from sglang_canopy.request.fields import FIELDS, flag, number

STAMP_KEY = "canopy"
"""The key of ``custom_params`` that carries the stamp to the scheduler."""

MARKER_KEY = "canopy-tool-marker"
"""Token ids that open a tool call in the model's output, where the request offers tools."""

MAX_MARKER = 64
"""Tokens of the marker that a request may carry."""

EPOCH_S = time.time() - time.monotonic()
"""Seconds since 1970 when this process's monotonic clock was 0: stamps carry it, because the disk
tier outlives the clock."""


def make_stamp(
    inferred: Mapping[str, Any],
    fields: Mapping[str, Any],
    time_s: float,
    source: str = CLIENT,
) -> dict[str, Any]:
    """The dict that travels as ``custom_params["canopy"]``; the client's fields win.

    ``source``: whose word its hints are.
    """
    return {**inferred, **fields, "source": source, "time": time_s, "epoch": EPOCH_S}


def read_stamp(custom_params: Any) -> dict[str, Any]:
    """The stamp of a request, as far as it is one: fields that ``make_stamp`` cannot have made are
    left out. Never raises; every tensor-parallel rank leaves out the same."""
    stamp = custom_params.get(STAMP_KEY) if isinstance(custom_params, Mapping) else None
    return _sound(stamp, _STAMP) if isinstance(stamp, Mapping) else {}


def read_marker(custom_params: Any) -> list[int]:
    """The token ids under ``MARKER_KEY``; none where they are none."""
    found = custom_params.get(MARKER_KEY) if isinstance(custom_params, Mapping) else None
    if not isinstance(found, list) or any(type(token) is not int for token in found):
        return []
    return found[:MAX_MARKER]


def apply_stamp(request: Request, stamp: Mapping[str, Any]) -> None:
    """Write a stamp into a policy request. ``stamp``: of ``make_stamp``, or ``read_stamp``.

    A stamp without a time leaves the request's as it is.
    """
    request.time = stamp.get("time", request.time)
    request.category = stamp.get("category", request.category)
    request.turn = stamp.get("turn", 1)
    request.conversation = stamp.get("conversation")
    request.over = stamp.get("over", False)
    request.return_in_s = stamp.get("return_in_s")
    request.source = stamp.get("source", CLIENT)
    request.slo_ms = stamp.get("slo_ms")
    if "alpha" in stamp and "beta" in stamp:
        request.ttft_model = (stamp["alpha"], stamp["beta"])


def _source(value: Any) -> str:
    if value not in (CLIENT, GATEWAY):
        raise ValueError(f"{CLIENT} or {GATEWAY}")
    return str(value)


_FAR_S = 1e10
_TIME = number(0.0, _FAR_S, "seconds")
_STAMP: dict[str, Callable[[Any], Any]] = {
    **dict(FIELDS.values()),
    "source": _source,
    "linear": flag,
    "time": _TIME,
    "epoch": number(-_FAR_S, _FAR_S, "seconds"),
    "alpha": number(0.0, _FAR_S, "seconds a token"),
    "beta": number(-_FAR_S, _FAR_S, "seconds"),
}
"""Every field that the entry may stamp, and what it may be."""


def _sound(given: Mapping[Any, Any], checks: Mapping[str, Callable[[Any], Any]]) -> dict[str, Any]:
    sound = {}
    for name, value in given.items():
        check = None if value is None else checks.get(name)
        if check is not None:
            try:
                sound[name] = check(value)
            except ValueError:
                continue
    return sound
