"""Document reuse in the ``usage`` of OpenAI's routes, streams included.

SGLang computes a stream's usage from numbers alone, so the report is attached to the number of
cached tokens.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

from sglang_canopy.wire.document_names import BOUNDS

FIELD = "canopy_documents"
"""Field next to ``cached_tokens`` in ``usage.prompt_tokens_details``."""


class CachedTokens(int):
    """A prompt's ``cached_tokens``, with the report on its documents."""

    report: dict[str, Any]


@functools.cache
def _details_class() -> Any:
    """Return SGLang's ``PromptTokensDetails``, changed so that answers include :data:`FIELD`.

    pydantic drops undeclared fields, so every class built around it is rebuilt.
    """
    from sglang.srt.entrypoints.openai import protocol

    protocol.PromptTokensDetails.model_config["extra"] = "allow"
    for name in (
        *("PromptTokensDetails", "UsageInfo", "ChatCompletionResponse", "CompletionResponse"),
        *("ChatCompletionStreamResponse", "CompletionStreamResponse"),
    ):
        getattr(protocol, name).model_rebuild(force=True)
    return protocol.PromptTokensDetails


async def with_reports(answers: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """Yield ``answers`` with each prompt's report attached to its ``cached_tokens``."""
    reports: dict[int, dict[str, Any]] = {}
    async with aclosing(answers) as parts:  # type: ignore[type-var]
        async for part in parts:
            for i, one in enumerate(part if isinstance(part, list) else [part]):
                _carry(one, one.get("index", i), reports)
            yield part


def _carry(one: dict[str, Any], index: int, reports: dict[int, dict[str, Any]]) -> None:
    meta = one.get("meta_info") or {}
    if meta.get(BOUNDS):
        reports[index] = meta[BOUNDS][0]
    if index in reports and "cached_tokens" in meta:
        meta["cached_tokens"] = CachedTokens(meta["cached_tokens"])
        meta["cached_tokens"].report = reports[index]


def of_answers(usage: Any, answers: Sequence[dict[str, Any]], n_choices: int) -> None:
    """Hook after ``UsageProcessor.calculate_response_usage``. Counts a prompt once per request."""
    _add(usage, [one["meta_info"].get("cached_tokens", 0) for one in answers[::n_choices]])


def of_stream(usage: Any, cached_tokens: dict[int, int], n_choices: int) -> None:
    """Hook after ``UsageProcessor.calculate_streaming_usage``."""
    _add(usage, [tokens for i, tokens in sorted(cached_tokens.items()) if i % n_choices == 0])


def _add(usage: Any, cached: Sequence[int]) -> None:
    """Add the field if a prompt has a report, and ``cached_tokens`` if SGLang does not report them.

    The ratio and the stand-ins are the minimum over all prompts.
    """
    reports = [tokens.report for tokens in cached if isinstance(tokens, CachedTokens)]
    if not reports:
        return
    reuse: dict[str, Any] = {
        f"{name}_tokens": sum(one.get(name, 0) for one in reports)
        for name in ("reused", "recomputed", "kept")
    }
    for name in ("ratio", "stand_in_tokens"):
        if found := [one[name] for one in reports if name in one]:
            reuse[name] = min(found)
    if reasons := sorted({one["why"] or "unknown" for one in reports if not one.get("fused")}):
        reuse["why"] = "; ".join(reasons)
    shown = usage.prompt_tokens_details
    details = {"cached_tokens": sum(cached)} if shown is None else shown.model_dump()
    usage.prompt_tokens_details = _details_class()(**{**details, FIELD: reuse})
