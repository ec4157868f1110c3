"""Time messages to the schedulers, for the session gate and other decaying values."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from sglang_canopy.wire.messages import TIME, send

logger = logging.getLogger(__name__)

TICK_S = 1.0
"""Seconds between time messages to the schedulers while requests are running."""

_ticking: asyncio.Task[None] | None = None


def start_ticker(manager: Any) -> None:
    """Send the time to the schedulers once a second while ``manager`` (SGLang's tokenizer manager) has
    running requests. Call it in its event loop for each request."""
    global _ticking
    if _ticking is None or _ticking.done() or _ticking.get_loop() is not asyncio.get_running_loop():
        _ticking = asyncio.get_running_loop().create_task(_broadcast_time(manager))


async def _broadcast_time(manager: Any) -> None:
    is_busy = True
    while is_busy:
        await asyncio.sleep(TICK_S)
        is_busy = bool(manager.rid_to_state)
        try:
            await send(manager, TIME, repr(time.monotonic()))
        except Exception:
            logger.exception("canopy: the time could not be sent to the schedulers")
