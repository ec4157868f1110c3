"""A link to the host that carries nothing until it is told to, or somebody waits for it.

On a CPU a copy is made where it is submitted. Here its bytes are read as late as a device's
copy engine might read them, so that KV that was overwritten in between is found.
"""

from __future__ import annotations

import sys
from typing import Any


class SlowLink:
    """Put between a cache and its controller."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.waits = 0
        """Times that SGLang waited for copies (``writing_check(write_back=True)``)."""
        self.carry = cache.cache_controller.start_writing
        """Make every copy that was submitted."""
        cache.cache_controller.start_writing = self._submitted

    def _submitted(self) -> None:
        if sys._getframe(1).f_code.co_name == "writing_check":  # the one caller that waits
            self.waits += bool(self.cache.ongoing_write_through)
            self.carry()
