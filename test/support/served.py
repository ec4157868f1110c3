"""Flags of tiers for real servers, and waits for their status, which is written once a second."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATIENCE_S = 60.0
_cores = sorted(os.sched_getaffinity(0))
CORES = {"SGLANG_CPU_OMP_THREADS_BIND": f"{_cores[0]}|{_cores[-1]}"}
"""SGLang needs the cores of each of two ranks."""


def until(true: Callable[[], Any], patience_s: float = PATIENCE_S) -> Any:
    """Return the first true value of ``true``."""
    deadline = time.monotonic() + patience_s
    while not (value := true()):
        assert time.monotonic() < deadline, true
        time.sleep(0.1)
    return value


def disk_flags(folder: Path) -> tuple[str, ...]:
    """Flags of a disk tier in ``folder``, whose pages a request waits for."""
    extra = {"path": str(folder), "capacity_gb": 0.1, "prefetch_threshold": 16}
    return (
        *("--hicache-storage-backend", "canopy"),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        *("--hicache-storage-backend-extra-config", json.dumps(extra)),
    )


def agreed(client: Any) -> dict[str, Any]:
    """Return the first rank's status once the other rank's is equal."""

    def equal() -> Any:
        first = client.rank()
        (peer,) = first["peers"]
        same = {key: peer[key] for key in first["agreement"]} == first["agreement"]
        return first if same else None

    return until(equal, 2 * PATIENCE_S)
