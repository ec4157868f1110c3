"""The action ``release`` of SGLang's ``kv_hints`` envelope: its request's conversation is over.

SGLang (0.5.23) transports the envelope on ``/generate`` and in its engine, and validates its shape.
Names and versions follow the proposals of SGLang (issue 36224), vLLM (53421) and Dynamo (13134):
``kv.release`` at version 1.0; the prefix may be absent. Other actions are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

PROTOCOL_VERSIONS = ("0.1", "1.0")
ACTION_VERSIONS = ("1", "1.0")
MAX_READ_ACTIONS = 16
"""Maximum actions read from one envelope."""


def read_envelope(envelope: Any) -> tuple[bool, int]:
    """Return whether an envelope releases its conversation, and the number of its ignored actions.

    ``envelope``: a mapping or SGLang's struct. A malformed one does nothing: SGLang rejects the request.
    """
    actions = _get(envelope, "actions")
    read_actions = actions[:MAX_READ_ACTIONS] if isinstance(actions, Sequence) else ()
    is_known = _get(envelope, "protocol_version") in PROTOCOL_VERSIONS
    released = [is_known and _is_release(action) for action in read_actions]
    return any(released), released.count(False)


def _is_release(action: Any) -> bool:
    kind = str(_get(action, "action_type")).removeprefix("kv.")
    return kind == "release" and _get(action, "action_version") in ACTION_VERSIONS


def _get(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, Mapping) else getattr(value, key, None)
