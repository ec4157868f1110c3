"""One request of a replay over HTTP: send token ids, read the stream, record times and hits.

Sends to SGLang's ``/generate`` and OpenAI's ``/v1/completions``, which take a prompt as token ids.
Chat endpoints do not, so they cannot replay block ids exactly.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

TIERS = ("device", "host", "storage")


@dataclass(frozen=True, slots=True)
class Dialect:
    """Capabilities of an endpoint type."""

    path: str
    is_native: bool = False
    """SGLang's own ``/generate``."""
    has_custom_params: bool = False
    pins_output: bool = True
    """Supports ``ignore_eos`` and, unless it is SGLang, ``min_tokens``."""


DIALECTS = {
    "sglang": Dialect("/generate", is_native=True, has_custom_params=True),
    "sglang-native": Dialect("/generate", is_native=True, has_custom_params=True),
    "sglang-oai": Dialect("/v1/completions", has_custom_params=True),
    "vllm": Dialect("/v1/completions"),
    "lmdeploy": Dialect("/v1/completions"),
    "openai": Dialect("/v1/completions", pins_output=False),
}
"""Dialects by the name of bench_serving's ``--backend``. ``openai`` sends standard fields only."""


@dataclass(slots=True)
class Reply:
    """A response. Times in seconds on the event loop's clock."""

    sent_s: float
    first_s: float | None = None
    """Arrival of the first token."""
    done_s: float = 0.0
    error: str = ""
    prompt_tokens: int | None = None
    """Count reported by the server, or ``None``."""
    output_tokens: int = 0
    cached_tokens: int | None = None
    by_tier: dict[str, int] = field(default_factory=dict)
    server_queue_s: float | None = None
    """Queueing time reported by the server (SGLang with ``--enable-metrics``)."""
    output_ids: list[int] = field(default_factory=list)
    text: str = ""
    gaps_s: list[float] = field(default_factory=list)
    """Time between tokens; the tokens of one chunk share its gap."""

    @property
    def is_complete(self) -> bool:
        """Whether a whole response was received."""
        return not self.error


def make_body(
    dialect: Dialect,
    model: str,
    prompt: list[int],
    output_tokens: int,
    custom_params: Mapping[str, Any],
    extra: Mapping[str, Any],
    stream: bool = True,
) -> dict[str, Any]:
    """Return the JSON body of one request. ``extra`` overrides everything except the prompt."""
    sent_params = dict(custom_params) if dialect.has_custom_params and custom_params else None
    if dialect.is_native:
        sampling_params: dict[str, Any] = {
            "temperature": 0,
            "max_new_tokens": output_tokens,
            "ignore_eos": True,
        }
        if sent_params:
            sampling_params["custom_params"] = sent_params
        extra = dict(extra)
        sampling_params.update(extra.pop("sampling_params", {}))
        return {"stream": stream, "sampling_params": sampling_params, **extra, "input_ids": prompt}
    fields: dict[str, Any] = {
        "model": model,
        "max_tokens": output_tokens,
        "temperature": 0,
        "stream": stream,
    }
    if stream:
        fields["stream_options"] = {"include_usage": True}
    if dialect.pins_output:
        fields["ignore_eos"] = True
        if not dialect.has_custom_params:
            fields["min_tokens"] = output_tokens
    if dialect.has_custom_params:
        fields["return_cached_tokens_details"] = True
        if sent_params:
            fields["custom_params"] = sent_params
    return {**fields, **extra, "prompt": prompt}


async def send(
    session: aiohttp.ClientSession,
    url: str,
    dialect: Dialect,
    payload: Mapping[str, Any],
    headers: Mapping[str, str],
) -> Reply:
    """POST one request and read its response to the end. Failures are in ``Reply.error``."""
    clock = asyncio.get_running_loop().time
    reply = Reply(clock())
    read_event = _read_native if dialect.is_native else _read_openai
    last_s, tokens = reply.sent_s, 0
    try:
        async with session.post(url, json=payload, headers=headers) as response:
            if response.status != 200:
                reply.error = f"{response.status}: {(await response.text())[:500]}"
                reply.done_s = clock()
                return reply
            async for line in response.content:
                text = line.strip()
                if text.startswith(b"data:"):
                    text = text[5:].strip()
                elif not text.startswith(b"{"):
                    continue
                if text == b"[DONE]":
                    continue
                event = json.loads(text)
                if "error" in event:
                    reply.error = json.dumps(event["error"])[:500]
                    continue
                read_event(event, reply)
                now_s = clock()
                new_tokens = reply.output_tokens - tokens
                if new_tokens > 0 and (dialect.is_native or event.get("choices")):
                    if reply.first_s is None:
                        reply.first_s = now_s
                    else:
                        reply.gaps_s += [(now_s - last_s) / new_tokens] * new_tokens
                    last_s, tokens = now_s, reply.output_tokens
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as error:
        reply.error = f"{type(error).__name__}: {error}"
    reply.done_s = clock()
    if not reply.error and reply.first_s is None:
        reply.error = "the response held no token"
    return reply


def _read_native(event: Mapping[str, Any], reply: Reply) -> None:
    meta_info = event.get("meta_info") or {}
    reply.text = event.get("text") or reply.text
    # Cumulative. If the server streams increments, this is only the last part.
    reply.output_ids = event.get("output_ids") or reply.output_ids
    reply.output_tokens = max(reply.output_tokens, meta_info.get("completion_tokens") or 0)
    reply.prompt_tokens = meta_info.get("prompt_tokens", reply.prompt_tokens)
    reply.cached_tokens = meta_info.get("cached_tokens", reply.cached_tokens)
    reply.server_queue_s = meta_info.get("queue_time", reply.server_queue_s)
    _read_tiers(meta_info.get("cached_tokens_details"), reply)
    finish = meta_info.get("finish_reason") or {}
    if isinstance(finish, dict) and finish.get("type") == "abort":
        reply.error = f"aborted: {finish.get('message', '')}"[:500]


def _read_openai(event: Mapping[str, Any], reply: Reply) -> None:
    for choice in event.get("choices") or ():
        text = choice.get("text") or ""
        reply.text += text
        # Chunks carry no count; the usage at the end corrects it.
        reply.output_tokens += bool(text)
    usage = event.get("usage")
    if usage:
        reply.prompt_tokens = usage.get("prompt_tokens", reply.prompt_tokens)
        reply.output_tokens = usage.get("completion_tokens", reply.output_tokens)
        details = usage.get("prompt_tokens_details")
        if details is not None:
            reply.cached_tokens = details.get("cached_tokens") or 0
    _read_tiers((event.get("sglext") or {}).get("cached_tokens_details"), reply)


def _read_tiers(details: Mapping[str, Any] | None, reply: Reply) -> None:
    if details:
        reply.by_tier = {tier: details.get(tier) or 0 for tier in TIERS}
        if reply.cached_tokens is None:
            reply.cached_tokens = sum(reply.by_tier.values())
