"""What a client may say about a request.

A client writes flat keys into ``custom_params`` (a field that SGLang's OpenAI bodies and
``/generate`` both have); whatever it leaves out is inferred (``sent.py``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from sglang_canopy.errors import CanopyError
from sglang_canopy.request import document_names

MAX_NAME = 128
MAX_TURN = 1_000_000
MAX_KEEP_S = 3600.0
MAX_RETURN_S = 7 * 24 * 3600.0
MAX_TTL_S = 30 * 24 * 3600.0
MAX_PIN_S = 24 * 3600.0

_NAME = re.compile(r"[\w.:/@+-]+", re.ASCII)
_STOPS = ("tool", "end", "length")


def _name(value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME or not _NAME.fullmatch(value):
        raise ValueError(f"a string of 1 to {MAX_NAME} letters, digits or _ . : / @ + -")
    return value


def _identity(value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME or not value.isprintable():
        raise ValueError(f"a string of 1 to {MAX_NAME} printable characters")
    return value


def _turn(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_TURN:
        raise ValueError(f"a whole number from 1 to {MAX_TURN}")
    return value


def flag(value: Any) -> bool:
    """A check for booleans. It raises ``ValueError``."""
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def _stop(value: Any) -> str:
    if value not in _STOPS:
        raise ValueError(f"one of {', '.join(_STOPS)}")
    return value


def number(low: float, high: float, what: str) -> Callable[[Any], float]:
    """A check for numbers, ``what`` being their unit. It raises ``ValueError``."""

    def check(value: Any) -> float:
        ok = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not ok or not low <= value <= high:  # false for NaN, and for integers beyond any float
            raise ValueError(f"{what} from {low:g} to {high:g}")
        return float(value)

    return check


FIELDS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "canopy_category": ("category", _name),
    "canopy_turn": ("turn", _turn),
    "canopy_conversation": ("conversation", _identity),
    "canopy_parent": ("parent", _identity),
    "canopy_stop": ("stop", _stop),
    "canopy_over": ("over", flag),
    "canopy_return_in_s": ("return_in_s", number(0, MAX_RETURN_S, "seconds")),
    "canopy_keep_s": ("keep_s", number(0, MAX_KEEP_S, "seconds")),
    "canopy_slo_ms": ("slo_ms", number(1, 1e7, "milliseconds")),
    "canopy_ttl_s": ("ttl_s", number(0, MAX_TTL_S, "seconds")),
    "canopy_pin_s": ("pin_s", number(0, MAX_PIN_S, "seconds")),
}
"""Every key a client may write: name on the wire -> (field, check)."""

FORCE_OUTPUT = "canopy_force_output"
"""With ``--canopy-enable-forced-output``: a flat list of token ids that the answer consists of."""

_FOREIGN = (
    *(FORCE_OUTPUT, "canopy_replay_clock"),
    *document_names.FIELDS,
)
"""Keys of other parts of Canopy, checked where they are used."""


def client_fields(custom_params: Any) -> dict[str, Any]:
    """The Canopy fields of a request's ``custom_params``, checked.

    Raises ``CanopyError`` (a ``ValueError``, which SGLang answers with status 400) naming the
    key, the value (shortened) and what is allowed. Keys not starting with ``canopy`` are not
    ours and are left alone.
    """
    if custom_params is None:
        return {}
    if not isinstance(custom_params, Mapping):
        raise CanopyError(
            f"custom_params must be a JSON object, got {_short(custom_params)}; "
            'for example {"canopy_category": "chat"}'
        )
    fields = {}
    for key, value in custom_params.items():
        if not isinstance(key, str) or not key.startswith("canopy") or key in _FOREIGN:
            continue
        if key not in FIELDS:
            raise CanopyError(
                f"custom_params has an unknown key {_short(key)}; "
                f"Canopy's keys are: {', '.join(FIELDS)}"
            )
        field, check = FIELDS[key]
        try:
            fields[field] = check(value)
        except ValueError as allowed:
            raise CanopyError(
                f"custom_params key {key!r} must be {allowed}, got {_short(value)}"
            ) from None
    return fields


def _short(value: Any) -> str:
    text = repr(value) if not isinstance(value, str) else repr(value[:60])
    return text if len(text) <= 60 else text[:57] + "..."
