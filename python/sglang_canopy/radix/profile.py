"""What a policy learnt, saved for the next start."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from sglang_canopy.policy.base import Policy
from sglang_canopy.private_file import replace_file

logger = logging.getLogger(__name__)

EVERY_S = 30.0
"""Seconds between two saves. SGLang kills its schedulers, so one at exit is not enough."""


class Profile:
    """A JSON file with a policy's learnt state: replaced whole, readable by its owner only."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._saved_at = float("-inf")
        self._failed = False

    def save_sometimes(self, policy: Policy, now: float) -> None:
        """Save if the last time is ``EVERY_S`` or more ago; ``now`` on the requests' clock."""
        if now - self._saved_at >= EVERY_S:
            self._saved_at = now
            self.save(policy)

    def save(self, policy: Policy) -> None:
        """Write the state. A disk that will not take it is logged once; serving goes on."""
        state = policy.state()
        if not state:
            return
        try:
            replace_file(self.path, json.dumps(state))
        except OSError as error:
            if not self._failed:
                self._failed = True
                logger.warning("cannot save the policy's profile to %s: %s", self.path, error)
