"""Which weights the KV in this process was computed with, as SGLang updates them at run time.

An update makes every page on disk stale. SGLang flushes the tree and the host tier after one, or
leaves that to the caller (``flush_cache: false``), in which case the old KV stays in use there.
So the disk tier rests from the moment an update begins until the tree has been flushed after it,
and starts then in a namespace of its own: pages of before and after never mix.

The hooks here are the ways in which SGLang changes weights: four calls that load some, and a
session around them, in which a peer may also write weights without any call.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_canopy.storage.fingerprint import NotFound, local_files, sampled, whole

_RESTS = (
    "the weights were updated and the cache was not flushed since; the disk tier starts again "
    "after POST /flush_cache"
)
_SESSION = "a session of weight updates is open; the disk tier starts again once it has ended"


class Weights:
    """The state of one process. Written by the scheduler's thread, read by any."""

    def __init__(self) -> None:
        self.id = ""
        """Empty for the weights of the start; otherwise a digest of all updates since."""
        self.repeatable = True
        """Whether the same updates after a restart give the same ``id``."""
        self._stale = False
        self._in_session = False
        self._loads = 0

    def resting(self) -> str | None:
        """Why no page may be read or written now; ``None`` while that is fine."""
        if self._in_session:
            return _SESSION
        return _RESTS if self._stale else None

    def changed(self, content: str | None = None) -> None:
        """Weights are loaded, with a digest of what they are; ``None`` where nobody can say."""
        self._stale = True
        self._loads += 1
        if content is None:
            self.repeatable = False
        step = content or uuid.uuid4().hex
        self.id = hashlib.sha256(f"{self.id}\0{step}".encode()).hexdigest()[:32]

    def elsewhere(self) -> None:
        """The weights of the start come from another process or machine: nobody can say which
        they are, so no later start asks for their pages."""
        if not self.id:
            self.id, self.repeatable = uuid.uuid4().hex, False

    def flushed(self) -> None:
        """The tree and the host tier hold nothing of before."""
        self._stale = False

    def session_begins(self) -> None:
        self._in_session = True
        self._loads = 0

    def session_ends(self) -> None:
        """Without a load in between, a peer wrote the weights, and nobody knows which."""
        if self._in_session and not self._loads:
            self.changed()
        self._in_session = False


WEIGHTS = Weights()
"""The one of this process."""


def adapter_id(original: Callable[[str, str], str], lora_name: str, lora_path: str) -> str:
    """Around ``LoRARef.deterministic_id``: an adapter in a folder is known by its content.

    SGLang makes the id of name and path, and keys the cache by it: an adapter retrained in place
    would find the KV of the one before. Times are left out, as all machines must agree. An
    adapter named by a hub id keeps its id, since not all machines may have it yet.
    """
    found = original(lora_name, lora_path)
    path = Path(lora_path).expanduser()
    try:
        return uuid.uuid5(uuid.UUID(found), whole(path)).hex if path.exists() else found
    except (OSError, ValueError):
        return found  # SGLang will say what is wrong with it


# ---- hooks ----


def _from_disk(_manager: Any, recv_req: Any, *_: Any) -> None:
    try:
        content = sampled(local_files(recv_req.model_path))
    except (NotFound, OSError):
        content = None
    WEIGHTS.changed(content and f"{recv_req.load_format}:{content}")


def _loaded(_manager: Any, _recv_req: Any, *_: Any) -> None:
    WEIGHTS.changed()


def _ended(result: Any, _manager: Any, _recv_req: Any, *_: Any) -> None:
    if not result.success:
        WEIGHTS.changed()  # some of it may be loaded


def _session_begun(result: Any, *_: Any) -> None:
    if not result.success:
        return
    WEIGHTS.session_begins()


def _session_ended(result: Any, *_: Any) -> None:
    if result.success:
        WEIGHTS.session_ends()


def _flushed(success: bool, *_: Any, **__: Any) -> None:
    if success:
        WEIGHTS.flushed()


_SRT = "sglang.srt."
_MANAGER = _SRT + "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
_UPDATE = ("self", "recv_req")
HOOKS: tuple[tuple[str, str, Callable[..., Any], tuple[str, ...]], ...] = (
    (
        _SRT + "lora.lora_registry.LoRARef.deterministic_id",
        "around",
        adapter_id,
        ("lora_name", "lora_path"),
    ),
    (_MANAGER + "update_weights_from_disk", "before", _from_disk, _UPDATE),
    (_MANAGER + "update_weights_from_disk", "after", _ended, _UPDATE),
    (_MANAGER + "update_weights_from_distributed", "before", _loaded, _UPDATE),
    (_MANAGER + "update_weights_from_distributed", "after", _ended, _UPDATE),
    (_MANAGER + "update_weights_from_tensor", "before", _loaded, _UPDATE),
    (_MANAGER + "update_weights_from_tensor", "after", _ended, _UPDATE),
    (_MANAGER + "update_weights_from_ipc", "before", _loaded, _UPDATE),
    (_MANAGER + "update_weights_from_ipc", "after", _ended, _UPDATE),
    (_MANAGER + "begin_weight_update", "after", _session_begun, _UPDATE),
    (_MANAGER + "end_weight_update", "after", _session_ended, _UPDATE),
    (_SRT + "managers.scheduler.Scheduler.flush_cache", "after", _flushed, ("self",)),
)
