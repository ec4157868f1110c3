"""Logs of gateways in front of a model server: JSON lines with ``messages`` or ``prompt`` and a time.

LiteLLM (``StandardLoggingPayload`` and rows of its table SpendLogs), Langfuse's observations, Helicone's
export, OpenAI's batch files, AIPerf's inputs with ``messages``, bodies of OpenAI's, Anthropic's and
Gemini's interfaces, and plain lines:

    {"time": "2026-01-02T10:00:00Z", "messages": [{"role": "user", "content": "Hello"}]}

``chat.py`` turns a chat into text. Its tokens differ slightly from a chat template's; shared prefixes
are the same. Requests may be out of order by
``prompts.ORDER_WINDOW`` requests; a file that is newest first is read from its end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from canopy_lab.trace import calls, fields, lines, usage
from canopy_lab.trace.chat import SYSTEM_FIELDS, TOOL_FIELDS, make_chat
from canopy_lab.trace.entries import read_entries
from canopy_lab.trace.fields import JsonObject
from canopy_lab.trace.prompts import LoggedPrompt, escape_name
from canopy_lab.trace.understood import Understood

TIME_FIELDS = (
    *("startTime", "start_time", "time", "timestamp", "ts", "requestedAt", "request_time"),
    *("request_created_at", "created_at", "createdAt", "created", "date"),
)
CONVERSATION_FIELDS = (
    *("canopy_conversation", "conversation_id", "conversationId", "session_id", "sessionId"),
    *("thread_id", "threadId", "litellm_session_id", "Helicone-Session-Id", "conversation"),
)
USER_FIELDS = ("user", "user_id", "userId", "end_user", "request_user_id", "user_api_key_user_id")
PROMPT_FIELDS = ("messages", "prompt", "input", "contents", "prompt_token_ids", "input_ids")
_SALTS = ("model", "lora_path", "extra_key", "cache_salt")
"""Fields that separate prompts: prompts that differ in one of these share no KV."""
_MODEL_FIELDS = ("model", "request_model", "provided_model_name")
_SHORTENED_MARK = "litellm_truncated"
_ROLE_HEAD = re.compile(r"\A<[\w-]{0,40}>\n")
"""Role before a message's text (``chat.py``)."""
_CLAUDE_SESSION = re.compile(r"_session_([\w-]{1,128})$")
_REDACTION = re.compile(
    r"\W*(?:redacted|masked|hidden|removed|filtered)(?:[ _-]+by[ _-]+\w+)?\W*|[*x#\u2588]{3,}", re.I
)
"""A text that a gateway put in place of a message."""
_UNREAD_CHARACTERS = 256
"""Unread fields of a body are counted if they are longer than this."""
_READ_FIELDS = {
    *(*TIME_FIELDS, *CONVERSATION_FIELDS, *USER_FIELDS, *PROMPT_FIELDS, *TOOL_FIELDS, *SYSTEM_FIELDS, *fields.BODY_FIELDS),
    *("response", "response_body", "responseBody", "output", "usage", "metadata", "response_format"),
    *("text", "generation_config", "generationConfig", "tool_choice", "stop", "logit_bias"),
    *("guided_json", "guided_grammar", "extra_body", "custom_params", "cost_breakdown"),
}  # fmt: skip
_ENTRY_FIELDS = ("hidden_params", "model_map_information", "error_information", "streamed_data")


def prompts(path: Path, tolerance: lines.Tolerance) -> Iterator[LoggedPrompt]:
    """Yield the prompts of ``path``, by time if the newest is first, else in the file's order.

    Failed calls, answers from a gateway's cache, second records of a call and calls of other models
    are ignored, and counted in ``tolerance.understood``.
    """
    notes, repeats = tolerance.understood, calls.RepeatFinder()
    for line, entry in read_entries(path, tolerance, _entry_time):
        try:
            logged = parse(entry, line, notes)
        except lines.BadLine as error:
            tolerance.count_bad(line, error)
            continue
        if len(logged) == 1 and repeats.is_repeat(entry, logged[0]):
            notes.left_out[calls.LOGGED_TWICE] += 1
            continue
        yield from logged
    if len(notes.models) > 1:
        lines.log.warning(
            "%s: it has calls of %d models (%s), which share no KV, but share one cache here; give a log of "
            "what one server runs", path, len(notes.models), ", ".join(list(notes.models)[:5]),
        )  # fmt: skip


def parse(entry: JsonObject, line: int = 0, notes: Understood | None = None) -> list[LoggedPrompt]:
    """Return an entry's prompts; none for a call that no server computed. Raises ``BadLine``."""
    notes = Understood() if notes is None else notes
    objects = fields.objects_in(entry)
    reason = calls.skip_reason(entry, objects)
    if reason is not None:
        notes.left_out[reason] += 1
        return []
    source, logged = fields.find_filled(fields.bodies_of(entry), PROMPT_FIELDS)
    _check_is_whole(entry, objects, logged)
    time_s = _time_s(entry, objects, notes)
    bodies = fields.bodies_of(entry)
    if isinstance(logged, dict):  # Langfuse: {"messages": [...], "tools": [...]}
        bodies, objects = [logged, *bodies], [logged, *objects]
        source, logged = fields.find_filled([logged], PROMPT_FIELDS)
    elif source is not None and source is not entry:
        bodies = [source, *bodies]
    is_list = isinstance(logged, list) and bool(logged) and set(map(type, logged)) <= {str, list}
    batch = logged if is_list else [logged]
    prompts = [
        _fill_from_entry(LoggedPrompt(time_s, line), raw, entry, bodies, objects, len(batch))
        for raw in batch
    ]
    for prompt in prompts:
        check_not_redacted(
            [part.text for part in prompt.parts if part.kind == "text"] or [prompt.text]
        )
    _count_contents(prompts, entry, source, bodies, notes)
    return prompts


def check_not_redacted(texts: list[str]) -> None:
    """Raise ``BadLine`` if each of a prompt's ``texts`` is a mark instead of what was sent."""
    long_texts = [text for text in (_ROLE_HEAD.sub("", item) for item in texts) if text.strip()]
    if long_texts and all(_REDACTION.fullmatch(text.strip()) for text in long_texts):
        raise lines.BadLine(
            f"its texts are redacted ({long_texts[0].strip()[:40]!r}), so equal prompts cannot be told from others; "
            "let the gateway log them (LiteLLM: turn_off_message_logging: false)"
        )


def _check_is_whole(entry: JsonObject, objects: list[JsonObject], logged: Any) -> None:
    """Raise ``BadLine`` if the entry holds no prompt or only a part of it."""
    if fields.find(objects, ("message_mode",)) == "delta":
        raise lines.BadLine(
            "its messages are only what a turn adds (message_mode: delta), and the answers between them "
            "are not in the file; give a log with whole prompts"
        )
    if logged is None and "custom_id" in entry and "response" in entry:
        raise lines.BadLine(
            "it is a line of a batch's output, which holds no prompt; give the batch's input file"
        )


def _time_s(entry: JsonObject, objects: list[JsonObject], notes: Understood) -> float:
    """Return the seconds since 1970, or since the start of the file. Raises ``BadLine``."""
    logged_time = fields.find(objects, TIME_FIELDS)
    if logged_time is None and "custom_id" in entry and "body" in entry:
        notes.remarks["A batch file has no times: its requests count as sent at once."] = None
        return 0.0
    if logged_time is None:
        raise lines.BadLine(f"it has no time; name it one of: {', '.join(TIME_FIELDS)}")
    if type(logged_time) in (int, float) and 0 <= logged_time < 1e9:
        if "output_length" in entry or "input_length" in entry:
            notes.remarks["Times are milliseconds from the start, as AIPerf writes them."] = None
            return float(logged_time) / 1000
        notes.remarks["Times are numbers without a date and count as seconds."] = None
    return fields.parse_time_s(logged_time)


def _entry_time(entry: JsonObject) -> float:
    """Return the time of an entry, which determines the order of a file. Raises ``BadLine``."""
    return fields.parse_time_s(fields.find(fields.objects_in(entry), TIME_FIELDS))


def _count_contents(
    prompts: list[LoggedPrompt], entry: JsonObject, source: JsonObject | None, bodies: list[JsonObject], notes: Understood
) -> None:  # fmt: skip
    """Count models, roles, changed prompts and unread fields."""
    for prompt in prompts:
        notes.count_model(prompt.salts[0])
        for part in prompt.parts:
            notes.role_bytes[part.role or "no role"] += len(part.text)
        if any(part.kind in ("image", "media") for part in prompt.parts):
            notes.changed["have pictures, sound or files, whose tokens are not counted"] += 1
        if _SHORTENED_MARK in prompt.text:
            notes.changed["have texts that the gateway shortened (litellm_truncated)"] += 1
    if fields.find(bodies, ("previous_response_id",)) is not None:
        notes.changed["continue a stored response (previous_response_id), so earlier turns are missing"] += len(prompts)  # fmt: skip
    for container in (source,) if source is not None else ():
        for name, value in container.items():
            if name in _READ_FIELDS or (container is entry and name in _ENTRY_FIELDS):
                continue
            characters = _text_characters(value)
            if characters > _UNREAD_CHARACTERS:
                notes.count_unread(str(name), characters)


def _text_characters(value: Any) -> int:
    """Return the characters of text in a field; 0 for numbers."""
    if isinstance(value, str):
        return len(value)
    return len(json.dumps(value)) if isinstance(value, (list, dict)) and value else 0


def _fill_from_entry(
    prompt: LoggedPrompt,
    logged: Any,
    entry: JsonObject,
    bodies: list[JsonObject],
    objects: list[JsonObject],
    calls_in_entry: int,
) -> LoggedPrompt:
    """Fill ``prompt`` and return it. ``logged`` is one of the entry's ``calls_in_entry``."""
    _fill_prompt(prompt, logged, bodies)
    name = fields.find(objects, CONVERSATION_FIELDS)
    if isinstance(name, dict):  # Responses: {"conversation": {"id": "..."}}
        name = name.get("id", name)
    if name is None:
        name = _claude_codes_session(objects)
    prompt.conversation = None if name is None else escape_name(name)
    user = fields.find(objects, USER_FIELDS)
    prompt.user = None if user is None else str(user)
    model = fields.find(objects, _MODEL_FIELDS)
    prompt.salts = (str(model or ""), *(str(fields.find(objects, (n,)) or "") for n in _SALTS[1:]))
    category = fields.find(objects, ("canopy_category",))
    turn = fields.find(objects, ("canopy_turn",))
    prompt.category = str(category) if category else prompt.category
    prompt.turn = turn if type(turn) is int and turn > 0 else prompt.turn
    prompt.logged_tokens, output = usage.token_counts(entry, objects)
    prompt.output_tokens = output or usage.find_count(objects, ("output_length",)) or 0
    prompt.stop = usage.stop_of(entry, objects)
    if calls_in_entry > 1:
        prompt.output_tokens, prompt.logged_tokens = prompt.output_tokens // calls_in_entry, None
    return prompt


def _claude_codes_session(objects: list[JsonObject]) -> str | None:
    """Return the session at the end of ``metadata.user_id``, as a server reads it."""
    for candidate in objects:
        metadata = fields.decode(candidate.get("metadata"))
        user = metadata.get("user_id") if isinstance(metadata, dict) else None
        session = _CLAUDE_SESSION.search(user) if isinstance(user, str) else None
        if session is not None:
            return session[1]
    return None


def _fill_prompt(prompt: LoggedPrompt, logged: Any, bodies: list[JsonObject]) -> None:
    if isinstance(logged, list) and logged and all(type(i) is int and 0 <= i < 1 << 63 for i in logged):  # fmt: skip
        prompt.token_ids = logged
        return
    if isinstance(logged, str):
        system = make_chat([], bodies)
        # In the Responses interface plain text is a message of the user.
        logged = [{"role": "user", "content": logged}] if system.parts else logged
    if isinstance(logged, str):
        prompt.text = logged
    elif isinstance(logged, list) and logged and all(isinstance(part, dict) for part in logged):
        converted = make_chat(logged, bodies)
        prompt.parts, prompt.text = converted.parts, converted.text
        prompt.category, prompt.turn = converted.category, converted.turn
    else:
        raise lines.BadLine(
            f"it has no prompt (messages, prompt or input); it has: {', '.join(sorted(map(str, bodies[0])))[:200]}"
        )
