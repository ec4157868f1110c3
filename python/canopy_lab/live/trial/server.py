"""Client of a running server, for a trial."""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.request
from typing import Any

from canopy_lab.live.top.source import fetch
from canopy_lab.live.trial.turns import Counts
from sglang_canopy.errors import CanopyError

TIMEOUT_S = 30.0
_NO_ROOM = "capacity"
"""Reason of an eviction that a policy decides."""


class RunningServer:
    """The server at ``url``. Every call raises ``CanopyError`` in one line."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self.url, self.api_key = url.rstrip("/"), api_key

    def status(self) -> dict[str, Any]:
        """Return the status, with replicas summed. Raises ``CanopyError`` for SGLang's policies."""
        status = fetch(self.url, self.api_key)
        if not status.get("ranks"):
            raise CanopyError(
                f"{self.url} runs {status['policy']}, SGLang's own, which cannot be exchanged; restart it "
                "with --radix-eviction canopy-lru --canopy-whatif auto,floor=off"
            )
        return status

    def counts(self) -> Counts:
        """Return the meter's counts if there is one: both sides then count the same requests."""
        status = self.status()
        running, meter = status["ranks"][0]["running"], status.get("whatif")
        tiers = status["tiers"]
        evicted = sum(tier["evicted_tokens"].get(_NO_ROOM, 0) for tier in tiers.values())
        if meter is not None:
            sums = meter["sums"]
            return Counts(
                running=running,
                shadow_tokens=meter["shadow_tokens"],
                shadow_squares=meter["shadow_squares"],
                depth_scale=meter["depth_scale_tokens"] or math.inf,
                evicted_tokens=evicted,
                **sums,
            )
        hits = sum(tier["hit_tokens"] for tier in tiers.values())
        return Counts(status["prompt_tokens"], hits, running, evicted_tokens=evicted)

    def exchange(self, policy: str) -> None:
        """Exchange the policy: ``POST /canopy/policy``."""
        request = urllib.request.Request(
            f"{self.url}/canopy/policy",
            data=json.dumps({"device": policy}).encode(),
            headers={"Content-Type": "application/json"},
        )
        if self.api_key:
            request.add_header("Authorization", f"Bearer {self.api_key}")
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S):
                pass
        except urllib.error.HTTPError as error:
            answer = error.read(4096).decode(errors="replace")
            raise CanopyError(f"{self.url} does not exchange its policy: {answer:.300}") from None
        except OSError as error:
            raise CanopyError(f"no answer from {self.url} ({error}); give --url") from None
