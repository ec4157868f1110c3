"""OpenTelemetry spans of model calls, as exported by collectors and tracing tools.

One span per line (``attributes`` flat, nested, or in OTLP's list of keys and values), or OTLP JSON
with ``resourceSpans``. Two conventions for a prompt are read: GenAI (``gen_ai.input.messages``,
``gen_ai.system_instructions``, ``gen_ai.tool.definitions``) and OpenInference
(``llm.input_messages.0.message.content``). Token counts of both should include cached tokens; those
of some instrumentations leave them out, which a count below the cached tokens beside it proves for
its model.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

from canopy_lab.trace import calls, fields, lines
from canopy_lab.trace.chat import make_chat
from canopy_lab.trace.entries import read_entries
from canopy_lab.trace.otel_messages import Attributes, messages_of
from canopy_lab.trace.prompts import LoggedPrompt, escape_name
from canopy_lab.trace.record import STOPS

_TIME_FIELDS = ("startTimeUnixNano", "start_time_unix_nano", "start_time", "startTime", "timestamp")
_OTHER_OPERATIONS = ("embeddings", "execute_tool", "invoke_agent", "create_agent", "retrieval")
_NO_MESSAGES = "without messages (turn on content capture: OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT=true)"
_CONVERSATION_FIELDS = ("gen_ai.conversation.id", "session.id", "langfuse.session.id", "thread.id")
_MODEL_FIELDS = ("gen_ai.request.model", "llm.model_name", "gen_ai.response.model")
_USER_FIELDS = ("user.id", "enduser.id", "langfuse.user.id")
_PROMPT_TOKEN_FIELDS = ("gen_ai.usage.input_tokens", "llm.token_count.prompt")
_CACHED_TOKEN_FIELDS = (
    ("gen_ai.usage.cache_read.input_tokens", "gen_ai.usage.cache_read_input_tokens", "llm.token_count.prompt_details.cache_read"),
    ("gen_ai.usage.cache_creation.input_tokens", "gen_ai.usage.cache_creation_input_tokens", "llm.token_count.prompt_details.cache_write"),
)  # fmt: skip
_MAX_HEAD_ENTRIES = 2_000
"""Entries that are read to find the models whose counts leave out cached tokens."""
_OUTPUT_TOKEN_FIELDS = ("gen_ai.usage.output_tokens", "llm.token_count.completion")
_STOP_REASON_FIELDS = ("gen_ai.response.finish_reasons", "llm.finish_reason")
_MAX_SPANS = 100_000
"""Maximum spans remembered until their children or parents appear."""


def prompts(path: Path, tolerance: lines.Tolerance) -> Iterator[LoggedPrompt]:
    """Yield the prompts; count failed and repeated calls and spans of other kinds."""
    notes, repeats = tolerance.understood, _RepeatedSpans()
    models_without_cached = _models_without_cached(path)
    for line, entry in read_entries(path, tolerance, _entry_time):
        for span in spans(entry):
            try:
                logged = parse(span, line)
            except lines.BadLine as error:
                tolerance.count_bad(line, error)
                continue
            if isinstance(logged, str):
                notes.left_out[logged] += 1
            elif repeats.is_repeat(span, logged):
                notes.left_out[calls.LOGGED_TWICE] += 1
            else:
                notes.count_model(logged.salts[0])
                if logged.salts[0] in models_without_cached and logged.logged_tokens is not None:
                    logged.logged_tokens += _cached_tokens(Attributes(span))
                for part in logged.parts:
                    notes.role_bytes[part.role or "no role"] += len(part.text)
                yield logged


def _models_without_cached(path: Path) -> set[str]:
    """Return the models whose prompt counts leave out cached tokens."""
    models = set()
    for _, entry in islice(
        read_entries(path, lines.Tolerance(path, lines.COUNT_LIMIT), _entry_time), _MAX_HEAD_ENTRIES
    ):
        for span in spans(entry):
            with contextlib.suppress(lines.BadLine):
                attributes = Attributes(span)
                prompt_tokens = _count(attributes, _PROMPT_TOKEN_FIELDS)
                if prompt_tokens is not None and prompt_tokens < _cached_tokens(attributes):
                    models.add(str(attributes.find(_MODEL_FIELDS) or ""))
    return models


def _cached_tokens(attributes: Attributes) -> int:
    return sum(_count(attributes, names) or 0 for names in _CACHED_TOKEN_FIELDS)


def spans(entry: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the spans of an entry; the entry itself is one unless it is an OTLP export."""
    if "resourceSpans" not in entry:
        yield entry
        return
    for resource in _objects(entry, "resourceSpans"):
        for scope in (*_objects(resource, "scopeSpans"), *_objects(resource, "instrumentationLibrarySpans")):  # fmt: skip
            yield from _objects(scope, "spans")


def _objects(parent: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    values = parent.get(name)
    return [v for v in values if isinstance(v, dict)] if isinstance(values, list) else []


def parse(span: Mapping[str, Any], line: int = 0) -> LoggedPrompt | str:
    """Return the prompt of a span, or the reason to omit it. Raises ``BadLine``."""
    attributes = Attributes(span)
    kind = str(attributes.find(("openinference.span.kind",)) or span.get("span_kind") or "LLM")
    operation = str(attributes.find(("gen_ai.operation.name",)) or "")
    if kind.upper() != "LLM" or operation in _OTHER_OPERATIONS:
        return calls.NO_MODEL_CALL
    parts = messages_of(attributes)
    if parts is None and not (operation or attributes.find(_MODEL_FIELDS)):
        return calls.NO_MODEL_CALL
    if _is_failure(span, attributes):
        return calls.FAILED
    if parts is None:
        return _NO_MESSAGES
    messages, body = parts
    prompt = LoggedPrompt(_time_s(span), line)
    chat = make_chat(messages, [body])
    prompt.parts, prompt.text, prompt.category, prompt.turn = chat.parts, chat.text, chat.category, chat.turn  # fmt: skip
    conversation = attributes.find(_CONVERSATION_FIELDS)
    prompt.conversation = None if conversation is None else escape_name(conversation)
    user = attributes.find(_USER_FIELDS)
    prompt.user = None if user is None else str(user)
    prompt.salts = (str(attributes.find(_MODEL_FIELDS) or ""),)
    prompt.logged_tokens = _count(attributes, _PROMPT_TOKEN_FIELDS)
    prompt.output_tokens = _count(attributes, _OUTPUT_TOKEN_FIELDS) or 0
    reason = fields.decode(attributes.find(_STOP_REASON_FIELDS))
    prompt.stop = STOPS.get(str(reason[0] if isinstance(reason, list) and reason else reason))
    return prompt


def _time_s(span: Mapping[str, Any]) -> float:
    start = fields.find([span], _TIME_FIELDS)
    if start is None:
        raise lines.BadLine(f"the span has no start; name it one of: {', '.join(_TIME_FIELDS)}")
    return fields.parse_time_s(start)


def _entry_time(entry: Mapping[str, Any]) -> float:
    return _time_s(next(spans(entry), {}))


def _is_failure(span: Mapping[str, Any], attributes: Attributes) -> bool:
    status = span.get("status")
    code = status.get("code", status.get("status_code")) if isinstance(status, dict) else status
    code = span.get("status_code") if code is None else code
    has_error_status = code == 2 or "ERROR" in str(code).upper()
    return has_error_status or attributes.find(("error.type",)) is not None


def _count(attributes: Attributes, names: tuple[str, ...]) -> int | None:
    value = attributes.find(names)
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if 0 < number < lines.COUNT_LIMIT else None


class _RepeatedSpans:
    """Finds second records of one call: a span exported twice, or the same prompt in parent and child."""

    def __init__(self) -> None:
        self._digests: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        """Digest of a span's prompt, by trace and span, and by trace and parent."""

    def is_repeat(self, span: Mapping[str, Any], prompt: LoggedPrompt) -> bool:
        """Record the span; return whether it, its parent or its child had this prompt before."""
        span_context = span.get("context")
        sources = [span_context, span] if isinstance(span_context, dict) else [span]
        trace_id, span_id, parent_id = (
            str(fields.find(sources, names) or "")
            for names in (
                ("traceId", "trace_id"),
                ("spanId", "span_id"),
                ("parentSpanId", "parent_span_id", "parent_id"),
            )
        )
        digest = blake2b(prompt.text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        related = [(trace_id, span_id), (trace_id, f"child of {span_id}")] if span_id else []
        related += [(trace_id, parent_id)] if parent_id else []
        if any(self._digests.get(key) == digest for key in related):
            return True
        self._digests[trace_id, span_id] = digest
        if parent_id:
            self._digests[trace_id, f"child of {parent_id}"] = digest
        while len(self._digests) > _MAX_SPANS:
            self._digests.popitem(last=False)
        return False
