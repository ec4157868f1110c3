"""A file with a policy's learnt state, which a later start restores."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.base import Policy
from sglang_canopy.private_file import replace_file, set_aside
from sglang_canopy.reuse import saved_curves

logger = logging.getLogger(__name__)

SAVE_INTERVAL_S = 30.0
"""Seconds between two saves. SGLang kills its schedulers, so a save at exit is not enough."""


def read_or_set_aside(path: str) -> Any:
    """Return the state in a file; ``None`` if it cannot be read. A damaged file is set aside."""
    try:
        state = saved_curves.read_profile(path)
        saved_curves.check_state(state)
        return state
    except saved_curves.DamagedProfile as error:
        set_aside(path, error)
    except CanopyError as error:
        logger.warning("The state learnt by the last server is not used: %s", error)
    return None


class Profile:
    """A JSON file with a policy's learnt state: written atomically, readable only by its owner."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._saved_at = float("-inf")
        self._has_failed = False
        self._write_lock = threading.Lock()
        self.writer: threading.Thread | None = None
        """Thread that writes the file, so that the scheduler does not wait for the disk."""

    def save_if_due(self, policy: Policy, now: float) -> None:
        """Save on a thread, if the last save is at least ``SAVE_INTERVAL_S`` ago. ``now`` is on the
        requests' clock. Skipped while the previous save is still being written."""
        if now - self._saved_at < SAVE_INTERVAL_S or self._write_lock.locked():
            return
        self._saved_at = now
        state = policy.state()
        self.writer = threading.Thread(target=self._write, args=(state,), daemon=True)
        self.writer.start()

    def save(self, policy: Policy) -> None:
        """Write the state. A failure is logged once."""
        self._write(policy.state())

    def _write(self, state: Mapping[str, Any] | None) -> None:
        if not state:
            return
        try:
            with self._write_lock:
                replace_file(self.path, json.dumps(state), durable=True)
        except OSError as error:
            if not self._has_failed:
                logger.warning("cannot save the policy's learnt state to %s: %s", self.path, error)
            self._has_failed = True
