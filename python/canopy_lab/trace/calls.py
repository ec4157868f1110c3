"""Find the entries of a gateway's log that a model server computed, each counted once."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b

from canopy_lab.trace.fields import JsonObject, find
from canopy_lab.trace.prompts import LoggedPrompt

FAILED = "failed calls"
CACHED_BY_GATEWAY = "answered from the gateway's own cache"
LOGGED_TWICE = "logged twice"
NO_MODEL_CALL = "no calls of a language model"

_NO_CALL_TYPES = ("SPAN", "EVENT", "TRACE")
_OTHER_OBSERVATION_TYPES = (
    "AGENT", "TOOL", "CHAIN", "RETRIEVER", "EVALUATOR", "EMBEDDING", "GUARDRAIL"
)  # fmt: skip
"""Langfuse's observation types other than generations; chains repeat their model's input."""
_OTHER_CALL_TYPES = ("embedding", "image", "transcription", "speech", "moderation", "rerank")
"""Values of LiteLLM's ``call_type`` that are no generation."""
_STATUS_CODE_FIELDS = ("status_code", "statusCode", "response_status", "http_status", "httpStatus")
_CLIENT_CLOSED_STATUS = 499
_CACHE_HIT_FIELDS = ("cache_hit", "cacheHit", "cached", "cache_status", "cacheStatus")
_HELICONE_CACHE_FIELD = "cache_reference_id"
_NO_UUID = "00000000-0000-0000-0000-000000000000"
CALL_IDS = ("litellm_call_id", "request_id", "requestId", "response_id", "call_id", "id")
_MAX_CALL_NAMES = 100_000
_SAME_CALL_S = 60.0
"""Records of one call begin within this time; a later record with its name is a retry."""


def skip_reason(entry: JsonObject, objects: list[JsonObject]) -> str | None:
    """Return why an entry is not a call computed by a model server, or ``None``."""
    entry_type = str(entry.get("type")).upper()
    is_observation = "trace_id" in entry or "traceId" in entry
    if entry_type in _NO_CALL_TYPES or (is_observation and entry_type in _OTHER_OBSERVATION_TYPES):
        return NO_MODEL_CALL
    if any(word in str(entry.get("call_type")) for word in _OTHER_CALL_TYPES):
        return NO_MODEL_CALL
    if _is_failure(entry, objects):
        return FAILED
    cache_status = find(objects, _CACHE_HIT_FIELDS)
    if cache_status is True or str(cache_status).lower() in ("true", "hit"):
        return CACHED_BY_GATEWAY
    if str(entry.get(_HELICONE_CACHE_FIELD) or _NO_UUID) != _NO_UUID:
        return CACHED_BY_GATEWAY
    return None


def _is_failure(entry: JsonObject, objects: list[JsonObject]) -> bool:
    if str(find(objects, ("status",))).lower() in ("failure", "error", "failed"):
        return True
    if entry.get("level") == "ERROR":
        return True
    code = find([*objects, *_answers(entry)], _STATUS_CODE_FIELDS)
    if isinstance(code, str) and code.isdecimal():
        code = int(code)
    return type(code) is int and code >= 400 and code != _CLIENT_CLOSED_STATUS


def _answers(entry: JsonObject) -> list[JsonObject]:
    answer = entry.get("response")
    return [answer] if isinstance(answer, dict) else []


class RepeatFinder:
    """Finds entries that repeat a call: same name, same prompt and nearly the same time.

    A name with two different prompts is not a call's name (it may be a trace's), and is ignored.
    The ``_MAX_CALL_NAMES`` most recent names are kept.
    """

    def __init__(self) -> None:
        self._last_by_name: OrderedDict[str, tuple[bytes, float] | None] = OrderedDict()
        """Digest and time of each name's last prompt; ``None`` for a name of several prompts."""

    def is_repeat(self, entry: JsonObject, prompt: LoggedPrompt) -> bool:
        """Record the call; return whether an earlier entry was of the same call."""
        name = next((entry[n] for n in CALL_IDS if isinstance(entry.get(n), str) and entry[n]), "")
        if not name:
            return False
        digest = blake2b(repr(prompt.token_ids).encode() if prompt.token_ids is not None
                         else prompt.text.encode("utf-8", "surrogatepass"), digest_size=8).digest()  # fmt: skip
        earlier = self._last_by_name.get(name, ())
        if earlier is None:
            return False
        if earlier and (earlier[0] != digest or abs(earlier[1] - prompt.time_s) > _SAME_CALL_S):
            self._last_by_name[name] = None if earlier[0] != digest else (digest, prompt.time_s)
            return False
        self._last_by_name[name] = (digest, prompt.time_s)
        while len(self._last_by_name) > _MAX_CALL_NAMES:
            self._last_by_name.popitem(last=False)
        return bool(earlier)
