"""Identity of the weights that computed the KV in this process, across SGLang's updates at run time.

An update makes every page on disk stale. SGLang flushes the tree and the host tier after an update, or
leaves that to the caller (``flush_cache: false``) and keeps using the old KV. The disk tier is
therefore disabled from the start of an update until the next flush of the tree, and then uses a new
random namespace, so that pages of different weights never mix.

The hooks cover SGLang's ways to change weights: four calls that load weights, and a session around
them, in which a peer may also write weights without a call.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_canopy.storage.fingerprint import full_digest

_UNFLUSHED_REASON = (
    "the weights were updated and the cache was not flushed since; the disk tier starts again "
    "after POST /flush_cache"
)
_SESSION_REASON = "a session of weight updates is open; the disk tier starts again after it"


class Weights:
    """State of one process. The scheduler thread writes it, any thread reads it."""

    def __init__(self) -> None:
        self.id = ""
        """Random after each update, empty for the initial weights."""
        self._is_stale = False
        self._is_in_session = False
        self._load_count = 0

    def pause_reason(self) -> str | None:
        """Return the reason why pages may not be read or written now, or ``None``."""
        if self._is_in_session:
            return _SESSION_REASON
        return _UNFLUSHED_REASON if self._is_stale else None

    def record_load(self) -> None:
        self._is_stale = True
        self._load_count += 1
        self.id = uuid.uuid4().hex

    def record_remote_load(self) -> None:
        """Record that the initial weights come from another process or machine. They cannot be
        identified, so their pages use a namespace that no later start reuses."""
        self.id = self.id or uuid.uuid4().hex

    def record_flush(self) -> None:
        """Record a flush: the tree and the host tier have no KV of earlier weights."""
        self._is_stale = False

    def begin_session(self) -> None:
        self._is_in_session = True
        self._load_count = 0

    def end_session(self) -> None:
        """End a session. If it had no load, a peer wrote unknown weights."""
        if self._is_in_session and not self._load_count:
            self.record_load()
        self._is_in_session = False


WEIGHTS = Weights()


def adapter_id(original: Callable[[str, str], str], lora_name: str, lora_path: str) -> str:
    """Return the id of an adapter, by content if it is in a local folder. Wraps
    ``LoRARef.deterministic_id``. SGLang derives the id from name and path and keys the cache by it, so
    an adapter retrained in place would match the old KV. Modification times are not used, because all
    machines must agree. An adapter named by a hub id keeps SGLang's id, because some machines may not
    have its files yet."""
    sglang_id = original(lora_name, lora_path)
    path = Path(lora_path).expanduser()
    try:
        if not path.exists():
            return sglang_id
        return uuid.uuid5(uuid.UUID(sglang_id), full_digest(path)).hex
    except (OSError, ValueError):
        return sglang_id  # SGLang reports the error


# ---- hooks ----


def _record_load(_manager: Any, _recv_req: Any, *_: Any) -> None:
    WEIGHTS.record_load()


def _record_failed_load(result: Any, _manager: Any, _recv_req: Any, *_: Any) -> None:
    if not result.success:
        WEIGHTS.record_load()  # some weights may be loaded


def _begin_session(result: Any, *_: Any) -> None:
    if not result.success:
        return
    WEIGHTS.begin_session()


def _end_session(result: Any, *_: Any) -> None:
    if result.success:
        WEIGHTS.end_session()


def _record_flush(success: bool, *_: Any, **__: Any) -> None:
    if success:
        WEIGHTS.record_flush()


_SRT = "sglang.srt."
_MANAGER = _SRT + "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
_PARAMETERS = ("self", "recv_req")
HOOKS: tuple[tuple[str, str, Callable[..., Any], tuple[str, ...]], ...] = (
    (
        _SRT + "lora.lora_registry.LoRARef.deterministic_id",
        "around",
        adapter_id,
        ("lora_name", "lora_path"),
    ),
    (_MANAGER + "update_weights_from_disk", "before", _record_load, _PARAMETERS),
    (_MANAGER + "update_weights_from_disk", "after", _record_failed_load, _PARAMETERS),
    (_MANAGER + "update_weights_from_distributed", "before", _record_load, _PARAMETERS),
    (_MANAGER + "update_weights_from_distributed", "after", _record_failed_load, _PARAMETERS),
    (_MANAGER + "update_weights_from_tensor", "before", _record_load, _PARAMETERS),
    (_MANAGER + "update_weights_from_tensor", "after", _record_failed_load, _PARAMETERS),
    (_MANAGER + "update_weights_from_ipc", "before", _record_load, _PARAMETERS),
    (_MANAGER + "update_weights_from_ipc", "after", _record_failed_load, _PARAMETERS),
    (_MANAGER + "begin_weight_update", "after", _begin_session, _PARAMETERS),
    (_MANAGER + "end_weight_update", "after", _end_session, _PARAMETERS),
    (_SRT + "managers.scheduler.Scheduler.flush_cache", "after", _record_flush, ("self",)),
)
