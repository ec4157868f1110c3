"""Calls from the HTTP process to the schedulers, through SGLang's ``TokenizerManager``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_canopy.wire.document_names import BOUNDS
from sglang_canopy.wire.messages import CHUNKS, send


async def generate(
    manager: Any,
    ids: Sequence[int],
    bounds: Sequence[int],
    answer_tokens: int,
    owner: dict[str, str | None],
) -> None:
    """Send an ordinary greedy request and wait for its answer.

    ``bounds`` of its documents as in ``canopy_chunks``; ``owner``: its ``extra_key`` and
    ``cache_salt``.
    """
    from sglang.srt.managers.io_struct import GenerateReqInput

    request = GenerateReqInput(
        input_ids=list(ids),
        sampling_params={
            "max_new_tokens": answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "custom_params": {BOUNDS: list(bounds)},
        },
        **owner,
    )
    async for _ in manager.generate_request(request, None):
        pass


async def encode(manager: Any, ids: Sequence[int], owner: dict[str, str | None]) -> None:
    """Send a one-token request whose prompt is the document, so that the scheduler encodes it."""
    await generate(manager, [*ids, ids[-1]], [0, len(ids)], 1, owner)


async def command(manager: Any, verb: str, names: Sequence[str], tenant: str | None) -> bool:
    """Pin, unpin or delete documents in the schedulers' stores, with one message. Returns whether
    any store changed."""
    manager.auto_create_handle_loop()
    commands = [f"{verb}:{name}:{tenant or ''}" for name in names]
    return any(bool(answer.updated) for answer in await send(manager, CHUNKS, *commands))


async def state(manager: Any) -> dict[str, Any]:
    """Return the counters of chunk reuse on the first replica (``ChunkEngine.stats``)."""
    return (await manager.get_internal_state())[0].get("canopy_chunks", {})
