"""Actions of SGLang's ``kv_hints`` envelope, mapped to Canopy's own hints.

SGLang (0.5.23) transports the envelope on ``/generate`` and in its engine, and validates its shape.
The actions apply to the conversation of their request. Names and versions follow the proposals of
SGLang (issue 36224), vLLM (53421) and Dynamo (13134): ``kv.NAME`` at version 1.0; the prefix may be
absent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_canopy.wire.stamp import FIELDS, MAX_KEEP_S

PROTOCOLS = ("0.1", "1.0")
VERSIONS = ("1", "1.0")
ACCEPTED, CLIPPED, IGNORED, REFUSED = "accepted", "clipped", "ignored", "refused"
MAX_ACTIONS = 16
"""Maximum actions read from one envelope."""
OTHER = "other"
"""Type under which unknown types are counted."""
TYPES = ("retain", "release", "demote", "return")

Outcome = dict[str, str]
"""``action_id``, ``action_type``, ``outcome`` and, unless accepted, ``reason``."""


def read(envelope: Any, trusted: bool) -> tuple[dict[str, Any], list[Outcome]]:
    """Return the stamp's fields that an envelope sets, and the outcome of each action.

    ``envelope``: a mapping or SGLang's struct. ``trusted``: whether the sender's hints count. Later
    actions override earlier ones. A malformed envelope sets nothing: SGLang rejects the request.
    """
    fields: dict[str, Any] = {}
    outcomes: list[Outcome] = []
    actions = _get(envelope, "actions")
    for number, action in enumerate(actions if isinstance(actions, Sequence) else ()):
        if number == MAX_ACTIONS:
            break
        kind = str(_get(action, "action_type") or "").removeprefix("kv.")
        if _get(envelope, "protocol_version") not in PROTOCOLS:
            found = (IGNORED, f"protocol_version must be one of {', '.join(PROTOCOLS)}")
        elif kind not in TYPES:
            found = (IGNORED, f"unknown type; known: {', '.join(TYPES)}")
        elif _get(action, "action_version") not in VERSIONS:
            found = (IGNORED, f"unknown version; known: {', '.join(VERSIONS)}")
        elif not trusted:
            found = (REFUSED, "hints of this sender are not trusted")
        else:
            found = _apply(kind, _get(action, "payload") or {}, fields)
        outcome, reason = found
        shown = {
            "action_id": str(_get(action, "action_id"))[:128],
            "action_type": kind[:64],
            "outcome": outcome,
        }
        outcomes.append({**shown, "reason": reason} if reason else shown)
    return fields, outcomes


def _apply(kind: str, payload: Any, fields: dict[str, Any]) -> tuple[str, str]:
    """Write one action into ``fields``. Return its outcome and the reason."""
    if not isinstance(payload, Mapping):
        return IGNORED, "payload must be an object"
    if kind in ("release", "demote"):
        fields.pop("return_in_s", None)
        fields.pop("keep_s", None)
        fields["over"] = True
        return ACCEPTED, ""
    key, field = ("seconds", "keep_s") if kind == "retain" else ("in_s", "return_in_s")
    seconds = payload.get(key)
    clipped = kind == "retain" and _above(seconds, MAX_KEEP_S)
    try:
        fields[field] = FIELDS[f"canopy_{field}"][1](MAX_KEEP_S if clipped else seconds)
    except ValueError as error:
        return IGNORED, f"{key} must be {error}"
    fields.pop("over", None)
    if clipped:
        return CLIPPED, f"seconds is at most {MAX_KEEP_S:g}"
    return ACCEPTED, ""


def _above(value: Any, limit: float) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and limit < value < float("inf")


def _get(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, Mapping) else getattr(value, key, None)


class Outcomes:
    """Counts of actions by type and outcome, since the start. Unknown types count as ``OTHER``."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()

    def add(self, outcomes: Sequence[Outcome]) -> None:
        """Count the outcomes of one envelope."""
        for one in outcomes:
            kind = one["action_type"] if one["action_type"] in TYPES else OTHER
            self._counts[kind, one["outcome"]] += 1

    def stats(self) -> dict[str, dict[str, int]]:
        """Return the counts, by type and outcome."""
        found: dict[str, dict[str, int]] = {}
        for (kind, outcome), count in sorted(self._counts.items()):
            found.setdefault(kind, {})[outcome] = count
        return found
