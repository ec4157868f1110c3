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
from canopy_lab.trace.chat import SYSTEMS, TOOLS, chat
from canopy_lab.trace.entries import entries
from canopy_lab.trace.fields import JsonObject
from canopy_lab.trace.prompts import LoggedPrompt, clients_name
from canopy_lab.trace.understood import Understood

TIMES = (
    *("startTime", "start_time", "time", "timestamp", "ts", "requestedAt", "request_time"),
    *("request_created_at", "created_at", "createdAt", "created", "date"),
)
CONVERSATIONS = (
    *("canopy_conversation", "conversation_id", "conversationId", "session_id", "sessionId"),
    *("thread_id", "threadId", "litellm_session_id", "Helicone-Session-Id", "conversation"),
)
USERS = ("user", "user_id", "userId", "end_user", "request_user_id", "user_api_key_user_id")
INPUTS = ("messages", "prompt", "input", "contents", "prompt_token_ids", "input_ids")
_SALTS = ("model", "lora_path", "extra_key", "cache_salt")
"""Fields that separate prompts: prompts that differ in one of these share no KV."""
_MODELS = ("model", "request_model", "provided_model_name")
_SHORTENED = "litellm_truncated"
_HEAD = re.compile(r"\A<[\w-]{0,40}>\n")
"""Role before a message's text (``chat.py``)."""
_SESSION = re.compile(r"_session_([\w-]{1,128})$")
_REDACTED = re.compile(
    r"\W*(?:redacted|masked|hidden|removed|filtered)(?:[ _-]+by[ _-]+\w+)?\W*|[*x#\u2588]{3,}", re.I
)
"""A text that a gateway put in place of a message."""
_UNREAD_CHARACTERS = 256
"""Unread fields of a body are counted if they are longer than this."""
_READ = {
    *(*TIMES, *CONVERSATIONS, *USERS, *INPUTS, *TOOLS, *SYSTEMS, *fields.BODIES),
    *("response", "response_body", "responseBody", "output", "usage", "metadata", "response_format"),
    *("text", "generation_config", "generationConfig", "tool_choice", "stop", "logit_bias"),
    *("guided_json", "guided_grammar", "extra_body", "custom_params", "cost_breakdown"),
}  # fmt: skip
_ENTRYS_OWN = ("hidden_params", "model_map_information", "error_information", "streamed_data")


def prompts(path: Path, tolerance: lines.Tolerance) -> Iterator[LoggedPrompt]:
    """Yield the prompts of ``path``, by time if the newest is first, else in the file's order.

    Failed calls, answers from a gateway's cache, second records of a call and calls of other models
    are ignored, and counted in ``tolerance.understood``.
    """
    seen, repeats = tolerance.understood, calls.Repeats()
    for line, entry in entries(path, tolerance, _entry_time):
        try:
            logged = parse(entry, line, seen)
        except lines.BadLine as error:
            tolerance.bad(line, error)
            continue
        if len(logged) == 1 and repeats.is_repeat(entry, logged[0]):
            seen.left_out[calls.TWICE] += 1
            continue
        yield from logged
    if len(seen.models) > 1:
        lines.log.warning(
            "%s: it has calls of %d models (%s), which share no KV, but share one cache here; give a log of "
            "what one server runs", path, len(seen.models), ", ".join(list(seen.models)[:5]),
        )  # fmt: skip


def parse(entry: JsonObject, line: int = 0, seen: Understood | None = None) -> list[LoggedPrompt]:
    """Return the prompts of one entry; an empty list for a call that no server computed.

    Raises ``BadLine``."""
    seen = Understood() if seen is None else seen
    among = fields.objects_in(entry)
    why = calls.skip_reason(entry, among)
    if why is not None:
        seen.left_out[why] += 1
        return []
    where, logged = fields.first_full(fields.bodies(entry), INPUTS)
    _check_whole(entry, among, logged)
    time_s = _time(entry, among, seen)
    bodies = fields.bodies(entry)
    if isinstance(logged, dict):  # Langfuse: {"messages": [...], "tools": [...]}
        bodies, among = [logged, *bodies], [logged, *among]
        where, logged = fields.first_full([logged], INPUTS)
    elif where is not None and where is not entry:
        bodies = [where, *bodies]
    several = isinstance(logged, list) and bool(logged) and set(map(type, logged)) <= {str, list}
    each = logged if several else [logged]
    prompts = [
        _prompt(LoggedPrompt(time_s, line), one, entry, bodies, among, len(each)) for one in each
    ]
    for prompt in prompts:
        check_not_redacted(
            [part.text for part in prompt.parts if part.kind == "text"] or [prompt.text]
        )
    _account(prompts, entry, where, bodies, seen)
    return prompts


def check_not_redacted(texts: list[str]) -> None:
    """Raise ``BadLine`` if each of a prompt's ``texts`` is a mark instead of what was sent."""
    long_texts = [text for text in (_HEAD.sub("", one) for one in texts) if text.strip()]
    if long_texts and all(_REDACTED.fullmatch(text.strip()) for text in long_texts):
        raise lines.BadLine(
            f"its texts are redacted ({long_texts[0].strip()[:40]!r}), so equal prompts cannot be told from others; "
            "let the gateway log them (LiteLLM: turn_off_message_logging: false)"
        )


def _check_whole(entry: JsonObject, among: list[JsonObject], logged: Any) -> None:
    """Raise ``BadLine`` if the entry holds no prompt or only a part of it."""
    if fields.first(among, ("message_mode",)) == "delta":
        raise lines.BadLine(
            "its messages are only what a turn adds (message_mode: delta), and the answers between them "
            "are not in the file; give a log with whole prompts"
        )
    if logged is None and "custom_id" in entry and "response" in entry:
        raise lines.BadLine(
            "it is a line of a batch's output, which holds no prompt; give the batch's input file"
        )


def _time(entry: JsonObject, among: list[JsonObject], seen: Understood) -> float:
    """Return the seconds since 1970, or since the start of the file. Raises ``BadLine``."""
    when = fields.first(among, TIMES)
    if when is None and "custom_id" in entry and "body" in entry:
        seen.remarks["A batch file has no times: its requests count as sent at once."] = None
        return 0.0
    if when is None:
        raise lines.BadLine(f"it has no time; name it one of: {', '.join(TIMES)}")
    if type(when) in (int, float) and 0 <= when < 1e9:
        if "output_length" in entry or "input_length" in entry:
            seen.remarks["Times are milliseconds from the start, as AIPerf writes them."] = None
            return float(when) / 1000
        seen.remarks["Times are numbers without a date and count as seconds."] = None
    return fields.seconds(when)


def _entry_time(entry: JsonObject) -> float:
    """Return the time of an entry, which determines the order of a file. Raises ``BadLine``."""
    return fields.seconds(fields.first(fields.objects_in(entry), TIMES))


def _account(
    prompts: list[LoggedPrompt], entry: JsonObject, where: JsonObject | None, bodies: list[JsonObject], seen: Understood
) -> None:  # fmt: skip
    """Count models, roles, changed prompts and unread fields."""
    for prompt in prompts:
        seen.count_model(prompt.salts[0])
        for part in prompt.parts:
            seen.role_bytes[part.role or "no role"] += len(part.text)
        if any(part.kind in ("image", "media") for part in prompt.parts):
            seen.changed["have pictures, sound or files, whose tokens are not counted"] += 1
        if _SHORTENED in prompt.text:
            seen.changed["have texts that the gateway shortened (litellm_truncated)"] += 1
    if fields.first(bodies, ("previous_response_id",)) is not None:
        seen.changed["continue a stored response (previous_response_id), so earlier turns are missing"] += len(prompts)  # fmt: skip
    for place in (where,) if where is not None else ():
        for name, value in place.items():
            if name in _READ or (place is entry and name in _ENTRYS_OWN):
                continue
            size = _size(value)
            if size > _UNREAD_CHARACTERS:
                seen.count_unread(str(name), size)


def _size(value: Any) -> int:
    """Return the characters of text in a field; 0 for numbers."""
    if isinstance(value, str):
        return len(value)
    return len(json.dumps(value)) if isinstance(value, (list, dict)) and value else 0


def _prompt(
    prompt: LoggedPrompt,
    logged: Any,
    entry: JsonObject,
    bodies: list[JsonObject],
    among: list[JsonObject],
    calls_of_entry: int,
) -> LoggedPrompt:
    """Fill ``prompt`` and return it. ``logged`` is one of the entry's ``calls_of_entry``."""
    _fill_prompt(prompt, logged, bodies)
    named = fields.first(among, CONVERSATIONS)
    if isinstance(named, dict):  # Responses: {"conversation": {"id": "..."}}
        named = named.get("id", named)
    if named is None:
        named = _claude_codes_session(among)
    prompt.conversation = None if named is None else clients_name(named)
    user = fields.first(among, USERS)
    prompt.user = None if user is None else str(user)
    model = fields.first(among, _MODELS)
    prompt.salts = (str(model or ""), *(str(fields.first(among, (n,)) or "") for n in _SALTS[1:]))
    category = fields.first(among, ("canopy_category",))
    turn = fields.first(among, ("canopy_turn",))
    prompt.category = str(category) if category else prompt.category
    prompt.turn = turn if type(turn) is int and turn > 0 else prompt.turn
    prompt.logged_tokens, output = usage.token_counts(entry, among)
    prompt.output_tokens = output or usage.count(among, ("output_length",)) or 0
    prompt.stop = usage.stop_of(entry, among)
    if calls_of_entry > 1:
        prompt.output_tokens, prompt.logged_tokens = prompt.output_tokens // calls_of_entry, None
    return prompt


def _claude_codes_session(among: list[JsonObject]) -> str | None:
    """Return the session at the end of ``metadata.user_id``, as a server reads it."""
    for place in among:
        metadata = fields.decoded(place.get("metadata"))
        user = metadata.get("user_id") if isinstance(metadata, dict) else None
        session = _SESSION.search(user) if isinstance(user, str) else None
        if session is not None:
            return session[1]
    return None


def _fill_prompt(prompt: LoggedPrompt, logged: Any, bodies: list[JsonObject]) -> None:
    if isinstance(logged, list) and logged and all(type(i) is int and 0 <= i < 1 << 63 for i in logged):  # fmt: skip
        prompt.token_ids = logged
        return
    if isinstance(logged, str):
        system = chat([], bodies)
        # In the Responses interface plain text is a message of the user.
        logged = [{"role": "user", "content": logged}] if system.parts else logged
    if isinstance(logged, str):
        prompt.text = logged
    elif isinstance(logged, list) and logged and all(isinstance(part, dict) for part in logged):
        made = chat(logged, bodies)
        prompt.parts, prompt.text = made.parts, made.text
        prompt.category, prompt.turn = made.category, made.turn
    else:
        raise lines.BadLine(
            f"it has no prompt (messages, prompt or input); it has: {', '.join(sorted(map(str, bodies[0])))[:200]}"
        )
