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


_TWO = {"max_tokens": 2}
ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "/generate": ("text", {"sampling_params": {"max_new_tokens": 2, "temperature": 0}}),
    "/v1/completions": ("prompt", _TWO),
    "/v1/chat/completions": ("messages", _TWO),
    "/v1/responses": ("input", {"max_output_tokens": 2}),
    "/v1/messages": ("messages", _TWO),
    "/invocations": ("messages", _TWO),
    "/api/chat": ("messages", {"options": {"num_predict": 2}}),
    "/api/generate": ("prompt", {"options": {"num_predict": 2}}),
}
"""Routes that generate: the field of the prompt, and the limit of the answer's tokens."""


def body_of(path: str, text: str, model: str = "m") -> dict[str, Any]:
    """Return a request of a text on a route."""
    field, limit = ROUTES[path]
    content = [{"role": "user", "content": text}] if field == "messages" else text
    return {"model": model, field: content, **limit}
