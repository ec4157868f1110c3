"""Canopy's state on SGLang's ``Req``, at ``req.canopy``."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_canopy.wire.stamp import KEY_PREFIX, PARAMS_ADDED, STAMP_KEY

_REQUEST_KEY = "__req__"
"""SGLang adds the request under this key, for custom logit processors."""


@dataclass(slots=True, eq=False)
class RequestState:
    """State of one request in a scheduler."""

    params: Mapping[str, Any]
    """Canopy's keys of its ``custom_params``."""
    request: Any = None
    """The policies' record (``radix.live_request``), if a Canopy policy ranks the tree."""
    documents: Any = None
    """State of its documents; ``None`` if it names none."""
    matched_version: tuple[int, int, int] | None = None
    """Version of tree and request at its latest match; ``None`` without one."""
    observed: bool = False
    """Whether ``--canopy-observe`` has counted it."""


def state_of(req: Any) -> RequestState:
    """Return the state of SGLang's ``req``. The first call removes Canopy's keys from a copy of
    ``req.sampling_params``: a client's custom logit processor may fail on keys that it does not define,
    and pipeline stages forward the original."""
    state: RequestState | None = getattr(req, "canopy", None)
    if state is None:
        state = req.canopy = RequestState(_take_params(req))
    return state


def _take_params(req: Any) -> dict[str, Any]:
    """Move Canopy's keys out of the custom parameters of ``req``, and return them."""
    params = getattr(req, "sampling_params", None)
    custom_params = getattr(params, "custom_params", None)
    canopy_params: dict[str, Any] = {}
    if not isinstance(custom_params, dict):
        return canopy_params
    other_params: dict[str, Any] = {}
    for key, value in custom_params.items():
        is_canopys = isinstance(key, str) and key.startswith(KEY_PREFIX)
        (canopy_params if is_canopys else other_params)[key] = value
    if canopy_params:
        stamp = canopy_params.get(STAMP_KEY)
        is_added = isinstance(stamp, dict) and stamp.get(PARAMS_ADDED) is True
        req.sampling_params = copy.copy(params)
        req.sampling_params.custom_params = (
            None if is_added and not other_params.keys() - {_REQUEST_KEY} else other_params
        )
    return canopy_params
