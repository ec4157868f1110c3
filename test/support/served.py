"""Flags of tiers for real servers, and waits for their status, which is written once a second."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TIMEOUT_S = 60.0
_cores = sorted(os.sched_getaffinity(0))
CORES = {"SGLANG_CPU_OMP_THREADS_BIND": f"{_cores[0]}|{_cores[-1]}"}
"""SGLang needs the cores of each of two ranks."""


def wait_until(condition: Callable[[], Any], timeout_s: float = TIMEOUT_S) -> Any:
    """Return the first true value of ``condition``."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, condition
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


def agreed_status(client: Any) -> dict[str, Any]:
    """Return the first rank's status once the other rank's is equal."""

    def equal() -> Any:
        first = client.rank()
        (peer,) = first["peers"]
        same = {key: peer[key] for key in first["agreement"]} == first["agreement"]
        return first if same else None

    return wait_until(equal, 2 * TIMEOUT_S)


_TWO_TOKENS = {"max_tokens": 2}
ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "/generate": ("text", {"sampling_params": {"max_new_tokens": 2, "temperature": 0}}),
    "/v1/completions": ("prompt", _TWO_TOKENS),
    "/v1/chat/completions": ("messages", _TWO_TOKENS),
    "/v1/responses": ("input", {"max_output_tokens": 2}),
    "/v1/messages": ("messages", _TWO_TOKENS),
    "/invocations": ("messages", _TWO_TOKENS),
    "/api/chat": ("messages", {"options": {"num_predict": 2}}),
    "/api/generate": ("prompt", {"options": {"num_predict": 2}}),
}
"""Routes that generate: the field of the prompt, and the limit of the answer's tokens."""


def body_of(path: str, text: str, model: str = "m") -> dict[str, Any]:
    """Return a request of a text on a route."""
    field, limit = ROUTES[path]
    content = [{"role": "user", "content": text}] if field == "messages" else text
    return {"model": model, field: content, **limit}
