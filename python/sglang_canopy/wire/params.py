"""Canopy's keys of ``custom_params``, which the scheduler removes before SGLang reads the rest.

``custom_params`` carries the stamp and clients' ``canopy_`` keys to every rank. A client's custom logit
processor reads the same dict and may fail on keys that it does not define.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from sglang_canopy.wire.stamp import ADDED, STAMP_KEY

PREFIX = "canopy"
"""Prefix of all keys of Canopy."""

_REQUEST = "__req__"
"""SGLang adds the request under this key, for custom logit processors."""


def own_params(req: Any) -> Mapping[str, Any]:
    """Return Canopy's keys of the ``custom_params`` of SGLang's ``req``.

    The first call removes them from a copy of ``req.sampling_params``, because pipeline stages forward
    the original.
    """
    own: Mapping[str, Any] | None = getattr(req, "canopy_params", None)
    if own is None:
        own = req.canopy_params = _take(req)
    return own


def _take(req: Any) -> dict[str, Any]:
    params = getattr(req, "sampling_params", None)
    custom = getattr(params, "custom_params", None)
    if not isinstance(custom, Mapping):
        return {}
    own = {key: value for key, value in custom.items() if _is_own(key)}
    if own:
        rest = {key: value for key, value in custom.items() if not _is_own(key)}
        stamp = own.get(STAMP_KEY)
        is_added = isinstance(stamp, Mapping) and stamp.get(ADDED) is True
        req.sampling_params = copy.copy(params)
        req.sampling_params.custom_params = (
            None if is_added and not rest.keys() - {_REQUEST} else rest
        )
    return own


def _is_own(key: Any) -> bool:
    return isinstance(key, str) and key.startswith(PREFIX)
