"""Token counts and stop reasons of logged answers.

OpenAI's ``prompt_tokens`` includes cached tokens. Anthropic's ``input_tokens`` excludes them: they are in
``cache_read_input_tokens`` and ``cache_creation_input_tokens``. SGLang's ``/v1/messages`` and Langfuse's
``usage_details`` follow Anthropic. The counts returned here include cached tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from canopy_lab.trace.fields import JsonObject, decode, find
from canopy_lab.trace.lines import WHOLE
from canopy_lab.trace.record import STOPS

_USAGES = ("usage", "usageDetails", "usage_details", "usageMetadata")
_WHOLE = ("prompt_tokens", "promptTokens", "promptTokenCount")
_UNCACHED = ("input_tokens", "input")
_CACHED = ("cache_read_input_tokens", "cache_creation_input_tokens")
_OUTPUT = ("completion_tokens", "output_tokens", "output", "completionTokens", "candidatesTokenCount")  # fmt: skip


def answer_of(entry: JsonObject) -> Mapping[str, Any]:
    for name in ("response", "response_body", "responseBody"):
        answer = decode(entry.get(name))
        if isinstance(answer, dict):
            body = decode(answer.get("body"))
            return body if isinstance(body, dict) else answer
    return {}


def token_counts(entry: JsonObject, objects: list[JsonObject]) -> tuple[int | None, int]:
    """Return the prompt tokens, including cached ones, and the output tokens; ``None`` and 0 if not
    logged."""
    answer = answer_of(entry)
    counts: list[JsonObject] = []
    for place in (answer, *objects):
        usages = (decode(place.get(name)) for name in _USAGES)
        counts += [usage for usage in usages if isinstance(usage, dict)]
    counts += [*objects, answer]
    return prompt_tokens(counts), count(counts, _OUTPUT) or 0


def prompt_tokens(counts: Iterable[JsonObject]) -> int | None:
    """Return the prompt tokens, including cached ones, of the first place that counts them."""
    for place in counts:
        total = count([place], _WHOLE)
        if total is not None:
            return total
        bare = count([place], _UNCACHED)
        cached = sum(_cached_beside(place).values())
        if bare is not None or cached:
            return (bare or 0) + cached
    return None


def _cached_beside(place: JsonObject) -> dict[str, int]:
    """Return the counts of cached tokens and other inputs that ``input_tokens`` excludes."""
    return {
        name: value
        for name, value in place.items()
        if type(value) is int
        and 0 < value < WHOLE
        and (name in _CACHED or (name.startswith("input_") and name not in _UNCACHED))
    }


def count(counts: Iterable[JsonObject], names: tuple[str, ...]) -> int | None:
    """Return the first whole number above 0 among ``names``."""
    for place in counts:
        for name in names:
            value = place.get(name)
            if type(value) is int and 0 < value < WHOLE:
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
