"""``--warmups canopy_chunks``: do the one-time work of fused prompts before the server accepts
requests.

Real prompts through the scheduler compile kernels and build the backend's plans.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from typing import Any

from canopy_chunks.server.http import calls
from canopy_chunks.server.options import Options
from canopy_chunks.text.documents import document_name
from sglang_canopy.tenant import tenant_of

logger = logging.getLogger(__name__)

NAME = "canopy_chunks"
DOCUMENTS, DOCUMENT_TOKENS, OTHER_TOKENS, ANSWER_TOKENS = 3, 192, 32, 4
ENCODED_WITHIN_S = 300.0
"""Seconds until the warm-up gives up. A CPU encodes 600 tokens of a large model slowly."""


def register(options: Options) -> None:
    """Add the warm-up to SGLang's table of warm-ups."""
    from sglang.srt.entrypoints.warmup import warmup

    async def run(_mode: str, manager: Any) -> None:
        try:
            await warm_up(manager, options)
        except Exception:
            logger.exception("canopy: the warm-up of chunk reuse failed; the server starts without")

    warmup(NAME)(run)


async def warm_up(manager: Any, options: Options) -> None:
    """Fuse one prompt alone and two together, then delete their documents.

    The documents belong to a tenant that no client can name. Logs the number of fused prompts.
    """
    started = time.monotonic()
    tokens = max(DOCUMENT_TOKENS, options.min_tokens)
    room = manager.model_config.context_len - 2 * OTHER_TOKENS - ANSWER_TOKENS - 1
    tokens = min(tokens, room // DOCUMENTS)
    draw = random.Random(0)
    vocabulary = manager.model_config.vocab_size

    def ids(count: int) -> list[int]:
        return [draw.randrange(vocabulary) for _ in range(count)]

    owner: dict[str, str | None] = {"extra_key": None, "cache_salt": secrets.token_hex(16)}
    tenant = tenant_of(**owner)
    system, documents = ids(OTHER_TOKENS), [ids(tokens) for _ in range(DOCUMENTS)]

    async def ask(order: tuple[int, ...], count: int) -> None:
        prompt, bounds = list(system), []
        for i in order:
            bounds += [len(prompt), len(prompt) + tokens]
            prompt += documents[i]
        await calls.generate(manager, prompt + ids(OTHER_TOKENS), bounds, count, owner)

    before = (await calls.state(manager)).get("fused_requests", 0)
    await ask((0, 1, 2), 1)
    while (found := await calls.state(manager)).get("waiting_tokens"):
        if time.monotonic() - started > ENCODED_WITHIN_S:
            break
        await asyncio.sleep(0.05)
    await ask((2, 0, 1), ANSWER_TOKENS)
    await asyncio.gather(ask((1, 2, 0), ANSWER_TOKENS), ask((2, 1, 0), ANSWER_TOKENS))
    found = await calls.state(manager)
    names = [document_name(one, tenant) for one in documents]
    await calls.command(manager, "delete", names, tenant)
    fused, took = found.get("fused_requests", 0) - before, time.monotonic() - started
    if fused:
        logger.info("canopy: warm-up of chunk reuse: %d prompts fused, %.1f s", fused, took)
    else:
        logger.warning(
            "canopy: the warm-up of chunk reuse fused nothing (%s); the first prompt will wait for it",
            found.get("not_fused"),
        )
