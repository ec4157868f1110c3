"""Metadata of a request, and the *stamp* that carries it to the scheduler.

A client writes flat keys into ``custom_params`` (a field of SGLang's OpenAI bodies and of
``/generate``); missing values are inferred (``infer.py``). On arrival they become one small dict, the
stamp, with the arrival time, so that all tensor-parallel ranks use the same values. Clients cannot write
the stamp directly.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from sglang_canopy.records import CLIENT, GATEWAY

KEY_PREFIX = "canopy"
"""Prefix of all keys of Canopy."""

STAMP_KEY = "canopy"
"""Key of ``custom_params`` for the stamp."""

FORCED_CALL = "forced"
"""``tool_parser`` of a request that forces a tool call, in place of a parser's name."""

PARAMS_ADDED = "added"
"""Stamp flag: the client sent no ``custom_params``, so the scheduler removes the field."""

EPOCH_S = time.time() - time.monotonic()
"""Unix time at zero of this process's monotonic clock, for the disk tier."""

MAX_NAME_CHARS = 128
MAX_TURN = 1_000_000
MAX_KEEP_S = 3600.0
MAX_RETURN_S = 7 * 24 * 3600.0
MAX_TTL_S = 30 * 24 * 3600.0
MAX_SAMPLES = 1_000_000

_NAME = re.compile(r"[\w.:/@+-]+", re.ASCII)


def _check_name(value: Any) -> str:
    is_name = isinstance(value, str) and len(value) <= MAX_NAME_CHARS and _NAME.fullmatch(value)
    if not is_name:
        raise ValueError(f"a string of 1 to {MAX_NAME_CHARS} letters, digits or _ . : / @ + -")
    return value


def conversation_name(value: Any) -> str:
    """Normalise a conversation's name: strip spaces, and replace a long name by its digest. Raises
    ``ValueError`` unless the value is printable text."""
    name = value.strip() if isinstance(value, str) else ""
    if not name or not name.isprintable():
        raise ValueError("a string of printable characters")
    if len(name) <= MAX_NAME_CHARS:
        return name
    return "#" + hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()


def _whole_number(low: int, high: int) -> Callable[[Any], int]:
    """Return a validation of whole numbers, which raises ``ValueError``."""

    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"a whole number from {low} to {high}")
        return value

    return check


def _one_of(*texts: str) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        if value not in texts:
            raise ValueError(f"one of {', '.join(texts)}")
        return str(value)

    return check


def _check_flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def _number(low: float, high: float, unit: str) -> Callable[[Any], float]:
    """Return a validation of numbers, which raises ``ValueError``. ``unit``: their unit."""

    def check(value: Any) -> float:
        if type(value) is float and low <= value <= high:  # nearly every call
            return value
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if (
            not is_number or not low <= value <= high
        ):  # false for NaN, and for integers beyond any float
            raise ValueError(f"{unit} from {low:g} to {high:g}")
        return float(value)

    return check


CLIENT_FIELDS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "canopy_category": ("category", _check_name),
    "canopy_turn": ("turn", _whole_number(1, MAX_TURN)),
    "canopy_conversation": ("conversation", conversation_name),
    "canopy_stop": ("stop", _one_of("tool", "end", "length")),
    "canopy_over": ("over", _check_flag),
    "canopy_return_in_s": ("return_in_s", _number(0, MAX_RETURN_S, "seconds")),
    "canopy_keep_s": ("keep_s", _number(0, MAX_KEEP_S, "seconds")),
    "canopy_slo_ms": ("slo_ms", _number(1, 1e7, "milliseconds")),
    "canopy_ttl_s": ("ttl_s", _number(0, MAX_TTL_S, "seconds")),
}
"""Keys that clients may write: name on the wire -> (field, validation)."""

_MAX_TIME_S = 1e10
_check_time = _number(0.0, _MAX_TIME_S, "seconds")
STAMP_FIELDS: dict[str, Callable[[Any], Any]] = {
    **dict(CLIENT_FIELDS.values()),
    "source": _one_of(CLIENT, GATEWAY),
    "linear": _check_flag,
    "samples": _whole_number(2, MAX_SAMPLES),
    "tool_parser": _check_name,
    PARAMS_ADDED: _check_flag,
    "time": _check_time,
    "epoch": _number(-_MAX_TIME_S, _MAX_TIME_S, "seconds"),
    "alpha": _number(0.0, _MAX_TIME_S, "seconds a token"),
    "beta": _number(-_MAX_TIME_S, _MAX_TIME_S, "seconds"),
}
"""Fields of a stamp -> validation."""

BOUNDS = "canopy_document_bounds"
"""Flat list of token positions ``[start, end, start, end, ...]``, or ``"off"``."""
RATIO = "canopy_recompute_ratio"
DOCUMENTS = "canopy_documents"
"""``"parts"``: in chat messages with several text parts, each part except the last is a document.
Also the key of the report in an answer's ``meta_info``, a list with one object, and of the documents'
state in ``/server_info``."""
ORDER = "canopy_order"
DOCUMENT_FIELDS = (BOUNDS, RATIO, DOCUMENTS, ORDER)

FORCE_OUTPUT = "canopy_force_output"
"""Flat list of token ids to generate; needs ``--canopy-enable-forced-output``."""

OTHER_PARTS_KEYS = (FORCE_OUTPUT, *DOCUMENT_FIELDS)
"""Keys that other parts of Canopy validate."""


def client_fields(custom_params: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the valid Canopy fields of a request's ``custom_params``, and an error for each wrong key.
    Keys without the prefix ``canopy`` are skipped. Wrong keys are ignored: a hint must not fail a
    request. An error states the key, the shortened value and the allowed values."""
    fields: dict[str, Any] = {}
    errors: dict[str, str] = {}
    for key, value in custom_params.items() if isinstance(custom_params, Mapping) else ():
        if not isinstance(key, str) or not key.startswith(KEY_PREFIX) or key in OTHER_PARTS_KEYS:
            continue
        if key not in CLIENT_FIELDS:
            known_keys = ", ".join(CLIENT_FIELDS)
            errors[key] = f"unknown key {_short(key)}; Canopy's keys are: {known_keys}"
            continue
        field, check = CLIENT_FIELDS[key]
        try:
            fields[field] = check(value)
        except ValueError as error:
            errors[key] = f"key {key!r} must be {error}, got {_short(value)}"
    return fields, errors


def make_stamp(
    inferred: Mapping[str, Any], fields: Mapping[str, Any], time_s: float, source: str = CLIENT
) -> dict[str, Any]:
    """Return the stamp, sent as ``custom_params["canopy"]``. The client's fields override inferred
    ones. ``source``: source of the hints, ``CLIENT`` or ``GATEWAY``."""
    return {**inferred, **fields, "source": source, "time": time_s, "epoch": EPOCH_S}


def read_stamp(custom_params: Any) -> dict[str, Any]:
    """Return the valid fields of a request's stamp. Never raises. Equal on all ranks."""
    stamp = custom_params.get(STAMP_KEY) if isinstance(custom_params, dict) else None
    valid_fields: dict[str, Any] = {}
    if not isinstance(stamp, dict):
        return valid_fields
    for name, value in stamp.items():
        check = None if value is None else STAMP_FIELDS.get(name)
        if check is not None:
            try:
                valid_fields[name] = check(value)
            except ValueError:
                continue
    return valid_fields


def read_time(custom_params: Mapping[str, Any]) -> float:
    """Return the valid time of a request's stamp, in seconds; 0 without one."""
    stamp = custom_params.get(STAMP_KEY)
    try:
        return _check_time(stamp.get("time")) if isinstance(stamp, dict) else 0.0
    except ValueError:
        return 0.0


def _short(value: Any) -> str:
    text = repr(value) if not isinstance(value, str) else repr(value[:60])
    return text if len(text) <= 60 else text[:57] + "..."
