"""The scheduler's fields of a stamped request that its policy request is made from."""

from types import SimpleNamespace
from typing import Any

from sglang_canopy.wire.stamp import STAMP_KEY


def stamped_req(stamp: dict[str, Any]) -> Any:
    """SGLang's ``Req`` with this stamp, and without a token."""
    params = SimpleNamespace(custom_params={STAMP_KEY: stamp})
    return SimpleNamespace(
        sampling_params=params, origin_input_ids=[], extra_key=None, cache_salt=None
    )
