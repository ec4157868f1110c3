"""Flags of tiers for real servers, and waits for their status, which is written once a second."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TIMEOUT_S = 60.0
_core_numbers = sorted(os.sched_getaffinity(0))
RANK_CORES_ENVIRONMENT = {"SGLANG_CPU_OMP_THREADS_BIND": f"{_core_numbers[0]}|{_core_numbers[-1]}"}
"""SGLang's variable with the cores of each of two ranks."""


def wait_until(condition: Callable[[], Any], timeout_s: float = TIMEOUT_S) -> Any:
    """Return the first true value of ``condition``. Raises AssertionError after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, condition
        time.sleep(0.1)
    return value


def disk_flags(folder: Path) -> tuple[str, ...]:
    """Flags of a disk tier in ``folder``; a request waits for its pages."""
    storage_config = {"path": str(folder), "capacity_gb": 0.1, "prefetch_threshold": 16}
    return (
        *("--hicache-storage-backend", "canopy"),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        *("--hicache-storage-backend-extra-config", json.dumps(storage_config)),
    )


def agreed_status(client: Any) -> dict[str, Any]:
    """Return the first rank's status once the other rank's is equal."""

    def status_if_equal() -> Any:
        status = client.rank()
        (peer,) = status["peers"]
        is_equal = {key: peer[key] for key in status["agreement"]} == status["agreement"]
        return status if is_equal else None

    return wait_until(status_if_equal, 2 * TIMEOUT_S)


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
    """Return the body of a request with this text on the route ``path``."""
    field, token_limit = ROUTES[path]
    content = [{"role": "user", "content": text}] if field == "messages" else text
    return {"model": model, field: content, **token_limit}


def greedy_ids(model_path: Path, prompts: list[list[int]], token_count: int) -> list[list[int]]:
    """Return the first ``token_count`` tokens that transformers generates for each prompt."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(model_path), dtype=torch.float32)
    options = {"do_sample": False, "min_new_tokens": token_count, "max_new_tokens": token_count}
    outputs = [model.generate(torch.tensor([prompt]), **options)[0] for prompt in prompts]
    return [ids[len(prompt) :].tolist() for prompt, ids in zip(prompts, outputs, strict=True)]
