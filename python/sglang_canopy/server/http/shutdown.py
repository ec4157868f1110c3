"""Time for the drain to disk after SIGTERM: the HTTP process announces the signal to the schedulers.

SGLang ends requests first, sends ``ShutdownReq`` to its schedulers, and kills those that run 15 s later.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from sglang_canopy.config.server_options import options_of
from sglang_canopy.wire.messages import DRAIN, send

logger = logging.getLogger(__name__)

SGLANG_EXIT_S = 15.0
"""Seconds that SGLang gives a scheduler to end, without a drain."""
_announcement: asyncio.Task[None] | None = None


def extend_shutdown(handler: Any, *_: Any, **__: Any) -> None:
    """Hook before ``SignalHandler.sigterm_handler``: start the time for the drain at the first signal,
    and extend SGLang's wait by the same time."""
    global _announcement
    manager = handler.tokenizer_manager
    drain_s = options_of(manager.server_args).tiers.drain_s
    has_disk = manager.server_args.hicache_storage_backend is not None
    if _announcement is not None or not has_disk or not drain_s:
        return
    from sglang.srt.managers import tokenizer_manager

    tokenizer_manager._SCHEDULER_EXIT_TIMEOUT_SECS = SGLANG_EXIT_S + drain_s
    _announcement = asyncio.get_running_loop().create_task(_announce_drain(manager))


async def _announce_drain(manager: Any) -> None:
    try:
        await send(manager, DRAIN, "")
    except Exception:
        logger.exception("canopy: the schedulers know no time of SIGTERM; the drain starts its own")
