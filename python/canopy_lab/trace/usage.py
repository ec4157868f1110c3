"""Token counts and stop reasons of logged answers.

OpenAI's ``prompt_tokens`` includes cached tokens. Anthropic's ``input_tokens`` excludes them: they are in
``cache_read_input_tokens`` and ``cache_creation_input_tokens``. SGLang's ``/v1/messages`` and Langfuse's
``usage_details`` follow Anthropic. The counts returned here include cached tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from canopy_lab.trace.fields import JsonObject, decode, find
from canopy_lab.trace.lines import COUNT_LIMIT
from canopy_lab.trace.record import STOPS

_USAGE_FIELDS = ("usage", "usageDetails", "usage_details", "usageMetadata")
_PROMPT_FIELDS = ("prompt_tokens", "promptTokens", "promptTokenCount")
_UNCACHED_FIELDS = ("input_tokens", "input")
_CACHED_FIELDS = ("cache_read_input_tokens", "cache_creation_input_tokens")
_OUTPUT_FIELDS = ("completion_tokens", "output_tokens", "output", "completionTokens", "candidatesTokenCount")  # fmt: skip


def answer_of(entry: JsonObject) -> Mapping[str, Any]:
    for name in ("response", "response_body", "responseBody"):
        answer = decode(entry.get(name))
        if isinstance(answer, dict):
            body = decode(answer.get("body"))
            return body if isinstance(body, dict) else answer
    return {}


def token_counts(entry: JsonObject, objects: list[JsonObject]) -> tuple[int | None, int]:
    """Return prompt tokens, cached ones included, and output tokens; ``None`` and 0 if unlogged."""
    answer = answer_of(entry)
    counts: list[JsonObject] = []
    for source in (answer, *objects):
        usages = (decode(source.get(name)) for name in _USAGE_FIELDS)
        counts += [usage for usage in usages if isinstance(usage, dict)]
    counts += [*objects, answer]
    return prompt_tokens(counts), find_count(counts, _OUTPUT_FIELDS) or 0


def prompt_tokens(counts: Iterable[JsonObject]) -> int | None:
    """Return the prompt tokens, including cached ones, of the first place that counts them."""
    for source in counts:
        total = find_count([source], _PROMPT_FIELDS)
        if total is not None:
            return total
        uncached = find_count([source], _UNCACHED_FIELDS)
        cached = sum(_cached_beside(source).values())
        if uncached is not None or cached:
            return (uncached or 0) + cached
    return None


def _cached_beside(source: JsonObject) -> dict[str, int]:
    """Return the counts of cached tokens and other inputs that ``input_tokens`` excludes."""
    return {
        name: value
        for name, value in source.items()
        if type(value) is int
        and 0 < value < COUNT_LIMIT
        and (name in _CACHED_FIELDS or (name.startswith("input_") and name not in _UNCACHED_FIELDS))
    }


def find_count(counts: Iterable[JsonObject], names: tuple[str, ...]) -> int | None:
    """Return the first whole number above 0 among ``names``."""
    for source in counts:
        for name in names:
            value = source.get(name)
            if type(value) is int and 0 < value < COUNT_LIMIT:
                return value
    return None


def stop_of(entry: JsonObject, objects: list[JsonObject]) -> str | None:
    """Return ``tool``, ``end`` or ``length``, or ``None`` if it is not logged."""
    answer = answer_of(entry)
    reason = answer.get("stop_reason")
    choices = answer.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], dict):
        reason = choices[0].get("finish_reason")
    logged_stop = find(objects, ("canopy_stop", "finish_reason"))
    return STOPS.get(str(logged_stop), STOPS.get(str(reason)))
